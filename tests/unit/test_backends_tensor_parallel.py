"""Which layers of a model tensor parallelism cuts, by transformers' own plans, and which models it refuses."""

import re

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from vision_models import KINDS

from openrlhf.backends.tensor_parallel import Cut, _divide_heads, cut_plan
from openrlhf.config.backend import BackendSection, LoraSection
from openrlhf.config.fields import ConfigError
from openrlhf.models.adapters import add_adapter
from openrlhf.models.policy import Policy
from openrlhf.models.value import ScalarHead, ValueModel

TWO = BackendSection(tensor_parallel_size=2)
SIZES = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
PROJECTIONS = {f"self_attn.{name}_proj": Cut.COLUMNS for name in "qkv"} | {"self_attn.o_proj": Cut.ROWS}
MLP = {"mlp.gate_proj": Cut.COLUMNS, "mlp.up_proj": Cut.COLUMNS, "mlp.down_proj": Cut.ROWS}


def policy(family: str, **sizes) -> Policy:
    config = AutoConfig.for_model(family, **SIZES | sizes)
    with torch.device("meta"):
        return Policy(AutoModelForCausalLM.from_config(config))


def cuts(module: nn.Module, ds: BackendSection = TWO) -> dict[str, Cut]:
    """By the names of layers in the first block."""
    found = cut_plan(module, ds).layers
    return {re.sub(r"^model\.(model\.)?layers\.0\.", "", name): cut for name, cut in found.items()}


@pytest.mark.parametrize(
    ("family", "sizes", "expected"),
    [
        ("qwen2", {}, PROJECTIONS | MLP),
        ("llama", {"tie_word_embeddings": True}, PROJECTIONS | MLP),
        ("qwen3", {"head_dim": 4}, PROJECTIONS | MLP),
        # Its norms are over all heads, so attention stays whole.
        ("olmo2", {}, MLP),
        # Experts are one tensor, and stay whole.
        ("qwen3_moe", {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8, "head_dim": 4}, PROJECTIONS),
    ],
)  # fmt: skip
def test_layers_are_cut_by_the_plan_of_their_family(family, sizes, expected):
    """No embedding, no head, no norm."""
    assert cuts(policy(family, **sizes)) == expected


def test_norms_of_single_heads_sum_their_gradients_where_they_are_trained():
    """Each rank has other heads, and so a part of the gradient of what all heads share."""
    model = policy("qwen3", head_dim=4)
    norms = [f"model.model.layers.0.self_attn.{which}_norm.weight" for which in "qk"]
    assert cut_plan(model, TWO).summed == norms
    assert cut_plan(policy("qwen2"), TWO).summed == []
    assert cut_plan(model.requires_grad_(False), TWO).summed == []


def test_a_critic_is_cut_like_a_policy_and_its_head_is_not():
    with torch.device("meta"):
        critic = ValueModel(AutoModel.from_config(AutoConfig.for_model("qwen2", **SIZES)), ScalarHead(16))
    assert cuts(critic) == PROJECTIONS | MLP


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "llava"])  # transformers has no plan for the decoder of Qwen3-VL
def test_of_an_image_text_model_the_decoder_is_cut(kind):
    """Every layer that is cut is the language model's; the tower stays whole."""
    _, model, _ = KINDS[kind]()
    model.model.language_model.config.num_key_value_heads = 2  # the small models of the tests have one
    found = cut_plan(Policy(model), TWO).layers
    assert found
    assert all("language_model.layers." in name for name in found)


def test_adapters_are_cut_on_the_side_of_their_layers():
    """W by columns: y is cut, and so is B. W by rows: x is cut, and so is A. The other factor is whole."""
    config = AutoConfig.for_model("qwen2", **SIZES)
    model = AutoModelForCausalLM.from_config(config)
    add_adapter(model, LoraSection(rank=4, target_modules=("q_proj", "o_proj", "up_proj")), dtype=torch.float32)
    found = cuts(Policy(model))
    adapted = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj")
    expected = {f"{n}.base_layer" if n in adapted else n: cut for n, cut in (PROJECTIONS | MLP).items()}
    expected |= {
        "self_attn.q_proj.lora_B.default": Cut.COLUMNS,
        "mlp.up_proj.lora_B.default": Cut.COLUMNS,
        "self_attn.o_proj.lora_A.default": Cut.ROWS,
    }
    assert found == expected


@pytest.mark.parametrize(
    ("family", "sizes", "ranks", "said"),
    [
        ("qwen2", {"num_key_value_heads": 1}, 2, "--ds.tensor_parallel_size 2: the model has 1 key/value heads"),
        ("qwen2", {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 4}, 2, "3 attention heads"),
        ("qwen2", {"intermediate_size": 25}, 2, r"mlp\.gate_proj is 25 wide, which 2 ranks cannot share evenly"),
        ("qwen2", {}, 4, "2 key/value heads, which 4 ranks"),
        ("gpt2", {}, 2, "transformers has no plan by which GPT2Model can be cut"),
        # Its layers hold several matrices in one.
        ("phi3", {"pad_token_id": 0}, 2, "no plan by which Phi3Model can be cut"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_by_flag(family, sizes, ranks, said):
    with pytest.raises(ConfigError, match=said):
        cut_plan(policy(family, **sizes), BackendSection(tensor_parallel_size=ranks))


def test_a_plan_that_is_not_known_is_refused():
    """A style that transformers may add: cutting one half of a pair would be wrong, and nobody would see it."""
    model = policy("qwen2")
    plan = dict(model.model.config.base_model_tp_plan)
    model.model.model.config.base_model_tp_plan = plan | {"layers.*.mlp.gate_proj": "diagonal"}
    with pytest.raises(ConfigError, match=r"cuts Qwen2Model in a way \(diagonal\) that is not known here"):
        cut_plan(model, TWO)
    # What is meant for stacked experts must not meet a plain layer.
    model.model.model.config.base_model_tp_plan = plan | {"layers.*.mlp.gate_proj": "packed_colwise"}
    with pytest.raises(ConfigError, match="packed_colwise"):
        cut_plan(model, TWO)


def test_attention_modules_that_count_their_heads_count_their_own():
    class Attention(nn.Module):
        num_heads = 8
        num_key_value_heads = 4
        head_dim = 16

    attention = Attention()
    _divide_heads(attention, 4)
    assert (attention.num_heads, attention.num_key_value_heads, attention.head_dim) == (2, 1, 16)

"""Adapters: what is frozen, what is written, and that nothing else notices them."""

import dataclasses
import importlib.machinery
import json
import sys
import types

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from small_sections import loading, optimizer
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from openrlhf.backends.torch import TorchBackend
from openrlhf.checkpoint.export import export_policy, export_value_model
from openrlhf.config.backend import LoraSection
from openrlhf.models.adapters import WithoutAdapter, adapter_off, has_adapter
from openrlhf.models.loading import ModelLoadError, load_policy, load_value_model
from openrlhf.models.value import Normalisation, sequence_ends
from openrlhf.types import PackedTokens

LORA = LoraSection(rank=4, alpha=8)
LINEAR = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=13,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        pad_token_id=0,
        initializer_range=0.3,
    )
    Qwen2ForCausalLM(config).save_pretrained(path)
    return path


def load(path, *, value=False, **kwargs):
    loader = load_value_model if value else load_policy
    return loader(path, loading(**{"lora": LORA, **kwargs}))


@torch.no_grad()
def perturb(model, *, scale=0.3):
    """B starts at 0; a trained adapter has moved."""
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return model


def stream(*lengths, shared=()):
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(1, 13, (n,), generator=generator) for n in lengths]
    return PackedTokens.from_sequences(ids, [torch.arange(n) >= 2 for n in lengths])


def logprobs(policy, tokens):
    return policy(tokens, temperature=1.0).logprobs_A


def test_lora_trains_only_the_adapter_and_leaves_the_head(folder):
    """Seven linear layers in each of two blocks, two matrices each. The head is tied to the embeddings: frozen."""
    policy = load(folder)
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    assert len(trained) == 2 * 7 * 2
    assert {name.split(".")[-4] for name in trained} == LINEAR
    assert all(".lora_" in name for name in trained)


def test_a_value_model_trains_its_head_too(folder):
    model = load(folder, value=True)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert {name for name in trained if ".lora_" not in name} == {"head.weight"}


def test_a_fresh_adapter_changes_nothing_and_a_trained_one_does(folder):
    tokens = stream(7, 5, 7)
    expected = logprobs(load(folder, lora=None), tokens)
    policy = load(folder)
    torch.testing.assert_close(logprobs(policy, tokens), expected, rtol=0, atol=0)
    assert (logprobs(perturb(policy), tokens) - expected).abs().max() > 0.1


def test_the_output_grows_by_alpha_over_rank_times_b_a_x(folder):
    """y − W x = (8 / 4) · B A x."""
    layer = perturb(load(folder)).model.model.layers[0].mlp.up_proj
    x = torch.randn(3, 16)
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    torch.testing.assert_close(layer(x) - layer.base_layer(x), 2.0 * x @ a.T @ b.T)


def test_the_seed_decides_what_an_adapter_starts_from(folder):
    torch.manual_seed(5)
    first = load(folder)
    torch.manual_seed(6)
    same, other = load(folder), load(folder, seed=1)
    name = "model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert torch.equal(first.get_parameter(name), same.get_parameter(name))
    assert not torch.equal(first.get_parameter(name), other.get_parameter(name))


def test_packing_and_shared_prefixes_see_no_difference(folder):
    """Three sequences with the same first four tokens: together, sharing them, and one at a time."""
    policy = perturb(load(folder))
    assert policy.packed
    ids = [torch.tensor([3, 1, 4, 1, *rest]) for rest in ([5, 9], [2, 6, 5], [12])]
    masks = [torch.arange(len(i)) >= 4 for i in ids]
    together = PackedTokens.from_sequences(ids, masks)
    shared = dataclasses.replace(together, shared_prefixes=(0, 4, 4))
    alone = torch.cat(
        [logprobs(policy, PackedTokens.from_sequences([i], [m])) for i, m in zip(ids, masks, strict=True)]
    )
    torch.testing.assert_close(logprobs(policy, together), alone)
    torch.testing.assert_close(logprobs(policy, shared), alone)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradient(folder, reentrant):
    gradients = []
    for on in (False, True):
        policy = perturb(load(folder, gradient_checkpointing=on, gradient_checkpointing_reentrant=reentrant))
        logprobs(policy, stream(7, 5)).sum().backward()
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.requires_grad]))
    assert gradients[0].norm() > 0
    torch.testing.assert_close(*gradients)


class TestSwitchedOff:
    def test_it_is_the_model_below(self, folder):
        policy, tokens = perturb(load(folder)), stream(7, 5)
        base, adapted = logprobs(load(folder, lora=None), tokens), logprobs(policy, tokens)
        with adapter_off(policy):
            assert torch.equal(logprobs(policy, tokens), base)
        assert torch.equal(logprobs(policy, tokens), adapted)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_a_reference_forward_before_the_backward_leaves_the_gradient_alone(self, folder, dtype):
        """The backend's masters get their gradients through hooks on the parameters, which must survive."""
        tokens, steps = stream(7, 5), []
        for with_reference in (False, True):
            policy = perturb(load(folder, dtype=dtype))
            backend = TorchBackend(policy, optimizer(lr=1e-2))
            loss = -logprobs(policy, tokens).sum()
            if with_reference:
                assert not logprobs(WithoutAdapter(policy), tokens).requires_grad
            backend.backward(loss)
            norm = backend.step()
            assert norm > 0
            steps.append((norm, {name: p.detach().clone() for name, p in policy.named_parameters()}))
        assert steps[0][0] == steps[1][0]
        for name, tensor in steps[0][1].items():
            assert torch.equal(tensor, steps[1][1][name]), name


def test_masters_of_a_bf16_adapter_are_fp32(folder):
    policy = load(folder, dtype=torch.bfloat16)
    assert {p.dtype for p in policy.parameters()} == {torch.bfloat16}
    backend = TorchBackend(policy, optimizer(lr=1e-2))
    assert {tensor.dtype for tensor in backend._masters.values()} == {torch.float32}


class TestFolder:
    def test_peft_loads_a_policys_adapter(self, folder, tmp_path):
        policy, tokens = perturb(load(folder)), stream(9)
        export_policy(policy, None, tmp_path / "a")
        saved = load_file(tmp_path / "a" / "adapter_model.safetensors")
        assert len(saved) == 28
        assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in saved
        written = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
        assert set(written["target_modules"]) == LINEAR
        assert (written["r"], written["lora_alpha"], written["task_type"]) == (4, 8, "CAUSAL_LM")
        assert written["base_model_name_or_path"] == str(folder)

        ids = tokens.token_ids[None]
        with torch.no_grad():
            by_peft = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "a")(
                ids
            ).logits
            by_transformers = AutoModelForCausalLM.from_pretrained(tmp_path / "a")(ids).logits
        for logits in (by_peft, by_transformers):
            expected = logits[0].log_softmax(-1)[torch.arange(1, 8), tokens.token_ids[2:]]
            torch.testing.assert_close(logprobs(policy, tokens), expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("prefix", ["score", "value_head"])
    def test_peft_loads_a_reward_models_adapter_and_its_head(self, folder, tmp_path, prefix):
        model, tokens = perturb(load(folder, value=True, value_head_prefix=prefix)), stream(9)
        export_value_model(model, None, tmp_path / "a", statistics=Normalisation(0.5, 2.0))
        base = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
        with torch.no_grad():
            score = PeftModel.from_pretrained(base, tmp_path / "a")(tokens.token_ids[None]).logits.item()
        assert model(tokens, positions=sequence_ends(tokens)).item() == pytest.approx(score, rel=1e-4)
        facts = json.loads((tmp_path / "a" / "value_head.json").read_text())
        assert facts == {"mean": 0.5, "std": 2.0, "value_head_prefix": prefix}

    def test_a_model_replaces_an_adapter_and_the_other_way_round(self, folder, tmp_path):
        adapted, plain = perturb(load(folder)), load(folder, lora=None)
        for policy, weights in ((adapted, "adapter_model"), (plain, "model"), (adapted, "adapter_model")):
            export_policy(policy, None, tmp_path / "a")
            assert [p.stem for p in (tmp_path / "a").glob("*.safetensors")] == [weights]
            assert (tmp_path / "a" / "adapter_config.json").exists() == has_adapter(policy.model)
            loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
            assert has_adapter(loaded) == has_adapter(policy.model)

    def test_an_adapters_folder_is_no_model(self, folder, tmp_path):
        export_policy(load(folder), None, tmp_path / "a")
        with pytest.raises(ModelLoadError, match=r"LoRA adapter.*lora_combiner"):
            load(tmp_path / "a")


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("lm_head",), "--ds.lora.target_modules lm_head: this is the model's head"),
        (("q_proj", "query"), r"--ds.lora.target_modules query: the model has no such module.*down_proj.*q_proj"),
        (("input_layernorm",), "--ds.lora.target_modules input_layernorm: .*not supported"),
    ],
)
def test_modules_that_can_have_no_adapter(folder, targets, message):
    with pytest.raises(ModelLoadError, match=message):
        load(folder, lora=LoraSection(rank=4, alpha=8, target_modules=targets))


def test_named_modules_get_adapters_and_no_others(folder):
    policy = load(folder, lora=LoraSection(rank=2, alpha=2, target_modules=("q_proj", "v_proj")))
    trained = {name.split(".")[-4] for name, p in policy.named_parameters() if p.requires_grad}
    assert trained == {"q_proj", "v_proj"}


def test_dropout_acts_in_training_mode_only(folder):
    policy = perturb(load(folder, lora=LoraSection(rank=4, alpha=8, dropout=0.5)))
    tokens = stream(9)
    assert not torch.equal(logprobs(policy, tokens), logprobs(policy, tokens))
    policy.eval()
    assert torch.equal(logprobs(policy, tokens), logprobs(policy, tokens))


@pytest.fixture(params=[False, True], ids=["plain cpu", "avx512-bf16 cpu"])
def cpu(request, monkeypatch):
    """What bitsandbytes believes of this CPU: with AVX512-BF16 it rearranges weights where nobody keeps it from that."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: request.param)


@pytest.mark.usefixtures("cpu")
class TestFourBit:
    def test_frozen_matrices_have_four_bits_and_the_rest_has_the_dtype(self, folder):
        """Two numbers to a byte; the head is tied to the embeddings and stays as it was."""
        policy = load(folder, load_in_4bit=True)
        layer = policy.model.model.layers[0].mlp.up_proj
        assert layer.base_layer.weight.dtype == torch.uint8
        assert layer.base_layer.weight.numel() == 24 * 16 // 2
        assert {p.dtype for p in policy.parameters() if p.requires_grad} == {torch.float32}
        assert policy.model.get_output_embeddings().weight.dtype == torch.float32

    def test_an_error_is_at_most_half_the_widest_gap_between_levels(self, folder):
        """NF4's levels lie between −1 and 1, widest apart at −1 and −0.696: 0.152 of a block's largest entry, and a
        little more, as that entry is quantised itself (8 bits, dynamic: within 2%)."""
        from bitsandbytes.functional import dequantize_4bit

        four, whole = load(folder, load_in_4bit=True), load(folder, lora=None)
        quantised = four.model.model.layers[1].self_attn.q_proj.base_layer.weight
        weight = whole.model.model.layers[1].self_attn.q_proj.weight
        error = (dequantize_4bit(quantised.data, quantised.quant_state) - weight).abs().max()
        assert 0 < error <= (0.152 + 0.02) * weight.abs().max()

    @pytest.mark.parametrize("inputs", [64, 24])
    def test_a_forward_without_gradients_changes_nothing_of_what_follows(self, tmp_path, inputs):
        """Every layer is linear in its weights as they are dequantised, before and after; gradients reach the layers
        below. 64 inputs are what bitsandbytes can rearrange; 24 it cannot."""
        from bitsandbytes.functional import dequantize_4bit
        from bitsandbytes.nn import Linear4bit

        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=13,
            hidden_size=inputs,
            intermediate_size=2 * inputs,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            pad_token_id=0,
        )
        Qwen2ForCausalLM(config).save_pretrained(tmp_path)
        policy = load(tmp_path, load_in_4bit=True).eval()
        tokens = stream(7, 5)
        with torch.no_grad():
            before = logprobs(policy, tokens)
            layers = [module for module in policy.modules() if isinstance(module, Linear4bit)]
            assert len(layers) == 14
            for layer in layers:
                x = torch.randn(3, layer.in_features)
                weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
                torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, weight, layer.bias))
        policy.train()
        torch.testing.assert_close(logprobs(policy, tokens).detach(), before, atol=1e-5, rtol=0)
        x = torch.randn(3, inputs, requires_grad=True)
        layer = policy.model.model.layers[0].mlp.up_proj.base_layer
        layer(x).sum().backward()
        weight = dequantize_4bit(layer.weight.data, layer.weight.quant_state)
        torch.testing.assert_close(x.grad, weight.sum(0).expand(3, -1))

    @pytest.mark.parametrize("value", [False, True])
    def test_it_trains_and_writes_an_adapter_like_any_other(self, folder, tmp_path, value):
        model, tokens = load(folder, load_in_4bit=True, value=value), stream(7, 5)
        frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
        backend = TorchBackend(model, optimizer(lr=1e-2))
        for _ in range(2):
            output = model(tokens, positions=sequence_ends(tokens)) if value else -logprobs(model, tokens)
            backend.backward(output.sum())
            assert backend.step() > 0
        assert all(torch.equal(p, frozen[name]) for name, p in model.named_parameters() if name in frozen)
        (export_value_model if value else export_policy)(model, None, tmp_path / "a")
        saved = load_file(tmp_path / "a" / "adapter_model.safetensors")
        assert len(saved) == 28 + value
        assert all(tensor.any() for tensor in saved.values())

    def test_without_the_library_the_line_that_installs_it_is_named(self, folder, monkeypatch):
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        with pytest.raises(
            ModelLoadError,
            match=r"--ds.load_in_4bit needs bitsandbytes.*pip install -e '\.\[qlora\]' in the repository",
        ):
            load(folder, load_in_4bit=True)
        with pytest.raises(
            ModelLoadError, match=r"--ds.use_liger_kernel needs .*pip install -e '\.\[liger\]' in the repository"
        ):
            load(folder, use_liger_kernel=True)


def test_liger_leaves_the_cross_entropy_alone(folder, monkeypatch):
    """Log-probs come from our own head; what Liger may replace is below it."""
    asked = []
    library, inner = types.ModuleType("liger_kernel"), types.ModuleType("liger_kernel.transformers")
    library.__spec__ = importlib.machinery.ModuleSpec("liger_kernel", None)
    inner._apply_liger_kernel_to_instance = lambda *, model, **choices: asked.append((type(model), choices))
    monkeypatch.setitem(sys.modules, "liger_kernel", library)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers", inner)
    load(folder, use_liger_kernel=True)
    assert asked == [(Qwen2ForCausalLM, {"cross_entropy": False, "fused_linear_cross_entropy": False})]

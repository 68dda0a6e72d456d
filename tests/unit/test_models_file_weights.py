"""What a policy computes with, written as files: the names of its model's files, and a model that computes the same."""

import re
import shutil

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from safetensors.torch import load_file, save_file
from small_sections import loading
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GPT2Config,
    Qwen2Config,
    Qwen3MoeConfig,
)
from transformers.core_model_loading import Chunk, WeightConverter
from vllm_mixtures import FAMILIES, make_mixture

from openrlhf.backends.base import ModuleWeights
from openrlhf.config.backend import LoraSection
from openrlhf.models.adapters import AdapterError, is_adapter
from openrlhf.models.file_weights import FileAdapter, file_weights
from openrlhf.models.loading import load_policy, policy_skeleton
from openrlhf.types import PackedTokens

SMALL = {
    "vocab_size": 13,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "initializer_range": 0.3,
}
EXPERTS = {"moe_intermediate_size": 8, "num_experts_per_tok": 2, "intermediate_size": 24}
CONFIGS = {
    "tied": Qwen2Config(**SMALL, intermediate_size=24, num_key_value_heads=1, tie_word_embeddings=True),
    "untied": Qwen2Config(**SMALL, intermediate_size=24, num_key_value_heads=1, tie_word_embeddings=False),
    "transposed": GPT2Config(vocab_size=13, n_embd=16, n_layer=2, n_head=2, n_positions=32, initializer_range=0.3),
    "experts": Qwen3MoeConfig(**SMALL, **EXPERTS, num_experts=4, num_key_value_heads=1, head_dim=8),
    "experts with a buffer": DeepseekV3Config(
        **SMALL,
        **EXPERTS,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        num_key_value_heads=2,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    ),
}
"""Matrices that GPT-2 keeps transposed; experts that transformers stacks; DeepSeek's bias of the router is a buffer."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name, config in CONFIGS.items():
        made[name] = tmp_path_factory.mktemp(name.replace(" ", "_"))
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for own, buffer in model.named_buffers():
            if own.endswith("e_score_correction_bias"):
                buffer.copy_(torch.randn_like(buffer))
        model.save_pretrained(made[name])
    return made


def load(folder, **kwargs):
    return load_policy(folder, loading(**kwargs))


@torch.no_grad()
def change(policy):
    """As training would: whatever is trained has moved."""
    generator = torch.Generator().manual_seed(1)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype))
    return policy


def weights(policy):
    whole = ModuleWeights(policy)
    found = dict(file_weights(policy, whole.whole_weights()))
    shapes = dict(file_weights(policy, whole.weight_shapes()))
    assert {n: (t.shape, t.dtype) for n, t in shapes.items()} == {n: (t.shape, t.dtype) for n, t in found.items()}
    assert all(tensor.is_meta for tensor in shapes.values())
    return found


@torch.no_grad()
def logprobs(policy):
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(1, 13, (n,), generator=generator) for n in (9, 6)]
    return policy(
        PackedTokens.from_sequences(ids, [torch.arange(len(i)) >= 1 for i in ids]), temperature=1.0
    ).logprobs_A


def reloaded(found, folder, target):
    """The model of `folder` with other weights in its one file."""
    shutil.copytree(folder, target)
    save_file(
        {name: tensor.contiguous() for name, tensor in found.items()}, target / "model.safetensors", {"format": "pt"}
    )
    return load(target)


@pytest.mark.parametrize("lora", [None, LoraSection(rank=4, alpha=8)], ids=["plain", "lora"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_with_these_weights_computes_what_the_policy_computes(folders, tmp_path, name, lora):
    policy = change(load(folders[name], lora=lora))
    before = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    found = weights(policy)
    assert found.keys() == load_file(folders[name] / "model.safetensors").keys()
    ours = logprobs(policy)
    assert torch.equal(logprobs(policy), ours)
    torch.testing.assert_close(logprobs(reloaded(found, folders[name], tmp_path / "new")), ours, atol=1e-5, rtol=0)
    assert (logprobs(load(folders[name])) - ours).abs().max() > 0.01
    assert all(torch.equal(tensor, before[name]) for name, tensor in policy.state_dict().items())


def adapter(policy):
    """The adapter, and the weights that it is trained beside, as the files' names have them."""
    whole, files = ModuleWeights(policy), FileAdapter(policy)
    factors = dict(files.tensors(whole.whole_weights(only=is_adapter)))
    base = file_weights(policy, whole.whole_weights(only=lambda name: not is_adapter(name)), merge=False)
    return files, factors, dict(base)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_base_and_the_adapter_beside_it_add_up_to_the_merged_weights(folders, name):
    """W + α/r · B A for each module, of experts too, whose gate and up have twice the rank; nothing else differs."""
    policy = change(load(folders[name], lora=LoraSection(rank=4, alpha=12)))
    files, factors, base = adapter(policy)
    merged, stored = weights(policy), load_file(folders[name] / "model.safetensors")
    assert base.keys() == merged.keys() == stored.keys()
    assert all(torch.equal(tensor, stored[name]) for name, tensor in base.items())
    assert factors.keys() == {f"{module}.lora_{side}.weight" for module in files.modules for side in "AB"}
    assert len(set(files.modules)) == len(files.modules)
    assert files.rank == files.config["r"] == (8 if "experts" in name else 4)
    assert files.config["lora_alpha"] / files.config["r"] == 3.0
    changed = {name for name, tensor in merged.items() if not torch.equal(tensor, base[name])}
    assert changed == {f"{module}.weight" for module in files.modules}
    for module in files.modules:
        a, b = (factors[f"{module}.lora_{side}.weight"] for side in "AB")
        assert len(a) == b.shape[1] == files.rank
        product = 3.0 * b @ a
        change_of_it = merged[f"{module}.weight"] - base[f"{module}.weight"]
        torch.testing.assert_close(product.T if name == "transposed" else product, change_of_it, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_policy_without_weights_has_the_same_adapter(folders, name):
    settings = loading(lora=LoraSection(rank=4, alpha=8))
    policy, skeleton = load_policy(folders[name], settings), policy_skeleton(folders[name], settings)
    assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}
    found, expected = FileAdapter(skeleton), FileAdapter(policy)
    assert (found.modules, found.rank, found.config) == (expected.modules, expected.rank, expected.config)


def test_the_modules_of_an_adapter_are_those_that_it_was_asked_for(folders):
    policy = load(folders["tied"], lora=LoraSection(rank=4, alpha=8, target_modules=("q_proj", "down_proj")))
    found = {f"model.layers.{i}.{module}" for i in (0, 1) for module in ("self_attn.q_proj", "mlp.down_proj")}
    assert set(adapter(policy)[0].modules) == found


@pytest.mark.parametrize(
    "also", ["model.layers.0.self_attn.q_proj.lora_magnitude_vector.default.weight", "model.norm.weight"]
)
def test_what_is_more_than_two_matrices_is_no_adapter_for_an_engine(folders, also):
    """DoRA's magnitudes, and a module that is trained whole."""
    policy = load(folders["untied"])
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"], use_dora="magnitude" in also), policy.model)
    for name, parameter in policy.model.named_parameters():
        parameter.requires_grad_(is_adapter(name) or name == also)
    with pytest.raises(AdapterError, match=rf"{re.escape(also)} is trained"):
        FileAdapter(policy)


def test_layers_of_different_scales_are_no_adapter_for_an_engine(folders):
    policy = load(folders["untied"])
    config = LoraConfig(r=2, lora_alpha=2, target_modules=["q_proj", "k_proj"], alpha_pattern={"k_proj": 5})
    inject_adapter_in_model(config, policy.model)
    for name, parameter in policy.model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
    with pytest.raises(AdapterError, match=r"different scales: 1, 2\.5"):
        FileAdapter(policy)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_experts_of_every_family_are_what_its_files_hold(family, tmp_path):
    """Names and bits: stacked or one by one, with biases, gate and up in turns, buffers of routers."""
    model = make_mixture(family)
    model.save_pretrained(tmp_path)
    found, held = weights(load(tmp_path)), load_file(tmp_path / "model.safetensors")
    assert found.keys() == held.keys()
    assert [name for name, tensor in held.items() if not torch.equal(found[name], tensor)] == []


@pytest.mark.parametrize("bf16_instructions", [False, True])
def test_weights_of_four_bits_are_made_whole(folders, tmp_path, monkeypatch, bf16_instructions):
    """Also on a CPU for whose instructions bitsandbytes would rearrange them."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: bf16_instructions)
    policy = change(
        load(folders["untied"], lora=LoraSection(rank=4, alpha=8, target_modules=("q_proj",)), load_in_4bit=True)
    )
    found = weights(policy)
    assert found.keys() == load_file(folders["untied"] / "model.safetensors").keys()
    assert {tensor.dtype for tensor in found.values()} == {torch.float32}
    new = reloaded(found, folders["untied"], tmp_path / "new")
    torch.testing.assert_close(logprobs(new), logprobs(policy), atol=1e-4, rtol=0)
    # An adapter is trained beside the weights that were made whole, not beside those of the files.
    files, factors, base = adapter(policy)
    stored = load_file(folders["untied"] / "model.safetensors")
    quantised = {name for name, tensor in base.items() if not torch.equal(tensor, stored[name])}
    assert quantised == {name for name in stored if name.endswith("_proj.weight")}
    for module in files.modules:
        change_of_it = 2.0 * factors[f"{module}.lora_B.weight"] @ factors[f"{module}.lora_A.weight"]
        torch.testing.assert_close(base[f"{module}.weight"] + change_of_it, found[f"{module}.weight"])


def test_a_16_bit_sum_is_rounded_once(folders):
    """1 + 2^-8 + 2^-17 is beyond the middle between 1 and 1 + 2^-7, the next number of bf16. The change alone would be
    rounded to 2^-8, and 1 + 2^-8, right in the middle, to 1."""
    policy = load(
        folders["untied"], lora=LoraSection(rank=2, alpha=2, target_modules=("q_proj",)), dtype=torch.bfloat16
    )
    layer = policy.model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.base_layer.weight.fill_(1.0)
        layer.lora_A["default"].weight.copy_(torch.tensor([[2.0**-8], [2.0**-17]]).expand(2, 16))
        layer.lora_B["default"].weight.fill_(1.0)
    found = weights(policy)["model.layers.0.self_attn.q_proj.weight"]
    assert found.dtype == torch.bfloat16
    assert (found == 1.0 + 2.0**-7).all()


def test_an_adapter_that_is_no_sum_is_refused_by_name(folders):
    """DoRA scales each column too."""
    policy = load(folders["untied"])
    inject_adapter_in_model(LoraConfig(r=2, target_modules=["q_proj"], use_dora=True), policy.model)
    with pytest.raises(AdapterError, match=r"q_proj\.lora_magnitude_vector\.default\.weight"):
        weights(policy)


def test_tensors_that_files_hold_in_one_are_refused(folders):
    policy = load(folders["untied"])
    policy.model._weight_conversions = [
        WeightConverter("qkv_proj", ["q_proj", "k_proj", "v_proj"], operations=[Chunk(dim=0)])
    ]
    with pytest.raises(ValueError, match="Qwen2ForCausalLM hold q_proj, k_proj, v_proj in one tensor"):
        weights(policy)

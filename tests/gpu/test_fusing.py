"""Fused norms and compiled layers change no log-prob and no gradient beyond rounding."""

import copy

import pytest
import torch
import transformers as hf

from openrlhf.models.body import fuse_norms
from openrlhf.models.compilation import compile_layers
from openrlhf.models.policy import Policy
from openrlhf.models.support import examine
from openrlhf.types import PackedTokens

pytestmark = pytest.mark.gpu

SMALL = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.3,
}  # fmt: skip
FAMILIES = {
    "qwen2": (hf.Qwen2Config, 5),
    "qwen3": (hf.Qwen3Config, 9),
    "llama": (hf.LlamaConfig, 5),
    "gemma": (hf.GemmaConfig, 0),  # multiplies with 1 + weight
}


def policy_of(model, *, compiled=False):
    support = examine(model, native_attention="sdpa")
    if compiled:
        compile_layers(model)
    return Policy(model, packed=support.packed, transform=support.transform)


def tokens(lengths):
    generator = torch.Generator().manual_seed(1)
    sequences = [torch.randint(101, (n,), generator=generator) for n in lengths]
    return PackedTokens.from_sequences(sequences, [torch.arange(n) > 0 for n in lengths]).to("cuda")


@pytest.mark.parametrize("family", FAMILIES)
def test_only_what_is_a_plain_rms_norm_is_fused(family):
    config, expected = FAMILIES[family]
    torch.manual_seed(0)
    model = config_model(config).to("cuda")
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.normal_(1.0, 0.3)
    plain = policy_of(copy.deepcopy(model))
    assert fuse_norms(model) == expected
    stream = tokens([7, 19, 4])
    assert torch.allclose(
        policy_of(model)(stream, temperature=1.0).logprobs_A, plain(stream, temperature=1.0).logprobs_A, atol=1e-4
    )


def config_model(config):
    return hf.AutoModelForCausalLM.from_config(config(**SMALL), dtype=torch.float32)


def test_compiled_layers_give_the_same_gradient_at_any_length():
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(hf.Qwen2Config(**SMALL | {"initializer_range": 0.05}))
    model = model.to("cuda", torch.bfloat16)
    plain, compiled = policy_of(copy.deepcopy(model)), policy_of(model, compiled=True)
    for lengths in ([7, 19, 4], [30, 12], [5, 6, 7, 8, 9]):
        gradients = []
        for policy in (plain, compiled):
            policy.zero_grad()
            policy(tokens(lengths), temperature=1.0).logprobs_A.mean().backward()
            gradients.append(torch.cat([p.grad.flatten().float() for p in policy.parameters()]))
        error = float((gradients[0] - gradients[1]).norm() / gradients[0].norm())
        assert error < 0.03, (lengths, error)

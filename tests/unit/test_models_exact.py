"""The exact forward: the same bits whatever else is in the batch, and the ordinary gradient."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
)

from openrlhf.models import exact
from openrlhf.models.attention import ATTENTION
from openrlhf.models.exact import ExactForward, InexactModelError, KeyPlaces
from openrlhf.models.policy import Policy
from openrlhf.types import PackedTokens

SIZES = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}
LENGTHS = (9, 4, 17, 1)
"""All but the first token of a sequence are actions; the last sequence has none."""


def _policy(config_class, *, checkpointing: bool = False, **changes) -> Policy:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_class(**SIZES, **changes), attn_implementation=ATTENTION)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return Policy(model).train()


def _tokens(lengths=LENGTHS, *, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 97, (length,), generator=generator) for length in lengths]


def _logprobs(policy: Policy, sequences: list[torch.Tensor]) -> torch.Tensor:
    stream = PackedTokens.from_sequences(sequences, [torch.arange(len(s)) > 0 for s in sequences])
    return policy(stream, temperature=0.8).logprobs_A


@pytest.mark.parametrize(
    "config",
    [LlamaConfig, Qwen2Config, Qwen3Config, MistralConfig],
    ids=lambda config: config.model_type,
)
def test_a_sequence_has_the_same_bits_alone_and_among_others(config):
    policy = _policy(config, **({"sliding_window": None} if config is MistralConfig else {}))
    ordinary = _logprobs(policy, _tokens()).detach()
    policy.exact = ExactForward(policy.model, policy.model.model)
    sequences = _tokens()
    together = _logprobs(policy, sequences).detach()
    torch.testing.assert_close(together, ordinary, atol=2e-5, rtol=0)
    alone = torch.cat([_logprobs(policy, [sequence]).detach() for sequence in sequences])
    assert torch.equal(together, alone)
    reverse = _logprobs(policy, sequences[::-1]).detach().split([len(s) - 1 for s in sequences[::-1]])
    assert torch.equal(together, torch.cat(reverse[::-1]))
    shorter = _logprobs(policy, [sequences[2][:8]]).detach()
    assert torch.equal(shorter, alone.split([len(s) - 1 for s in sequences])[2][:7])


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradient_is_the_ordinary_one(checkpointing):
    gradients = []
    for is_exact in (False, True):
        policy = _policy(LlamaConfig, checkpointing=checkpointing, tie_word_embeddings=True)
        if is_exact:
            policy.exact = ExactForward(policy.model, policy.model.model)
        weights = torch.linspace(-1, 1, sum(LENGTHS) - len(LENGTHS))
        (_logprobs(policy, _tokens()) * weights).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in policy.named_parameters()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, atol=1e-4, rtol=1e-4, msg=name)


def test_threads_and_the_place_of_weights_in_memory_change_nothing():
    """Weights that are read from a file lie anywhere."""
    policy = _policy(Qwen2Config)
    policy.exact = ExactForward(policy.model, policy.model.model)
    expected = _logprobs(policy, _tokens()).detach()
    for parameter in policy.parameters():
        elsewhere = torch.empty(parameter.numel() + 1)[1:].view_as(parameter)
        parameter.data = elsewhere.copy_(parameter.data)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert torch.equal(_logprobs(policy, _tokens()).detach(), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(
    ("config", "changes", "reason"),
    [
        (MixtralConfig, {"num_local_experts": 2}, "mlp"),
        (MistralConfig, {"sliding_window": 4}, "within a window"),
        (GemmaConfig, {"head_dim": 8}, "something else"),
        (
            LlamaConfig,
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "longest sequence of a batch",
        ),
    ],
    ids=["experts", "window", "other norms", "rotary"],
)
def test_a_model_that_computes_something_else_is_refused(config, changes, reason):
    policy = _policy(config, **changes)
    with pytest.raises(InexactModelError, match=reason):
        ExactForward(policy.model, policy.model.model)


def test_attention_finds_keys_wherever_they_are():
    """A decoding step of two sequences whose keys lie about, against the whole sequences."""
    torch.manual_seed(0)
    lengths, heads, key_heads, size = [7, 12], 4, 2, 8
    q, k, v = (torch.randn(sum(lengths), n, size) for n in (heads, key_heads, key_heads))
    decoder = exact.ExactDecoder(LlamaConfig(**(SIZES | {"hidden_size": heads * size})))
    starts = torch.tensor([0, 7, 19], dtype=torch.int32)
    whole = decoder.attend(q, k, v, KeyPlaces(starts, starts.diff(), starts[:-1, None] + torch.arange(12), 12))
    places = torch.randperm(40)[: sum(lengths)]
    cache = torch.full((40, 2, key_heads, size), torch.nan)
    cache[places, 0], cache[places, 1] = k, v
    slots = torch.zeros(2, 12, dtype=torch.long)
    slots[0, :7], slots[1, :12] = places[:7], places[7:]
    last = torch.tensor([4, 5, 6, 18])  # three new tokens of the first, one of the second
    step = KeyPlaces(torch.tensor([0, 3, 4]), torch.tensor(lengths), slots, 3)
    assert torch.equal(decoder.attend(q[last], cache[:, 0], cache[:, 1], step), whole[last])
    expected = F.scaled_dot_product_attention(
        *(x[7:].transpose(0, 1)[None] for x in (q, k, v)), is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(whole[7:].transpose(0, 1)[None], expected)


def test_the_gpu_kernels_compute_the_same_by_rows():
    """Triton's interpreter runs them here: their arithmetic and their masks. Their bits are those of the machine's own
    matrix product, which may treat rows differently; on a GPU `tests/gpu/test_exact.py` compares them."""
    pytest.importorskip("triton", reason="Triton is not installed: pip install triton")
    file = Path(__file__).with_name("exact_kernels.py")
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, file], env=environment, check=True, timeout=300)

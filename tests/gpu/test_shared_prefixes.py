"""On CUDA a prompt's samples share its forward by one varlen call with keys laid out per sample."""

import dataclasses

import pytest
import torch
import transformers as hf
from prompted_streams import prompted_stream

from openrlhf.models.policy import Policy
from openrlhf.models.support import examine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

GROUPS = [(200, [64, 40, 64, 7]), (1, [3, 3]), (96, [128]), (96, [128, 128])]
CONFIGS = {
    "qwen2": hf.Qwen2Config(
        vocab_size=512, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.1,
    ),
    "mistral window": hf.MistralConfig(
        vocab_size=512, hidden_size=256, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=48, initializer_range=0.1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", CONFIGS)
def test_sharing_changes_neither_log_probs_nor_gradient(name, dtype):
    """bf16 takes the varlen kernel, fp32 the grouped SDPA calls."""
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(CONFIGS[name]).to("cuda", dtype)
    policy = Policy(model, packed=examine(model, native_attention="sdpa").packed)
    assert policy.packed
    tokens = prompted_stream(GROUPS).to("cuda")

    def run(stream):
        policy.zero_grad()
        out = policy(stream, temperature=1.0).logprobs_A
        (out * torch.linspace(-1, 1, len(out), device="cuda")).sum().backward()
        return out.detach(), torch.cat([p.grad.float().flatten() for p in policy.parameters() if p.grad is not None])

    actual, gradient = run(tokens)
    expected, expected_gradient = run(dataclasses.replace(tokens, shared_prefixes=()))
    tolerance = 5e-2 if dtype == torch.bfloat16 else 2e-3
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance * 4)
    assert (gradient - expected_gradient).norm() <= tolerance * expected_gradient.norm()

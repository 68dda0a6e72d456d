"""On CUDA, in bf16: the MLPs of a long sequence in tiles give its log-probs and gradient, and hold less memory."""

import copy

import pytest
import torch
import transformers as hf

from openrlhf.models.policy import Policy
from openrlhf.models.support import examine
from openrlhf.models.tiles import tile_mlps
from openrlhf.types import PackedTokens

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

LENGTH = 8192


@pytest.fixture(scope="module")
def policy():
    torch.manual_seed(0)
    config = hf.Qwen2Config(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=2048,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.05,
    )
    model = hf.AutoModelForCausalLM.from_config(config).to("cuda", torch.bfloat16)
    support = examine(model, native_attention="sdpa")
    return Policy(model, packed=support.packed, transform=support.transform)


def trained(policy, *, tiled, checkpointing=False):
    """Log-probs, gradients, and the bytes that forward and backward took at most."""
    own = copy.deepcopy(policy).train()
    if tiled:
        assert tile_mlps(own.model, long=LENGTH, tile=1024) == 4
    if checkpointing:
        own.model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(512, (LENGTH,), generator=torch.Generator().manual_seed(0))
    stream = PackedTokens.from_sequences([ids], [torch.arange(LENGTH) > 0]).to("cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output = own(stream, temperature=1.0)
    output.logprobs_A.mean().backward()
    taken = torch.cuda.max_memory_allocated() - before
    return output.logprobs_A.detach(), {name: p.grad.float() for name, p in own.named_parameters()}, taken


@pytest.mark.parametrize("checkpointing", [False, True])
def test_tiles_are_the_whole_within_rounding_in_less_memory(policy, checkpointing):
    in_fp32 = trained(copy.deepcopy(policy).float(), tiled=False)
    whole = trained(policy, tiled=False, checkpointing=checkpointing)
    tiled = trained(policy, tiled=True, checkpointing=checkpointing)
    noise = float((whole[0] - in_fp32[0]).abs().mean())
    assert float((tiled[0] - in_fp32[0]).abs().mean()) < 1.5 * noise
    for name, gradient in in_fp32[1].items():
        errors = [float((found[name] - gradient).norm() / gradient.norm()) for found in (tiled[1], whole[1])]
        assert errors[0] < 1.5 * errors[1] + 1e-3, name
    assert tiled[2] < 0.8 * whole[2]

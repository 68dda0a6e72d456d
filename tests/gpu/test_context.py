"""On CUDA, in bf16: all shards of a policy's stream, played in one process, are the whole within bf16's rounding."""

import copy

import pytest
import torch
import transformers as hf
from prompted_streams import prompted_stream

from openrlhf.models.context import Context, share_streams
from openrlhf.models.exchange import play
from openrlhf.models.policy import Policy
from openrlhf.models.support import examine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.fixture(scope="module")
def policy():
    """Fourteen heads, as Qwen2.5-0.5B has: two ranks take seven each, four ranks make a ring."""
    torch.manual_seed(0)
    config = hf.Qwen2Config(
        vocab_size=512,
        hidden_size=896,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=14,
        num_key_value_heads=2,
        initializer_range=0.05,
    )
    model = hf.AutoModelForCausalLM.from_config(config).to("cuda", torch.bfloat16)
    support = examine(model, native_attention="sdpa")
    return Policy(model, packed=support.packed, transform=support.transform)


STREAMS = {
    "shared prompts": [(200, [64, 40, 64, 7]), (1, [3, 3]), (96, [128, 300])],
    "one long": [(1, [4096])],
}


def trained(policy, stream, context=None):
    own = copy.deepcopy(policy)
    share_streams(own, context)
    output = own(stream, temperature=1.0)
    output.logprobs_A.mean().backward()
    return output.logprobs_A.detach(), {name: p.grad.float() for name, p in own.named_parameters()}


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("groups", STREAMS)
@pytest.mark.parametrize(("ranks", "always_ring"), [(2, False), (2, True), (4, False)])
def test_shards_are_the_whole_within_rounding(policy, groups, ranks, always_ring):
    stream = prompted_stream(STREAMS[groups]).to("cuda")
    in_fp32 = trained(copy.deepcopy(policy).float(), stream)
    whole = trained(policy, stream)
    parts = play(ranks, lambda e: trained(policy, stream, Context(exchange=e, always_ring=always_ring)))
    for logprobs_A, _ in parts:
        assert torch.equal(logprobs_A, parts[0][0]), "every rank has the same column"
    # The rounding of bf16 is what separates the whole from the same in fp32.
    noise = float((whole[0] - in_fp32[0]).abs().mean())
    assert float((parts[0][0] - in_fp32[0]).abs().mean()) < 1.5 * noise
    for name, gradient in in_fp32[1].items():
        summed = sum(part[name] for _, part in parts)
        assert relative(summed, gradient) < 1.5 * relative(whole[1][name], gradient) + 1e-3, name

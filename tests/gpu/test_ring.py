"""On CUDA the ring's flash kernels give, slice by slice, what one `varlen_attn` call gives for the whole stream."""

import pytest
import torch
from prompted_streams import prompted_stream

from openrlhf.models import ring
from openrlhf.models.exchange import play
from openrlhf.models.packed import PackedAttention
from openrlhf.models.prefixes import share_prefixes
from openrlhf.models.ring import RingAttention

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

CUDA = torch.device("cuda")
HEADS = (10, 2)


def packed(lengths):
    return PackedAttention(torch.tensor([0, *lengths], device=CUDA).cumsum(0).to(torch.int32), max(lengths)), sum(
        lengths
    )


def prompted(groups):
    """`groups`: (prompt length, response lengths) of each prompt."""
    shared = share_prefixes(prompted_stream(groups).to("cuda"))
    return shared.plan, shared.tokens.num_tokens


STREAMS = {
    "packed": lambda: packed([7, 129, 1, 700, 2, 64, 1]),
    "one long": lambda: packed([2048]),
    "sequences shorter than the ring": lambda: packed([1, 2, 1, 1, 2, 1, 1, 1, 3]),  # slices without any key
    "shared prompts": lambda: prompted([(200, [64, 40, 64, 7]), (1, [3, 3]), (96, [128, 300])]),
}


def attend(plan, leaves, weights, window):
    """Output and gradients, as fp32."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in leaves)
    out = plan(None, q, k, v, scaling=0.11, sliding_window=window, dropout=0.0).squeeze(0)
    return [x.float() for x in (out.detach(), *torch.autograd.grad((out * weights).sum(), leaves))]


@pytest.mark.parametrize("window", [None, 1, 2, 50])
@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.parametrize("name", STREAMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_the_ring_equals_the_whole_stream(name, size, window, dtype):
    plan, tokens = STREAMS[name]()
    padded = -(-tokens // size) * size
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(padded, heads, 64) for heads in (HEADS[0], HEADS[1], HEADS[1], HEADS[0])]
    *qkv, weights = (torch.randn(shape, generator=generator, device=CUDA).to(dtype) for shape in shapes)
    weights[tokens:] = 0  # no loss on what fills up
    assert isinstance(ring._kernel(qkv[0], qkv[2], 0.11), ring._Flash) == (dtype == torch.bfloat16)

    def run(exchange):
        own = RingAttention(plan, exchange, padded_length=padded, head_stride=1 + size % 2, device=CUDA)
        leaves = [x[exchange.rank :: size].clone().requires_grad_() for x in qkv]
        return attend(own, leaves, weights[exchange.rank :: size], window)

    mine = [torch.stack(stripes, dim=1).flatten(0, 1) for stripes in zip(*play(size, run), strict=True)]
    theirs = attend(plan, [x[:tokens].clone().requires_grad_() for x in qkv], weights[:tokens], window)
    tolerance = 1.5e-2 if dtype == torch.bfloat16 else 2e-3  # fp32 products may run in TF32
    # A window of one sees itself alone: the exact gradients of query and key are 0 there, so all are held against the
    # value's.
    scale = theirs[3].norm()
    for what, a, b in zip(("out", "dq", "dk", "dv"), mine, theirs, strict=True):
        assert a.isfinite().all(), what
        assert (a[:tokens] - b).norm() < tolerance * max(b.norm(), scale), what

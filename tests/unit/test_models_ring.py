"""Keys and values that go around a ring of ranks give the attention of the whole stream, forward and backward."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_models_prefixes import make_stream
from torch.utils.checkpoint import checkpoint

from openrlhf.config.fields import ConfigError
from openrlhf.models import ring
from openrlhf.models.exchange import play
from openrlhf.models.packed import PackedAttention, StreamPart
from openrlhf.models.prefixes import share_prefixes
from openrlhf.models.ring import RingAttention, RingLayout, check_head_stride

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=6)
GROUPS = st.lists(
    st.tuples(st.integers(1, 9), st.lists(st.integers(1, 6), min_size=1, max_size=4)), min_size=1, max_size=3
)
HEADS = [(8, 2), (3, 3), (2, 1)]


def packed_plan(lengths):
    return PackedAttention(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), max(lengths)), sum(lengths)


def prefix_plan(groups):
    """Of sequences that share a prompt; a group of one shares nothing."""
    tokens = make_stream(groups)
    if (shared := share_prefixes(tokens)) is None:
        return packed_plan(tokens.cu_seqlens.diff().tolist())
    return shared.plan, shared.tokens.num_tokens


def make_qkv(tokens, heads, *, dim=8, value_dim=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    shapes = [(heads[0], dim), (heads[1], dim), (heads[1], value_dim)]
    return [torch.randn(tokens, *shape, generator=generator).to(dtype) for shape in shapes]


def attend(plan, qkv, *, window, dropout=0.0):
    """A plan on q, k, v [T, H, D] → [T, H, D]."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in qkv)
    return plan(None, q, k, v, scaling=0.3, sliding_window=window, dropout=dropout).squeeze(0)


def whole(plan, qkv, weights, *, window):
    """Output and gradients of the plan on the whole stream."""
    leaves = [x.clone().requires_grad_() for x in qkv]
    out = attend(plan, leaves, window=window)
    (out * weights).sum().backward()
    return [out.detach(), *(x.grad for x in leaves)]


def in_stripes(plan, qkv, weights, size, *, window, head_stride=1, checkpointed=False):
    """The same from so many ranks, laid together again; they fill the stream up with ones."""
    tokens = len(weights)
    padded = -(-tokens // size) * size

    def stripe(x, rank):
        return torch.cat([x, x.new_ones(padded - tokens, *x.shape[1:])])[rank::size]

    def run(exchange):
        leaves = [stripe(x, exchange.rank).clone().requires_grad_() for x in qkv]
        rank_plan = RingAttention(
            plan, exchange, padded_length=padded, head_stride=head_stride, device=torch.device("cpu")
        )
        if checkpointed:
            out = checkpoint(lambda *qkv: attend(rank_plan, qkv, window=window), *leaves, use_reentrant=False)
        else:
            out = attend(rank_plan, leaves, window=window)
        mine = stripe(weights, exchange.rank)
        if exchange.rank >= tokens % size > 0:
            mine[-1] = 0  # no loss on what fills up
        (out * mine).sum().backward()
        return [out.detach(), *(x.grad for x in leaves)]

    return [torch.stack(stripes, dim=1).flatten(0, 1)[:tokens] for stripes in zip(*play(size, run), strict=True)]


def assert_the_same(
    plan, tokens, size, *, window=None, heads=(8, 2), head_stride=1, tolerance=1e-10, checkpointed=False, **options
):
    qkv = make_qkv(tokens, heads, **options)
    weights = torch.randn(tokens, heads[0], qkv[2].shape[-1], generator=torch.Generator().manual_seed(1))
    weights = weights.to(qkv[0].dtype)
    expected = whole(plan, qkv, weights, window=window)
    actual = in_stripes(plan, qkv, weights, size, window=window, head_stride=head_stride, checkpointed=checkpointed)
    for name, mine, theirs in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        assert mine.dtype == theirs.dtype
        torch.testing.assert_close(
            mine, theirs, rtol=tolerance, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_three_tokens_on_two_ranks_by_hand():
    """Scores are log 1, log 2, log 3 for keys a, b, c and every query; values are 6, 12, 18.

    a sees a: 6. b sees a, b: (1·6 + 2·12) / 3 = 10. c sees all: (1·6 + 2·12 + 3·18) / 6 = 14. Rank 0 has a and c, rank
    1 has b and a token that fills up. A loss of c's output alone moves the values by their shares 1/6, 2/6, 3/6.
    """
    plan, _ = packed_plan([3])
    q = torch.full((3, 1, 1), 1 / 0.3)
    k = torch.tensor([1.0, 2.0, 3.0]).log().reshape(3, 1, 1)
    v = torch.tensor([6.0, 12.0, 18.0]).reshape(3, 1, 1)
    weights = torch.tensor([0.0, 0.0, 1.0]).reshape(3, 1, 1)
    out, _, dk, dv = in_stripes(plan, [q, k, v], weights, 2, window=None)
    torch.testing.assert_close(out.flatten(), torch.tensor([6.0, 10.0, 14.0]))
    torch.testing.assert_close(dv.flatten(), torch.tensor([1 / 6, 2 / 6, 3 / 6]))
    # d out / d score = share · (value - out)
    torch.testing.assert_close(dk.flatten(), torch.tensor([-8 / 6, -2 * 2 / 6, 3 * 4 / 6]))


@pytest.mark.parametrize("size", [2, 3, 4])
@settings(max_examples=15, deadline=None)
@given(
    lengths=LENGTHS,
    heads=st.sampled_from(HEADS),
    window=st.sampled_from([None, 1, 2, 3, 5, 7, 100]),
    block=st.sampled_from([1, 3, 256]),
)
def test_packed_sequences(size, lengths, heads, window, block):
    plan, tokens = packed_plan(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "_BLOCK", block)
        assert_the_same(plan, tokens, size, window=window, heads=heads)


@pytest.mark.parametrize("size", [2, 3, 4])
@settings(max_examples=15, deadline=None)
@given(
    groups=GROUPS,
    window=st.sampled_from([None, None, 1, 2, 4, 6, 9, 100]),
    block=st.sampled_from([1, 3, 256]),
)
def test_shared_prompts(size, groups, window, block):
    plan, tokens = prefix_plan(groups)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "_BLOCK", block)
        assert_the_same(plan, tokens, size, window=window, heads=(2, 1))


MIXED = [1, 40, 2, 7, 1, 1, 33, 12]
"""Sequences of one token, shorter than the ring, and many times longer; 97 tokens, which no ring divides."""
PROMPTED = [(30, [5, 17, 5]), (1, [2, 9]), (8, [1, 1, 24])]


@pytest.mark.parametrize("window", [None, 2, 11])
@pytest.mark.parametrize("size", [2, 3, 4, 9])  # more ranks than heads too
def test_single_precision(size, window):
    for plan, tokens in (packed_plan(MIXED), prefix_plan(PROMPTED)):
        assert_the_same(plan, tokens, size, window=window, tolerance=1e-5, dtype=torch.float32)


@pytest.mark.parametrize("head_stride", [1, 2, 3, 6])
def test_the_result_does_not_depend_on_how_many_heads_travel_at_a_time(head_stride):
    plan, tokens = packed_plan(MIXED)
    assert_the_same(plan, tokens, 4, heads=(6, 6), head_stride=head_stride)


def test_values_may_be_narrower_than_keys():
    plan, tokens = packed_plan(MIXED)
    assert_the_same(plan, tokens, 3, value_dim=5, head_stride=2)


@pytest.mark.parametrize("window", [None, 11])
def test_layers_that_are_computed_again_in_the_backward_pass(window):
    plan, tokens = prefix_plan(PROMPTED)
    assert_the_same(plan, tokens, 3, window=window, checkpointed=True)


def test_bfloat16_is_summed_in_single_precision():
    """Nine slices are merged, and the result stays within one rounding of that of the whole stream."""
    plan, tokens = packed_plan(MIXED)
    assert_the_same(plan, tokens, 9, dtype=torch.bfloat16, tolerance=3e-2)


def calls(rank, window):
    """What a rank of two has to compute at step 1 of the stream a b c d e | f g, which `+` fills up."""
    layout = RingLayout([StreamPart(0, 5), StreamPart(5, 2)], 8, rank=rank, size=2, device=torch.device("cpu"))
    return layout.calls(1, window)


def test_what_ranks_see_of_each_others_tokens():
    """Rank 0 has a c e g and gets b d f +: a sees none of them, c sees b, e sees b d, g sees f; nobody asks for +.

    Rank 1 has b d f + and gets a c e g: b sees a, d sees a c; e and g are after the last query of their sequence, so f sees
    none, and neither does +.
    """
    (call,) = calls(0, None)
    assert (call.keys, call.cu_queries.tolist(), call.cu_keys.tolist()) == (slice(0, 3), [0, 3, 4], [0, 2, 3])
    assert call.blind_Q.tolist() == [True, False, False, False]
    (call,) = calls(1, None)
    assert (call.keys, call.cu_queries.tolist(), call.cu_keys.tolist()) == (slice(0, 2), [0, 2, 3, 4], [0, 2, 2, 2])
    assert call.blind_Q.tolist() == [False, False, True, True]


def test_a_window_shrinks_to_the_tokens_of_one_rank():
    """At step 1 a query's nearest key is 1 token away, the next ones 3 and 5: windows of 2, 4 and 6 tokens reach them."""
    assert [[call.left for call in calls(0, window)] for window in (1, 2, 3, 4)] == [[], [0], [0], [1]]
    assert [call.left for call in calls(0, 5)] == [None]  # as long as the longest sequence: no window


def test_a_stride_that_does_not_divide_the_heads_is_refused():
    with pytest.raises(ConfigError, match=r"--ds.ring_attn_head_stride 3: .* model has 8; take one of 1, 2, 4, 8"):
        check_head_stride(8, 3)
    with pytest.raises(ConfigError, match="head_stride 0"):
        check_head_stride(8, 0)
    check_head_stride(8, 4)


def test_dropped_attention_weights_are_refused():
    plan, _ = packed_plan([4])

    def run(exchange):
        ranks = RingAttention(plan, exchange, padded_length=4, head_stride=1, device=torch.device("cpu"))
        attend(ranks, [x[exchange.rank :: 2] for x in make_qkv(4, (3, 3))], window=None, dropout=0.1)

    with pytest.raises(ConfigError, match=r"--ds.ring_attn_size 2: .*\(0.1\).* divides its 3 heads"):
        play(2, run)

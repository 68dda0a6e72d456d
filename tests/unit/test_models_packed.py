"""A plan attends inside each sequence of the stream, exactly as if it stood alone."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from openrlhf.models import packed
from openrlhf.models.attention import ATTENTION, _attend
from openrlhf.models.packed import PackedAttention, length_order
from openrlhf.types import PackedTokens

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=8)


def make_qkv(tokens, *, heads, key_heads, dim, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def make(h):
        return torch.randn(1, h, tokens, dim, generator=generator).to(dtype).requires_grad_()

    return make(heads), make(key_heads), make(key_heads)


def cuts(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def by_hand(query, key, value, lengths, *, window=None):
    """softmax(q·k / √d) v with a T×T mask that allows the same sequence, no later token, fewer than `window` back."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    position = torch.arange(len(owner))
    distance = position[:, None] - position[None, :]
    allowed = (owner[:, None] == owner[None, :]) & (distance >= 0)
    if window is not None:
        allowed &= distance < window
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
    return (scores.masked_fill(~allowed, -torch.inf).softmax(-1) @ value).transpose(1, 2)


def run(lengths, query, key, value, *, window=None, dropout=0.0):
    plan = PackedAttention(cuts(lengths), max(lengths))
    return plan(None, query, key, value, scaling=query.shape[-1] ** -0.5, sliding_window=window, dropout=dropout)


@settings(max_examples=30, deadline=None)
@given(
    lengths=LENGTHS,
    heads=st.sampled_from([(4, 4), (4, 2), (3, 1)]),
    window=st.sampled_from([None, 1, 3, 5, 100]),
    block=st.sampled_from([1, 4, 256]),
)
def test_attention_and_its_gradients_equal_the_masked_formula(lengths, heads, window, block):
    query, key, value = make_qkv(sum(lengths), heads=heads[0], key_heads=heads[1], dim=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "_MIN_BLOCK", block)  # small blocks take short sequences through the banded path
        actual = run(lengths, query, key, value, window=window)
    expected = by_hand(query, key, value, lengths, window=window)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn(actual.shape, generator=torch.Generator().manual_seed(1))
    for mine, theirs in zip(
        torch.autograd.grad((actual * weights).sum(), (query, key, value)),
        torch.autograd.grad((expected * weights).sum(), (query, key, value)),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_values_may_be_narrower_than_keys():
    query, key, _ = make_qkv(9, heads=2, key_heads=2, dim=8)
    value = torch.randn(1, 2, 9, 4)
    out = run([4, 5], query, key, value)
    assert out.shape == (1, 9, 2, 4)
    torch.testing.assert_close(out, by_hand(query, key, value, [4, 5]), rtol=1e-5, atol=1e-6)


def test_bfloat16_stays_within_its_rounding():
    query, key, value = make_qkv(24, heads=4, key_heads=2, dim=16, dtype=torch.bfloat16)
    out = run([7, 7, 10], query, key, value)
    assert out.dtype == torch.bfloat16
    expected = by_hand(query.float(), key.float(), value.float(), [7, 7, 10])
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)


def test_dropout_is_honoured():
    """With every value 1 an undropped output is exactly 1; dropping half and doubling the rest scatters around 1."""
    query, key, _ = make_qkv(40, heads=2, key_heads=2, dim=8)
    value = torch.ones(1, 2, 40, 8)
    torch.testing.assert_close(run([20, 20], query, key, value), torch.ones(1, 40, 2, 8))
    torch.manual_seed(0)
    dropped = run([20, 20], query, key, value, dropout=0.5)
    assert dropped.std() > 0.1
    assert dropped.mean().item() == pytest.approx(1.0, abs=0.2)


def test_equal_neighbours_share_one_call(monkeypatch):
    """Lengths 3 3 3 5 5 3 are three runs, so three calls of 3, 2 and 1 rows."""
    rows = []
    sdpa = F.scaled_dot_product_attention

    def counting(query, *args, **kwargs):
        rows.append(query.shape[0])
        return sdpa(query, *args, **kwargs)

    monkeypatch.setattr(packed.F, "scaled_dot_product_attention", counting)
    lengths = [3, 3, 3, 5, 5, 3]
    run(lengths, *make_qkv(sum(lengths), heads=2, key_heads=2, dim=4))
    assert rows == [3, 2, 1]


def test_a_window_never_scores_more_than_a_band(monkeypatch):
    """1,000 tokens, window 10, blocks of 256: each of 4 calls sees its block and 9 keys before it, not 1,000."""
    shapes = []
    sdpa = F.scaled_dot_product_attention

    def counting(query, key, value, **kwargs):
        shapes.append((query.shape[2], key.shape[2]))
        return sdpa(query, key, value, **kwargs)

    monkeypatch.setattr(packed.F, "scaled_dot_product_attention", counting)
    run([1000], *make_qkv(1000, heads=1, key_heads=1, dim=4), window=10)
    assert shapes == [(256, 256), (256, 265), (256, 265), (232, 241)]


@given(lengths=LENGTHS)
def test_length_order_sorts_sequences_and_knows_the_way_back(lengths):
    sequences = [torch.arange(n) + 100 * i for i, n in enumerate(lengths)]
    tokens = PackedTokens.from_sequences(sequences, [torch.arange(n) % 2 == 1 for n in lengths])
    order = length_order(tokens)
    if order is None:
        runs = [n for i, n in enumerate(lengths) if i == 0 or lengths[i - 1] != n]
        assert len(runs) == len(set(lengths))
        return
    assert order.tokens.cu_seqlens.diff().tolist() == sorted(lengths)
    assert torch.equal(order.tokens.token_ids[order.back_T], tokens.token_ids)
    assert torch.equal(order.tokens.position_ids[order.back_T], tokens.position_ids)
    wanted = tokens.token_ids[tokens.action_positions].sort().values
    assert torch.equal(order.tokens.token_ids[order.tokens.action_positions].sort().values, wanted)


class TestWhatAPlanCannotExpress:
    def attend(self, **kwargs):
        query, key, value = make_qkv(4, heads=1, key_heads=1, dim=4)
        mask = kwargs.pop("attention_mask", None)
        return _attend(
            torch.nn.Identity(), query, key, value, mask, attention_plan=PackedAttention(cuts([4]), 4), **kwargs
        )

    def test_plain_arguments_pass(self):
        out, weights = self.attend(softcap=None, position_ids=torch.arange(4))
        assert out.shape == (1, 4, 1, 4)
        assert weights is None

    @pytest.mark.parametrize(
        "extra", [{"softcap": 50.0}, {"s_aux": torch.zeros(1)}, {"is_causal": False}, {"attention_mask": torch.ones(4)}]
    )
    def test_more_than_causal_softmax_is_refused_by_name(self, extra):
        with pytest.raises(NotImplementedError, match=next(iter(extra))):
            self.attend(**extra)

    def test_a_forward_without_a_plan_says_what_is_missing(self):
        with pytest.raises(RuntimeError, match=f"{ATTENTION}.*attention_plan"):
            _attend(torch.nn.Identity(), *make_qkv(4, heads=1, key_heads=1, dim=4), None)

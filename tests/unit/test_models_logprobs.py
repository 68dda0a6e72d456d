"""Chunked log-probs, entropies and their gradients are those of the full logits."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.models import logprobs
from openrlhf.models.logprobs import LogitTransform, chunked_logprobs
from openrlhf.types import Supports


def make(tokens, vocab, hidden, *, bias=False, dtype=torch.float32, spread=1.0):
    generator = torch.Generator().manual_seed(tokens * 1000 + vocab)
    hidden_AD = (torch.randn(tokens, hidden, generator=generator) * spread).to(dtype).requires_grad_()
    weight_VD = torch.randn(vocab, hidden, generator=generator).to(dtype).requires_grad_()
    bias_V = torch.randn(vocab, generator=generator).to(dtype).requires_grad_() if bias else None
    return hidden_AD, weight_VD, bias_V, torch.randint(vocab, (tokens,), generator=generator)


def in_full(hidden_AD, weight_VD, bias_V, targets_A, *, temperature=1.0, transform=LogitTransform()):  # noqa: B008
    logits = hidden_AD.float() @ weight_VD.float().t()
    if bias_V is not None:
        logits = logits + bias_V.float()
    logits = logits * transform.scale
    if transform.softcap is not None:
        logits = transform.softcap * torch.tanh(logits / transform.softcap)
    logp_AV = torch.log_softmax(logits / temperature, dim=-1)
    return logp_AV.gather(1, targets_A[:, None]).squeeze(1), -(logp_AV.exp() * logp_AV).sum(-1)


def relative_error(actual, expected):
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-12)).item()


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 9),
    vocab=st.integers(2, 23),
    tile=st.tuples(st.integers(1, 10), st.integers(1, 25)),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    transform=st.sampled_from([LogitTransform(), LogitTransform(scale=0.25), LogitTransform(scale=2.0, softcap=3.0)]),
    bias=st.booleans(),
)
def test_values_and_gradients_equal_the_full_computation(tokens, vocab, tile, temperature, transform, bias):
    """Tiles that do not divide rows or vocabulary, tiles of one column, tiles larger than everything."""
    inputs = make(tokens, vocab, 6, bias=bias)
    hidden_AD, weight_VD, bias_V, targets_A = inputs
    actual = chunked_logprobs(
        hidden_AD,
        weight_VD,
        targets_A,
        bias_V=bias_V,
        temperature=temperature,
        with_entropy=True,
        transform=transform,
        tile=tile,
    )
    expected = in_full(*inputs, temperature=temperature, transform=transform)
    torch.testing.assert_close(actual.logprobs_A, expected[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual.entropy_A, expected[1], rtol=1e-5, atol=1e-5)

    g, k = torch.randn(2, tokens, generator=torch.Generator().manual_seed(7))
    leaves = [leaf for leaf in (hidden_AD, weight_VD, bias_V) if leaf is not None]
    mine = torch.autograd.grad((g * actual.logprobs_A + k * actual.entropy_A).sum(), leaves)
    theirs = torch.autograd.grad((g * expected[0] + k * expected[1]).sum(), leaves)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_gradients_agree_to_one_part_in_100_000():
    """Sizes at which rounding averages out: 200 tokens, 5,000 entries, tiles of 64 × 768."""
    inputs = make(200, 5000, 32, spread=0.5)
    hidden_AD, weight_VD, _, targets_A = inputs
    actual = chunked_logprobs(hidden_AD, weight_VD, targets_A, temperature=0.8, with_entropy=True, tile=(64, 768))
    expected = in_full(*inputs, temperature=0.8)
    assert relative_error(actual.logprobs_A, expected[0]) < 1e-5
    assert relative_error(actual.entropy_A, expected[1]) < 1e-5
    mine = torch.autograd.grad((actual.logprobs_A - 0.1 * actual.entropy_A).mean(), (hidden_AD, weight_VD))
    theirs = torch.autograd.grad((expected[0] - 0.1 * expected[1]).mean(), (hidden_AD, weight_VD))
    for a, b in zip(mine, theirs, strict=True):
        assert relative_error(a, b) < 1e-5


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(1, 9),
    vocab=st.integers(2, 23),
    tile=st.tuples(st.integers(1, 10), st.integers(1, 25)),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    bias=st.booleans(),
    kept=st.booleans(),
)
def test_kept_tiles_and_recomputed_ones_give_the_full_gradient(tokens, vocab, tile, temperature, bias, kept):
    inputs = make(tokens, vocab, 6, bias=bias)
    hidden_AD, weight_VD, bias_V, targets_A = inputs
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(logprobs._KEPT_BYTES, "cpu", 1 << 20 if kept else 0)
        actual = chunked_logprobs(
            hidden_AD, weight_VD, targets_A, bias_V=bias_V, temperature=temperature, tile=tile
        ).logprobs_A
    expected, _ = in_full(*inputs, temperature=temperature)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1.0, 2.0, tokens)
    wanted = [x for x in (hidden_AD, weight_VD, bias_V) if x is not None]
    for mine, theirs in zip(
        torch.autograd.grad((actual * weights).sum(), wanted),
        torch.autograd.grad((expected * weights).sum(), wanted),
        strict=True,
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_small_logits_are_multiplied_once_and_large_ones_twice(monkeypatch):
    """One product forward; backward two (for hidden and weight), and one more where the tile was not kept."""
    hidden_AD, weight_VD, _, targets_A = make(8, 20, 6)
    for limit, products in ((1 << 20, 3), (0, 4)):
        monkeypatch.setitem(logprobs._KEPT_BYTES, "cpu", limit)
        with torch.profiler.profile() as profile:
            chunked_logprobs(hidden_AD, weight_VD, targets_A).logprobs_A.sum().backward()
        counts = {event.key: event.count for event in profile.key_averages()}
        assert counts["aten::mm"] + counts.get("aten::addmm_", 0) == products


def test_two_entries_by_hand():
    """Logits 0 and ln 3: p = 1/4, 3/4. log p = −1.386294, −0.287682; entropy = 1/4·1.386294 + 3/4·0.287682 = 0.562335.
    At temperature 2 the second logit is ln √3: p = 1/(1+√3) = 0.366025."""
    hidden, weight = torch.ones(2, 1), torch.tensor([[0.0], [math.log(3)]])
    out = chunked_logprobs(hidden, weight, torch.tensor([0, 1]), with_entropy=True, tile=(1, 1))
    assert out.logprobs_A.tolist() == pytest.approx([-1.386294, -0.287682], abs=1e-6)
    assert out.entropy_A.tolist() == pytest.approx([0.562335, 0.562335], abs=1e-6)
    warm = chunked_logprobs(hidden, weight, torch.tensor([0, 1]), temperature=2.0)
    assert warm.logprobs_A[0].item() == pytest.approx(math.log(0.366025), abs=1e-5)
    assert warm.entropy_A is None


def test_greedy_temperature_counts_as_one():
    hidden, weight, _, targets = make(5, 11, 4)
    greedy = chunked_logprobs(hidden, weight, targets, temperature=0.0, with_entropy=True)
    plain = chunked_logprobs(hidden, weight, targets, temperature=1.0, with_entropy=True)
    assert torch.equal(greedy.logprobs_A, plain.logprobs_A)
    assert torch.equal(greedy.entropy_A, plain.entropy_A)


def test_huge_logits_neither_overflow_nor_lose_the_entropy():
    """Logits of ±10⁴: one entry has all the mass, so log-prob 0 and entropy 0, and the gradient is 0."""
    hidden = torch.tensor([[1e4]], requires_grad=True)
    weight = torch.tensor([[-1.0], [0.5], [1.0]], requires_grad=True)
    out = chunked_logprobs(hidden, weight, torch.tensor([2]), with_entropy=True, tile=(1, 1))
    assert out.logprobs_A.item() == 0.0
    assert out.entropy_A.item() == 0.0
    for gradient in torch.autograd.grad(out.logprobs_A.sum() + out.entropy_A.sum(), (hidden, weight)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_chunked_logprobs_give_gradients_only_where_needed():
    hidden, weight, _, targets = make(5, 11, 4)
    frozen = weight.detach()
    (gradient,) = torch.autograd.grad(chunked_logprobs(hidden, frozen, targets).logprobs_A.sum(), hidden)
    (expected,) = torch.autograd.grad(in_full(hidden, frozen, None, targets)[0].sum(), hidden)
    torch.testing.assert_close(gradient, expected)


def test_entropy_alone_and_log_prob_alone_can_be_differentiated():
    inputs = make(5, 11, 4)
    hidden, weight, _, targets = inputs
    for index in (0, 1):
        out = chunked_logprobs(hidden, weight, targets, with_entropy=True)
        mine = torch.autograd.grad(out[index].sum(), (hidden, weight))
        theirs = torch.autograd.grad(in_full(*inputs)[index].sum(), (hidden, weight))
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_chunked_logprobs_of_no_tokens_have_zero_gradients():
    hidden = torch.zeros(0, 4, requires_grad=True)
    weight = torch.randn(11, 4, requires_grad=True)
    out = chunked_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64), with_entropy=True)
    assert out.logprobs_A.shape == out.entropy_A.shape == (0,)
    _, gradient = torch.autograd.grad(out.logprobs_A.sum(), (hidden, weight))
    assert torch.equal(gradient, torch.zeros(11, 4))


def test_16_bit_factors_have_logits_in_fp32():
    """Logits of about 64 / 2 · 1 = 32, which bf16 has in steps of 1/8 and 1/4: rounded, log-probs would be off by some
    hundredths. Products of 8 bits each are exact in fp32, and only their sum rounds."""
    torch.manual_seed(0)
    hidden_AD, weight_VD = torch.normal(1.0, 0.3, (40, 64)).bfloat16(), torch.normal(0.5, 0.1, (300, 64)).bfloat16()
    targets_A = torch.randint(300, (40,))
    exact_A = (hidden_AD.double() @ weight_VD.double().t()).log_softmax(-1)[torch.arange(40), targets_A]
    rounded_A = (hidden_AD @ weight_VD.t()).double().log_softmax(-1)[torch.arange(40), targets_A]
    found_A = chunked_logprobs(hidden_AD, weight_VD, targets_A, tile=(16, 64)).logprobs_A
    assert (rounded_A - exact_A).abs().mean() > 0.02
    assert (found_A - exact_A).abs().max() < 1e-4


def test_bfloat16_results_are_float32_and_gradients_keep_the_parameters_type():
    inputs = make(40, 300, 16, dtype=torch.bfloat16, spread=0.3)
    hidden, weight, _, targets = inputs
    out = chunked_logprobs(hidden, weight, targets, with_entropy=True, tile=(16, 64))
    expected = in_full(*inputs)
    assert out.logprobs_A.dtype == torch.float32
    torch.testing.assert_close(out.logprobs_A, expected[0], rtol=0, atol=3e-2)
    mine = torch.autograd.grad(out.logprobs_A.sum(), (hidden, weight))
    theirs = torch.autograd.grad(expected[0].sum(), (hidden, weight))
    for a, b in zip(mine, theirs, strict=True):
        assert a.dtype == torch.bfloat16
        assert relative_error(a.float(), b.float()) < 2e-2


def test_autocast_multiplies_in_its_type_and_gradients_reach_float32_weights():
    inputs = make(40, 300, 16, spread=0.3)
    hidden, weight, _, targets = inputs
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = chunked_logprobs(hidden, weight, targets)
    (gradient,) = torch.autograd.grad(out.logprobs_A.sum(), weight)
    assert out.logprobs_A.dtype == gradient.dtype == torch.float32
    torch.testing.assert_close(out.logprobs_A, in_full(*inputs)[0], rtol=0, atol=5e-2)


def test_wrong_sizes_and_temperatures_are_refused():
    hidden, weight, _, targets = make(5, 11, 4)
    with pytest.raises(ValueError, match="5 hidden states for 4 targets"):
        chunked_logprobs(hidden, weight, targets[:4])
    with pytest.raises(ValueError, match="temperature"):
        chunked_logprobs(hidden, weight, targets, temperature=-1.0)


def test_the_logits_of_all_tokens_never_exist_at_once():
    """64 tokens × 4,096 entries would be 262,144 logits; the largest matrix is the weight's gradient, 4,096 × 8."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.dim() == 2:
                sizes.append(out.shape[0] * out.shape[1])
            return out

    hidden, weight, _, targets = make(64, 4096, 8)
    with Watch():
        out = chunked_logprobs(hidden, weight, targets, with_entropy=True, tile=(64, 100))
        (out.logprobs_A.sum() + out.entropy_A.sum()).backward()
    assert max(sizes) == 4096 * 8
    assert 64 * 100 in sizes


# ------------------------------------------------------------------------------------------------------- supports


def drawn_supports(targets_A, vocab, *, seed):
    """Of every kind: whole, untold, the target alone, some, all."""
    generator = torch.Generator().manual_seed(seed)
    told = []
    for target in targets_A.tolist():
        others = [token for token in torch.randperm(vocab, generator=generator).tolist() if token != target]
        size = int(torch.randint(-2, vocab, (), generator=generator))
        told.append(None if size == -2 else [] if size == -1 else [target, *others[:size]])
    return told


def over_supports(hidden_AD, weight_VD, bias_V, targets_A, told, *, temperature=1.0, transform=LogitTransform()):  # noqa: B008
    """By the definition: token after token, with the logits of its support alone."""
    columns = []
    for a, ids in enumerate(told):
        own = torch.tensor(ids or range(len(weight_VD)))
        bias = None if bias_V is None else bias_V[own]
        place = torch.tensor([own.tolist().index(int(targets_A[a]))])
        columns.append(
            in_full(hidden_AD[a : a + 1], weight_VD[own], bias, place, temperature=temperature, transform=transform)
        )
    logprobs_A, entropy_A = zip(*columns, strict=True)
    return torch.cat(logprobs_A), torch.cat(entropy_A)


@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(1, 9),
    vocab=st.integers(2, 23),
    tile=st.tuples(st.integers(1, 10), st.integers(1, 25)),
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    transform=st.sampled_from([LogitTransform(), LogitTransform(scale=0.25), LogitTransform(scale=2.0, softcap=3.0)]),
    bias=st.booleans(),
    entropy=st.booleans(),
    kept=st.booleans(),
)
def test_a_softmax_over_supports_and_its_gradient_are_those_of_the_definition(
    tokens, vocab, tile, temperature, transform, bias, entropy, kept
):
    """Supports that are in some tiles and not in others, also not in the first."""
    inputs = make(tokens, vocab, 6, bias=bias)
    targets_A = inputs[-1]
    told = drawn_supports(targets_A, vocab, seed=tokens + vocab)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(logprobs._KEPT_BYTES, "cpu", 1 << 20 if kept else 0)
        actual = chunked_logprobs(
            *inputs[:2],
            targets_A,
            bias_V=inputs[2],
            temperature=temperature,
            with_entropy=entropy,
            transform=transform,
            supports=Supports.of(told),
            tile=tile,
        )
    expected = over_supports(*inputs, told, temperature=temperature, transform=transform)
    torch.testing.assert_close(actual.logprobs_A, expected[0], rtol=1e-5, atol=1e-5)
    g, k = torch.randn(2, tokens, generator=torch.Generator().manual_seed(7))
    mine, theirs = (g * actual.logprobs_A).sum(), (g * expected[0]).sum()
    if entropy:
        torch.testing.assert_close(actual.entropy_A, expected[1], rtol=1e-5, atol=1e-5)
        mine, theirs = mine + (k * actual.entropy_A).sum(), theirs + (k * expected[1]).sum()
    leaves = [leaf for leaf in inputs[:3] if leaf is not None]
    for a, b in zip(torch.autograd.grad(mine, leaves), torch.autograd.grad(theirs, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_the_gradient_over_supports_is_that_of_finite_differences():
    """Of Σ g·log π − k·H, by the definition in fp64, at each entry of the hidden states and of the head."""
    hidden_AD, weight_VD, _, targets_A = make(4, 11, 3)
    told = [
        [int(targets_A[0]), (int(targets_A[0]) + 3) % 11, (int(targets_A[0]) + 7) % 11],
        [],
        None,
        [int(targets_A[3])],
    ]
    g_A, k_A = torch.tensor([0.7, -1.3, 0.4, 2.0]), torch.tensor([0.3, -0.2, 0.5, 1.0])
    out = chunked_logprobs(
        hidden_AD, weight_VD, targets_A, with_entropy=True, supports=Supports.of(told), temperature=0.8, tile=(3, 4)
    )
    gradients = torch.autograd.grad((g_A * out.logprobs_A - k_A * out.entropy_A).sum(), (hidden_AD, weight_VD))

    def value(hidden, weight):
        total = 0.0
        for a, ids in enumerate(told):
            own = ids or list(range(11))
            log_p = torch.log_softmax(hidden[a] @ weight[own].t() / 0.8, dim=-1)
            total += g_A[a] * log_p[own.index(int(targets_A[a]))] + k_A[a] * (log_p.exp() * log_p).sum()
        return float(total)

    leaves = [hidden_AD.detach().double(), weight_VD.detach().double()]
    for leaf, gradient in zip(leaves, gradients, strict=True):
        for place in range(leaf.numel()):
            around = []
            for step in (1e-5, -1e-5):
                leaf.view(-1)[place] += step
                around.append(value(*leaves))
                leaf.view(-1)[place] -= step
            assert gradient.view(-1)[place].item() == pytest.approx((around[0] - around[1]) / 2e-5, abs=1e-4)


def test_what_is_outside_every_support_gets_no_gradient():
    """Exactly 0, not nearly: its row of the head is that of no token."""
    hidden_AD, weight_VD, _, _ = make(6, 40, 5)
    targets_A = torch.tensor([3, 3, 17, 18, 19, 39])
    told = [[3, 5], [3], [17, 18, 19], [18, 17], [19, 39], [39, 5]]
    out = chunked_logprobs(hidden_AD, weight_VD, targets_A, with_entropy=True, supports=Supports.of(told), tile=(4, 7))
    (out.logprobs_A.sum() + out.entropy_A.sum()).backward()
    inside = sorted({token for ids in told for token in ids})
    outside = [token for token in range(40) if token not in inside]
    assert (weight_VD.grad[outside] == 0).all()
    assert (weight_VD.grad[[5, 17, 18, 19, 39]] != 0).any(dim=1).all()
    assert out.logprobs_A[1].item() == 0.0  # the only token that it could be
    assert out.entropy_A[1].item() == pytest.approx(0.0, abs=1e-6)
    assert (hidden_AD.grad[1] == 0).all()


def test_supports_must_be_those_of_the_tokens():
    hidden_AD, weight_VD, _, targets_A = make(3, 5, 2)
    with pytest.raises(ValueError, match="2 supports for 3 targets"):
        chunked_logprobs(hidden_AD, weight_VD, targets_A, supports=Supports.of([[1], [2]]))

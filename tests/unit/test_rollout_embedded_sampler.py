"""Sampling: inverse CDF with hashed uniforms, truncation, and the log-prob of what was really drawn from."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.rollout.embedded.sampler import Penalty, _mix, inverse_cdf, sample, uniforms
from openrlhf.utils.randomness import derive_seed


def draw(
    logits: torch.Tensor,
    *,
    uniform: list[float],
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = -1,
    min_p: float = 0.0,
    **kwargs,
):
    B = len(logits)
    return sample(
        logits.clone(),
        uniform=np.array(uniform),
        temperature=np.full(B, temperature, np.float32),
        top_p=np.full(B, top_p, np.float32),
        top_k=np.full(B, top_k),
        min_p=np.full(B, min_p, np.float32),
        **kwargs,
    )


def test_mix_is_splitmix64():
    """The reference generator with seed 0 gives 0xE220A8397B1DCDAF first: the finaliser of the golden gamma."""
    assert int(_mix(np.array([0x9E3779B97F4A7C15], np.uint64))[0]) == 0xE220A8397B1DCDAF


@given(seed=st.integers(0, 2**64 - 1), counter=st.integers(0, 2**40))
def test_a_uniform_depends_on_its_own_seed_and_counter_only(seed, counter):
    alone = uniforms(np.array([seed], np.uint64), np.array([counter]))
    among = uniforms(np.array([1, seed, 2], np.uint64), np.array([5, counter, counter]))
    assert alone[0] == among[1]
    assert 0 <= alone[0] < 1


def test_uniforms_of_neighbouring_seeds_and_counters_look_independent():
    seeds, counters = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200))
    u = uniforms(seeds.ravel(), counters.ravel()).reshape(200, 200)
    assert len(np.unique(u)) == u.size
    histogram, _ = np.histogram(u, bins=20, range=(0, 1))
    assert ((histogram - 2000) ** 2 / 2000).sum() < 44  # chi-square, 19 degrees of freedom: 43.8 at p = 0.001
    assert abs(np.corrcoef(u[:-1].ravel(), u[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(u[:, :-1].ravel(), u[:, 1:].ravel())[0, 1]) < 0.02


def test_derived_seeds_differ_and_take_any_integer():
    seeds = {derive_seed(seed, counter) for seed in (-1, 0, 1, 2**70 + 5) for counter in range(100)}
    assert len(seeds) == 400
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_inverse_cdf_by_hand():
    """Cumulative 0.125 0.125 0.5 1: u = 0 … 0.124 → token 0, 0.125 … 0.499 → 2 (1 has no mass), above → 3."""
    probs = torch.tensor([[0.125, 0.0, 0.375, 0.5]]).expand(6, -1)
    uniform = torch.tensor([0.0, 0.124, 0.125, 0.499, 0.5, 1 - 2.0**-48], dtype=torch.float64)
    assert inverse_cdf(probs, uniform).tolist() == [0, 0, 2, 2, 3, 3]


@settings(max_examples=60, deadline=None)
@given(vocabulary=st.integers(1, 300), seed=st.integers(0, 10**6), sharpness=st.sampled_from([0.1, 1.0, 10.0]))
def test_inverse_cdf_agrees_with_a_plain_cumulative_sum(vocabulary, seed, sharpness):
    generator = torch.Generator().manual_seed(seed)
    probs = torch.softmax(torch.randn(8, vocabulary, generator=generator) * sharpness, -1)
    probs[torch.rand(probs.shape, generator=generator) < 0.3] = 0
    probs[:, -1] += 1e-3
    uniform = torch.rand(8, dtype=torch.float64, generator=generator)
    token_ids = inverse_cdf(probs, uniform)
    assert (probs.gather(-1, token_ids[:, None]) > 0).all()
    cumulative = probs.double().cumsum(-1)
    target = uniform * cumulative[:, -1]
    at = cumulative.gather(-1, token_ids[:, None]).squeeze(-1)
    before = at - probs.double().gather(-1, token_ids[:, None]).squeeze(-1)
    assert (at >= target - 1e-6).all()
    assert (before <= target + 1e-6).all()


def test_frequencies_follow_the_softmax_at_temperature():
    """q ∝ p^(1/T): with p = (1, 2, 4)/7 and T = 0.5, q = (1, 4, 16)/21."""
    n = 20_000
    logits = torch.tensor([1.0, 2.0, 4.0]).log().expand(n, -1)
    out = draw(logits, uniform=uniforms(np.full(n, 7, np.uint64), np.arange(n)).tolist(), temperature=0.5)
    q = torch.tensor([1.0, 4.0, 16.0]) / 21
    frequency = torch.bincount(out.token_ids, minlength=3) / n
    assert torch.allclose(frequency, q, atol=0.01)
    assert torch.allclose(out.logprobs, q.log()[out.token_ids], atol=1e-6)


def test_top_k_keeps_k_and_renormalises():
    """p = (0.1, 0.4, 0.2, 0.3), k = 2 keeps tokens 1 and 3: q = (4/7, 3/7)."""
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(3, -1)
    out = draw(logits, uniform=[0.0, 0.57, 0.58], top_k=2)
    assert out.token_ids.tolist() == [1, 1, 3]
    assert out.logprobs.exp().tolist() == pytest.approx([4 / 7, 4 / 7, 3 / 7], abs=1e-6)


def test_top_p_includes_the_token_that_crosses_it():
    """Sorted 0.4 0.3 0.2 0.1, p = 0.5: 0.4 is not enough, 0.3 crosses, so tokens 1 and 3 stay."""
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(2, -1)
    out = draw(logits, uniform=[0.0, 0.99], top_p=0.5)
    assert out.token_ids.tolist() == [1, 3]
    assert out.logprobs.exp().tolist() == pytest.approx([4 / 7, 3 / 7], abs=1e-6)


def test_top_p_counts_within_what_top_k_left():
    """k = 3 leaves 0.4 0.3 0.2 of 0.9; p = 0.4 of that is 0.36 < 0.4, so only token 1 stays."""
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()[None]
    out = draw(logits, uniform=[0.99], top_k=3, top_p=0.4)
    assert (out.token_ids.item(), out.logprobs.item()) == (1, pytest.approx(0.0, abs=1e-6))


def test_a_nucleus_wider_than_the_candidates_is_still_exact():
    """1,000 equal tokens, p = 0.5: 500 stay (one more if the sum falls short by rounding), each with 1/500."""
    n = 2000
    out = draw(torch.zeros(n, 1000), uniform=np.linspace(0, 1, n, endpoint=False).tolist(), top_p=0.5)
    assert len(out.token_ids.unique()) in (500, 501)
    assert out.logprobs.exp().mean().item() == pytest.approx(1 / 500, rel=3e-3)


def test_forbidden_tokens_only_where_forbidden():
    logits = torch.tensor([5.0, 1.0, 0.0]).expand(2, -1)
    out = draw(logits, uniform=[0.1, 0.1], forbidden=np.array([[0, 0]]))
    assert out.token_ids.tolist() == [1, 0]
    assert out.logprobs[0].item() == pytest.approx(1 - math.log(math.e + 1), abs=1e-6)


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "want_logprobs": False},
        {"temperature": 0.7},
        {"top_p": 0.6},
        {"top_k": 3},
        {"min_p": 0.3},
        {"temperature": 1.3, "top_p": 0.9, "top_k": 5, "min_p": 0.05},
        {"penalties": (2.0, 0.5, 0.25)},
        {"penalties": (0.5, -1.0, -2.0), "top_p": 0.7},
    ],
    ids=str,
)
def test_unsampled_tokens_are_as_if_the_vocabulary_had_none_of_them(asked):
    """Whatever is asked for, tokens 2 and 6 are by far the likeliest, and in prompt and response; what comes out is
    what comes out of the other six tokens alone."""
    n, unsampled = 40, [2, 6]
    others = torch.tensor([token for token in range(8) if token not in unsampled])
    logits = torch.randn(n, 8, generator=torch.Generator().manual_seed(1)) * 2
    logits[:, unsampled] += 30
    uniform = np.linspace(0, 1, n, endpoint=False).tolist()
    asked = dict(asked)
    given = asked.pop("penalties", None)

    def penalties(prompt: list[int], response: list[int]) -> list[Penalty]:
        rows = range(n) if given else ()
        return [Penalty(row, np.array(prompt), np.array(response), *given) for row in rows]

    # Token 5 is the fifth of the other six.
    among = penalties([1, 2], [5, 5, 2, 6])
    out = draw(logits, uniform=uniform, unsampled=torch.tensor(unsampled), penalties=among, **asked)
    alone = draw(logits[:, others], uniform=uniform, penalties=penalties([1], [4, 4]), **asked)
    assert torch.equal(out.token_ids, others[alone.token_ids])
    if alone.logprobs is None:
        assert out.logprobs is None
    else:
        assert torch.allclose(out.logprobs, alone.logprobs, atol=1e-6)


def test_each_row_is_told_what_its_token_was_chosen_among():
    """p = (0.1, 0.4, 0.2, 0.3). top-k 2: {1, 3}; top-p 0.8: {1, 3, 2}, for 0.4 + 0.3 is less; min-p 0.6: above 0.24.
    A row that wants at most two is not told of three; one that wants nothing, and a greedy one, are told nothing; a
    distribution that nothing cuts has every token."""
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log().expand(8, 4)
    out = sample(
        logits.clone(),
        uniform=np.linspace(0, 0.99, 8),
        temperature=np.array([1, 1, 1, 1, 1, 0, 1, 1], np.float32),
        top_p=np.array([1, 0.8, 1, 0.8, 0.8, 0.8, 1, 0.8], np.float32),
        top_k=np.array([2, -1, -1, -1, -1, -1, -1, 2]),
        min_p=np.array([0, 0, 0.6, 0, 0, 0, 0, 0], np.float32),
        most_support=np.array([2, 3, 64, 2, 0, 64, 64, 64]),
    )
    assert [None if own is None else list(own) for own in out.supports] == [
        [1, 3], [1, 2, 3], [1, 3], None, [], [], [0, 1, 2, 3], [1, 3],
    ]  # fmt: skip
    for token, own in zip(out.token_ids.tolist(), out.supports, strict=True):
        assert not own or token in own
    assert draw(logits, uniform=[0.5] * 8, top_k=2).supports is None


def test_min_p_keeps_what_is_near_the_likeliest():
    """p = (0.1, 0.4, 0.2, 0.3), min_p = 0.6: 0.24 is the least, so 0.4 and 0.3 stay: q = (4/7, 3/7)."""
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(2, -1)
    out = draw(logits, uniform=[0.0, 0.99], min_p=0.6)
    assert out.token_ids.tolist() == [1, 3]
    assert out.logprobs.exp().tolist() == pytest.approx([4 / 7, 3 / 7], abs=1e-6)


def test_penalties_by_hand():
    """Row 0, logits (2, -1, 1, 0.5), prompt (0), response (1, 2, 2), repetition 2, presence 0.25, frequency 0.5:

    2/2 = 1 · -1·2 - 0.25 - 0.5 = -2.75 · 1/2 - 0.25 - 2·0.5 = -0.75 · 0.5 as it was.  Row 1 pays nothing.
    """
    logits = torch.tensor([2.0, -1.0, 1.0, 0.5]).expand(2, -1)
    penalty = Penalty(0, np.array([0]), np.array([1, 2, 2]), repetition=2.0, presence=0.25, frequency=0.5)
    out = draw(logits, uniform=[0.0, 0.0], temperature=0.0, penalties=[penalty])
    penalised = torch.tensor([1.0, -2.75, -0.75, 0.5])
    expected = [penalised.log_softmax(0)[0].item(), logits[1].log_softmax(0)[0].item()]
    assert out.logprobs.tolist() == pytest.approx(expected, abs=1e-6)


def test_greedy_reports_the_temperature_one_log_prob():
    out = draw(torch.tensor([[0.0, math.log(3)]]), uniform=[0.0], temperature=0.0)
    assert (out.token_ids.item(), out.logprobs.item()) == (1, pytest.approx(math.log(0.75), abs=1e-6))
    assert draw(torch.zeros(1, 2), uniform=[0.0], temperature=0.0, want_logprobs=False).logprobs is None


def test_a_row_samples_the_same_whatever_its_neighbours_ask_for():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 500, generator=generator) * 3
    parameters = [(0.0, 1.0, -1, 0.0), (0.7, 0.8, -1, 0.0), (1.3, 1.0, 20, 0.0), (1.0, 1.0, -1, 0.1)]
    uniform = np.array([0.2, 0.5, 0.7, 0.9])
    together = sample(
        logits.clone(),
        uniform=uniform,
        temperature=np.array([p[0] for p in parameters], np.float32),
        top_p=np.array([p[1] for p in parameters], np.float32),
        top_k=np.array([p[2] for p in parameters]),
        min_p=np.array([p[3] for p in parameters], np.float32),
    )
    for i, (temperature, top_p, top_k, min_p) in enumerate(parameters):
        alone = draw(
            logits[i : i + 1], uniform=[uniform[i]], temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p
        )
        assert alone.token_ids.item() == together.token_ids[i].item()
        assert alone.logprobs.item() == pytest.approx(together.logprobs[i].item(), abs=1e-6)


def test_low_precision_logits_are_sampled_in_float32():
    logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.bfloat16)
    out = draw(logits, uniform=[0.999])
    assert out.logprobs.dtype == torch.float32
    assert out.logprobs.item() == pytest.approx(torch.log_softmax(logits.float(), -1)[0, 2].item(), abs=1e-6)

"""Every number here is derived by hand in its docstring."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from openrlhf.algorithms.advantages import (
    ESTIMATORS,
    Moments,
    discounted_returns,
    gae,
    get_estimator,
    whiten,
)

GROUP_ESTIMATORS = [name for name, estimator in ESTIMATORS.items() if estimator.needs_group]


def shaped(name: str, totals: list[float]) -> list[float]:
    totals_G = torch.tensor(totals)
    shaping = get_estimator(name).shape(totals_G)
    return ((totals_G - shaping.baseline_G) / shaping.scale_G).tolist()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Totals 1, 0, 0, 3: mean 1; the others' means are 1, 4/3, 4/3, 1/3; unbiased variance (0+1+1+4)/3 = 2.
        ("gae", [1.0, 0.0, 0.0, 3.0]),
        ("reinforce", [1.0, 0.0, 0.0, 3.0]),
        ("reinforce_baseline", [0.0, -1.0, -1.0, 2.0]),
        ("dr_grpo", [0.0, -1.0, -1.0, 2.0]),
        ("rloo", [0.0, -4 / 3, -4 / 3, 8 / 3]),
        ("group_norm", [0.0, -1 / math.sqrt(2), -1 / math.sqrt(2), math.sqrt(2)]),
    ],
)
def test_group_shaping_by_hand(name, expected):
    assert shaped(name, [1.0, 0.0, 0.0, 3.0]) == pytest.approx(expected, abs=1e-6)


def test_what_each_estimator_needs():
    assert [name for name, e in ESTIMATORS.items() if e.needs_critic] == ["gae"]
    assert [name for name, e in ESTIMATORS.items() if e.whiten] == ["gae", "reinforce", "reinforce_baseline"]
    assert GROUP_ESTIMATORS == ["rloo", "reinforce_baseline", "group_norm", "dr_grpo"]


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
@settings(deadline=None, max_examples=50)
@given(st.floats(-10, 10, width=32), st.integers(2, 64))
def test_a_group_that_agrees_gives_no_advantage(name, reward, size):
    """Exactly none: the float32 mean of 64 times −0.9 is off by one bit, which over a spread as small would be a
    z-score of 1."""
    assert shaped(name, [reward] * size) == [0.0] * size


@pytest.mark.parametrize("name", GROUP_ESTIMATORS)
def test_a_single_sample_has_nothing_to_be_compared_with(name):
    with pytest.raises(ValueError, match="two or more"):
        shaped(name, [1.0])


@pytest.mark.parametrize("name", [name for name in ESTIMATORS if name not in GROUP_ESTIMATORS])
def test_estimators_without_comparison_take_a_single_sample_as_it_is(name):
    assert shaped(name, [0.25]) == [0.25]


@pytest.mark.parametrize("name", ESTIMATORS)
@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(-5, 5), min_size=2, max_size=8), st.randoms(use_true_random=False))
def test_permuting_a_group_permutes_its_shaping(name, totals, random):
    order = list(range(len(totals)))
    random.shuffle(order)
    whole = shaped(name, [float(t) for t in totals])
    assert shaped(name, [float(totals[i]) for i in order]) == pytest.approx([whole[i] for i in order], abs=1e-5)


def test_an_unknown_estimator_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="known: gae, reinforce, rloo, reinforce_baseline, group_norm, dr_grpo"):
        get_estimator("gea")


def test_returns_discount_over_action_tokens():
    """r = 0, 1, 0, 2 and γ = 1/2: R_3 = 2, R_2 = 1, R_1 = 1 + 1/2, R_0 = 3/4. With γ = 1 plain suffix sums."""
    rewards = torch.tensor([0.0, 1.0, 0.0, 2.0])
    assert discounted_returns(rewards, [0, 4], gamma=0.5).tolist() == [0.75, 1.5, 1.0, 2.0]
    assert discounted_returns(rewards, [0, 4]).tolist() == [3.0, 3.0, 2.0, 2.0]


def test_returns_of_a_batch_by_hand():
    """Two samples, γ = 1/2. (1, 0) before 4: R_1 = 0 + 4/2 = 2, R_0 = 1 + 2/2 = 2. (0, 0, 8) before nothing: 2, 4, 8."""
    rewards = torch.tensor([1.0, 0.0, 0.0, 0.0, 8.0])
    returns = discounted_returns(rewards, [0, 2, 5], gamma=0.5, later_N=torch.tensor([4.0, 0.0]))
    assert returns.tolist() == [2, 2, 2, 4, 8]


def test_rewards_of_two_turns_credit_their_own_and_earlier_tokens():
    """Two turns of two action tokens each, reward 1 for the first and 2 for the second, the environment's tokens in
    between left out of the column: R = 3, 3 in the first turn and 2, 2 in the second, γ = 1. In a group whose other
    member earned 1 in one token, rloo's baselines are 1 and 3: advantages 2, 2, 1, 1 and −2."""
    rewards = torch.tensor([0.0, 1.0, 0.0, 2.0, 1.0])
    returns = discounted_returns(rewards, [0, 4, 5])
    baselines = get_estimator("rloo").shape(torch.tensor([3.0, 1.0])).baseline_G
    assert (returns - baselines[torch.tensor([0, 0, 0, 0, 1])]).tolist() == [2, 2, 1, 1, -2]


def test_gae_by_hand():
    """r = 0, 1, 2; V = 1, 2, 4; γ = 1/2, λ = 1/2, so γλ = 1/4; behind the end V = A = 0.

    δ_2 = 2 + 0 − 4 = −2          A_2 = −2
    δ_1 = 1 + 4/2 − 2 = 1         A_1 = 1 − 2/4 = 1/2
    δ_0 = 0 + 2/2 − 1 = 0         A_0 = 0 + 1/8 = 1/8
    returns A + V = 9/8, 5/2, 2
    """
    rewards, values = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.0, 2.0, 4.0])
    result = gae(rewards, values, [0, 3], gamma=0.5, lambd=0.5)
    assert result.advantages_A.tolist() == [0.125, 0.5, -2]
    assert result.returns_A.tolist() == [1.125, 2.5, 2]


def test_gae_with_more_to_come_by_hand():
    """r = 1, V = 2; behind it V = 6, A = 4; γ = 1/2, λ = 1/2: δ = 1 + 3 − 2 = 2, A = 2 + 4/4 = 3, return 5."""
    result = gae(
        torch.tensor([1.0]),
        torch.tensor([2.0]),
        [0, 1],
        gamma=0.5,
        lambd=0.5,
        next_values_N=torch.tensor([6.0]),
        next_advantages_N=torch.tensor([4.0]),
    )
    assert result.advantages_A.tolist() == [3]
    assert result.returns_A.tolist() == [5]


def test_the_ends_of_lambda():
    """λ = 0: A = δ, what one step told. λ = 1: A = R − V, with the discounted returns (γ = 1/2) 1, 2, 2."""
    rewards, values = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.0, 2.0, 4.0])
    assert gae(rewards, values, [0, 3], gamma=0.5, lambd=0.0).advantages_A.tolist() == [0, 1, -2]
    ended = gae(rewards, values, [0, 3], gamma=0.5, lambd=1.0)
    assert ended.advantages_A.tolist() == [0, 0, -2]
    assert ended.returns_A.tolist() == discounted_returns(rewards, [0, 3], gamma=0.5).tolist() == [1, 2, 2]


TOKENS = st.tuples(st.floats(-2, 2, width=32), st.floats(-2, 2, width=32))


@settings(deadline=None, max_examples=50)
@given(
    st.lists(st.lists(TOKENS, min_size=1, max_size=7), min_size=1, max_size=5),
    st.sampled_from([0.0, 0.9, 1.0]),
    st.sampled_from([0.0, 0.95, 1.0]),
    st.randoms(use_true_random=False),
)
def test_gae_of_a_batch_is_the_definition_of_each_sample_in_any_order(samples, gamma, lambd, random):
    random.shuffle(samples)
    expected = []
    for sample in samples:
        next_value = next_advantage = 0.0
        backwards = []
        for reward, value in reversed(sample):
            next_advantage = reward + gamma * next_value - value + gamma * lambd * next_advantage
            next_value = value
            backwards.append(next_advantage)
        expected += backwards[::-1]
    offsets = [sum(len(s) for s in samples[:i]) for i in range(len(samples) + 1)]
    rewards, values = torch.tensor([token for sample in samples for token in sample]).T
    result = gae(rewards, values, offsets, gamma=gamma, lambd=lambd)
    assert result.advantages_A.tolist() == pytest.approx(expected, abs=1e-4)
    assert torch.equal(result.returns_A, result.advantages_A + values)


@settings(deadline=None, max_examples=50)
@given(st.lists(TOKENS, min_size=2, max_size=8), st.integers(1, 7), st.sampled_from([0.9, 1.0]))
def test_an_episode_in_two_segments_is_credited_as_in_one(tokens, cut, gamma):
    """The later segment first; what stands at its first token stands behind the earlier one's last."""
    cut = min(cut, len(tokens) - 1)
    rewards, values = torch.tensor(tokens).T
    whole = gae(rewards, values, [0, len(tokens)], gamma=gamma, lambd=0.8)
    later = gae(rewards[cut:], values[cut:], [0, len(tokens) - cut], gamma=gamma, lambd=0.8)
    earlier = gae(
        rewards[:cut],
        values[:cut],
        [0, cut],
        gamma=gamma,
        lambd=0.8,
        next_values_N=values[cut : cut + 1],
        next_advantages_N=later.advantages_A[:1],
    )
    joined = torch.cat([earlier.advantages_A, later.advantages_A])
    torch.testing.assert_close(joined, whole.advantages_A, atol=1e-5, rtol=1e-5)
    returns = discounted_returns(rewards, [0, len(tokens)], gamma=gamma)
    first = discounted_returns(rewards[:cut], [0, cut], gamma=gamma, later_N=returns[cut : cut + 1])
    torch.testing.assert_close(first, returns[:cut], atol=1e-5, rtol=1e-5)


def test_whitening_by_hand():
    """1, 3, 5, 7: mean 4, population variance (9+1+1+9)/4 = 5."""
    values = torch.tensor([1.0, 3.0, 5.0, 7.0])
    expected = [(v - 4) / math.sqrt(5) for v in (1, 3, 5, 7)]
    assert whiten(values, Moments.of(values)).tolist() == pytest.approx(expected)
    assert whiten(values, Moments.of(values), divide_by_std=False).tolist() == [-3, -1, 1, 3]


def test_whitening_equal_values_gives_zeros_not_infinities():
    values = torch.full((4,), 0.3)
    assert whiten(values, Moments.of(values)).abs().max() < 1e-3
    assert whiten(values[:1], Moments.of(values[:1])).abs().max() < 1e-3


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=20), st.integers(1, 19))
def test_moments_of_parts_add_up_to_moments_of_the_whole(numbers, cut):
    values = torch.tensor(numbers)
    left, right = Moments.of(values[:cut]), Moments.of(values[cut:])
    both = Moments(*(a + b for a, b in zip(left, right, strict=True)))
    assert both.mean == pytest.approx(Moments.of(values).mean, abs=1e-9)
    assert both.variance == pytest.approx(Moments.of(values).variance, abs=1e-7)

"""Every number here is derived by hand in its docstring."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from openrlhf.algorithms.advantages import ESTIMATORS, Moments, get_estimator, rewards_to_come, whiten
from openrlhf.algorithms.evaluation import pass_at_k
from openrlhf.algorithms.losses import get_policy_loss, ppo_loss
from openrlhf.algorithms.reduction import Aggregation, sample_weights


def shaped(name: str, totals: list[float]) -> list[float]:
    totals_G = torch.tensor(totals)
    shaping = get_estimator(name).shape(totals_G)
    return ((totals_G - shaping.baseline_G) / shaping.scale_G).tolist()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # Totals 1, 0, 0, 3: mean 1; the others' means are 1, 4/3, 4/3, 1/3; unbiased variance (0+1+1+4)/3 = 2.
        ("reinforce", [1.0, 0.0, 0.0, 3.0]),
        ("reinforce_baseline", [0.0, -1.0, -1.0, 2.0]),
        ("dr_grpo", [0.0, -1.0, -1.0, 2.0]),
        ("rloo", [0.0, -4 / 3, -4 / 3, 8 / 3]),
        ("group_norm", [0.0, -1 / math.sqrt(2), -1 / math.sqrt(2), math.sqrt(2)]),
    ],
)
def test_group_shaping_by_hand(name, expected):
    assert shaped(name, [1.0, 0.0, 0.0, 3.0]) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("name", [n for n, e in ESTIMATORS.items() if e.needs_group])
def test_a_group_that_agrees_gives_no_advantage(name):
    assert shaped(name, [0.7, 0.7, 0.7]) == pytest.approx([0, 0, 0], abs=1e-6)


def test_an_unknown_estimator_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="known: reinforce, reinforce_baseline, rloo, group_norm, dr_grpo"):
        get_estimator("gea")
    with pytest.raises(ValueError, match="known: ppo"):
        get_policy_loss("ppp")


def test_rewards_to_come_discount_over_action_tokens():
    """r = 0, 1, 0, 2 and γ = 1/2: R_3 = 2, R_2 = 1, R_1 = 1 + 1/2, R_0 = 3/4. With γ = 1 plain suffix sums."""
    rewards = torch.tensor([0.0, 1.0, 0.0, 2.0])
    assert rewards_to_come(rewards, gamma=0.5).tolist() == [0.75, 1.5, 1.0, 2.0]
    assert rewards_to_come(rewards).tolist() == [3.0, 3.0, 2.0, 2.0]


def test_reward_of_later_segments_stands_behind_the_last_token():
    """r = 1, 0 with 4 to come and γ = 1/2: R_1 = 2, R_0 = 1 + 1."""
    rewards = torch.tensor([1.0, 0.0])
    assert rewards_to_come(rewards, gamma=0.5, later=4.0).tolist() == [2.0, 2.0]
    assert rewards_to_come(rewards, later=4.0).tolist() == [5.0, 4.0]


def test_whitening_by_hand():
    """1, 3, 5, 7: mean 4, population variance (9+1+1+9)/4 = 5."""
    values = torch.tensor([1.0, 3.0, 5.0, 7.0])
    expected = [(v - 4) / math.sqrt(5) for v in (1, 3, 5, 7)]
    assert whiten(values, Moments.of(values)).tolist() == pytest.approx(expected)
    assert whiten(values, Moments.of(values), divide_by_std=False).tolist() == [-3, -1, 1, 3]


def test_whitening_equal_values_gives_zeros_not_infinities():
    values = torch.full((4,), 0.3)
    assert whiten(values, Moments.of(values)).abs().max() < 1e-3


@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=20), st.integers(1, 19))
def test_moments_of_parts_add_up_to_moments_of_the_whole(numbers, cut):
    values = torch.tensor(numbers)
    left, right = Moments.of(values[:cut]), Moments.of(values[cut:])
    both = Moments(*(a + b for a, b in zip(left, right, strict=True)))
    assert both.mean == pytest.approx(Moments.of(values).mean, abs=1e-9)
    assert both.variance == pytest.approx(Moments.of(values).variance, abs=1e-7)


def test_clipped_loss_and_gradient_by_hand():
    """ε_low = 0.2, ε_high = 0.3; old log-prob 0, so ρ = exp(logp) and dρ/dlogp = ρ.

    ρ    A    min(ρA, clip(ρ)A)         loss    d loss / d logp
    1    2    2                          -2      -2           (= -ρA)
    1.5  2    min(3, 2.6) = 2.6          -2.6     0           clipped above
    1.5 -1    min(-1.5, -1.3) = -1.5      1.5     1.5         (= -ρA: the pessimistic side is never clipped)
    0.5  2    min(1, 1.6) = 1            -1      -1
    0.5 -1    min(-0.5, -0.8) = -0.8      0.8     0           clipped below
    """
    ratio = torch.tensor([1.0, 1.5, 1.5, 0.5, 0.5])
    logp = ratio.log().requires_grad_()
    advantages = torch.tensor([2.0, 2.0, -1.0, 2.0, -1.0])
    result = ppo_loss(logp, torch.zeros(5), advantages, clip_low=0.2, clip_high=0.3)
    assert result.loss_A.tolist() == pytest.approx([-2, -2.6, 1.5, -1, 0.8])
    assert result.clipped_A.tolist() == [False, True, False, False, True]
    result.loss_A.sum().backward()
    assert logp.grad.tolist() == pytest.approx([-2, 0, 1.5, -1, 0], abs=1e-6)


def test_a_wild_ratio_stays_finite():
    logp = torch.tensor([500.0, -500.0], requires_grad=True)
    loss = ppo_loss(logp, torch.zeros(2), torch.tensor([-1.0, 1.0]), clip_low=0.2, clip_high=0.2).loss_A
    assert torch.isfinite(loss).all()


def test_sample_weights_by_hand():
    """Samples of 1, 3 and 0 action tokens.

    token: 1/4 each; sequence: two samples count, so 1/2 and 1/(2·3); constant L = 8: 1/(2·8) each. The sample
    without actions weighs nothing and is in no denominator.
    """
    counts = [1, 3, 0]
    assert sample_weights(Aggregation.TOKEN, counts) == [1 / 4, 1 / 4, 0]
    assert sample_weights(Aggregation.SEQUENCE, counts) == [1 / 2, 1 / 6, 0]
    assert sample_weights(Aggregation.CONSTANT, counts, constant_length=8) == [1 / 16, 1 / 16, 0]
    assert sample_weights(Aggregation.TOKEN, [0, 0]) == [0, 0]
    with pytest.raises(ValueError, match="needs the length"):
        sample_weights(Aggregation.CONSTANT, counts)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=10))
def test_token_and_sequence_weights_make_means(counts):
    """The loss of all-ones is 1 under a mean: Σ_i w_i |o_i| = 1."""
    for aggregation in (Aggregation.TOKEN, Aggregation.SEQUENCE):
        weights = sample_weights(aggregation, counts)
        assert sum(w * c for w, c in zip(weights, counts, strict=True)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("n", "correct", "k", "expected"),
    [(4, 0, 1, 0), (4, 4, 2, 1), (4, 1, 1, 1 / 4), (4, 2, 2, 1 - 1 / 6), (5, 3, 3, 1)],
)
def test_pass_at_k_by_hand(n, correct, k, expected):
    """n=4, c=2, k=2: of the 6 pairs one has no right sample. n=5, c=3, k=3: only 2 wrong ones, so none of 3."""
    assert pass_at_k(n, correct, k) == pytest.approx(expected)

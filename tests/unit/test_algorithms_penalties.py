"""Penalties at their edges."""

import pytest
import torch

from openrlhf.algorithms.penalties import normalise, overlong_penalty, stop_properly


@pytest.mark.parametrize(
    ("length", "expected"),
    [(0, 0), (80, 0), (81, -0.1), (90, -1), (99, -1.9), (100, -2), (101, -2), (500, -2)],
)
def test_overlong_penalty_by_hand(length, expected):
    """Limit 100, buffer 20, factor 2: nothing up to 80 tokens, then 2/20 per token, −2 from the limit on."""
    assert overlong_penalty(length, limit=100, buffer=20, factor=2.0) == pytest.approx(expected)


def test_a_buffer_as_long_as_the_limit_charges_from_the_first_token():
    assert overlong_penalty(1, limit=10, buffer=10, factor=1.0) == pytest.approx(-0.1)


@pytest.mark.parametrize("buffer", [0, 11])
def test_a_buffer_that_does_not_fit_is_refused(buffer):
    with pytest.raises(ValueError, match="above 0 and at most 10"):
        overlong_penalty(5, limit=10, buffer=buffer, factor=1.0)


@pytest.mark.parametrize(
    ("coef", "expected"),
    [
        (1.0, [1, 0.5, 2]),  # keeps all
        (0.5, [0.5, 0.25, 1]),
        (0.0, [0, 0, 0]),
        (-0.5, [0, 0, -0.5]),  # the total becomes the coefficient
        (-3.0, [0, 0, -3]),
    ],
)
def test_what_a_truncated_episode_keeps(coef, expected):
    rewards = torch.tensor([1.0, 0.5, 2.0])
    assert stop_properly(rewards, coef=coef).tolist() == expected
    assert rewards.tolist() == [1, 0.5, 2]


def test_a_bonus_for_truncation_is_refused():
    with pytest.raises(ValueError, match="<= 1"):
        stop_properly(torch.tensor([1.0]), coef=1.5)


def test_the_order_of_penalties_matters_and_is_the_documented_one():
    """Rewards 1, 2, the second turn overlong: −1; stop-properly 0.5; clip [−1, 0.75]: (1, 2) → (1, 1) → (0.5, 0.5) →
    unchanged. Stop-properly first would give (0.5, 0), the clip first (0.375, −0.125)."""
    penalties = [overlong_penalty(length, limit=10, buffer=5, factor=1.0) for length in (3, 10)]
    charged = torch.tensor([1.0, 2.0]) + torch.tensor(penalties)
    assert stop_properly(charged, coef=0.5).clamp(-1, 0.75).tolist() == [0.5, 0.5]


def test_normalising_by_hand():
    """(5 − 3) / 4 = 1/2 and (−1 − 3) / 4 = −1."""
    assert normalise(torch.tensor([5.0, -1.0]), mean=3.0, std=4.0).tolist() == [0.5, -1]


@pytest.mark.parametrize("std", [0.0, -1.0])
def test_a_standard_deviation_nobody_can_divide_by_is_refused(std):
    with pytest.raises(ValueError, match="must be > 0"):
        normalise(torch.tensor([1.0]), mean=0.0, std=std)

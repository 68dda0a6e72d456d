"""Schedules by name, against rates worked out by hand."""

import math

import pytest

from openrlhf.backends.schedules import rate_factor, share_of
from openrlhf.config.optimizer import SCHEDULES

COS_QUARTER = (1 + math.cos(math.pi / 4)) / 2
"""Half a cosine, a quarter of the way down: 0.853553."""


def shifted(k: int) -> float:
    """0.1 + 0.9·½(1 + cos(π·k/16)): a cosine to 0.1, k of 16 steps down."""
    return 0.1 + 0.9 * (1 + math.cos(math.pi * k / 16)) / 2


# 20 steps, of which ceil(20·0.2) = 4 warm up, with 1/4, 2/4, 3/4 and 1. After 0 steps (the first of warm-up), 2 (its
# third), 4 (it is over), then 8, 12 and 20: a quarter, a half and all of the other 16.
EXPECTED = {
    "constant": [1, 1, 1, 1, 1, 1],
    "constant_with_warmup": [1 / 4, 3 / 4, 1, 1, 1, 1],
    "linear": [1 / 4, 3 / 4, 1, 3 / 4, 1 / 2, 0],
    "cosine": [1 / 4, 3 / 4, 1, COS_QUARTER, 1 / 2, 0],
    "cosine_with_restarts": [1 / 4, 3 / 4, 1, COS_QUARTER, 1 / 2, 0],
    # 0.1 + 0.9 times the cosine.
    "cosine_with_min_lr": [1 / 4, 3 / 4, 1, 0.1 + 0.9 * COS_QUARTER, 0.55, 0.1],
    # One step ahead of the others: the first step of warm-up has 1/4, the fourth 1, and after 4 steps the descent is at
    # 1/16; the last of the 20 steps, after 19, has 0.1 and what comes after the end would rise again.
    "cosine_warmup_with_min_lr": [1 / 4, 3 / 4, shifted(1), shifted(5), shifted(9), shifted(17)],
    # Power 1.
    "polynomial": [1 / 4, 3 / 4, 1, 3 / 4, 1 / 2, 0],
    # 1/√(n/4).
    "inverse_sqrt": [1 / 4, 3 / 4, 1, 1 / math.sqrt(2), 1 / math.sqrt(3), 1 / math.sqrt(5)],
    # Level until the last 10 %.
    "warmup_stable_decay": [1 / 4, 3 / 4, 1, 1, 1, 0],
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_factors_by_hand(name):
    factor = rate_factor(name, total_steps=20, warmup_ratio=0.2, min_lr_ratio=0.1)
    assert [factor(n) for n in (0, 2, 4, 8, 12, 20)] == pytest.approx(EXPECTED[name], abs=1e-9)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "constant"])
def test_every_step_of_a_warm_up_moves_the_weights(name):
    """⌈10·0.3⌉ = 3 steps with a third, two thirds and all of the rate: none has 0."""
    factor = rate_factor(name, total_steps=10, warmup_ratio=0.3, min_lr_ratio=0.1)
    assert [factor(n) for n in range(3)] == pytest.approx([1 / 3, 2 / 3, 1])


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_warm_up_of_one_step_is_a_step_at_the_peak(name):
    """⌈8·0.03⌉ = 1: a run of 8 steps takes 8, the first of them in full."""
    factor = rate_factor(name, total_steps=8, warmup_ratio=0.03, min_lr_ratio=0.1)
    assert factor(0) == pytest.approx(1.0)
    assert all(factor(n) > 0 for n in range(8))


def test_the_shifted_cosine_reaches_its_peak_and_its_floor_within_the_run():
    factor = rate_factor("cosine_warmup_with_min_lr", total_steps=20, warmup_ratio=0.2, min_lr_ratio=0.1)
    assert [factor(3), factor(19)] == pytest.approx([1.0, 0.1])


def test_warmup_stable_decay_falls_over_the_last_tenth():
    """The last 4 of 40 steps, along half a cosine: after 36, 37, 38 and 39 steps ½(1 + cos(π·k/4)) for k = 0 … 3."""
    factor = rate_factor("warmup_stable_decay", total_steps=40, warmup_ratio=0.1, min_lr_ratio=0.1)
    falling = [(1 + math.cos(math.pi * k / 4)) / 2 for k in range(4)]
    assert [factor(n) for n in (4, 35, 36, 37, 38, 39, 40)] == pytest.approx([1, 1, *falling, 0])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("total", [1, 2, 7])
@pytest.mark.parametrize("warmup_ratio", [0.0, 0.03, 0.95, 1.0])
def test_short_runs_and_long_warm_ups_stay_between_nothing_and_the_peak(name, total, warmup_ratio):
    factor = rate_factor(name, total_steps=total, warmup_ratio=warmup_ratio, min_lr_ratio=0.1)
    assert all(0 <= factor(n) <= 1 for n in range(total + 1))


@pytest.mark.parametrize(("steps", "ratio", "expected"), [(100, 0.03, 3), (10, 0.03, 1), (100, 0.07, 7), (9, 0, 0)])
def test_warm_up_is_rounded_up(steps, ratio, expected):
    """100 · 0.07 is a little more than 7 in floating point and still 7 steps."""
    assert share_of(steps, ratio) == expected

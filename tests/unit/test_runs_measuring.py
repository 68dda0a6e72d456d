"""pass@k and means with their intervals, derived by hand."""

import math

import pytest
import torch

from openrlhf.runs.measuring import mean_interval, rate_interval, summarise
from openrlhf.types import Group, Outcome, Prompt, SampleKey, Segment, Trajectory

SEGMENT = Segment(
    token_ids=torch.tensor([1, 2]),
    action_mask=torch.tensor([False, True]),
    rollout_logprobs=torch.zeros(2),
    versions=torch.tensor([-1, 0], dtype=torch.int32),
    turn_rewards=torch.zeros(2),
)


def group(ordinal: int, *scores: float | None) -> Group:
    """A prompt with one sample for each score; None: it failed."""
    members = tuple(
        Trajectory(key=SampleKey(ordinal, i), segments=(), outcome=Outcome.FAILED, error="boom")
        if score is None
        else Trajectory(
            key=SampleKey(ordinal, i), segments=(SEGMENT,), outcome=Outcome.FINISHED, reward=2.0 * score, score=score
        )
        for i, score in enumerate(scores)
    )
    return Group(prompt=Prompt(ordinal=ordinal, text="x"), trajectories=members)


def test_one_sample_of_each_prompt_has_wilsons_interval():
    """3 of 4: (0.75 + 3.8415/8 ± 1.96 √(0.1875/4 + 3.8415/64)) / (1 + 3.8415/4) = 0.6276 ± 0.3269."""
    assert rate_interval([1, 0, 1, 1], samples=4) == pytest.approx((0.75, 0.3006, 0.9544), abs=1e-4)


def test_prompts_that_all_came_out_alike_still_have_an_interval():
    """All 4 right: from 1 / (1 + 3.8415/4) = 0.5101 on. All at a half, of 4 samples: 0.5 ± 0.35, as 2 of 4."""
    assert rate_interval([1, 1, 1, 1], samples=16) == pytest.approx((1, 0.5101, 1), abs=1e-4)
    assert rate_interval([0, 0, 0, 0], samples=16) == pytest.approx((0, 0, 0.4899), abs=1e-4)
    assert rate_interval([0.5, 0.5], samples=4) == pytest.approx((0.5, 0.15, 0.85), abs=1e-4)


def test_more_samples_of_a_prompt_tell_more_but_not_as_much_as_more_prompts():
    def width(values, samples):
        _, low, high = rate_interval(values, samples=samples)
        return high - low

    once, often, others = width([1, 0], 2), width([0.9, 0.1], 20), width([1, 0] * 10, 20)
    assert others < often < once


def test_the_mean_of_scores_has_standard_errors():
    """Of 0 and 2: s² = 2, the standard error √(2/2) = 1."""
    assert mean_interval([0, 2]) == pytest.approx((1, 1 - 1.96, 1 + 1.96), abs=1e-4)
    assert mean_interval([3.0]) == (3.0, -math.inf, math.inf)


def test_failed_samples_are_counted_and_in_no_other_number():
    """2, 0 and 4 right of 4: pass@2 is 1 − C(2,2)/C(4,2) = 5/6, 0 and 1. The last prompt has one judged sample, a right
    one: it is in pass@1 and in no other pass@k."""
    groups = [group(0, 1, 0, 1, 0), group(1, 0, 0, 0, 0), group(2, 1, 1, 1, 1), group(3, None, 1, None, None)]
    found = summarise(groups, ks=(1, 2, 4))
    assert (found.prompts, found.samples, found.failed) == (4, 13, 3)
    assert found.pass_prompts == {1: 4, 2: 3, 4: 3}
    assert found.pass_at[1].value == pytest.approx((0.5 + 0 + 1 + 1) / 4)
    assert found.pass_at[2].value == pytest.approx((5 / 6 + 0 + 1) / 3)
    assert found.pass_at[4].value == pytest.approx(2 / 3)
    assert found.score.value == pytest.approx(2.5 / 4)
    assert found.reward.value == pytest.approx(5 / 4)


def test_where_all_failed_there_is_no_number():
    found = summarise([group(0, None)], ks=(1,))
    assert (found.samples, found.failed, found.pass_at, found.score) == (0, 1, {}, None)


def test_right_begins_at_the_threshold():
    assert summarise([group(0, 0.5, 0.2)], ks=(1,), threshold=0.5).pass_at[1].value == 0.5

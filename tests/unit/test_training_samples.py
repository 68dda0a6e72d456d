"""From judged groups to samples: who is in, with which baseline."""

import dataclasses

import pytest
import torch

from openrlhf.agents.recorder import TokenRecorder
from openrlhf.algorithms.advantages import get_estimator
from openrlhf.learners.samples import training_samples
from openrlhf.types import FinishReason, Generation, Group, Outcome, Prompt, SampleKey, Trajectory

WIDE = (-10.0, 10.0)


def turns(*rewards: float) -> TokenRecorder:
    """An episode with one two-token action per reward."""
    recorder = TokenRecorder([1])
    for reward in rewards:
        recorder.append_action(
            Generation(token_ids=[2, 3], logprobs=[0.0, 0.0], versions=[0, 0], finish_reason=FinishReason.STOP)
        )
        recorder.reward_turn(reward)
        recorder.append_observation([4])
    return recorder


def group(*episodes: tuple[float, ...], failed: int = 0) -> Group:
    members = [
        Trajectory(
            key=SampleKey(0, i), segments=(turns(*rewards).segment(),), outcome=Outcome.FINISHED, reward=sum(rewards)
        )
        for i, rewards in enumerate(episodes)
    ]
    broken = [
        Trajectory(key=SampleKey(0, len(episodes) + i), segments=(), outcome=Outcome.FAILED, error="boom")
        for i in range(failed)
    ]
    return Group(prompt=Prompt(ordinal=0, text="x"), trajectories=(*members, *broken))


def shape(groups: list[Group], name: str = "reinforce_baseline", clip_range=WIDE):
    return training_samples(groups, estimator=get_estimator(name), clip_range=clip_range)


def test_failed_members_are_in_no_statistic():
    """Rewards 1 and 3 and a failure: the mean is 2, not 4/3."""
    result = shape([group((1.0,), (3.0,), failed=1)])
    assert [s.baseline for s in result.samples] == [2.0, 2.0]


def test_a_member_left_alone_gives_no_sample_where_members_are_compared():
    result = shape([group((1.0,), failed=1), group((1.0,), (0.0,))])
    assert len(result.samples) == 2
    assert result.lonely == 1
    assert len(shape([group((1.0,), failed=1)], "reinforce").samples) == 1


def test_raw_rewards_are_clipped_per_turn_before_the_baseline():
    """Turns 20 and −1 under a clip of ±10 are 10 and −1: total 9; the other's total is 1: baseline 5."""
    result = shape([group((20.0, -1.0), (1.0,))])
    assert [s.baseline for s in result.samples] == [5.0, 5.0]
    assert result.samples[0].segment.turn_rewards.tolist() == [0, 0, 10, 0, 0, -1, 0]
    assert (result.clipped_rewards, result.rewards) == (1, 3)


def test_a_zero_reward_is_clipped_too():
    result = shape([group((0.0,), (2.0,))], clip_range=(0.5, 1.0))
    assert [float(s.segment.turn_rewards.sum()) for s in result.samples] == [0.5, 1.0]
    assert result.clipped_rewards == 2


def test_segments_of_one_episode_share_its_statistics_and_pass_later_rewards_back():
    """An episode of two segments worth 1 and 2 beside one worth 5: totals 3 and 5, baseline 4 for all three."""
    two, one = group((1.0,), (5.0,)).trajectories
    second = turns(2.0).segment()
    two = dataclasses.replace(two, segments=(*two.segments, second), reward=3.0)
    result = shape([Group(prompt=Prompt(ordinal=0, text="x"), trajectories=(two, one))])
    assert [s.key for s in result.samples] == [(0, 0, 0), (0, 0, 1), (0, 1, 0)]
    assert [s.baseline for s in result.samples] == [4.0, 4.0, 4.0]
    assert [s.later_reward for s in result.samples] == [2.0, 0.0, 0.0]


def test_an_episode_without_actions_counts_in_the_baseline_but_is_not_trained():
    silent = Trajectory(
        key=SampleKey(0, 1), segments=(TokenRecorder([1, 2]).segment(),), outcome=Outcome.FINISHED, reward=0.0
    ).with_reward(0.0, score=None, extra_logs={})
    talking = group((2.0,)).trajectories[0]
    result = shape([Group(prompt=Prompt(ordinal=0, text="x"), trajectories=(talking, silent))])
    assert [s.baseline for s in result.samples] == [1.0]


@pytest.mark.parametrize("name", ["reinforce", "reinforce_baseline", "rloo", "group_norm", "dr_grpo"])
def test_an_empty_round_is_an_empty_list(name):
    assert shape([group(failed=2)], name).samples == []


def test_totals_are_float32():
    result = shape([group((0.1,), (0.2,))], "rloo")
    assert result.samples[0].segment.turn_rewards.dtype == torch.float32

"""From judged groups to samples: who is in, with which baseline."""

import dataclasses

import pytest
import torch

from openrlhf.agents.recorder import TokenRecorder
from openrlhf.algorithms.advantages import get_estimator
from openrlhf.learners.samples import RewardShaping, training_samples
from openrlhf.types import FinishReason, Generation, Group, Outcome, Prompt, SampleKey, TrainingBatch, Trajectory

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


def shape(groups: list[Group], name: str = "reinforce_baseline", clip_range=WIDE, **shaping):
    return training_samples(
        groups, estimator=get_estimator(name), shaping=RewardShaping(clip_range=clip_range, **shaping)
    )


def test_failed_members_are_in_no_statistic():
    """Rewards 1 and 3 and a failure: the mean is 2, not 4/3."""
    result = shape([group((1.0,), (3.0,), failed=1)])
    assert [s.baseline for s in result.samples] == [2.0, 2.0]


def test_a_member_left_alone_gives_no_sample_where_members_are_compared():
    result = shape([group((1.0,), failed=1), group((1.0,), (0.0,))])
    assert len(result.samples) == 2
    assert result.metrics.values()["rollout/left_alone"] == 1
    assert len(shape([group((1.0,), failed=1)], "reinforce").samples) == 1


def test_raw_rewards_are_clipped_per_turn_before_the_baseline():
    """Turns 20 and −1 under a clip of ±10 are 10 and −1: total 9; the other's total is 1: baseline 5."""
    result = shape([group((20.0, -1.0), (1.0,))])
    assert [s.baseline for s in result.samples] == [5.0, 5.0]
    assert result.samples[0].rewards_A.tolist() == [0, 10, 0, -1]
    assert (result.clipped_rewards, result.rewards) == (1, 3)


def truncated(*rewards: float) -> Group:
    """Two episodes of two turns (four action tokens); the first was cut by a limit."""
    whole = group(rewards, rewards)
    cut = dataclasses.replace(whole.trajectories[0], outcome=Outcome.TRUNCATED)
    return dataclasses.replace(whole, trajectories=(cut, whole.trajectories[1]))


def test_the_overlong_penalty_sits_on_the_last_turn_and_is_in_the_reward():
    """4 action tokens, limit 5, buffer 2: over = 4 − 3 = 1, penalty −½·factor 3 = −1.5. Turns 1, 2 become 1, 0.5."""
    result = shape([group((1.0, 2.0), (1.0, 2.0))], overlong_buffer=2, overlong_factor=3.0, response_limit=5)
    assert result.samples[0].rewards_A.tolist() == [0, 1, 0, 0.5]
    values = result.metrics.values()
    assert values["overlong_penalty"] == -1.5
    assert values["reward"] == 1.5


def test_truncated_episodes_keep_what_the_coefficient_leaves_them():
    """½ of turns 1 and 2; −3 in their place. The one that ended properly keeps all. Baselines are of what is left."""
    half = shape([truncated(1.0, 2.0)], stop_properly=0.5)
    assert [s.rewards_A.tolist() for s in half.samples] == [[0, 0.5, 0, 1], [0, 1, 0, 2]]
    assert half.samples[0].baseline == 2.25
    assert half.metrics.values()["reward"] == 2.25
    replaced = shape([truncated(1.0, 2.0)], stop_properly=-3.0)
    assert [s.rewards_A.tolist() for s in replaced.samples] == [[0, 0, 0, -3], [0, 1, 0, 2]]


def test_penalties_come_before_the_clip_and_overlong_before_stop_properly():
    """Reward 1 − 4 (overlong, at the limit) = −3, halved −1.5, clipped to −1. In another order it would be −0.5 or −1.5."""
    cut = truncated(1.0).trajectories[0]
    one = Group(prompt=Prompt(ordinal=0, text="x"), trajectories=(cut,))
    result = shape(
        [one],
        "reinforce",
        clip_range=(-1.0, 1.0),
        overlong_buffer=1,
        overlong_factor=4.0,
        response_limit=2,
        stop_properly=0.5,
    )
    assert result.samples[0].rewards_A.tolist() == [0, -1]
    assert result.metrics.values()["reward"] == -1.5
    assert result.metrics.values()["reward_clipped"] == 1.0


def test_equal_rewards_earned_in_another_order_are_equal_totals():
    """0.1 + 0.2 + 0.3 and 0.3 + 0.2 + 0.1 differ in float32's last bit; a z-score of that would be ±0.7."""
    result = shape([group((0.1, 0.2, 0.3), (0.3, 0.2, 0.1))], "group_norm")
    first = result.samples[0]
    assert float(first.rewards_A.double().sum().float() - first.baseline) == 0.0


def test_a_zero_reward_is_clipped_too():
    result = shape([group((0.0,), (2.0,))], clip_range=(0.5, 1.0))
    assert [float(s.rewards_A.sum()) for s in result.samples] == [0.5, 1.0]
    assert result.clipped_rewards == 2


def test_segments_of_one_episode_share_its_statistics():
    """An episode of two segments worth 1 and 2 beside one worth 5: totals 3 and 5, baseline 4 for all three."""
    two, one = group((1.0,), (5.0,)).trajectories
    second = turns(2.0).segment()
    two = dataclasses.replace(two, segments=(*two.segments, second), reward=3.0)
    result = shape([Group(prompt=Prompt(ordinal=0, text="x"), trajectories=(two, one))])
    assert [s.key for s in result.samples] == [(0, 0, 0), (0, 0, 1), (0, 1, 0)]
    assert [s.baseline for s in result.samples] == [4.0, 4.0, 4.0]
    assert [s.rewards_A.tolist() for s in result.samples] == [[0, 1], [0, 2], [0, 5]]
    assert TrainingBatch(samples=result.samples).episode_offsets == [0, 4, 6]


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
    assert result.samples[0].rewards_A.dtype == torch.float32

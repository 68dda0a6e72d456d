"""From judged groups to training samples: penalties, clip, comparison within the group; failures are left out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from openrlhf.algorithms.advantages import (
    Estimator,
    TurnRewards,
    Turns,
    overlong_penalty,
    stop_properly,
    turn_advantages,
)
from openrlhf.observability.metrics import Metrics
from openrlhf.types import Group, Outcome, TrainingSample, Trajectory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardShaping:
    """What is done to an episode's rewards before episodes are compared, in this order."""

    overlong_buffer: float | None = None
    """Tokens before `response_limit` in which the reward falls; None: no such penalty."""
    overlong_factor: float = 1.0
    response_limit: int = 0
    """Of one turn."""
    stop_properly: float | None = None
    """What truncated episodes keep: a factor in [0, 1], or a total below 0. None: everything."""
    clip_range: tuple[float, float] = (-10.0, 10.0)
    """Each turn's reward is clipped to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedSamples:
    """What `training_samples` made of a round's groups."""

    samples: list[TrainingSample]
    metrics: Metrics
    clipped_rewards: int
    """Turn rewards that the clip range changed."""
    rewards: int
    """Turn rewards there were."""


def training_samples(
    groups: Sequence[Group], *, estimator: Estimator, shaping: RewardShaping, turns: Turns = Turns.OUTCOME
) -> ShapedSamples:
    """One `TrainingSample` per segment of every judged episode.

    A group left with fewer than two members gives no samples under estimators that compare members. An episode
    in which the policy sampled nothing still counts in its group's statistics; it has no token to train.
    """
    samples: list[TrainingSample] = []
    metrics = Metrics()
    clipped = rewards = lonely = 0
    for group in groups:
        members = group.scored
        if estimator.needs_group and len(members) < 2:
            lonely += len(members)
            continue
        if not members:
            continue
        charged = [_charge(member, _Earned.by(member), shaping, metrics) for member in members]
        shaped = [earned.clip(shaping.clip_range) for earned in charged]
        rewards += sum(int(earned.rewarded().sum()) for earned in charged)
        clipped += sum(int((a.rewards_A != b.rewards_A).sum()) for a, b in zip(charged, shaped, strict=True))
        metrics.mean("reward", sum(float(earned.rewards_A.sum()) for earned in charged), len(members))
        compared: Sequence[Tensor | None] = [None] * len(members)
        if estimator.shape is not None:
            advantages = turn_advantages([earned.per_turn() for earned in shaped], estimator.shape, turns)
            compared = [a_K[earned.turns_A].float() for a_K, earned in zip(advantages, shaped, strict=True)]
        for member, earned, compared_A in zip(members, shaped, compared, strict=True):
            samples.extend(_segments(member, earned.rewards_A.float(), compared_A))
    metrics.mean("reward_clipped", clipped, rewards)
    metrics.last("rollout/left_alone", lonely)
    return ShapedSamples(samples=samples, metrics=metrics, clipped_rewards=clipped, rewards=rewards)


class SampleMaker:
    """`training_samples` as a run is set; says once that rewards were clipped."""

    def __init__(self, *, estimator: Estimator, shaping: RewardShaping, turns: Turns = Turns.OUTCOME) -> None:
        self._estimator = estimator
        self._shaping = shaping
        self._turns = turns
        self._warned_of_clipping = False

    def __call__(self, groups: Sequence[Group]) -> ShapedSamples:
        shaped = training_samples(groups, estimator=self._estimator, shaping=self._shaping, turns=self._turns)
        if shaped.clipped_rewards and not self._warned_of_clipping:
            logger.warning(
                "%d of %d rewards lie outside --reward.clip_range %g %g and were clipped; widen it if they are meant",
                shaped.clipped_rewards,
                shaped.rewards,
                *self._shaping.clip_range,
            )
            self._warned_of_clipping = True
        return shaped


class _Earned(NamedTuple):
    """What an episode earned, over the action tokens of all its segments; an episode without any has a single entry."""

    rewards_A: Tensor
    """float64: a turn's reward stands on its last token."""
    sizes_A: Tensor
    """float64: the sum of the absolute values of what each reward was added up from."""
    turns_A: Tensor
    """int64: which turn of the episode each token is of."""

    @staticmethod
    def by(member: Trajectory) -> _Earned:
        rewards_A = torch.cat([segment.turn_rewards[segment.action_mask] for segment in member.segments]).double()
        ends_A = torch.cat([segment.turn_ends_A for segment in member.segments])
        if not len(rewards_A):
            rewards_A, ends_A = torch.tensor([member.reward], dtype=torch.float64), torch.ones(1, dtype=torch.bool)
        sizes_A = rewards_A.abs()
        if member.reward_size is not None:
            sizes_A[-1] = member.reward_size
        return _Earned(rewards_A, sizes_A, ends_A.cumsum(0) - ends_A.long())

    def rewarded(self) -> Tensor:
        """bool: tokens that carry a reward, the last action's being one even when it is 0."""
        rewarded_A = self.rewards_A != 0
        rewarded_A[-1] = True
        return rewarded_A

    def clip(self, clip_range: tuple[float, float]) -> _Earned:
        low, high = torch.tensor(clip_range, dtype=torch.float32).tolist()  # as rewards come: 0.3 is not above 0.3
        rewards_A = torch.where(self.rewarded(), self.rewards_A.clamp(low, high), self.rewards_A)
        # A bound of the range is as it was given, and no sum.
        sizes_A = torch.where(rewards_A == self.rewards_A, self.sizes_A, rewards_A.abs())
        return self._replace(rewards_A=rewards_A, sizes_A=sizes_A)

    def per_turn(self) -> TurnRewards:
        empty_K = self.rewards_A.new_zeros(int(self.turns_A[-1]) + 1)
        return TurnRewards(
            empty_K.index_add(0, self.turns_A, self.rewards_A), empty_K.index_add(0, self.turns_A, self.sizes_A)
        )


def _charge(member: Trajectory, earned: _Earned, shaping: RewardShaping, metrics: Metrics) -> _Earned:
    """Length penalties: those of overlong turns on these, and what is left of a truncated episode's rewards."""
    rewards_A, sizes_A, turns_A = earned
    if shaping.overlong_buffer is not None:
        lengths_K = turns_A.bincount() if member.num_actions else torch.zeros(1, dtype=torch.int64)
        penalties = [
            overlong_penalty(
                length,
                limit=shaping.response_limit,
                buffer=shaping.overlong_buffer,
                factor=shaping.overlong_factor,
            )
            for length in lengths_K.tolist()
        ]
        metrics.mean("overlong_penalty", sum(penalties), 1)
        ends_K = turns_A.bincount().cumsum(0) - 1
        penalties_K = torch.tensor(penalties, dtype=torch.float64)
        rewards_A = rewards_A.index_add(0, ends_K, penalties_K)
        sizes_A = sizes_A.index_add(0, ends_K, penalties_K.abs())
    if shaping.stop_properly is not None and member.outcome is Outcome.TRUNCATED:
        rewards_A = stop_properly(rewards_A, coef=shaping.stop_properly)
        sizes_A = stop_properly(sizes_A, coef=shaping.stop_properly).abs()
    return _Earned(rewards_A, sizes_A, turns_A)


def _segments(member: Trajectory, rewards_A: Tensor, compared_A: Tensor | None) -> list[TrainingSample]:
    samples = []
    start = 0
    for index, segment in enumerate(member.segments):
        own = slice(start, start + segment.num_actions)
        if own.stop > own.start:
            samples.append(
                TrainingSample(
                    key=member.key._replace(segment=index),
                    segment=segment,
                    rewards_A=rewards_A[own],
                    compared_A=None if compared_A is None else compared_A[own],
                )
            )
        start = own.stop
    return samples

"""From judged groups to training samples: penalties and clip on raw rewards, group statistics, failures left out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf.algorithms.advantages import Estimator
from openrlhf.algorithms.penalties import charge_last_turn, overlong_penalty, stop_properly
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


def training_samples(groups: Sequence[Group], *, estimator: Estimator, shaping: RewardShaping) -> ShapedSamples:
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
        columns = [_action_rewards(member) for member in members]
        charged = [_charge(member, column, shaping, metrics) for member, column in zip(members, columns, strict=True)]
        shaped = [_clip(column, shaping.clip_range) for column in charged]
        rewards += sum(int(_rewarded(column).sum()) for column in charged)
        clipped += sum(int((a != b).sum()) for a, b in zip(charged, shaped, strict=True))
        metrics.mean("reward", sum(float(column.sum()) for column in charged), len(members))
        # In float64: equal rewards summed in another order must stay equal, or a z-score makes ±1 of the last bit.
        totals_G = torch.stack([column.double().sum() for column in shaped]).float()
        statistics = estimator.shape(totals_G)
        for member, column, baseline, scale in zip(
            members, shaped, statistics.baseline_G, statistics.scale_G, strict=True
        ):
            samples.extend(_segments(member, column, baseline=float(baseline), scale=float(scale)))
    metrics.mean("reward_clipped", clipped, rewards)
    metrics.last("rollout/left_alone", lonely)
    return ShapedSamples(samples=samples, metrics=metrics, clipped_rewards=clipped, rewards=rewards)


class SampleMaker:
    """`training_samples` as a run is set; says once that rewards were clipped."""

    def __init__(self, *, estimator: Estimator, shaping: RewardShaping) -> None:
        self._estimator = estimator
        self._shaping = shaping
        self._warned_of_clipping = False

    def __call__(self, groups: Sequence[Group]) -> ShapedSamples:
        shaped = training_samples(groups, estimator=self._estimator, shaping=self._shaping)
        if shaped.clipped_rewards and not self._warned_of_clipping:
            logger.warning(
                "%d of %d rewards lie outside --reward.clip_range %g %g and were clipped; widen it if they are meant",
                shaped.clipped_rewards,
                shaped.rewards,
                *self._shaping.clip_range,
            )
            self._warned_of_clipping = True
        return shaped


def _action_rewards(member: Trajectory) -> Tensor:
    """float32 [A] over the episode's action tokens; for an episode without one, its whole reward as a single entry."""
    column = torch.cat([segment.turn_rewards[segment.action_mask] for segment in member.segments]).float()
    return column if len(column) else torch.tensor([member.reward], dtype=torch.float32)


def _charge(member: Trajectory, column: Tensor, shaping: RewardShaping, metrics: Metrics) -> Tensor:
    """Length penalties, on the last turn."""
    if shaping.overlong_buffer is not None:
        penalty = overlong_penalty(
            member.num_actions,
            limit=shaping.response_limit,
            buffer=shaping.overlong_buffer,
            factor=shaping.overlong_factor,
        )
        metrics.mean("overlong_penalty", penalty, 1)
        column = charge_last_turn(column, penalty)
    if shaping.stop_properly is not None and member.outcome is Outcome.TRUNCATED:
        column = stop_properly(column, coef=shaping.stop_properly)
    return column


def _clip(column: Tensor, clip_range: tuple[float, float]) -> Tensor:
    return torch.where(_rewarded(column), column.clamp(*clip_range), column)


def _rewarded(column: Tensor) -> Tensor:
    """bool [A]: tokens that carry a reward, the last action's being one even when it is 0."""
    rewarded = column != 0
    rewarded[-1] = True
    return rewarded


def _segments(member: Trajectory, column: Tensor, *, baseline: float, scale: float) -> list[TrainingSample]:
    samples = []
    start = 0
    for index, segment in enumerate(member.segments):
        count = segment.num_actions
        if count:
            samples.append(
                TrainingSample(
                    key=member.key._replace(segment=index),
                    segment=segment,
                    rewards_A=column[start : start + count],
                    baseline=baseline,
                    scale=scale,
                )
            )
        start += count
    return samples

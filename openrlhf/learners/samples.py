"""From judged groups to training samples: raw rewards clipped, group statistics taken, failures left out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from openrlhf.algorithms.advantages import Estimator
from openrlhf.types import Group, Segment, TrainingSample, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedSamples:
    """What `training_samples` made of a round's groups."""

    samples: list[TrainingSample]
    clipped_rewards: int
    """Turn rewards that the clip range changed."""
    rewards: int
    """Turn rewards there were."""
    lonely: int
    """Samples left out because failures left them alone in their group."""


def training_samples(
    groups: Sequence[Group], *, estimator: Estimator, clip_range: tuple[float, float]
) -> ShapedSamples:
    """One `TrainingSample` per segment of every judged episode.

    A group left with fewer than two members gives no samples under estimators that compare members. An episode
    in which the policy sampled nothing still counts in its group's statistics; it has no token to train.
    """
    samples: list[TrainingSample] = []
    clipped = rewards = lonely = 0
    for group in groups:
        members = group.scored
        if estimator.needs_group and len(members) < 2:
            lonely += len(members)
            continue
        if not members:
            continue
        raw = [s.turn_rewards[_rewarded(s)] for member in members for s in member.segments]
        clipped += sum(int((r != r.clamp(*clip_range)).sum()) for r in raw)
        rewards += sum(len(r) for r in raw)
        shaped = [_clip(member, clip_range) for member in members]
        totals = torch.tensor([sum(float(s.turn_rewards.sum()) for s in m.segments) for m in shaped])
        shaping = estimator.shape(totals)
        for member, baseline, scale in zip(shaped, shaping.baseline_G, shaping.scale_G, strict=True):
            samples.extend(_segments(member, baseline=float(baseline), scale=float(scale)))
    return ShapedSamples(samples=samples, clipped_rewards=clipped, rewards=rewards, lonely=lonely)


def _clip(member: Trajectory, clip_range: tuple[float, float]) -> Trajectory:
    segments = tuple(
        dataclasses.replace(
            segment,
            turn_rewards=torch.where(_rewarded(segment), segment.turn_rewards.clamp(*clip_range), segment.turn_rewards),
        )
        for segment in member.segments
    )
    return dataclasses.replace(member, segments=segments)


def _rewarded(segment: Segment) -> Tensor:
    """bool [T]: tokens that carry a reward, the last action's being one even when it is 0."""
    rewarded = segment.turn_rewards != 0
    actions = segment.action_mask.nonzero()
    if len(actions):
        rewarded[actions[-1]] = True
    return rewarded


def _segments(member: Trajectory, *, baseline: float, scale: float) -> list[TrainingSample]:
    later = 0.0
    backwards: list[TrainingSample] = []
    for index in range(len(member.segments) - 1, -1, -1):
        segment = member.segments[index]
        if segment.num_actions:
            backwards.append(
                TrainingSample(
                    key=member.key._replace(segment=index),
                    segment=segment,
                    baseline=baseline,
                    scale=scale,
                    later_reward=later,
                )
            )
        later += float(segment.turn_rewards.sum())
    return backwards[::-1]

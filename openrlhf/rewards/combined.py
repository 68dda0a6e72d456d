"""Several rewards at once: their weighted sum."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from openrlhf.rewards.base import Reward, RewardError, RewardRequest, RewardSource
from openrlhf.rewards.steps import StepRewards
from openrlhf.types import RewardPart

T = TypeVar("T")

LARGEST = 3.4028234663852886e38
"""The largest float32."""


class CombinedReward:
    """reward = Σ_i w_i · r_i; score = the mean of the sources' scores, weighted by |w_i|, over those that give scores.
    Where all w_i are 0 (something else teaches the policy, and rewards are only measured) scores count alike.

    The sources judge at the same time. A prompt that one of them cannot judge is not judged. Each source's own reward
    is logged as `reward_<name>`; what it logs itself keeps its name, unless an earlier source has the same.
    """

    def __init__(self, sources: Mapping[str, RewardSource], weights: Sequence[float]) -> None:
        """`sources`: by name, in the order of `weights`."""
        if len(sources) != len(weights):
            raise ValueError(f"{len(weights)} weights for {len(sources)} sources")
        self._names = tuple(sources)
        self._sources = tuple(sources.values())
        self._weights = tuple(weights)

    async def start(self) -> None:
        await _all(source.start() for source in self._sources)

    async def score(self, request: RewardRequest) -> Sequence[Reward]:
        judged = await _all(source.score(request) for source in self._sources)
        return [self._combine(rewards) for rewards in zip(*judged, strict=True)]

    async def close(self) -> None:
        closed = await asyncio.gather(*(source.close() for source in self._sources), return_exceptions=True)
        for error in closed:
            if isinstance(error, BaseException):
                raise error

    def _combine(self, rewards: Sequence[Reward]) -> Reward:
        """The reward of one sample, from those of each source."""
        parts = list(zip(self._names, self._weights, rewards, strict=True))
        heights = [abs(weight) for weight in self._weights] if any(self._weights) else [1.0] * len(parts)
        judged = [
            (height, part.reward if part.score is None and not any(self._weights) else part.score)
            for height, (_, _, part) in zip(heights, parts, strict=True)
        ]
        scored = [(height, score) for height, score in judged if score is not None and height]
        logs: dict[str, float] = {}
        for name, _, part in parts:
            for key, value in part.extra_logs.items():
                logs[f"{key}_{name}" if key in logs else key] = value
        logs |= {f"reward_{name}": part.reward for name, _, part in parts}
        total = sum(weight * part.reward for _, weight, part in parts)
        if not math.isfinite(total) or abs(total) > LARGEST:
            raise RewardError(f"the weighted sum of {', '.join(self._names)} is {total}: too large for a float32")
        return Reward(
            reward=total,
            score=sum(w * s for w, s in scored) / sum(w for w, _ in scored) if scored else None,
            extra_logs=logs,
            size=sum(abs(weight) * (abs(part.reward) if part.size is None else part.size) for _, weight, part in parts),
            parts=tuple(named for name, weight, part in parts for named in _named(name, weight, part)),
            steps=_steps([(weight, part) for _, weight, part in parts]),
        )


def _steps(weighted: Sequence[tuple[float, Reward]]) -> StepRewards | None:
    """Σ_i w_i · r_ij on each step; sources that judge no steps add to the last one. None where no source judges any."""
    judged = [(weight, reward.steps) for weight, reward in weighted if reward.steps is not None]
    if not judged:
        return None
    ends = sorted({end for _, steps in judged for end in steps.ends})
    placed = dict.fromkeys(ends, 0.0)
    for weight, steps in judged:
        for end, reward in zip(steps.ends, steps.rewards, strict=True):
            placed[end] += weight * reward
    if ends:
        placed[ends[-1]] += sum(weight * reward.reward for weight, reward in weighted if reward.steps is None)
    return StepRewards(tuple(ends), tuple(placed.values()))


def _named(name: str, weight: float, reward: Reward) -> list[RewardPart]:
    """A source's reward as parts of the whole: itself, or the parts that it has."""
    if not reward.parts:
        return [RewardPart(name, reward.reward, weight)]
    return [RewardPart(f"{name}.{part.name}", part.value, weight * part.weight) for part in reward.parts]


async def _all(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Their results; the first error ends the others."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in running]


if TYPE_CHECKING:
    _: type[RewardSource] = CombinedReward

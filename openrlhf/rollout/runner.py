"""Plays prompts: n concurrent episodes each, judged together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Any

from openrlhf.agents.base import Player
from openrlhf.agents.seeds import derive_seed
from openrlhf.rewards.base import RewardError, RewardRequest, RewardSource
from openrlhf.rollout.base import Engine
from openrlhf.types import Group, Outcome, Prompt, SampleKey, SamplingParams, Trajectory

logger = logging.getLogger(__name__)

HOPELESS_AFTER = 3
"""Reward calls that may fail before the first success; then the reward is taken to be broken, not unlucky."""


class RolloutError(Exception):
    """Rollouts cannot go on. The text says what failed and what to do."""


class EpisodeRunner:
    """Turns a prompt into a judged group. Failures become data; only a hopeless reward ends the run."""

    def __init__(
        self,
        *,
        engine: Engine,
        executor: Player,
        reward: RewardSource,
        tokenizer: Any,
        max_length: int,
        seed: int,
    ) -> None:
        self._engine = engine
        self._executor = executor
        self._reward = reward
        self._tokenizer = tokenizer
        self._max_length = max_length
        self._seed = seed
        self._judged = 0
        self._unjudged = 0

    async def play_all(
        self, prompts: Sequence[Prompt], *, n: int, sampling_params: SamplingParams, purpose: str = "train"
    ) -> list[Group]:
        """Play all prompts at once; groups come back in their order. The first error ends the others."""
        try:
            async with asyncio.TaskGroup() as tasks:
                playing = [
                    tasks.create_task(self.play(prompt, n=n, sampling_params=sampling_params, purpose=purpose))
                    for prompt in prompts
                ]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in playing]

    async def play(self, prompt: Prompt, *, n: int, sampling_params: SamplingParams, purpose: str = "train") -> Group:
        """`n` samples of a prompt. `purpose` keeps the randomness of evaluation apart from that of training."""
        seeds = [derive_seed(self._seed, purpose, prompt.ordinal, sample) for sample in range(n)]
        trajectories = await asyncio.gather(
            *(self._episode(prompt, i, sampling_params.copy(seed=seed)) for i, seed in enumerate(seeds))
        )
        return await self._judge(Group(prompt=prompt, trajectories=tuple(trajectories)))

    async def _episode(self, prompt: Prompt, sample: int, sampling_params: SamplingParams) -> Trajectory:
        episode = await self._executor.play(
            prompt.text,
            prompt.label,
            sampling_params,
            self._max_length,
            self._tokenizer,
            self._engine,
            images=prompt.images or None,
        )
        return Trajectory(
            key=SampleKey(prompt.ordinal, sample),
            segments=episode.segments,
            outcome=Outcome.TRUNCATED if episode.truncated else Outcome.FINISHED,
            text=episode.text,
            reward=episode.reward,
            score=episode.score,
            extra_logs=episode.extra_logs,
        )

    async def _judge(self, group: Group) -> Group:
        try:
            rewards = await self._reward.score(RewardRequest.of(group))
        except RewardError as error:
            self._note_failure(error)
            failed = tuple(t.as_failed(str(error)) for t in group.trajectories)
            return Group(prompt=group.prompt, trajectories=failed)
        self._judged += 1
        judged = (
            t.with_reward(r.reward, score=r.score, extra_logs=r.extra_logs)
            for t, r in zip(group.trajectories, rewards, strict=True)
        )
        return Group(prompt=group.prompt, trajectories=tuple(judged))

    def _note_failure(self, error: RewardError) -> None:
        self._unjudged += 1
        logger.warning("reward failed: %s", error)
        if self._judged == 0 and self._unjudged >= HOPELESS_AFTER:
            raise RolloutError(f"the first {self._unjudged} reward calls all failed: {error}") from error

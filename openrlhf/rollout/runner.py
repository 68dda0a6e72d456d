"""Plays prompts: n concurrent episodes each, judged together."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from openrlhf.agents.base import Episode, FailedEpisode
from openrlhf.agents.episodes import EpisodeError, Episodes
from openrlhf.rewards.base import RewardError, RewardRequest, RewardSource
from openrlhf.types import Group, Outcome, Prompt, SampleKey, SamplingParams, Trajectory
from openrlhf.utils import waits
from openrlhf.utils.randomness import derive_seed

logger = logging.getLogger(__name__)

T = TypeVar("T")

HOPELESS_AFTER = 3
"""Reward calls, or prompts' worth of episodes, that may fail before the first success; then the reward or the agent is
taken to be broken, not unlucky."""
ATTEMPTS = 3
"""How often an episode is played that fails in a way that may pass."""
BACK_OFF_SECONDS = 0.5
"""Before the second attempt; twice as long before each further one."""


class RolloutError(Exception):
    """Rollouts cannot go on. The text says what failed and what to do."""


class EpisodeRunner:
    """Turns a prompt into a judged group. Failures become data; only a hopeless reward or agent ends the run."""

    def __init__(
        self,
        *,
        episodes: Episodes,
        reward: RewardSource | None,
        seed: int,
        has_worked: bool = False,
        greedy_baseline: bool = False,
        on_sample: Callable[[], None] = lambda: None,
    ) -> None:
        """`reward` judges the episodes that bring no reward of their own; None: there are none.

        `has_worked`: in the run that this one continues. Whatever fails first is then no worse than what fails later.
        `greedy_baseline`: beside a prompt's samples for training a greedy one is played and judged. Only its reward is
        kept, as their `greedy_reward`. `on_sample` is called after every episode.
        """
        self._episodes = episodes
        self._reward = reward
        self._seed = seed
        self._greedy_baseline = greedy_baseline
        self._on_sample = on_sample
        self._said: Counter[str] = Counter()
        self._played = self._judged = int(has_worked)
        self._unplayed = self._unjudged = 0

    async def play_all(
        self, prompts: Sequence[Prompt], *, n: int, sampling_params: SamplingParams, purpose: str = "train"
    ) -> list[Group]:
        """Play all prompts at once; groups come back in their order. The first error ends the others."""
        playing: list[asyncio.Task[Group]] = []
        try:
            with waits.waiting(lambda: _for_whom(playing)):
                async with asyncio.TaskGroup() as tasks:
                    playing += [
                        tasks.create_task(self.play(prompt, n=n, sampling_params=sampling_params, purpose=purpose))
                        for prompt in prompts
                    ]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [task.result() for task in playing]

    async def play(self, prompt: Prompt, *, n: int, sampling_params: SamplingParams, purpose: str = "train") -> Group:
        """`n` samples of a prompt. `purpose` keeps the randomness of evaluation apart from that of training."""
        greedy = self._greedy_baseline and purpose == "train"
        seeds = [derive_seed(self._seed, purpose, prompt.ordinal, sample) for sample in range(n + greedy)]
        params = [sampling_params.copy(seed=seed) for seed in seeds]
        if greedy:
            params[n].temperature = 0.0
        if self._episodes.plays_groups:
            trajectories = await self._together(prompt, params)
        else:
            trajectories = await asyncio.gather(*(self._episode(prompt, i, own) for i, own in enumerate(params)))
        if all(t.failed for t in trajectories):
            self._note_unplayed(trajectories[0].error)
        else:
            self._played += 1
        judged = await self._judge(prompt, trajectories)
        if greedy:
            found = judged[n].reward
            judged = [dataclasses.replace(t, greedy_reward=found) for t in judged[:n]]
        return Group(prompt=prompt, trajectories=tuple(judged))

    async def _episode(self, prompt: Prompt, sample: int, sampling_params: SamplingParams) -> Trajectory:
        """One episode. A failure that stays becomes a failed trajectory."""
        with waits.activity(f"prompt {prompt.ordinal} sample {sample}"):
            try:
                episode = await _tried(lambda: self._episodes.play(prompt, sampling_params))
            except EpisodeError as error:
                return self._failed(prompt, sample, FailedEpisode(error=str(error)))
        return self._trajectory(prompt, sample, episode)

    async def _together(self, prompt: Prompt, params: Sequence[SamplingParams]) -> list[Trajectory]:
        """All episodes of a prompt, played as one. Where they fail together, they are played again together."""
        with waits.activity(f"prompt {prompt.ordinal}"):
            try:
                episodes = await _tried(lambda: self._episodes.play_group(prompt, params))
            except EpisodeError as error:
                episodes = [FailedEpisode(error=str(error))] * len(params)
        return [
            self._failed(prompt, sample, one)
            if isinstance(one, FailedEpisode)
            else self._trajectory(prompt, sample, one)
            for sample, one in enumerate(episodes)
        ]

    def _failed(self, prompt: Prompt, sample: int, failed: FailedEpisode) -> Trajectory:
        where = prompt.where or f"prompt {prompt.ordinal}"
        self._warn(f"an episode of {where} failed", failed.error)
        waits.mark_progress()
        return Trajectory(
            key=SampleKey(prompt.ordinal, sample),
            segments=(),
            outcome=Outcome.FAILED,
            error=f"{where}: {failed.error}",
            agent=failed.agent,
        )

    def _trajectory(self, prompt: Prompt, sample: int, episode: Episode) -> Trajectory:
        waits.mark_progress()
        self._on_sample()
        if episode.unmatched_ranges:
            self._warn(
                "some tokens that an agent returned as its actions were not sampled by the engine",
                "they are trained on all the same; return what llm_engine.generate gave",
            )
        return Trajectory(
            key=SampleKey(prompt.ordinal, sample),
            segments=episode.segments,
            outcome=Outcome.TRUNCATED if episode.truncated else Outcome.FINISHED,
            text=episode.text,
            reward=episode.reward,
            score=episode.reward if episode.score is None else episode.score,
            extra_logs=episode.extra_logs,
            agent=episode.agent,
            fork=episode.fork,
        )

    async def _judge(self, prompt: Prompt, trajectories: Sequence[Trajectory]) -> Sequence[Trajectory]:
        """The trajectories, with a reward for every one that brought none of its own."""
        unjudged = [t for t in trajectories if not t.failed and t.reward is None]
        if not unjudged:
            return trajectories
        judged: dict[SampleKey, Trajectory] = {}
        try:
            if self._reward is None:
                raise RewardError(
                    f"{prompt.where}: the agent gave this episode no reward, and nobody else judges it: return "
                    "one, or give --reward.remote_url"
                )
            with waits.activity(f"prompt {prompt.ordinal}"), waits.doing("being judged"):
                rewards = await self._reward.score(RewardRequest.of(prompt, unjudged))
            waits.mark_progress()
        except RewardError as error:
            self._note_unjudged(error)
            judged = {t.key: t.as_failed(str(error)) for t in unjudged}
        else:
            self._judged += 1
            for t, r in zip(unjudged, rewards, strict=True):
                logs = {**t.extra_logs, **r.extra_logs}
                judged[t.key] = t.with_reward(
                    r.reward, score=r.score, extra_logs=logs, size=r.size, parts=r.parts, steps=r.steps
                )
        return [judged.get(t.key, t) for t in trajectories]

    def _note_unplayed(self, error: str) -> None:
        self._unplayed += 1
        if self._played == 0 and self._unplayed >= HOPELESS_AFTER:
            raise RolloutError(f"all episodes of the first {self._unplayed} prompts failed: {error}")

    def _note_unjudged(self, error: RewardError) -> None:
        self._unjudged += 1
        self._warn("reward failed", str(error))
        if self._judged == 0 and self._unjudged >= HOPELESS_AFTER:
            raise RolloutError(f"the first {self._unjudged} reward calls all failed: {error}") from error

    def _warn(self, what: str, why: str) -> None:
        """The first few of a kind, then fewer and fewer: a run that goes on must not drown in what it survived."""
        kind = what.split(" of ")[0]
        self._said[kind] += 1
        count = self._said[kind]
        if count <= 3 or count in (10, 100, 1000, 10_000):
            logger.warning("%s: %s%s", what, why, f" (and {count - 1} before)" if count > 3 else "")


async def _tried(play: Callable[[], Awaitable[T]]) -> T:
    """The result, tried again where a failure may pass."""
    for attempt in range(ATTEMPTS - 1):
        try:
            return await play()
        except EpisodeError as error:
            if not error.retry:
                raise
            await asyncio.sleep(BACK_OFF_SECONDS * 2**attempt)
    return await play()


def _for_whom(playing: Sequence[asyncio.Task[Group]]) -> str:
    unfinished = sum(not task.done() for task in playing)
    return f"for {unfinished} of {len(playing)} prompts: {waits.oldest_activity()}"

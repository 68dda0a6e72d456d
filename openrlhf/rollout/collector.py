"""Where training batches come from: prompts in, judged groups out. Sync: one round at a time.

Which groups a round trains on does not depend on which finishes first. Prompts start in the order of their ordinals.
A round that lacks L groups begins with L + S prompts, S being what over-sampling adds. Each group that is turned away
takes from S as long as there is some, and is replaced by the next prompt at once when there is none. The round ends
when nothing is in play. So it has started L + S prompts, or, when more than S of these are turned away, exactly as
many as it takes to have L accepted groups; both are functions of what the prompts' groups are like, not of time.
It trains on the `batch_size` accepted groups with the lowest ordinals; the others wait, and the next round takes them
first. They were sampled by older weights, and every token of theirs says so (`Segment.versions`).

A checkpoint keeps groups that wait as plain values and tensors (`group_state`, `group_from`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from statistics import pstdev, stdev
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from openrlhf.data.prompts import PromptStream
from openrlhf.observability.metrics import Metrics
from openrlhf.rollout.filtering import ScoreFilter, Verdicts
from openrlhf.rollout.runner import EpisodeRunner
from openrlhf.types import (
    UNTOLD,
    Fork,
    Group,
    Outcome,
    Prompt,
    RewardPart,
    SampleKey,
    SamplingParams,
    Segment,
    Supports,
    Trajectory,
)
from openrlhf.utils import waits
from openrlhf.utils.event_loops import LoopRunner

MOST_NAMED = 5
"""Prompts in a line about a wait."""


class PromptsExhausted(Exception):
    """There is nothing left to train on. The text says what became of the prompts."""

    def __init__(self, text: str, *, rejected_prompts: Sequence[int] = ()) -> None:
        """`rejected_prompts`: prompts whose groups were rejected since the last round."""
        super().__init__(text)
        self.rejected_prompts = rejected_prompts


class Round(NamedTuple):
    """The groups that one round trains on."""

    groups: list[Group]
    """In the order of their prompts."""
    metrics: Metrics
    """How many groups were judged, rejected and failed on the way; `rollout_metrics` says what the groups are like."""
    rejected_prompts: Sequence[int] = ()
    """Ordinals of the prompts that were played for it and not accepted."""


@dataclass(slots=True)
class Draw:
    """The prompts that one round starts, and what becomes of them."""

    lacking: int
    """Accepted groups that the round needs beyond those that wait."""
    surplus: int
    """Prompts it begins with beyond that."""
    verdicts: Verdicts
    """On the groups that have ended."""
    started: int = 0

    @property
    def due(self) -> int:
        """Prompts that should be started now."""
        if self.lacking <= 0:
            return 0
        return self.lacking + max(self.surplus, len(self.verdicts.rejected)) - self.started


class SyncCollector:
    """Plays prompts until `batch_size` groups are accepted, at most `generate_batch_size` at a time."""

    def __init__(
        self,
        *,
        prompts: PromptStream,
        runner: EpisodeRunner,
        loop: LoopRunner,
        batch_size: int,
        samples_per_prompt: int,
        sampling_params: SamplingParams,
        logprobs_every: int = 1,
        generate_batch_size: int | None = None,
        score_filter: ScoreFilter | None = None,
    ) -> None:
        """`logprobs_every` n: sampled log-probs are asked for on prompts whose ordinal is a multiple of n, by a resumed
        run on the same. `generate_batch_size` None: `batch_size`. More than that over-samples: it counts groups that
        wait as well.
        """
        self._prompts = prompts
        self._runner = runner
        self._loop = loop
        self._batch_size = batch_size
        self._samples_per_prompt = samples_per_prompt
        self._sampling_params = sampling_params
        self._logprobs_every = logprobs_every
        self._generate_batch_size = generate_batch_size or batch_size
        self._filter = score_filter
        self._playing: set[int] = set()
        """Ordinals of the prompts in play."""
        self._waiting: dict[int, Group] = {}
        """Accepted groups that no round has trained on, by ordinal."""

    def next_batch(self) -> Round:
        """The next round. Fewer than `batch_size` groups when the prompts run out; PromptsExhausted after that."""
        draw = self._loop.run(self._draw())
        groups = [self._waiting.pop(ordinal) for ordinal in sorted(self._waiting)[: self._batch_size]]
        draw.verdicts.require_success(groups, batch_size=self._batch_size)
        if not groups:
            raise PromptsExhausted(draw.verdicts.exhausted(), rejected_prompts=draw.verdicts.rejected_prompts)
        self._prompts.settle(draw.verdicts.scores(groups))
        metrics = draw.verdicts.metrics(buffered=len(self._waiting))
        metrics.merge(self._prompts.metrics())
        return Round(groups, metrics, draw.verdicts.rejected_prompts)

    def state_dict(self) -> dict[str, Any]:
        """Groups that wait are kept whole; prompts in play as ordinals: a resumed run asks them again, first."""
        return {
            "prompts": self._prompts.state_dict(),
            "unserved": sorted(self._playing),
            "waiting": [group_state(self._waiting[ordinal]) for ordinal in sorted(self._waiting)],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._prompts.load_state_dict(state["prompts"])
        self._prompts.give_back(state["unserved"])
        groups = [group_from(saved, self._prompts.prompt_at(saved["ordinal"])) for saved in state["waiting"]]
        self._waiting = {group.prompt.ordinal: group for group in groups}

    async def _draw(self) -> Draw:
        draw = Draw(
            lacking=self._batch_size - len(self._waiting),
            surplus=max(0, self._generate_batch_size - self._batch_size),
            verdicts=Verdicts(self._filter),
        )
        try:
            with waits.waiting(lambda: f"for {prompts_in_play(self._playing, started=draw.started)}"):
                async with asyncio.TaskGroup() as tasks:
                    self._start_due(draw, tasks)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._prompts.give_back(self._playing)
            self._playing.clear()
        return draw

    def _start_due(self, draw: Draw, tasks: asyncio.TaskGroup) -> None:
        if draw.verdicts.hopeless(self._batch_size):
            return
        for prompt in self._prompts.take(min(draw.due, self._generate_batch_size - len(self._playing))):
            draw.started += 1
            self._playing.add(prompt.ordinal)
            tasks.create_task(self._play(prompt, draw, tasks))

    async def _play(self, prompt: Prompt, draw: Draw, tasks: asyncio.TaskGroup) -> None:
        params = params_of(prompt, self._sampling_params, logprobs_every=self._logprobs_every)
        group = await self._runner.play(prompt, n=self._samples_per_prompt, sampling_params=params)
        self._playing.remove(prompt.ordinal)
        if draw.verdicts.accepts(group):
            self._waiting[prompt.ordinal] = group
        self._start_due(draw, tasks)


def prompts_in_play(ordinals: Collection[int], *, started: int) -> str:
    """What a wait is for: `3 of 64 prompts (17, 23, 40): prompt 17 sample 0 at the engine`."""
    named = [*map(str, sorted(ordinals)[:MOST_NAMED]), *(["…"] if len(ordinals) > MOST_NAMED else [])]
    who = waits.oldest_activity()
    return f"{len(ordinals)} of {started} prompts ({', '.join(named)})" + (f": {who}" if who else "")


def params_of(prompt: Prompt, params: SamplingParams, *, logprobs_every: int) -> SamplingParams:
    """The sampling parameters of a prompt: with log-probs if its ordinal is a multiple of `logprobs_every`."""
    return params.copy(logprobs=None) if prompt.ordinal % logprobs_every else params


def group_state(group: Group) -> dict[str, Any]:
    """Without its prompt, which its ordinal stands for."""
    return {"ordinal": group.prompt.ordinal, "trajectories": [_trajectory_state(t) for t in group.trajectories]}


def group_from(state: dict[str, Any], prompt: Prompt) -> Group:
    return Group(prompt=prompt, trajectories=tuple(_trajectory_from(t) for t in state["trajectories"]))


def _trajectory_state(trajectory: Trajectory) -> dict[str, Any]:
    segments = [_values(segment) for segment in trajectory.segments]
    return _values(trajectory) | {"segments": segments, "outcome": str(trajectory.outcome)}


def _trajectory_from(state: dict[str, Any]) -> Trajectory:
    segments = tuple(_segment_from(segment) for segment in state["segments"])
    fork = state.get("fork")  # checkpoints of earlier versions have none
    return Trajectory(
        **state
        | {
            "key": SampleKey(*state["key"]),
            "segments": segments,
            "outcome": Outcome(state["outcome"]),
            "fork": None if fork is None else Fork(*fork),
            "reward_parts": tuple(RewardPart(*part) for part in state.get("reward_parts", ())),
        }
    )


def _segment_from(state: dict[str, Any]) -> Segment:
    supports = state.get("supports")  # checkpoints of earlier versions have none
    return Segment(**state | {"supports": None if supports is None else Supports(*supports)})


def _values(record: Trajectory | Segment) -> dict[str, Any]:
    """By their names; supports as the two columns that they are."""
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    if (supports := values.get("supports")) is not None:
        values["supports"] = [supports.sizes_A, supports.token_ids]
    return values


def rollout_metrics(groups: Sequence[Group], *, max_length: int) -> Metrics:
    """Means over the judged samples of the groups that a round trains on; failed ones are only counted."""
    metrics = Metrics()
    judged = [t for group in groups for t in group.scored]
    count = len(judged)
    rewards = [reward for group in groups for reward in group.rewards]
    truncated = sum(t.outcome is Outcome.TRUNCATED for t in judged)
    responses = sum(t.num_actions for t in judged)
    metrics.mean("score", sum(score for group in groups for score in group.scores), count)
    metrics.mean("response_length", responses, count)
    metrics.mean("total_length", sum(t.num_tokens for t in judged), count)
    metrics.mean("truncated", truncated, count)
    metrics.mean("response_clip_ratio", sum(t.num_tokens >= max_length for t in judged), count)
    roles = [(agent, members) for group in groups for agent, members in group.by_agent.items()]
    earned = [(agent, [t.reward for t in members if t.reward is not None]) for agent, members in roles]
    compared = [rewards for _, rewards in earned if len(rewards) > 1]
    spread = sum(stdev(rewards) for rewards in compared)
    metrics.mean("group_reward_std", spread, len(compared))
    for trajectory in judged:
        for name, value in trajectory.extra_logs.items():
            metrics.mean(name, value, 1)
    metrics.mean("rollout/reward_mean", sum(rewards), count)
    for agent, own in earned:
        if agent:
            metrics.mean(f"rollout/reward_mean_{agent}", sum(own), len(own))
    metrics.last("rollout/reward_std", pstdev(rewards) if count else 0.0)
    metrics.mean("rollout/response_length_mean", responses, count)
    metrics.mean("rollout/truncated_rate", truncated, count)
    metrics.last("rollout/num_samples", count)
    told = [segment.supports for t in judged for segment in t.segments if segment.supports is not None]
    sizes_A = torch.cat([supports.sizes_A for supports in told]) if told else torch.zeros(0)
    if cut := int((sizes_A != 0).sum()):
        metrics.mean("rollout/support_size", float(sizes_A.clamp(min=0).sum()), int((sizes_A > 0).sum()))
        metrics.mean("rollout/support_untold", int((sizes_A == UNTOLD).sum()), cut)
    metrics.sum("rollout/failed", sum(t.failed for group in groups for t in group.trajectories))
    return metrics


def source_metrics(groups: Sequence[Group]) -> Metrics:
    """The same of each data source alone, and how many of the prompts are of it."""
    metrics = Metrics()
    for group in groups:
        source, count = group.prompt.datasource, len(group.scored)
        metrics.mean(f"source/{source}_score", sum(group.scores), count)
        metrics.mean(f"source/{source}_reward", sum(group.rewards), count)
        metrics.sum(f"source/{source}_prompts", 1)
    return metrics


if TYPE_CHECKING:
    from openrlhf.trainers.pipelines import Collector

    _: type[Collector] = SyncCollector

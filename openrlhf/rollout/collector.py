"""Where training batches come from: prompts in, judged groups out. Sync: one round at a time.

Which groups a round trains on does not depend on who finishes first. Prompts start in the order of their ordinals.
A round that lacks L groups begins with L + S prompts, S being what over-sampling adds. Each group that is turned away
takes from S as long as there is some, and is replaced by the next prompt at once when there is none. The round ends
when nothing is in play. So it has started L + S prompts, or, when more than S of these are turned away, exactly as
many as it takes to have L accepted groups; both are functions of what the prompts' groups are like, not of time.
It trains on the `batch_size` accepted groups with the lowest ordinals; the others wait, and the next round takes them
first. They were sampled by older weights, and every token of theirs says so (`Segment.versions`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from openrlhf.data.prompts import PromptStream
from openrlhf.observability.metrics import Metrics
from openrlhf.rollout.filtering import ScoreFilter
from openrlhf.rollout.runner import EpisodeRunner, RolloutError
from openrlhf.rollout.saved_groups import group_from, group_state
from openrlhf.types import Group, Prompt, SamplingParams


class PromptsExhausted(Exception):
    """There is nothing left to train on. The text says what became of the prompts."""


class Round(NamedTuple):
    """What one round trains on."""

    groups: list[Group]
    """In the order of their prompts."""
    metrics: Metrics
    """How it was to get them; what they are like is `statistics`' business."""


@dataclass(slots=True)
class Draw:
    """The prompts that one round starts, and what becomes of them."""

    lacking: int
    """Accepted groups that the round needs beyond those that wait."""
    surplus: int
    """Prompts it begins with beyond that."""
    started: int = 0
    turned_away: int = 0
    """Groups that ended without being accepted: rejected or failed."""
    judged: int = 0
    rejected: int = 0
    failed: list[Group] = field(default_factory=list)
    """Groups without a judged member, in the order in which they ended."""
    failed_samples: int = 0
    """Failed samples of the groups turned away."""

    @property
    def due(self) -> int:
        """Prompts that should be started now."""
        if self.lacking <= 0:
            return 0
        return self.lacking + max(self.surplus, self.turned_away) - self.started


class SyncCollector:
    """Plays prompts until `batch_size` groups are accepted, at most `generate_batch_size` at a time.

    Without a filter every group is accepted, also a failed one: it is in the batch, gives no sample and is counted.
    With a filter failed groups are replaced like rejected ones.
    """

    def __init__(
        self,
        *,
        prompts: PromptStream,
        runner: EpisodeRunner,
        loop: asyncio.Runner,
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
        if not any(group.scored for group in groups) and (groups or self._hopeless(draw)):
            reason = min(t.error for group in draw.failed for t in group.trajectories if t.failed)
            raise RolloutError(f"all {len(draw.failed)} groups of a round failed; first reason: {reason}")
        if not groups:
            raise PromptsExhausted("the prompts ran out" + (f"; {self._filter.summary()}" if self._filter else ""))
        return Round(groups, self._metrics(draw))

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
        )
        try:
            async with asyncio.TaskGroup() as tasks:
                self._start_due(draw, tasks)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self._prompts.give_back(self._playing)
            self._playing.clear()
        return draw

    def _start_due(self, draw: Draw, tasks: asyncio.TaskGroup) -> None:
        if self._hopeless(draw):
            return
        for prompt in self._prompts.take(min(draw.due, self._generate_batch_size - len(self._playing))):
            draw.started += 1
            self._playing.add(prompt.ordinal)
            tasks.create_task(self._play(prompt, draw, tasks))

    async def _play(self, prompt: Prompt, draw: Draw, tasks: asyncio.TaskGroup) -> None:
        params = self._sampling_params
        if prompt.ordinal % self._logprobs_every:
            params = params.copy(logprobs=None)
        group = await self._runner.play(prompt, n=self._samples_per_prompt, sampling_params=params)
        self._playing.remove(prompt.ordinal)
        self._sort(group, draw)
        self._start_due(draw, tasks)

    def _sort(self, group: Group, draw: Draw) -> None:
        """Whether a group that ended is trained on."""
        if group.scored:
            draw.judged += 1
            accepted = self._filter is None or self._filter.accepts(group)
            draw.rejected += not accepted
        else:
            draw.failed.append(group)
            accepted = self._filter is None
        if accepted:
            self._waiting[group.prompt.ordinal] = group
        else:
            draw.turned_away += 1
            draw.failed_samples += sum(t.failed for t in group.trajectories)

    def _hopeless(self, draw: Draw) -> bool:
        """A batch's worth of groups failed and none was judged: replacements would only use up the prompts."""
        return len(draw.failed) >= self._batch_size and not draw.judged

    def _metrics(self, draw: Draw) -> Metrics:
        metrics = Metrics()
        if self._filter is not None:
            metrics.mean("dynamic_filtering_pass_rate", draw.judged - draw.rejected, draw.judged)
            metrics.last("rollout/judged_groups", draw.judged)
            metrics.last("rollout/rejected_groups", draw.rejected)
            metrics.last("rollout/buffered", len(self._waiting))
            metrics.sum("rollout/failed", draw.failed_samples)
        return metrics

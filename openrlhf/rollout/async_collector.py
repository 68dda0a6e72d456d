"""Where training batches come from when episodes outlive the round they began in.

Prompts start on a loop of its own, in the order of their ordinals, as long as at most `capacity` groups are begun and
not trained on, and at most `at_once` of these are in play. A finished group is there for the next round at once.

Two ways to start prompts:
    ahead          all the time: generation goes on while rounds are trained on
    not ahead      while a round is waited for; it ends when it has its groups, and the rest goes on in the next

When new weights come is the business of `trainers.pipelines`. Where they come when nothing is in play it calls `drain`
before and `resume` after the push.

Which finished groups a round trains on (`chosen`, `bound_of`, `room_for`). A group is begun with the weights of some
version, and trained on by the round that leads from version v to v + 1. Its staleness is v minus the version of its
oldest token. It may not exceed a bound S: a group begun at version s must be in one of the rounds up to v = s + S. A
round takes B groups.

A round does not wait for the slowest groups: it takes the B oldest of those that have finished, but only if the others
can still be in time. The groups that were begun at version s or before, and are not taken now, have s + S − v rounds
left, so there may be at most (s + S − v)·B of them. If there are more, the round waits until enough of the older ones
have finished. With at most S·B groups begun and not trained on, this wait always ends: when all groups have finished,
the B oldest satisfy the condition.

Where the engine is d updates behind, a group that begins now has version v − d, and d rounds less: there may be at most
(S − d)·B of them.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from openrlhf.data.prompts import PromptStream
from openrlhf.observability.metrics import BusyClock, Metrics
from openrlhf.rollout.base import Engine
from openrlhf.rollout.collector import PromptsExhausted, Round, group_from, group_state, params_of, prompts_in_play
from openrlhf.rollout.filtering import ScoreFilter, Verdicts
from openrlhf.rollout.runner import EpisodeRunner, RolloutError
from openrlhf.types import Group, Prompt, SamplingParams
from openrlhf.utils import waits
from openrlhf.utils.event_loops import BackgroundRunner


def chosen(
    finished: Mapping[int, int], unfinished: Collection[int], *, version: int, batch_size: int, bound: int
) -> list[int] | None:
    """The ordinals of the groups that the next round trains on, oldest first; None: wait until more have finished.

    `finished`: ordinal → the version that the group was begun with. `unfinished`: the versions of the groups that are
    still being played. If there are none of these, a round may have fewer than `batch_size` groups.
    """
    if len(finished) < batch_size and unfinished:
        return None
    order = sorted(finished, key=lambda ordinal: (finished[ordinal], ordinal))
    taken, left = order[:batch_size], order[batch_size:]
    starts = sorted([*unfinished, *(finished[ordinal] for ordinal in left)])
    # In ascending order, the `count`-th start has `count` groups that are as old or older, itself included. All of them
    # must fit into the rounds that are left for this one.
    in_time = all(count <= (start + bound - version) * batch_size for count, start in enumerate(starts, 1))
    return taken if in_time or not unfinished else None


def bound_of(capacity: int, *, batch_size: int) -> int:
    """The staleness bound S for so many groups, begun and not trained on: the rounds that it takes to train on them."""
    return -(-capacity // batch_size)


def room_for(capacity: int, *, batch_size: int, behind: int) -> int:
    """The number of groups that may be begun and not trained on, while the engine is `behind` updates behind."""
    return min(capacity, (bound_of(capacity, batch_size=batch_size) - behind) * batch_size)


class _Finished(NamedTuple):
    group: Group
    version: int
    """The version that it was begun with."""


class AsyncCollector:
    """Plays prompts on a loop that never rests."""

    def __init__(
        self,
        *,
        prompts: PromptStream,
        runner: EpisodeRunner,
        engine: Engine,
        loop: BackgroundRunner,
        batch_size: int,
        samples_per_prompt: int,
        sampling_params: SamplingParams,
        logprobs_every: int = 1,
        queue_size: int = 1,
        at_once: int | None = None,
        ahead: bool = True,
        behind: Callable[[], int] = lambda: 0,
        score_filter: ScoreFilter | None = None,
    ) -> None:
        """`queue_size`: rounds that generation may be ahead. `at_once`: most prompts in play; None: `batch_size`.
        `ahead` False: prompts start only while a round is waited for. `behind`: updates whose weights the engine has
        not got, because their pushes were deferred.
        """
        self._prompts = prompts
        self._runner = runner
        self._engine = engine
        self._loop = loop
        self._batch_size = batch_size
        self._samples_per_prompt = samples_per_prompt
        self._sampling_params = sampling_params
        self._logprobs_every = logprobs_every
        self._at_once = at_once or batch_size
        self._capacity = max(queue_size * batch_size, self._at_once)
        self._ahead = ahead
        self._filter = score_filter
        self._tasks: dict[int, asyncio.Task[Group]] = {}
        """The prompts in play, by ordinal."""
        self._versions: dict[int, int] = {}
        """The versions that the prompts in play were begun with, by ordinal."""
        self._finished: dict[int, _Finished] = {}
        self._behind = behind
        self._changed = asyncio.Event()
        self._in_play = BusyClock()
        self._resting = not ahead
        self._failure: BaseException | None = None
        self._verdicts = Verdicts(score_filter)

    @property
    def staleness_bound(self) -> int:
        return bound_of(self._capacity, batch_size=self._batch_size)

    @property
    def seconds_in_play(self) -> float:
        """So far, in which any prompt was in play."""
        return self._in_play.seconds

    @property
    def version(self) -> int:
        """The version of the weights that the next round trains, or that are trained now."""
        return self._engine.version + self._behind()

    def next_batch(self) -> Round:
        """The next round, as soon as its groups are there. PromptsExhausted when there are none any more."""
        return self._loop.run(self._next_batch())

    def drain(self) -> None:
        """Start nothing new, and wait until nothing is in play. `resume` ends it."""
        self._loop.run(self._drain())

    def resume(self) -> None:
        """Start prompts again."""
        self._loop.run(self._resume())

    def can_do_without_push(self) -> bool:
        """After an update: whether what is in play may go on without its weights.

        It may as long as the next round leaves some behind. A round that takes all there is waits for the slowest
        episode anyway.
        """
        return self._loop.run(self._can_do_without_push())

    def state_dict(self) -> dict[str, Any]:
        """Finished groups are kept whole; prompts in play as ordinals: a resumed run asks them again, first.

        So are those turned away since the last round: the next one's account of what became of prompts is whole.
        """
        return self._loop.run(self._state())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._prompts.load_state_dict(state["prompts"])
        self._prompts.give_back(state["unserved"])
        for saved in state["waiting"]:
            group = group_from(saved, self._prompts.prompt_at(saved["ordinal"]))
            self._finished[group.prompt.ordinal] = _Finished(group, saved["version"])
        # Checkpoints of earlier versions have no scores of them.
        scores = state.get("turned_away_scores") or [[] for _ in state["turned_away"]]
        self._verdicts.rejected |= zip(state["turned_away"], scores, strict=True)

    async def _next_batch(self) -> Round:
        self._resting = False
        while True:
            self._changed.clear()
            self._start_due()
            if self._failure is not None:
                raise self._failure
            ordinals = chosen(
                {ordinal: finished.version for ordinal, finished in self._finished.items()},
                list(self._versions.values()),
                version=self.version,
                batch_size=self._batch_size,
                bound=self.staleness_bound,
            )
            if ordinals is not None:
                break
            with waits.waiting(self._for_whom):
                await self._changed.wait()
        groups = [self._finished.pop(ordinal).group for ordinal in sorted(ordinals)]
        self._verdicts.require_success(groups, batch_size=self._batch_size)
        if not groups:
            raise PromptsExhausted(self._verdicts.exhausted(), rejected_prompts=self._verdicts.rejected_prompts)
        verdicts, self._verdicts = self._verdicts, Verdicts(self._filter)
        self._prompts.settle(verdicts.scores(groups))
        metrics = self._metrics(groups, verdicts)
        metrics.merge(self._prompts.metrics())
        self._resting = not self._ahead
        self._start_due()  # there is room now, and `next_batch` is not called before the round is trained
        return Round(groups, metrics, verdicts.rejected_prompts)

    async def _drain(self) -> None:
        self._resting = True
        while self._tasks and self._failure is None:
            self._changed.clear()
            with waits.waiting(self._for_whom):
                await self._changed.wait()

    def _for_whom(self) -> str:
        return f"for {prompts_in_play(self._tasks, started=len(self._tasks) + len(self._finished))}"

    async def _resume(self) -> None:
        self._resting = False
        self._start_due()

    async def _can_do_without_push(self) -> bool:
        return bool(self._tasks) and len(self._tasks) + len(self._finished) > self._batch_size

    async def _state(self) -> dict[str, Any]:
        finished = [self._finished[ordinal] for ordinal in sorted(self._finished)]
        return {
            "prompts": self._prompts.state_dict(),
            "unserved": sorted(self._tasks),
            "waiting": [group_state(one.group) | {"version": one.version} for one in finished],
            "turned_away": self._verdicts.rejected_prompts,
            "turned_away_scores": list(self._verdicts.rejected.values()),
        }

    def _start_due(self) -> None:
        if self._resting or self._failure is not None or self._verdicts.hopeless(self._batch_size):
            return
        capacity = room_for(self._capacity, batch_size=self._batch_size, behind=self._behind())
        room = capacity - len(self._tasks) - len(self._finished)
        for prompt in self._prompts.take(max(0, min(room, self._at_once - len(self._tasks)))):
            self._in_play.begin()
            self._versions[prompt.ordinal] = self._engine.version
            task = asyncio.create_task(self._play(prompt), name=f"prompt {prompt.ordinal}")
            task.add_done_callback(functools.partial(self._ended, prompt.ordinal))
            self._tasks[prompt.ordinal] = task

    async def _play(self, prompt: Prompt) -> Group:
        params = params_of(prompt, self._sampling_params, logprobs_every=self._logprobs_every)
        return await self._runner.play(prompt, n=self._samples_per_prompt, sampling_params=params)

    def _ended(self, ordinal: int, task: asyncio.Task[Group]) -> None:
        """However: one that was cancelled before it began has run no line of its own, and its prompt is lost."""
        version = self._versions.pop(ordinal)
        del self._tasks[ordinal]
        if task.cancelled():
            self._failure = self._failure or RolloutError(f"prompt {ordinal} was given up while it was in play")
        elif (error := task.exception()) is not None:
            self._failure = self._failure or error
        elif self._verdicts.accepts(task.result()):
            self._finished[ordinal] = _Finished(task.result(), version)
        self._in_play.end()
        self._changed.set()
        self._start_due()

    def _metrics(self, groups: list[Group], verdicts: Verdicts) -> Metrics:
        metrics, version = verdicts.metrics(buffered=len(self._finished)), self.version
        for trajectory in (t for group in groups for t in group.scored):
            versions = [s.oldest_version for s in trajectory.segments if s.oldest_version is not None]
            if versions:
                metrics.mean("rollout/staleness", version - min(versions), 1)
                metrics.max("rollout/staleness_max", version - min(versions))
        metrics.last("rollout/buffered", len(self._finished))
        metrics.last("rollout/in_play", len(self._tasks))
        return metrics


if TYPE_CHECKING:
    from openrlhf.trainers.pipelines import Collector

    _: type[Collector] = AsyncCollector

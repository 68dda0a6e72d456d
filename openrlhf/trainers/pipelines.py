"""The pipeline of a run: rounds one after the other, or generation that goes on while they are trained on.

    sync               SyncCollector
    sync, stragglers   AsyncCollector that is not ahead; engines stop from the end of a round until the push after it
    async              AsyncCollector; new weights come when nothing is in play, and not before they must
    async, partial     AsyncCollector; new weights come in the middle of responses

Engines with weights of their own take them at a push. The embedded engine samples with the very weights that are
trained: it has to stop from the beginning of an update until the push after it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from openrlhf.config.commands import RLConfig
from openrlhf.data.prompts import PromptStream
from openrlhf.learners.base import Workers, WorkersBehind
from openrlhf.observability.metrics import Metrics
from openrlhf.rollout.async_collector import AsyncCollector
from openrlhf.rollout.collector import SyncCollector
from openrlhf.rollout.filtering import ScoreFilter
from openrlhf.rollout.runner import EpisodeRunner
from openrlhf.runs.launchers import RunParts
from openrlhf.trainers.evaluation import EvaluationBeside, PromptEvaluation
from openrlhf.trainers.rl import Collector, Evaluation
from openrlhf.types import Group, SamplingParams
from openrlhf.utils.event_loops import BackgroundRunner, LoopRunner
from openrlhf.weight_sync.base import WeightSync


class Pipeline(NamedTuple):
    """What of the loop's parts depends on it."""

    collector: Collector
    workers: Workers
    weights: WeightSync
    evaluation: Evaluation | None


def pipeline(
    config: RLConfig,
    bound: RunParts,
    *,
    prompts: PromptStream,
    runner: EpisodeRunner,
    loop: LoopRunner,
    sampling_params: SamplingParams,
    evaluation: PromptEvaluation | None = None,
) -> Pipeline:
    shared: dict[str, Any] = {
        "prompts": prompts,
        "runner": runner,
        "batch_size": config.rollout.batch_size,
        "samples_per_prompt": config.samples_per_prompt,
        "sampling_params": sampling_params,
        "logprobs_every": config.logprobs_every,
        "score_filter": _score_filter(config),
    }
    if not config.plays_across_rounds:
        collector = SyncCollector(**shared, loop=loop, generate_batch_size=config.generate_batch_size)
        return Pipeline(collector, bound.workers, bound.weights, evaluation)
    assert isinstance(loop, BackgroundRunner), "episodes that outlive their round need a loop that never rests"
    ahead = config.train.async_enable
    lasting = AsyncCollector(
        **shared,
        engine=bound.engine,
        loop=loop,
        queue_size=config.train.async_queue_size if ahead else 1,
        at_once=config.generate_batch_size,
        ahead=ahead,
    )
    if not ahead:
        workers, weights = _in_turns(bound, loop)
        return Pipeline(lasting, workers, weights, evaluation)
    beside = evaluation and EvaluationBeside(evaluation, loop)
    settle = beside.settle if beside else lambda: None
    partial = config.train.partial_rollout_enable
    workers, weights = _asynchronous(lasting, bound, loop, partial=partial, settle=settle)
    if beside and isinstance(weights, DeferredWeightSync):
        beside.catch_up = weights.catch_up
    return Pipeline(lasting, workers, weights, beside)


def _in_turns(bound: RunParts, loop: BackgroundRunner) -> tuple[Workers, WeightSync]:
    """Engines stop when a round has its groups, with what is in play, and go on after the push."""
    return RestingWorkers(bound.workers, lambda: loop.run(bound.engine.pause())), bound.weights


def _asynchronous(
    collector: AsyncCollector, bound: RunParts, loop: BackgroundRunner, *, partial: bool, settle: Callable[[], None]
) -> tuple[Workers, WeightSync]:
    """`settle` comes before weights that an engine samples with change."""
    engine, rest = bound.engine, Rest(collector.rest, collector.go_on)
    if engine.shares_weights:
        if partial:  # the push itself lets it go on
            rest = Rest(lambda: loop.run(engine.pause()), lambda: None)

        def begin() -> None:
            settle()
            rest.begin()

        return RestingWorkers(bound.workers, begin), RestingWeightSync(bound.weights, rest)
    workers = OverlappedWorkers(bound.workers, collector)
    if partial:
        return workers, SettlingWeightSync(bound.weights, settle)
    at_rest = SettlingWeightSync(RestingWeightSync(bound.weights, rest), settle)
    return workers, DeferredWeightSync(at_rest, collector.puts_off_push)


class Rest:
    """Generation that rests, from the first who asks for it until it goes on."""

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin = begin
        self._end = end
        self._resting = False

    def begin(self) -> None:
        if not self._resting:
            self._begin()
            self._resting = True

    def end(self) -> None:
        if self._resting:
            self._end()
            self._resting = False


class RestingWorkers(WorkersBehind):
    """Generation rests when a round is placed."""

    def __init__(self, workers: Workers, begin_rest: Callable[[], None]) -> None:
        super().__init__(workers)
        self._begin_rest = begin_rest

    def place(self, groups: Sequence[Group]) -> Any:
        self._begin_rest()
        return super().place(groups)


class RestingWeightSync:
    """Generation rests during a push, and goes on after it. Implements `WeightSync` with the one it is given."""

    def __init__(self, weights: WeightSync, rest: Rest) -> None:
        self._weights = weights
        self._rest = rest

    def push(self, *, version: int) -> Metrics:
        self._rest.begin()
        metrics = self._weights.push(version=version)
        self._rest.end()
        return metrics


class OverlappedWorkers(WorkersBehind):
    """Tells with an update for which share of a round's time, from update to update, generation went on beside it:
    `perf/overlap`."""

    def __init__(self, workers: Workers, collector: AsyncCollector) -> None:
        super().__init__(workers)
        self._collector = collector
        self._in_play_before = 0.0
        self._last_update: float | None = None

    def place(self, groups: Sequence[Group]) -> Any:
        self._in_play_before = self._collector.seconds_in_play
        return super().place(groups)

    def update(self, batch: Any) -> Metrics:
        metrics = super().update(batch)
        now, beside = time.perf_counter(), self._collector.seconds_in_play - self._in_play_before
        if self._last_update is not None:
            metrics.last("perf/overlap", beside / (now - self._last_update))
        self._last_update = now
        return metrics


class SettlingWeightSync:
    """A push waits for an evaluation of the weights it would replace. Implements `WeightSync` with the one given."""

    def __init__(self, weights: WeightSync, settle: Callable[[], None]) -> None:
        self._weights = weights
        self._settle = settle

    def push(self, *, version: int) -> Metrics:
        start = time.perf_counter()
        self._settle()
        waited = time.perf_counter() - start
        metrics = self._weights.push(version=version)
        metrics.last("timing/evaluation_wait", waited)
        return metrics


class DeferredWeightSync:
    """Pushes only when it has to. Implements `WeightSync` with the one it is given."""

    def __init__(self, weights: WeightSync, puts_off: Callable[[], bool]) -> None:
        self._weights = weights
        self._puts_off = puts_off
        self._waiting: int | None = None
        """The version that the engine has not got yet."""

    def push(self, *, version: int) -> Metrics:
        if self._puts_off():
            self._waiting = version
            return Metrics()
        self._waiting = None
        return self._weights.push(version=version)

    def catch_up(self) -> None:
        """The engine gets the newest weights, if it has not got them."""
        if self._waiting is not None:
            version, self._waiting = self._waiting, None
            self._weights.push(version=version)


def _score_filter(config: RLConfig) -> ScoreFilter | None:
    if not config.algo.dynamic_filtering_enable:
        return None
    low, high = config.algo.dynamic_filtering_range
    members = 2 if config.uses_group_baseline else 1
    return ScoreFilter(low, high, warn_after=10 * config.rollout.batch_size, members=members)

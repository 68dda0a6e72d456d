"""The pipeline of a run: rounds one after the other, or generation that goes on while they are trained on.

    sync               SyncCollector
    sync, stragglers   AsyncCollector that is not ahead; engines stop from the end of a round until the push after it
    async              AsyncCollector; new weights come when nothing is in play
    async, partial     AsyncCollector; new weights come in the middle of responses

Engines with weights of their own take them at a push. The embedded engine samples with the very weights that are
trained: it has to stop from the beginning of an update until the push after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from openrlhf.config.roots import RLConfig
from openrlhf.data.prompts import PromptStream
from openrlhf.learners.base import Workers, WorkersBehind
from openrlhf.observability.metrics import Metrics
from openrlhf.rollout.async_collector import AsyncCollector
from openrlhf.rollout.collector import SyncCollector
from openrlhf.rollout.embedded import EmbeddedEngine
from openrlhf.rollout.filtering import ScoreFilter
from openrlhf.rollout.runner import EpisodeRunner
from openrlhf.trainers.launching import Bound
from openrlhf.trainers.rl import Collector
from openrlhf.types import Group, SamplingParams
from openrlhf.utils.background import BackgroundRunner, LoopRunner
from openrlhf.weight_sync.base import WeightSync


class Pipeline(NamedTuple):
    """What of the loop's parts depends on it."""

    collector: Collector
    workers: Workers
    weights: WeightSync


def pipeline(
    config: RLConfig,
    bound: Bound,
    *,
    prompts: PromptStream,
    runner: EpisodeRunner,
    loop: LoopRunner,
    sampling_params: SamplingParams,
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
        return Pipeline(collector, bound.workers, bound.weights)
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
    in_the_middle = config.train.partial_rollout_enable or not ahead
    return _lasting(lasting, bound, loop, ahead=ahead, in_the_middle=in_the_middle)


def _lasting(
    collector: AsyncCollector, bound: Bound, loop: BackgroundRunner, *, ahead: bool, in_the_middle: bool
) -> Pipeline:
    """`ahead`: engines with weights of their own sample while the policy is trained. `in_the_middle` of responses new
    weights may come."""
    engine, at_rest = bound.engine, Rest(collector.rest, collector.go_on)
    if isinstance(engine, EmbeddedEngine):
        held = Rest(lambda: loop.run(engine.hold()), lambda: loop.run(engine.go_on()))
        rest = held if in_the_middle else at_rest
        return Pipeline(collector, RestingWorkers(bound.workers, rest.begin), RestingWeightSync(bound.weights, rest))
    if not ahead:  # the push lets them go on
        return Pipeline(collector, RestingWorkers(bound.workers, engine.hold), bound.weights)
    weights = bound.weights if in_the_middle else RestingWeightSync(bound.weights, at_rest)
    return Pipeline(collector, bound.workers, weights)


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


def _score_filter(config: RLConfig) -> ScoreFilter | None:
    if not config.algo.dynamic_filtering_enable:
        return None
    low, high = config.algo.dynamic_filtering_range
    return ScoreFilter(low, high, warn_after=10 * config.rollout.batch_size)

"""The four pipelines of an RL run: when episodes are played, when weights change, and what waits for what.

                who runs                consumes        produces           waits for                unblocked by
    Sync        rollout, then training  prompts         a round            every episode it began   its last episode
    CarryOver   rollout, then training  prompts, and    a round; what is   enough finished groups,  the group that
                                        what was left   in play stays      and any that are due     completes a round
    Async       rollout beside          prompts, as     a round of the     as CarryOver; a push     the last episode in
                training                long as there   oldest finished    also for everything in   play; the end of an
                                        is room         groups             play and an evaluation   evaluation
    Async-      rollout beside          as Async        as Async           as CarryOver; a push     the end of an
    Partial     training                                                   also for an evaluation   evaluation

How new weights reach the engine, and what versions the tokens of a sample have:

    Sync           between two rounds, when nothing is in play                                one version
    CarryOver      between two rounds, in the middle of the responses that a round left       several versions
    Async          when nothing is in play; a push is deferred while rounds can be had        one version
                   without it
    AsyncPartial   after every round, in the middle of responses                              several versions

An engine with weights of its own gets them by a push. One that shares the trained weights (`shares_weights`) has to be
paused from `begin_training` until the push in `finish_training`: the update changes the weights under it.

The loop calls `start` once, then for every round `next_batch`, `begin_training`, `finish_training`; `evaluate` comes
between two rounds.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from openrlhf.observability.metrics import Metrics
from openrlhf.rollout.async_collector import AsyncCollector
from openrlhf.rollout.base import ControlledEngine
from openrlhf.rollout.collector import Round
from openrlhf.trainers.evaluation import BackgroundEvaluation, Evaluation
from openrlhf.trainers.hybrid import DeviceTurns, DeviceUsage
from openrlhf.utils.event_loops import LoopRunner
from openrlhf.weight_sync.base import WeightSync


class Collector(Protocol):
    """Plays prompts and gives rounds of judged groups."""

    def next_batch(self) -> Round: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class EngineParts(NamedTuple):
    """The parts that every pipeline drives."""

    engine: ControlledEngine
    weights: WeightSync
    usage: DeviceUsage
    loop: LoopRunner
    """Runs what is asked of the engine. Of `CarryOver`, `Async` and `AsyncPartial` it goes on between two calls."""


class Pipeline(ABC):
    """The pipeline as the RL loop sees it."""

    collector: Collector
    evaluation: Evaluation | None
    """None without evaluation prompts. `evaluate` starts it; its result is taken from it."""

    def __init__(self, parts: EngineParts) -> None:
        self.engine, self.weights, self.usage, self.loop = parts

    @abstractmethod
    def start(self, version: int) -> None:
        """Give the engine its first weights. It begins with whatever its files hold, or with nothing."""

    def next_batch(self) -> Round:
        """The next round of groups. Raises PromptsExhausted when there is nothing left to train on."""
        return self.collector.next_batch()

    @abstractmethod
    def begin_training(self) -> Metrics:
        """Make room for scoring and training, in memory and in the weights."""

    @abstractmethod
    def finish_training(self, version: int) -> Metrics:
        """The policy has the weights of `version` now: bring them to the engine, or decide to do so later."""

    @abstractmethod
    def evaluate(self) -> None:
        """Measure the newest weights: to the end, or beside the next round."""

    def state_dict(self) -> dict[str, Any]:
        return self.collector.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.collector.load_state_dict(state)


class Sync(Pipeline):
    """One round after the other. While the policy is trained nothing is in play."""

    def __init__(
        self, parts: EngineParts, collector: Collector, turns: DeviceTurns, evaluation: Evaluation | None = None
    ) -> None:
        super().__init__(parts)
        self.collector = collector
        self.turns = turns
        self.evaluation = evaluation

    def start(self, version: int) -> None:
        self.turns.to_rollout()
        self.weights.push(version=version)

    def begin_training(self) -> Metrics:
        metrics = self.usage.of("generation")
        if self.engine.shares_weights:
            self.loop.run(self.engine.pause())
        self.turns.to_training()
        self.usage.forget()  # a look while engines fell asleep belongs to neither phase
        return metrics

    def finish_training(self, version: int) -> Metrics:
        metrics = self.usage.of("training")
        self.turns.to_rollout()
        metrics.merge(self.weights.push(version=version))
        return metrics

    def evaluate(self) -> None:
        assert self.evaluation is not None
        self.evaluation.start()


class CarryOver(Sync):
    """One round after the other, without its slowest episodes: those stop where they are and go on in the next.

    `Sync` with a collector that keeps what is in play, and with engines that stop in the middle of responses.
    """

    def begin_training(self) -> Metrics:
        self.loop.run(self.engine.pause())  # the push in `finish_training` resumes it
        return super().begin_training()


class Async(Pipeline):
    """Rollout goes on beside training. Weights change when nothing is in play, and not before they must.

    This pipeline alone knows how many updates the engine is behind: its collector asks it.
    """

    def __init__(
        self,
        parts: EngineParts,
        make_collector: Callable[[Callable[[], int]], AsyncCollector],
        evaluation: BackgroundEvaluation | None = None,
    ) -> None:
        """`make_collector` is given a function that says how many updates the engine is behind."""
        super().__init__(parts)
        self.collector: AsyncCollector = make_collector(lambda: self._trained - self.engine.version)
        self.evaluation: BackgroundEvaluation | None = evaluation
        self.overlap = Overlap(self.collector)
        self._trained = self.engine.version
        """The version of the policy's weights. The engine's is older while a push is deferred."""

    def start(self, version: int) -> None:
        self._push(version)

    def begin_training(self) -> Metrics:
        metrics = Metrics()
        if self.engine.shares_weights:
            metrics.merge(wait_for(self.evaluation))
            self.collector.drain()
            self.loop.run(self.engine.pause())
        else:
            self.overlap.begin()
        metrics.merge(self.usage.of("generation"))
        self.usage.forget()
        return metrics

    def finish_training(self, version: int) -> Metrics:
        metrics = self.usage.of("training")
        if self.engine.shares_weights:
            metrics.merge(self._push(version))
            return metrics
        metrics.merge(self.overlap.end())
        if self.collector.can_do_without_push():
            self._trained = version  # deferred: the push would wait for the slowest episode, and no round has to yet
            return metrics
        metrics.merge(wait_for(self.evaluation))
        metrics.merge(self._push(version))
        return metrics

    def evaluate(self) -> None:
        assert self.evaluation is not None
        if self._trained != self.engine.version:  # a push was deferred, and it is the newest weights that are measured
            self.evaluation.wait()
            self._push(self._trained)
        self.evaluation.start()

    def _push(self, version: int) -> Metrics:
        self.collector.drain()
        metrics = self.weights.push(version=version)
        self._trained = version
        self.collector.resume()
        return metrics


class AsyncPartial(Pipeline):
    """Rollout goes on beside training. Weights change after every round, in the middle of responses."""

    def __init__(
        self, parts: EngineParts, collector: AsyncCollector, evaluation: BackgroundEvaluation | None = None
    ) -> None:
        super().__init__(parts)
        self.collector: AsyncCollector = collector
        self.evaluation: BackgroundEvaluation | None = evaluation
        self.overlap = Overlap(collector)

    def start(self, version: int) -> None:
        self.weights.push(version=version)

    def begin_training(self) -> Metrics:
        metrics = Metrics()
        if self.engine.shares_weights:
            metrics.merge(wait_for(self.evaluation))
            self.loop.run(self.engine.pause())
        else:
            self.overlap.begin()
        metrics.merge(self.usage.of("generation"))
        self.usage.forget()
        return metrics

    def finish_training(self, version: int) -> Metrics:
        metrics = self.usage.of("training")
        if not self.engine.shares_weights:
            metrics.merge(self.overlap.end())
            metrics.merge(wait_for(self.evaluation))
        metrics.merge(self.weights.push(version=version))  # pauses the engine, and resumes it with the new weights
        return metrics

    def evaluate(self) -> None:
        assert self.evaluation is not None
        self.evaluation.start()


def wait_for(evaluation: BackgroundEvaluation | None) -> Metrics:
    """An evaluation measures the weights that it began with: before these change it has to be over."""
    start = time.perf_counter()
    if evaluation is not None:
        evaluation.wait()
    metrics = Metrics()
    metrics.last("timing/evaluation_wait", time.perf_counter() - start)
    return metrics


class Overlap:
    """`perf/overlap`: for which share of a round's time, from update to update, episodes were in play beside it."""

    def __init__(self, collector: AsyncCollector) -> None:
        self._collector = collector
        self._in_play_before = 0.0
        self._last_end: float | None = None

    def begin(self) -> None:
        self._in_play_before = self._collector.seconds_in_play

    def end(self) -> Metrics:
        metrics, now = Metrics(), time.perf_counter()
        if self._last_end is not None:
            beside = self._collector.seconds_in_play - self._in_play_before
            metrics.last("perf/overlap", beside / (now - self._last_end))
        self._last_end = now
        return metrics

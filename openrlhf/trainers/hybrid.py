"""One device for sampling and training, in turns: who sleeps when, and whether anybody must.

HybridSwitch        to_training: engines sleep, backends wake · to_rollout: backends sleep, and a push wakes the engines
HybridWorkers       a round that is placed begins to be trained
HybridWeightSync    a push begins the next rollout
needs_sleep         whether engine and training fit beside each other
The loop knows none of this: it places a round and pushes weights, as it always does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from openrlhf.learners.base import Workers, WorkersBehind
from openrlhf.observability.metrics import Metrics
from openrlhf.observability.usage import GIB, Usage
from openrlhf.rollout.base import EngineControl
from openrlhf.types import Group
from openrlhf.utils.event_loops import LoopRunner
from openrlhf.weight_sync.base import WeightSync


@dataclass(frozen=True, slots=True)
class EngineSleep:
    """Puts an engine to sleep until the next push."""

    engine: EngineControl
    loop: LoopRunner

    def sleep(self) -> None:
        self.loop.run(self.engine.sleep())


class SleepingBackend(Protocol):
    def sleep(self) -> None: ...

    def wake(self) -> None: ...


class HybridSwitch:
    """Moves a device from one phase to the other. It begins in training: engines asleep, backends awake.

    Engines that stay awake and backends that stay on the device are simply not among those it is given.
    """

    def __init__(
        self,
        *,
        engines: Sequence[EngineSleep] = (),
        backends: Sequence[SleepingBackend] = (),
        release: Callable[[], None] = torch.cuda.empty_cache,
    ) -> None:
        """`release` gives back what the trainer's allocator has kept for later."""
        self._engines = tuple(engines)
        self._backends = tuple(backends)
        self._release = release
        self._training = True

    def to_training(self) -> None:
        if self._training:
            return
        for engine in self._engines:
            engine.sleep()
        for backend in self._backends:
            backend.wake()
        self._training = True

    def to_rollout(self) -> None:
        """Leaves room for the engines; the push that follows wakes them."""
        if not self._training:
            return
        for backend in self._backends:
            backend.sleep()
        if self._engines:
            self._release()
        self._training = False


class HybridWorkers(WorkersBehind):
    """A round that is placed switches to training; what devices did meanwhile is told with the update."""

    def __init__(
        self, workers: Workers, switch: HybridSwitch, *, usage: Callable[[], Mapping[str, Usage]] = dict
    ) -> None:
        """`usage`: of devices since the last call, by the name of their node."""
        super().__init__(workers)
        self._switch = switch
        self._usage = usage
        self._used = Metrics()

    def place(self, groups: Sequence[Group]) -> Any:
        self._note("generation")
        self._switch.to_training()
        self._usage()  # a look while engines fell asleep is of neither phase
        return super().place(groups)

    def update(self, batch: Any) -> Metrics:
        metrics = super().update(batch)
        self._note("training")
        metrics.merge(self._used)
        self._used = Metrics()
        return metrics

    def _note(self, phase: str) -> None:
        for node, usage in self._usage().items():
            self._used.max(f"memory/peak_{phase}_gb", usage.peak_gb)
            if math.isfinite(usage.busy):
                self._used.last(f"device/{node}/{phase}_busy", usage.busy)


class HybridWeightSync:
    """Implements `weight_sync.base.WeightSync` with the one it is given, after a switch to rollout."""

    def __init__(self, weights: WeightSync, switch: HybridSwitch) -> None:
        self._weights = weights
        self._switch = switch

    def push(self, *, version: int) -> Metrics:
        self._switch.to_rollout()
        return self._weights.push(version=version)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedShape:
    """What the memory of training a model follows from."""

    parameters: int
    """Trained ones."""
    layers: int
    hidden: int
    intermediate: int
    element_bytes: int
    checkpointing: bool

    @property
    def state_bytes(self) -> int:
        """What stays from step to step beside the weights: two moments, and a master of 16-bit weights, in fp32."""
        return (12 if self.element_bytes < 4 else 8) * self.parameters


def training_bytes(shape: TrainedShape, *, tokens: int) -> int:
    """What training a loaded model takes beside its weights, for micro-batches of so many tokens; an estimate.

    To the state come gradients in fp32. Activations of a layer are about 12 vectors of the hidden size (norms, queries,
    keys, values, attention, residuals) and 4 of the intermediate one (gate, its activation, up, their product) per
    token; checkpointing keeps one vector a layer, and all of one layer. For 1.5B parameters and 16,384 tokens: 23 + 46
    GiB; `bench.sft` saw 73 GiB with 3 of weights.
    """
    whole = shape.element_bytes * (12 * shape.hidden + 4 * shape.intermediate)
    kept = shape.element_bytes * shape.hidden
    per_token = whole + shape.layers * kept if shape.checkpointing else shape.layers * whole
    return shape.state_bytes + 4 * shape.parameters + tokens * per_token


def engine_share(asked: float, *, free: int, total: int, staying: Iterable[int] = ()) -> float:
    """The share of a device's memory that an engine may take, where models are loaded already.

    vLLM does not start where less is free than it is to take. `staying` is what the trainer keeps there while the
    engine samples (`TrainedShape.state_bytes`, unless its backends sleep); 3 GiB more are left for contexts and for
    weights on their way.
    """
    return max(0.0, min(asked, (free - sum(staying) - 3 * GIB) / total))


def needs_sleep(share: float, *, free: int, total: int, training: Iterable[int]) -> bool:
    """Whether an engine with this share leaves too little for training (`training_bytes` of each trained model).

    With half as much again as is estimated: a run that sleeps in vain loses a little time each round, one that does
    not sleep where it should have ends.
    """
    return 1.5 * sum(training) > free - share * total

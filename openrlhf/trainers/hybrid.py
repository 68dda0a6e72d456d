"""The hybrid engine: one device for sampling and training, in turns.

DeviceTurns    what sleeps in whose turn
DeviceUsage    how full and how busy devices were in each turn
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch

from openrlhf.observability.metrics import Metrics
from openrlhf.observability.usage import Usage
from openrlhf.rollout.base import EngineControl
from openrlhf.utils.event_loops import LoopRunner


class SleepingBackend(Protocol):
    """A trained model whose optimizer state can leave the device and come back."""

    def sleep(self) -> None: ...

    def wake(self) -> None: ...


class DeviceTurns:
    """Moves a shared device from one phase to the other. It begins in training: engine asleep, backends awake."""

    def __init__(
        self,
        loop: LoopRunner,
        *,
        engine: EngineControl | None = None,
        backends: Sequence[SleepingBackend] = (),
        release: Callable[[], None] = torch.cuda.empty_cache,
        after_first: Callable[[], None] = lambda: None,
    ) -> None:
        """`engine`: None if it stays awake. `backends`: those that do not stay on the device.

        `loop` runs what is asked of the engine; `release` gives back what the trainer's allocator has kept for later.
        `after_first` is called when the first turn of training is over, before anything is moved.
        """
        self._loop = loop
        self._engine = engine
        self._backends = tuple(backends)
        self._release = release
        self._after_first: Callable[[], None] | None = after_first
        self._training = self._begins = True

    def to_training(self) -> None:
        """The engine falls asleep, then backends take their memory back."""
        if self._training:
            return
        self._begins = False
        if self._engine is not None:
            self._loop.run(self._engine.sleep())
        for backend in self._backends:
            backend.wake()
        self._training = True

    def to_rollout(self) -> None:
        """Backends leave room for the engine; the push that follows wakes it."""
        if not self._training:
            return
        if self._after_first is not None and not self._begins:
            self._after_first()
            self._after_first = None
        for backend in self._backends:
            backend.sleep()
        if self._engine is not None:
            self._release()
        self._training = False


class DeviceUsage:
    """How full and how busy devices were while a phase lasted, as metrics."""

    def __init__(self, usage: Callable[[], Mapping[str, Usage]] = dict) -> None:
        """`usage` gives the use of devices since the last call, by the name of their node."""
        self._usage = usage

    def of(self, phase: str) -> Metrics:
        """The metrics of a phase that ends now."""
        metrics = Metrics()
        for node, usage in self._usage().items():
            metrics.max(f"memory/peak_{phase}_gb", usage.peak_gb)
            if math.isfinite(usage.busy):
                metrics.last(f"device/{node}/{phase}_busy", usage.busy)
        return metrics

    def forget(self) -> None:
        """Leave out what was seen since the last phase ended."""
        self._usage()

"""The hybrid engine: one device for sampling and training, in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

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
    ) -> None:
        """`engine`: None if it stays awake. `backends`: those that do not stay on the device.

        `loop` runs what is asked of the engine; `release` gives back what the trainer's allocator has kept for later.
        """
        self._loop = loop
        self._engine = engine
        self._backends = tuple(backends)
        self._release = release
        self._training = True

    def to_training(self) -> None:
        """The engine falls asleep, then backends take their memory back."""
        if self._training:
            return
        if self._engine is not None:
            self._loop.run(self._engine.sleep())
        for backend in self._backends:
            backend.wake()
        self._training = True

    def to_rollout(self) -> None:
        """Backends leave room for the engine; the push that follows wakes it."""
        if not self._training:
            return
        for backend in self._backends:
            backend.sleep()
        if self._engine is not None:
            self._release()
        self._training = False

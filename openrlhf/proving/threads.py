"""Two ranks as threads of this process: enough for everything that ranks tell each other without a model."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

T = TypeVar("T")
DEADLINE = 60.0
"""Seconds that a thread waits for the others."""


class ThreadRanks:
    """Implements `Ranks`."""

    def __init__(self, index: int, barrier: threading.Barrier, shelf: list[Any]) -> None:
        self.index, self.count, self.is_main = index, barrier.parties, index == 0
        self._barrier, self._shelf = barrier, shelf

    def gather(self, value: T) -> list[T]:
        self._shelf[self.index] = value
        self._barrier.wait(DEADLINE)
        values = list(self._shelf)
        self._barrier.wait(DEADLINE)
        return values

    def gather_processes(self, value: T) -> list[T]:
        return self.gather(value)

    def agree(self, value: T | None) -> T | None:
        return next((one for one in self.gather(value) if one is not None), None)

    def barrier(self, name: str) -> None:
        self._barrier.wait(DEADLINE)

    def close(self) -> None:
        pass


def together(count: int, function: Callable[[ThreadRanks], T]) -> list[T]:
    """`function(ranks)` on so many ranks at once; what each returned. The first error of one ends the others."""
    barrier, shelf = threading.Barrier(count), [None] * count

    def run(index: int) -> T:
        try:
            return function(ThreadRanks(index, barrier, shelf))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(run, index) for index in range(count)]
        errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]


if TYPE_CHECKING:
    from openrlhf.backends.ranks import Ranks

    _: type[Ranks] = ThreadRanks

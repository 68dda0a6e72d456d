"""An event loop that goes on while the program does something else: `asyncio.Runner` in a thread of its own."""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Protocol, TypeVar

from openrlhf.utils.loop_thread import LoopThread

_T = TypeVar("_T")
_GIVE_UP_SECONDS = 5.0
_DEAD = "the thread that plays episodes has ended; nobody will finish what is in play"


class LoopRunner(Protocol):
    """Runs coroutines to their end, one call after the other: `asyncio.Runner`, or one whose loop never rests."""

    def run(self, work: Coroutine[Any, Any, _T]) -> _T: ...


class BackgroundRunner:
    """While open, tasks on its loop go on between two calls of `run`, and during everything else."""

    def __init__(self, name: str = "rollout") -> None:
        self._thread = LoopThread(name)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Block until it is done. Who is interrupted meanwhile gives it up, as `asyncio.Runner` does."""
        if not self._thread.alive:
            work.close()
            raise RuntimeError(_DEAD)
        future = self._thread.submit(work)
        try:
            while not concurrent.futures.wait([future], timeout=1.0).done:
                if not self._thread.alive:
                    raise RuntimeError(_DEAD)
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            concurrent.futures.wait([future], timeout=_GIVE_UP_SECONDS)
            raise
        except concurrent.futures.CancelledError:
            raise asyncio.CancelledError from None

    def submit(self, work: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Begin it, and come back at once."""
        return self._thread.submit(work)

    def __enter__(self) -> BackgroundRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.close()

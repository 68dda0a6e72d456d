"""Event loops in threads of their own, whose tasks go on while the caller blocks.

LoopThread          runs coroutines for any thread; each wait has a name and a deadline
BackgroundRunner    an `asyncio.Runner` whose loop also runs between two calls of `run`
own_loops           lets this thread run event loops of its own although it is inside one, as a notebook's cells are
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Coroutine, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from openrlhf.utils import waits

_T = TypeVar("_T")
_CLOSING_SECONDS = 20.0
"""After this long, a loop that does not answer is left alone; it ends with the process."""


class LoopThread:
    """Runs coroutines on its loop, for callers in any thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        waits.loops.add(self._loop)
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether the loop still runs. A task that raises SystemExit (`sys.exit`) ends it."""
        return self._thread.is_alive()

    def submit(self, work: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Start the coroutine. Cancelling the future cancels it."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, _T], what: str, *, deadline: float) -> _T:
        """Run the coroutine and wait for it. After `deadline` seconds it is cancelled; the TimeoutError names it."""
        future, end = self.submit(work), time.monotonic() + deadline
        with waits.waiting(what, deadline=deadline) as wait:
            while not concurrent.futures.wait([future], timeout=min(1.0, max(0.0, end - time.monotonic()))).done:
                if time.monotonic() >= end or wait.failure is not None:
                    future.cancel()
                    wait.check()
                    raise TimeoutError(f"waited {deadline:g} s {what}")
        waits.mark_progress()
        return future.result()

    def close(self) -> None:
        """Cancel all tasks and end the thread. It may be called twice."""
        if self._loop.is_closed():
            return
        if self.alive:
            with contextlib.suppress(TimeoutError):
                self.run(_cancel_others(), "for tasks to end", deadline=_CLOSING_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(_CLOSING_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


_GIVE_UP_SECONDS = 5.0
_DEAD = "the thread that plays episodes has ended; nobody will finish what is in play"


class LoopRunner(Protocol):
    """Runs coroutines to their end, one call after the other: `asyncio.Runner` or `BackgroundRunner`."""

    def run(self, work: Coroutine[Any, Any, _T]) -> _T: ...


class BackgroundRunner:
    """While open, the tasks on its loop also go on between two calls of `run`."""

    def __init__(self, name: str = "rollout") -> None:
        self._thread = LoopThread(name)

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run the coroutine and wait for it. A KeyboardInterrupt cancels it, as with `asyncio.Runner`."""
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
        """Start the coroutine and return at once."""
        return self._thread.submit(work)

    def __enter__(self) -> BackgroundRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.close()


@contextlib.contextmanager
def own_loops() -> Iterator[None]:
    """Inside, `asyncio.run` and `asyncio.Runner` work also where this thread runs a loop already, which stands still
    meanwhile. Afterwards that one goes on.

    A cell of a notebook is a callback of the kernel's loop, on the main thread. To run elsewhere, a training would
    leave the thread on which signals arrive.
    """
    outer = asyncio._get_running_loop()
    if outer is None:
        yield
        return
    task = asyncio.current_task(outer)
    if task is not None:
        asyncio.tasks._leave_task(outer, task)
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio.set_event_loop(outer)  # a runner that is closed leaves none
        asyncio._set_running_loop(outer)
        if task is not None:
            asyncio.tasks._enter_task(outer, task)


if TYPE_CHECKING:
    _: type[LoopRunner] = BackgroundRunner

"""An event loop in a thread of its own: who lives on it goes on while the caller's loop rests or blocks."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

_T = TypeVar("_T")
_CLOSING_SECONDS = 20.0
"""After this long a loop that does not answer is left to end with the process."""


class LoopThread:
    """Runs coroutines on its loop, for callers in any thread."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        """Cancelling the future cancels the work."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def run(self, work: Coroutine[Any, Any, _T], what: str, *, deadline: float) -> _T:
        """Block until it is done. After `deadline` seconds it is cancelled, and a TimeoutError says what it was for."""
        future = self.submit(work)
        if not concurrent.futures.wait([future], timeout=deadline).done:
            future.cancel()
            raise TimeoutError(f"waited {deadline:g} s {what}")
        return future.result()

    def close(self) -> None:
        """Cancel what is left, and end the thread. Closing twice is fine."""
        if self._loop.is_closed():
            return
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

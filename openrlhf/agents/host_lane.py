"""A thread with an event loop of its own, for the users' code of one call. Imports the standard library only."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any


class EpisodeThread:
    """What is submitted may block. Plain functions of a call all meet the same thread, as sqlite connections, browsers
    and simulators ask for; its coroutines the same loop, which runs on between them.

    Costs a few milliseconds to make, so that calls hand theirs on.
    """

    def __init__(self, name: str) -> None:
        self._closing = False
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Runs it in a copy of the present context. Cancelling the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def clear(self) -> Future[None]:
        """Done when the thread has left the code of its call, and tasks which that left behind have ended too."""
        return self.submit(_cancel_others())

    def close(self) -> None:
        """End the thread, when it can."""
        self._closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._closing:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # of a task: it ends the task, not the lane
                self._loop.run_forever()
        self._loop.close()


async def _cancel_others() -> None:
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

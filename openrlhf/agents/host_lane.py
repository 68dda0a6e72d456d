"""A thread with an event loop of its own, for the users' code of one call. Imports the standard library only."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any


class Lane:
    """What is submitted may block. Plain functions of a call all meet the same thread, as sqlite connections, browsers
    and simulators ask for; its coroutines the same loop, which runs on between them."""

    def __init__(self, name: str) -> None:
        self.ended: Future[None] = Future()
        """Done when the thread has left users' code."""
        self._closing = False
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Runs it in a copy of the present context. Cancelling the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def close(self) -> None:
        """Ends when what runs now has ended, which takes as long as it takes."""
        self._closing = True
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        while not self._closing:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # of a task: it ends the task, not the lane
                self._loop.run_forever()
        with contextlib.suppress(BaseException):
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()
        self.ended.set_result(None)

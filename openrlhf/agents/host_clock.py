"""How long a call has had, and who holds the event loop that calls share. Imports the standard library only.

Many calls share one loop, so a call may be late because another blocks it (`time.sleep` in a coroutine). `WatchedLoop`
notes on whose behalf each of its callbacks runs, and a call's clock leaves out the time in which others held the loop:
whoever is late by that clock hangs by itself.
"""

from __future__ import annotations

import asyncio
import resource
import threading
import time
from collections.abc import Callable
from contextvars import Context, ContextVar
from typing import Any, TypeVarTuple

Ts = TypeVarTuple("Ts")

BLOCKED_SECONDS = 0.1
"""A users' function that keeps the loop waiting for longer than this blocks it."""

current_clock: ContextVar[CallClock | None] = ContextVar("current_clock", default=None)
"""Of the call on whose behalf code runs. Tasks and callbacks inherit it."""

current_function: ContextVar[Callable[..., Any] | None] = ContextVar("current_function", default=None)
"""The users' function that code belongs to. Tasks and callbacks inherit it."""


class LoopWatch:
    """Adds up who holds a loop for how long. Read from any thread."""

    def __init__(self, *, on_block: Callable[[Callable[..., Any]], None]) -> None:
        """`on_block` hears of each users' function that blocks the loop; on the loop, after the fact."""
        self._on_block = on_block
        self._lock = threading.Lock()
        self._total = 0.0
        self._holder: CallClock | None = None
        self._since: float | None = None
        """When the callback that runs now began."""

    def run(self, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        clock = current_clock.get()
        function = current_function.get()
        computed, waits = time.thread_time(), _waits()
        began = time.monotonic()
        with self._lock:
            self._holder, self._since = clock, began
        try:
            callback(*args)
        finally:
            held = time.monotonic() - began
            with self._lock:
                self._holder = self._since = None
                self._total += held
                if clock is not None:
                    clock.held += held
        # Computing is not blocking, nor is waiting for a core of a busy machine: a thread would not make it faster.
        if function is not None and held - (time.thread_time() - computed) > BLOCKED_SECONDS and _waits() > waits:
            self._on_block(function)

    @property
    def holder(self) -> CallClock | None:
        """Of the call on whose behalf a callback runs now."""
        with self._lock:
            return self._holder

    def held_by_others(self, clock: CallClock) -> float:
        """Seconds in which the loop was held, but not on behalf of this clock's call."""
        with self._lock:
            running = 0.0 if self._since is None or self._holder is clock else time.monotonic() - self._since
            return self._total - clock.held + running


def _waits() -> float:
    """Grows whenever this thread gives up its core to wait for something; all the time where that is not counted."""
    if not hasattr(resource, "RUSAGE_THREAD"):
        return time.monotonic()
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


class WatchedLoop(asyncio.SelectorEventLoop):
    """An event loop whose every callback, and so every step of every task, is timed."""

    def __init__(self, watch: LoopWatch) -> None:
        super().__init__()
        self._watch = watch

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon(self._watch.run, callback, args, context=context)

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        return super().call_soon_threadsafe(self._watch.run, callback, args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return super().call_at(when, self._watch.run, callback, args, context=context)


class CallClock:
    """Time of one call since it began or was last answered. Stands still while an ask is unanswered."""

    def __init__(self, watch: LoopWatch) -> None:
        self.held = 0.0
        """How long this call has held the loop; the watch's."""
        self._watch = watch
        self._lock = threading.Lock()
        self._asks = 0
        self._began = time.monotonic()
        self._others_before = watch.held_by_others(self)
        self._waited = 0.0
        self._waits_since = 0.0

    def ask(self) -> None:
        with self._lock:
            if self._asks == 0:
                self._waits_since = time.monotonic()
            self._asks += 1

    def answer(self) -> None:
        with self._lock:
            self._asks -= 1
            if self._asks == 0:
                self._began = time.monotonic()
                self._others_before = self._watch.held_by_others(self)
                self._waited += self._began - self._waits_since

    def spent(self) -> float:
        with self._lock:
            if self._asks:
                return 0.0
            lost = self._watch.held_by_others(self) - self._others_before
            return time.monotonic() - self._began - lost

    def without_waits(self) -> float:
        """A clock to take differences of, which stands still while an ask is unanswered."""
        with self._lock:
            now = self._waits_since if self._asks else time.monotonic()
            return now - self._waited

"""The waits of this process: each has a name, and a watchdog looks at them (`observability.watchdog`).

    waiting        a wait that stops the run until it ends; the watchdog logs it every now and then
    activity       a unit of work that a wait may be for (a prompt), and its stage: what it is `doing` now
    mark_progress  a sign of life: something was finished, so the waits are not in vain
    peers          other processes of the run, which can be asked for their stacks and their signs of life

Imports the standard library only. The waiting code keeps its deadline itself, also when no watchdog runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol


class WaitError(RuntimeError):
    """A wait was given up, because nothing happened any more. The text names it."""


@dataclass(slots=True, eq=False)
class Wait:
    """One wait, from its beginning to its end."""

    what: Callable[[], str]
    """The text after "waiting 60 s": "for update: actor rank 0 on 10.0.0.1", "to start: …". Called when it is shown."""
    deadline: float | None
    """Seconds that the waiting code allows; None: no limit, as long as the run makes any progress."""
    task: asyncio.Task[object] | None
    """The waiting task; None where a thread waits."""
    thread: int
    since: float = field(default_factory=time.monotonic)
    failure: WaitError | None = None
    is_open: bool = True

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def fail(self, error: WaitError) -> None:
        """End the wait with this error, from any thread: a coroutine at once, a thread when it calls `check`."""
        self.failure = error
        if self.task is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                self.task.get_loop().call_soon_threadsafe(self._cancel)

    def check(self) -> None:
        """Threads that wait in short stretches call this between them. Raises WaitError."""
        if self.failure is not None:
            raise self.failure

    def _cancel(self) -> None:
        if self.is_open and self.task is not None:
            self.task.cancel()


_numbers = itertools.count()
loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
"""Event loops that run in threads of their own. A dump of all stacks shows their coroutines too."""
_waits: dict[int, Wait] = {}


@contextlib.contextmanager
def waiting(what: str | Callable[[], str], *, deadline: float | None = None) -> Iterator[Wait]:
    """Register a wait of this thread or coroutine while open. Raises WaitError when the watchdog gives the wait up."""
    number = next(_numbers)
    wait = Wait(what if callable(what) else lambda: what, deadline, _current_task(), threading.get_ident())
    _waits[number] = wait
    try:
        yield wait
    except asyncio.CancelledError:
        if wait.failure is None or wait.task is None:
            raise
        wait.task.uncancel()  # the watchdog cancelled this wait alone, the task goes on
        raise wait.failure from None
    finally:
        wait.is_open = False
        # The watchdog's thread may still hold this wait. Its text can refer to Ray's object references, which must be
        # released here and now, in the thread that made them, and not when the watchdog lets the wait go.
        wait.what = _nothing
        del _waits[number]


def _nothing() -> str:
    return "for nothing any more"


def open_waits() -> list[Wait]:
    """The innermost wait of every thread and coroutine, oldest first."""
    innermost: dict[object, Wait] = {}
    for wait in list(_waits.values()):
        innermost[wait.task or wait.thread] = wait
    return list(innermost.values())


def _current_task() -> asyncio.Task[object] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:
        return None


# ------------------------------------------------------------------------------------------------ units of work

_part = ""


@contextlib.contextmanager
def during(part: str) -> Iterator[None]:
    """While open, waits belong to this part of the run: "round 12". It is global: a process runs one training loop."""
    global _part
    before, _part = _part, part
    try:
        yield
    finally:
        _part = before


def current_part() -> str:
    return _part


@dataclass(slots=True, eq=False)
class Activity:
    """A unit of work that is under way, for example one prompt."""

    name: str
    stages: list[str] = field(default_factory=list)
    """The stages that the process is in, the innermost last."""
    turns: int = 0
    """The number of answers that it has asked the policy for."""

    def __str__(self) -> str:
        turn = f" turn {self.turns}" if self.turns > 1 else ""
        stage = f" {self.stages[-1]}" if self.stages else ""
        return f"{self.name}{turn}{stage}"


_activities: dict[int, Activity] = {}
_own_activity: ContextVar[Activity | None] = ContextVar("activity", default=None)


@contextlib.contextmanager
def activity(name: str) -> Iterator[Activity]:
    """While open, this coroutine works on the activity `name`, and so do tasks that run in a copy of its context."""
    number, active = next(_numbers), Activity(name)
    _activities[number] = active
    token = _own_activity.set(active)
    try:
        yield active
    finally:
        _own_activity.reset(token)
        del _activities[number]


@contextlib.contextmanager
def doing(stage: str, *, turn: bool = False) -> Iterator[None]:
    """While open, this coroutine's activity is in this stage: "at the engine". `turn`: count a turn."""
    active = _own_activity.get()
    if active is None:
        yield
        return
    active.turns += turn
    active.stages.append(stage)
    try:
        yield
    finally:
        active.stages.remove(stage)


def oldest_activity() -> str:
    """The activity that began first and is still open, with its stage; "" when there is none."""
    oldest = next(iter(list(_activities.values())), None)
    return "" if oldest is None else str(oldest)


# ----------------------------------------------------------------------------------------------- signs of life

_marks = 0
_sources: list[weakref.WeakMethod[Callable[[], Hashable]]] = []


def mark_progress() -> None:
    """Say that something was finished: an episode, a micro-batch, a bucket of weights, a file, a remote answer."""
    global _marks
    _marks += 1


def add_progress_source(source: Callable[[], Hashable]) -> None:
    """Add a method whose value changes with its object's work. It replaces marks that would come too often (tokens)."""
    _sources.append(weakref.WeakMethod(source))


def progress_token() -> tuple[Hashable, ...]:
    """A value that changes whenever something is finished in this process."""
    methods = [method for method in (source() for source in list(_sources)) if method is not None]
    return (_marks, *(method() for method in methods))


# --------------------------------------------------------------------------------------------- other processes


class PeerProcesses(Protocol):
    """Processes that this one has started and that it can look at."""

    def stacks(self) -> dict[str, str]:
        """For each process, by name: the stacks of its threads, or why they are not known."""
        ...

    def idle_seconds(self) -> float:
        """Seconds since the last sign of life of any of them; infinite where they give none."""
        ...


peers: weakref.WeakSet[PeerProcesses] = weakref.WeakSet()
"""Code that starts processes adds itself here."""

_dump: Callable[[str], Path] | None = None


def set_dump(dump: Callable[[str], Path] | None) -> None:
    """Set the function that writes the stacks of all processes into a file. It is given the reason."""
    global _dump
    _dump = dump


def with_stacks(problem: str) -> str:
    """The problem of a wait that has failed, with the name of a file of all stacks, if one is written."""
    return problem if _dump is None else f"{problem}; stacks are in {_dump(problem)}"

"""What this process waits for: every wait has a name, and somebody who looks at it (`observability.watchdog`).

    waiting     a wait that stops the run until it ends; a line about it appears every now and then
    activity    somebody whom such a wait may be for (a prompt), and what he is `doing` (asking the engine)
    beat        a sign of life: something got done, so nobody waits in vain
    neighbours  other processes, which can be asked for their stacks and their signs of life

Imports the standard library only. Deadlines are kept by those who wait, also where nobody watches.
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
    """After "waiting 60 s": "for update: actor rank 0 on 10.0.0.1", "to start: …". Asked when somebody looks."""
    deadline: float | None
    """Seconds that whoever waits allows; None: as long as anything happens at all."""
    task: asyncio.Task[object] | None
    """Who waits, where that is a coroutine."""
    thread: int
    since: float = field(default_factory=time.monotonic)
    failure: WaitError | None = None
    is_open: bool = True

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.since

    def fail(self, error: WaitError) -> None:
        """End it with this error, from any thread: a coroutine at once, a thread when it calls `check`."""
        self.failure = error
        if self.task is not None:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                self.task.get_loop().call_soon_threadsafe(self._cancel)

    def check(self) -> None:
        """For threads that wait in short stretches. Raises WaitError."""
        if self.failure is not None:
            raise self.failure

    def _cancel(self) -> None:
        if self.is_open and self.task is not None:
            self.task.cancel()


_numbers = itertools.count()
loops: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()
"""Event loops that go on by themselves, whose coroutines are of interest when nothing happens."""
_waits: dict[int, Wait] = {}


@contextlib.contextmanager
def waiting(what: str | Callable[[], str], *, deadline: float | None = None) -> Iterator[Wait]:
    """While open this thread, or this coroutine, waits. Raises WaitError when the wait is given up from outside."""
    number = next(_numbers)
    wait = Wait(what if callable(what) else lambda: what, deadline, _current_task(), threading.get_ident())
    _waits[number] = wait
    try:
        yield wait
    except asyncio.CancelledError:
        if wait.failure is None or wait.task is None:
            raise
        wait.task.uncancel()  # it was this wait that was cancelled, not the task
        raise wait.failure from None
    finally:
        wait.is_open = False
        # Somebody may still look at it, in another thread. What it was for is let go here: some of it, as references of
        # Ray's, may not be let go anywhere else, nor any later.
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


# ------------------------------------------------------------------------------------------ who, and what he does

_part = ""


@contextlib.contextmanager
def during(part: str) -> Iterator[None]:
    """While open, waits are part of this: "round 12". There is one loop in a process, and it does one thing."""
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
    """Somebody at work."""

    who: str
    stages: list[str] = field(default_factory=list)
    """What he does, the innermost last."""
    turns: int = 0
    """Answers he has asked the policy for."""

    def __str__(self) -> str:
        turn = f" turn {self.turns}" if self.turns > 1 else ""
        stage = f" {self.stages[-1]}" if self.stages else ""
        return f"{self.who}{turn}{stage}"


_activities: dict[int, Activity] = {}
_own_activity: ContextVar[Activity | None] = ContextVar("activity", default=None)


@contextlib.contextmanager
def activity(who: str) -> Iterator[Activity]:
    """While open, whatever this coroutine does is done by him; also by those who answer it in a copy of its context."""
    number, active = next(_numbers), Activity(who)
    _activities[number] = active
    token = _own_activity.set(active)
    try:
        yield active
    finally:
        _own_activity.reset(token)
        del _activities[number]


@contextlib.contextmanager
def doing(stage: str, *, turn: bool = False) -> Iterator[None]:
    """While open, this coroutine's activity does that: "at the engine". `turn`: the next one of a conversation."""
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
    """Who has been at work for longest, and at what; "" when nobody is."""
    oldest = next(iter(list(_activities.values())), None)
    return "" if oldest is None else str(oldest)


# ----------------------------------------------------------------------------------------------- signs of life

_beats = 0
_sources: list[weakref.WeakMethod[Callable[[], Hashable]]] = []


def beat() -> None:
    """Something got done: an episode, a micro-batch, a bucket of weights, a file, an answer from another process."""
    global _beats
    _beats += 1


def add_pulse(source: Callable[[], Hashable]) -> None:
    """A method whose answer changes as its object gets something done, for those who would beat too often."""
    _sources.append(weakref.WeakMethod(source))


def pulse() -> tuple[Hashable, ...]:
    """Changes whenever something gets done in this process."""
    methods = [method for method in (source() for source in list(_sources)) if method is not None]
    return (_beats, *(method() for method in methods))


# --------------------------------------------------------------------------------------------- other processes


class Neighbour(Protocol):
    """Processes that belong to this one."""

    def stacks(self) -> dict[str, str]:
        """By the name of each, what its threads are doing; or why that is not known."""
        ...

    def idle_seconds(self) -> float:
        """Since their last sign of life; infinite where they give none."""
        ...


neighbours: weakref.WeakSet[Neighbour] = weakref.WeakSet()
"""Whoever starts processes adds himself."""

_dump: Callable[[str], Path] | None = None


def set_dump(dump: Callable[[str], Path] | None) -> None:
    """How the stacks of everybody get into a file. `dump` is told why."""
    global _dump
    _dump = dump


def with_stacks(problem: str) -> str:
    """The problem of a wait that is over, and the file with the stacks of everybody at this moment, if one is kept."""
    return problem if _dump is None else f"{problem}; stacks are in {_dump(problem)}"

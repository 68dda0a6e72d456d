"""The watchdog: a thread that looks at what this process waits for (`utils.waits`), so that nothing hangs unseen.

    60 s, 120 s, 240 s, …   a line says what is waited for
    at a wait's deadline    whoever waits gives up, with an error that names it; the stacks of everybody are kept
    nothing ever happens    the same for all waits: no sign of life here or in any peer for `stall_seconds`

A wait that cannot be made to fail, because its thread is inside a call that does not come back, ends the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import itertools
import logging
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple

from openrlhf.utils import waits
from openrlhf.utils.waits import Wait, WaitError

logger = logging.getLogger(__name__)

STATUS = 1
"""The exit status of a process that the watchdog ends."""
MOST_NAMED = 5
"""Coroutines that stand in the same place."""


class Watchdog:
    """Looks at this process's waits while open. There is one at a time."""

    def __init__(
        self,
        *,
        stall_seconds: float = 0.0,
        at_the_end: Callable[[], None] = lambda: None,
        end: Callable[[int], None] = os._exit,
        first_line: float = 60.0,
        grace: float = 120.0,
        tick: float = 1.0,
    ) -> None:
        """
        Args:
            stall_seconds: without any sign of life for so long the run has failed; 0: it never has.
            at_the_end: done before `end`, which ends the process as it is.
            grace: seconds that a run has to end by itself after a wait has failed, or to come to life again.
        """
        self._stall_seconds = stall_seconds
        self._at_the_end = at_the_end
        self._end = end
        self._first_line = first_line
        self._grace = grace
        self._tick = tick
        self._folder: Path | None = None
        self._numbers = itertools.count(1)
        self._next_lines: dict[Wait, float] = {}
        self._progress: tuple[Hashable, ...] = ()
        self._moved = time.monotonic()
        self._stalls = False
        """Whether the absence of any sign of life counts now."""
        self._given_up: _GivenUp | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        waits.set_dump(self.dump)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        waits.set_dump(None)
        self._over.set()
        self._thread.join()

    @contextlib.contextmanager
    def stalls_count(self, folder: Path | None) -> Iterator[None]:
        """While open the run is under way: it has to go on, and `folder` is where stacks are kept."""
        self._folder, self._moved, self._stalls = folder, time.monotonic(), True
        try:
            yield
        finally:
            self._stalls = False

    def dump(self, reason: str) -> Path:
        """Write the stacks of all processes into the next of stacks-1.txt, stacks-2.txt, …

        Before a run has a folder, they go into a temporary one that only this user may read.
        """
        folder = self._folder = self._folder or Path(tempfile.mkdtemp(prefix="openrlhf-stacks-"))
        folder.mkdir(parents=True, exist_ok=True)
        path, file = self._next_file(folder)
        with file:
            file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {reason}\n\n== waits\n")
            file.writelines(f"{line(wait)}\n" for wait in waits.open_waits())
            file.write(f"\n== threads of process {os.getpid()}\n")
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            file.write(f"\n== coroutines\n{_coroutines()}")
            for peer in list(waits.peers):
                for name, text in _stacks(peer).items():
                    file.write(f"\n== {name}\n{text.rstrip()}\n")
                    file.flush()
        return path

    def _next_file(self, folder: Path) -> tuple[Path, IO[str]]:
        """Open a new file: "x" replaces nothing, and follows no link that another user has put there."""
        for number in self._numbers:
            path = folder / f"stacks-{number}.txt"
            with contextlib.suppress(FileExistsError):
                return path, path.open("x", encoding="utf-8")
        raise AssertionError("numbers do not end")

    # ------------------------------------------------------------------------------------------- in its thread

    def _watch(self) -> None:
        while not self._over.wait(self._tick):
            try:
                self._look()
            except Exception:  # whoever fails to look must not be the one who ends the run
                logger.exception("the watchdog failed")

    def _look(self) -> None:
        self._notice_progress()
        open_waits = waits.open_waits()
        self._next_lines = {wait: self._next_lines.get(wait, self._first_line) for wait in open_waits}
        for wait in open_waits:
            if wait.seconds >= self._next_lines[wait]:
                self._next_lines[wait] *= 2
                logger.info("%s", line(wait))
        if self._given_up is not None:
            self._see_to_the_end(self._given_up)
            return
        if self._stalls and 0 < self._stall_seconds <= self._idle_seconds():
            during = [line(wait) for wait in open_waits] or [f"in {waits.current_part() or 'no wait that is known'}"]
            seconds = f"{self._stall_seconds:g}"
            self._give_up(
                open_waits,
                f"nothing has happened for {seconds} s (--train.stall_timeout {seconds}): {'; '.join(during)}",
            )

    def _notice_progress(self) -> None:
        token = waits.progress_token()
        if token != self._progress:
            self._progress, self._moved = token, time.monotonic()

    def _idle_seconds(self) -> float:
        """Seconds since anything happened anywhere. Other processes are asked only when it matters, because it takes a
        while."""
        idle = time.monotonic() - self._moved
        if idle >= self._stall_seconds:
            elsewhere = min(map(_idle_seconds, list(waits.peers)), default=idle)
            self._moved = max(self._moved, time.monotonic() - elsewhere)
            idle = min(idle, elsewhere)
        return idle

    def _give_up(self, hopeless: list[Wait], problem: str) -> None:
        problem = waits.with_stacks(problem)
        logger.error("%s", problem)
        for wait in hopeless:
            wait.fail(WaitError(problem))
        self._given_up = _GivenUp(hopeless, time.monotonic())

    def _see_to_the_end(self, given_up: _GivenUp) -> None:
        """A wait that failed is over, and so is the run, unless it has come to life again."""
        if self._stalls and self._moved > given_up.at and not any(wait.is_open for wait in given_up.waits):
            self._given_up = None
        elif time.monotonic() >= given_up.at + self._grace:
            self._end_process()

    def _end_process(self) -> None:
        print(f"error: the run does not end by itself within {self._grace:g} s; it is ended now", file=sys.stderr)
        try:
            self._at_the_end()
        finally:
            self._end(STATUS)


class _GivenUp(NamedTuple):
    waits: list[Wait]
    at: float


def line(wait: Wait) -> str:
    """`round 12: waiting 60 s (of 3600) for update: actor rank 0 on 10.0.0.1`"""
    part = f"{part}: " if (part := waits.current_part()) else ""
    allowed = "" if wait.deadline is None else f" (of {wait.deadline:g})"
    return f"{part}waiting {wait.seconds:.0f} s{allowed} {wait.what()}"


def _coroutines() -> str:
    """The stacks of the tasks of all known loops. Tasks at the same place are shown once."""
    loops = {wait.task.get_loop() for wait in waits.open_waits() if wait.task is not None} | set(waits.loops)
    places: dict[str, list[str]] = {}
    for task in (task for loop in loops for task in asyncio.all_tasks(loop)):
        places.setdefault("".join(traceback.format_list(_await_chain(task))), []).append(task.get_name())
    return "".join(f"{len(names)}: {', '.join(names[:MOST_NAMED])}\n{place}" for place, names in places.items())


def _await_chain(task: asyncio.Task[object]) -> list[traceback.FrameSummary]:
    """The place of a coroutine, down to the innermost one that it awaits; `Task.get_stack` ends at the first."""
    frames: list[traceback.FrameSummary] = []
    awaited: Any = task.get_coro()
    while awaited is not None:
        kind = next((kind for kind in ("cr", "gi", "ag") if hasattr(awaited, f"{kind}_frame")), None)
        if kind is None:
            break
        if (frame := getattr(awaited, f"{kind}_frame")) is not None:
            frames.append(traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
        awaited = getattr(awaited, "gi_yieldfrom" if kind == "gi" else f"{kind}_await")
    return frames


def _idle_seconds(peer: waits.PeerProcesses) -> float:
    try:
        return peer.idle_seconds()
    except Exception:  # one that cannot be asked is no sign of life
        return float("inf")


def _stacks(peer: waits.PeerProcesses) -> dict[str, str]:
    try:
        return peer.stacks()
    except Exception as error:  # one that cannot be asked hides nobody else's
        return {type(peer).__name__: f"not to be had: {error!r}"}

"""Signals that end a run: Ctrl-C, SIGTERM and SIGHUP at once, SIGTERM and SIGUSR1 after the running step.

At once: logs are closed, the report is written, and the processes with users' code are ended. Another signal during
that ends the process immediately. Each signal has its own exit status.

After the step: while a run trains (`deferred`), SIGTERM and SIGUSR1 ask it to save a checkpoint and stop. Before and
after that, SIGUSR1 has no effect. Imports the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType

LIKE_CTRL_C = (signal.SIGTERM, signal.SIGHUP)
SAVE_AND_STOP = (signal.SIGTERM, signal.SIGUSR1)
SHOW_CURSOR = b"\x1b[?25h"

_latest = signal.SIGINT
_owns_process = True
_before_the_end: Callable[[], None] | None = None


@contextlib.contextmanager
def handled(*, owns_process: bool = True) -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise KeyboardInterrupt as Ctrl-C does, and SIGUSR1 is ignored. The former handlers
    are restored afterwards.

    Signals that are ignored (`nohup`), or that have another handler already, are left alone. `owns_process` False: the
    process belongs to a program that goes on after the run, and no signal ends it (`end_at_once_on_the_next`).
    """
    global _latest, _owns_process
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and only there do signals arrive
        return
    owned, _owns_process = _owns_process, owns_process
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *LIKE_CTRL_C, signal.SIGUSR1)}
    _latest = signal.SIGINT
    deaf = before[signal.SIGINT] is signal.SIG_IGN
    if deaf:
        # Background jobs of shells ignore Ctrl-C. Here it is blocked instead, which has the same effect. An event loop
        # installs its orderly shutdown only where SIGINT has Python's default handler, and SIGTERM and SIGHUP need
        # that shutdown too (`_like_ctrl_c`).
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in LIKE_CTRL_C:
        if before[number] is signal.SIG_DFL:
            signal.signal(number, _like_ctrl_c)
    if before[signal.SIGUSR1] is signal.SIG_DFL:
        # Processes that are started from now on inherit this. SLURM sends the signal to them too; if it ended an
        # engine, the run could not finish its step and save.
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: set by C code, which cannot be put back from here
                signal.signal(number, handler)
        if deaf:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        _owns_process = owned


class Stopped(KeyboardInterrupt):
    """A signal ended the run. The text, if there is one, says what was saved and how to continue."""

    def __init__(self, by: signal.Signals, text: str = "", *, saved: bool = True) -> None:
        """`saved`: the run has saved a checkpoint at the end of a step, as the signal asked it to."""
        super().__init__(text)
        self.by = by
        self.saved = saved


class StopRequest:
    """Whether a signal has asked the run to stop. Only a request that `deferred` made can receive signals."""

    def __init__(self) -> None:
        self.asked: signal.Signals | None = None
        self.overdue = False
        """The deadline passed before the loop accepted the request."""

    def accept(self) -> signal.Signals | None:
        """The signal that has asked, if any. The caller then saves and stops, and the deadline no longer counts."""
        if self.asked is not None:
            signal.setitimer(signal.ITIMER_REAL, 0)
        return self.asked


@contextlib.contextmanager
def deferred(deadline: float) -> Iterator[StopRequest]:
    """Inside, SIGTERM and SIGUSR1 ask the run to stop; after `deadline` seconds they act like Ctrl-C (0: at once).

    Only the first signal counts, because launchers pass signals on to processes that have received them already.
    Ctrl-C itself does not wait.
    """
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if request.asked is not None:
            return
        request.asked = signal.Signals(number)
        if deadline <= 0:
            _like_ctrl_c(number, frame)
            return
        signal.setitimer(signal.ITIMER_REAL, deadline)
        with contextlib.suppress(OSError, ValueError):  # not `print`: it may be what was interrupted
            os.write(sys.stderr.fileno(), f"{request.asked.name}: the run stops after this step\n".encode())

    def too_late(number: int, frame: FrameType | None) -> None:
        assert request.asked is not None
        request.overdue = True
        _like_ctrl_c(request.asked, frame)

    before = {number: signal.getsignal(number) for number in (*SAVE_AND_STOP, signal.SIGALRM)}
    if before[signal.SIGTERM] is _like_ctrl_c:
        signal.signal(signal.SIGTERM, ask)
    if before[signal.SIGUSR1] in (signal.SIG_IGN, signal.SIG_DFL):
        signal.signal(signal.SIGUSR1, ask)
    signal.signal(signal.SIGALRM, too_late)
    try:
        yield request
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            if handler is not None:  # None: set by C code
                signal.signal(number, handler)


def latest() -> signal.Signals:
    """The signal that ended the run at once; SIGINT unless it was another one."""
    return _latest


def exit_status() -> int:
    """The exit status after the latest signal: 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP."""
    return 128 + _latest


def end_at_once_on_the_next(*, last: Callable[[], None]) -> None:
    """The run is shutting down: one more signal calls `last` and ends the process without waiting for anything.

    Where the process is not the run's own (`handled`), one more signal is one more KeyboardInterrupt.
    """
    global _before_the_end
    if threading.current_thread() is not threading.main_thread() or not _owns_process:
        return
    _before_the_end = last
    for number in (signal.SIGINT, *LIKE_CTRL_C):
        if callable(signal.getsignal(number)):
            signal.signal(number, _end_at_once)


def _like_ctrl_c(number: int, frame: FrameType | None) -> None:
    global _latest
    _latest = signal.Signals(number)
    # An event loop has its own handler for Ctrl-C, which cancels its tasks in order.
    handler = signal.getsignal(signal.SIGINT)
    (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)


def _end_at_once(number: int, frame: FrameType | None) -> None:
    try:
        if _before_the_end is not None:
            _before_the_end()
        if sys.stderr.isatty():
            os.write(sys.stderr.fileno(), SHOW_CURSOR)
    finally:
        os._exit(128 + number)

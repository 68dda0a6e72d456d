"""Signals that end a run. SIGTERM and SIGHUP act like Ctrl-C, each with its own exit status.

The first one unwinds the run: logs are closed, the report is written, users' code is ended. Another one during that
ends the process where it stands. Imports the standard library only.
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
SHOW_CURSOR = b"\x1b[?25h"

_latest = signal.SIGINT
_before_the_end: Callable[[], None] | None = None


@contextlib.contextmanager
def handled() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise KeyboardInterrupt as Ctrl-C does. Handlers are put back afterwards.

    Signals that are ignored (`nohup`), or that somebody else handles already, are left alone.
    """
    global _latest
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers, and only there do signals arrive
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *LIKE_CTRL_C)}
    _latest = signal.SIGINT
    deaf = before[signal.SIGINT] is signal.SIG_IGN
    if deaf:
        # Background jobs of shells ignore Ctrl-C. Blocked it stays unheard as well, and event loops, which take over
        # from the default handler only, can wind up in order for the other signals.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in LIKE_CTRL_C:
        if before[number] is signal.SIG_DFL:
            signal.signal(number, _like_ctrl_c)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: set by C code, which cannot be put back from here
                signal.signal(number, handler)
        if deaf:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def exit_status() -> int:
    """Of a process that the latest signal ended: 130 after Ctrl-C, 143 after SIGTERM, 129 after SIGHUP."""
    return 128 + _latest


def end_at_once_on_the_next(*, last: Callable[[], None]) -> None:
    """The run is being wound up: one more signal calls `last` and ends the process without waiting for anything."""
    global _before_the_end
    if threading.current_thread() is not threading.main_thread():
        return
    _before_the_end = last
    for number in (signal.SIGINT, *LIKE_CTRL_C):
        if callable(signal.getsignal(number)):
            signal.signal(number, _end_at_once)


def _like_ctrl_c(number: int, frame: FrameType | None) -> None:
    global _latest
    _latest = signal.Signals(number)
    # An event loop has a handler of its own for Ctrl-C, which cancels its tasks in order.
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

"""Processes that end with the one they belong to, also when it is killed and cannot tell them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading


def end_with(owner: int) -> None:
    """When the process `owner` is gone this one ends, and so does whatever process stands between the two.

    Without a word: nobody is there who would hear it, and what they hold, a GPU's memory for instance, is wanted.
    """
    between = os.getppid()
    try:
        watched = os.pidfd_open(owner)  # not the number, which the next process may get
    except ProcessLookupError:
        os._exit(1)

    def wait() -> None:
        poll = select.poll()
        poll.register(watched, select.POLLIN)
        poll.poll()
        if between != owner:
            with contextlib.suppress(ProcessLookupError):
                os.kill(between, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=wait, name="owner", daemon=True).start()

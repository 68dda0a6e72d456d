"""A process that others on its machine can look at, also while its interpreter is held: how it is, and what it does.

Its beacon is a file without a name: its time is that of the last sign of life (`waits.pulse`), and a signal makes the
process write its stacks into it. `/proc` lets other processes of the same user open it. Standard library only.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, NamedTuple

from openrlhf.utils import waits

ASK = signal.SIGUSR2
BEAT_SECONDS = 5.0
ANSWER_SECONDS = 1.0
"""How long a process has to write its stacks: no interpreter is needed for it, but it must be running."""


class Address(NamedTuple):
    """Where a process's beacon is, on its machine."""

    pid: int
    descriptor: int


def lit() -> Address:
    """Give this process a beacon, for as long as it lives."""
    file = tempfile.TemporaryFile()  # noqa: SIM115
    faulthandler.register(ASK, file, all_threads=True)
    threading.Thread(target=_beat, args=(file,), name="beacon", daemon=True).start()
    return Address(os.getpid(), file.fileno())


def _beat(file: IO[bytes]) -> None:
    before = None
    while True:
        now = waits.pulse()
        if now != before:
            before = now
            os.utime(file.fileno())
        time.sleep(BEAT_SECONDS)


def idle_seconds(address: Address) -> float:
    """Since its last sign of life; infinite when it is gone."""
    try:
        return time.time() - os.stat(_path(address)).st_mtime
    except OSError:
        return float("inf")


def stacks(address: Address) -> str:
    """What its threads are doing, or why that is not known."""
    try:
        with open(_path(address), "rb") as file:
            file.seek(0, os.SEEK_END)
            os.kill(address.pid, ASK)
            text = _written(file)
    except OSError as error:
        return f"it is gone ({error.strerror})"
    return text or f"it does not answer; {_state(address.pid)}"


def _written(file: IO[bytes]) -> str:
    """Until nothing more comes."""
    end, text = time.monotonic() + ANSWER_SECONDS, b""
    while time.monotonic() < end:
        time.sleep(0.05)
        more = file.read()
        if text and not more:
            break
        text += more
    return text.decode(errors="replace")


def _state(pid: int) -> str:
    """As the system sees it: "T (stopped)"."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("State:"):
                return f"state {line.split(maxsplit=1)[1]}"
    return "its state is not known"


def _path(address: Address) -> str:
    return f"/proc/{address.pid}/fd/{address.descriptor}"

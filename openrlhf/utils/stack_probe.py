"""The stack probe: other processes on the machine can see a process's stacks and its last sign of life.

It works also while the process holds its interpreter lock and answers no call. The probe is a file without a name. Its
modification time is that of the last sign of life (`waits.progress_token`), and a signal makes the process write its
stacks into it (faulthandler needs no interpreter for that). Other processes of the same user open it through `/proc`.
Imports the standard library only.
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
TOUCH_SECONDS = 5.0
"""How often the file's time is brought up to date."""
ANSWER_SECONDS = 1.0
"""How long a process has to write its stacks. It needs no interpreter for that, but it must not be stopped."""


class Address(NamedTuple):
    """The place of a process's probe on its machine."""

    pid: int
    descriptor: int


def install() -> Address:
    """Give this process a stack probe, for as long as it lives."""
    file = tempfile.TemporaryFile()  # noqa: SIM115
    faulthandler.register(ASK, file, all_threads=True)
    threading.Thread(target=_touch, args=(file,), name="stack-probe", daemon=True).start()
    return Address(os.getpid(), file.fileno())


def _touch(file: IO[bytes]) -> None:
    before = None
    while True:
        now = waits.progress_token()
        if now != before:
            before = now
            os.utime(file.fileno())
        time.sleep(TOUCH_SECONDS)


def idle_seconds(address: Address) -> float:
    """Seconds since the process's last sign of life; infinite when it is gone."""
    try:
        return time.time() - os.stat(_path(address)).st_mtime
    except OSError:
        return float("inf")


def stacks(address: Address) -> str:
    """The stacks of the process's threads, or why they are not known."""
    try:
        with open(_path(address), "rb") as file:
            file.seek(0, os.SEEK_END)
            os.kill(address.pid, ASK)
            text = _written(file)
    except OSError as error:
        return f"it is gone ({error.strerror})"
    return text or f"it does not answer; {_state(address.pid)}"


def _written(file: IO[bytes]) -> str:
    """Read what the process writes, until nothing more comes."""
    end, text = time.monotonic() + ANSWER_SECONDS, b""
    while time.monotonic() < end:
        time.sleep(0.05)
        more = file.read()
        if text and not more:
            break
        text += more
    return text.decode(errors="replace")


def _state(pid: int) -> str:
    """The state of a process as the system sees it: "T (stopped)"."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("State:"):
                return f"state {line.split(maxsplit=1)[1]}"
    return "its state is not known"


def _path(address: Address) -> str:
    return f"/proc/{address.pid}/fd/{address.descriptor}"

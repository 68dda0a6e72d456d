"""A folder that one run has for itself: a lock beside or in it, which the system takes away when the run is killed."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

logger = logging.getLogger(__name__)


class ClaimedError(RuntimeError):
    """Another run has it. The text says which, as far as it is known."""


class Claim:
    """Of a folder, by this process. It is taken with `take`, and given back with `release` or by the process's end."""

    def __init__(self, file: Path, *, flag: str) -> None:
        """`file`: the lock's. `flag`: the folder in users' words, for messages."""
        self._file = file
        self._flag = flag
        self._lock = FileLock(file)

    def take(self) -> None:
        """Raises ClaimedError, and OSError where no file can be written."""
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ClaimedError(self._holder()) from None
        except NotImplementedError:  # filelock before 3.25; later ones keep a file that says who has it
            logger.warning("%s: this file system has no locks; start no second run on it", self._flag)
            return
        if not isinstance(self._lock, SoftFileLock):
            with contextlib.suppress(OSError):  # whoever is refused is told less
                _write_no_link(self._file, f"{os.getpid()}\n{socket.gethostname()}\n")

    def _holder(self) -> str:
        try:
            pid, host = self._file.read_text(encoding="utf-8").split()[:2]
        except (OSError, ValueError):
            return f"another run, which holds {self._file}"
        return f"the run with process id {int(pid)} on {host}" if pid.isdecimal() else f"another run ({self._file})"

    def release(self, *, remove: bool = False) -> None:
        """`remove`: the lock's file is not to be left. Nobody waits for it, so nobody holds what is removed."""
        if remove and self._lock.is_locked:
            with contextlib.suppress(OSError):
                self._file.unlink()
        self._lock.release()


def _write_no_link(file: Path, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
        opened.write(text)

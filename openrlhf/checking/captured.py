"""Capturing what a user's file prints while it is tried: kept apart, and shown when it helps."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator

MOST_PRINTED = 40
"""Lines that a file printed, of which the last ones are shown."""


@contextlib.contextmanager
def captured_stderr() -> Iterator[list[str]]:
    """The lines that processes of users' code write to stderr meanwhile; the list is filled when this ends."""
    lines: list[str] = []
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()


def replay(lines: list[str]) -> None:
    """Show the last of them on stderr."""
    if len(lines) > MOST_PRINTED:
        print(f"… {len(lines) - MOST_PRINTED} lines before", file=sys.stderr)
    for line in lines[-MOST_PRINTED:]:
        print(line, file=sys.stderr)

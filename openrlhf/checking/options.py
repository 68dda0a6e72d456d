"""The options of `openrlhf check`, and the capture of what a user's file prints while it is tried."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

LOAD_SECONDS = 60.0
"""The least time allowed for loading a file: importing libraries may take long, however short its calls are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The command line of `openrlhf check`."""

    file: Path
    pretrain: str | None
    prompt_data: str | None
    input_key: str
    label_key: str | None
    apply_chat_template: bool
    n: int
    """Samples per prompt."""
    timeout: float
    max_len: int
    max_new_tokens: int
    max_steps: int
    agent_hosts: int

    @property
    def start_timeout(self) -> float:
        return max(self.timeout, LOAD_SECONDS)


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

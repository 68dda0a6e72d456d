"""The notes of a run, kept for its report: notes, warnings, and how the run ended."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from openrlhf.observability.jsonl import JsonLinesWriter, read_json_lines

NoteKind = Literal["start", "note", "warning", "end"]

MOST_NOTES = 1000
"""The most notes of one start of a run, so that a warning at every step does not fill the disk."""
MOST_CHARACTERS = 2000


class NoteLog:
    """notes.jsonl: `{"step": 3, "kind": "warning", "clock": 1763000000.0, "text": "…"}`, each text once.

    Every start of a run and every end is a line too: without an end it goes on, or was killed.
    """

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time) -> None:
        self._lines = JsonLinesWriter(path)
        self._now = now
        self._told: set[str] = set()
        self.step = 0
        """The latest that is finished; a note belongs to it."""

    def write(self, kind: NoteKind, text: str) -> None:
        if kind in ("note", "warning"):
            if text in self._told or len(self._told) >= MOST_NOTES:
                return
            self._told.add(text)
        record = {"step": self.step, "kind": kind, "clock": round(self._now(), 3), "text": text[:MOST_CHARACTERS]}
        with contextlib.suppress(OSError, ValueError):  # a full disk, a closed file: words must not end a run
            self._lines.write(record)

    def close(self) -> None:
        self._lines.close()

    @contextlib.contextmanager
    def hears_warnings(self) -> Iterator[None]:
        """Warnings that the parts of a run log meanwhile are notes as well."""
        handler = _Listener(self)
        logger = logging.getLogger("openrlhf")
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)


class _Listener(logging.Handler):
    def __init__(self, notes: NoteLog) -> None:
        super().__init__(logging.WARNING)
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        self._notes.write("warning", record.getMessage())


def read_notes(path: Path) -> list[dict[str, Any]]:
    """The whole lines of the file, in order; none where there is no file."""
    lines = read_json_lines(path)
    return [note for note in lines if isinstance(note.get("text"), str) and isinstance(note.get("step"), int)]

"""JSON lines that survive a kill: one object per line, flushed line by line, read up to the last whole one."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple


class JsonLinesWriter:
    """Appends objects to a file, each visible to readers when `write` returns.

    Numbers that are not finite become null, since JSON has no NaN; what JSON does not know becomes its `str`.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        _mend_last_line(path)
        # Unbuffered: a line is one write, so neither a reader nor a signal meets half of it.
        self._file: IO[bytes] | None = path.open("ab", buffering=0)

    def write(self, record: Mapping[str, Any]) -> None:
        if self._file is None:
            raise ValueError("this file is closed; nothing more can be written")
        line = json.dumps(finite(record), ensure_ascii=False, default=str) + "\n"
        self._file.write(line.encode("utf-8", errors="replace"))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The whole objects of a file, in order. Half-written lines are passed over; a missing file is empty."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        for line in lines:
            if (record := parse_json_line(line)) is not None:
                yield record


class Line(NamedTuple):
    """A line of a file, its line break included."""

    start: int
    """The place of its first byte in the file."""
    content: bytes


class LinesTail:
    """What was appended to a file since the last look: whole lines, each once.

    Where a file has become shorter, or other bytes stand where the last line that was read ended, it is another file
    under the same name. It is read from its beginning, and `restarts` grows.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._end = b""
        self.place = 0
        """The byte behind the last line that was read."""
        self.restarts = 0

    @property
    def size(self) -> int:
        """The bytes that the file has; 0 where there is none."""
        try:
            return self._path.stat().st_size
        except OSError:
            return 0

    def read(self) -> Iterator[Line]:
        """The lines behind `place`, which moves as they are taken: a caller may stop, and go on with another call."""
        try:
            file = self._path.open("rb")
        except OSError:
            if self.place:
                self._restart()
            return
        with file:
            if self.place:
                file.seek(self.place - len(self._end))
                if file.read(len(self._end)) != self._end:
                    self._restart()
            file.seek(self.place)
            for content in file:
                if not content.endswith(b"\n"):
                    return
                start, self.place = self.place, self.place + len(content)
                self._end = content[-64:]
                yield Line(start, content)

    def _restart(self) -> None:
        self.place, self._end = 0, b""
        self.restarts += 1


def parse_json_line(line: bytes) -> dict[str, Any] | None:
    """The object a line holds, None when it holds no whole one."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _mend_last_line(path: Path) -> None:
    """Cut off what a killed writer left half done, so that the next record starts on a line of its own."""
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb+") as file:
        # Backwards in blocks: the file may be large, its last line is not.
        end = file.seek(0, 2)
        start, tail = end, b""
        while start > 0 and b"\n" not in tail:
            start = max(0, start - 65536)
            file.seek(start)
            tail = file.read(end - start)
        whole = tail.rfind(b"\n") + 1
        if whole == len(tail):
            return
        try:
            json.loads(tail[whole:])
        except ValueError:
            file.truncate(start + whole)
        else:
            file.seek(0, 2)
            file.write(b"\n")


def finite(value: Any) -> Any:
    """The same with None for every number that is not finite, however deep: JSON has no NaN."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value

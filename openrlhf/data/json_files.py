"""JSON files as exact records.

Read here rather than by `datasets`, whose type inference changes what the user wrote: the label "007" becomes 7,
"2024-01-31" a datetime, a long integer a float. Rewards compare with labels, so records stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openrlhf.data.errors import DataError

Record = Mapping[str, Any]


class JsonLines(Sequence[Record]):
    """Records of a JSON-lines file, kept as its bytes and parsed when asked for: exact and compact.

    The bytes are held, not the file, so that a file edited during the run changes nothing.
    """

    def __init__(self, lines: list[bytes]) -> None:
        self._lines = lines

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return JsonLines(self._lines[index])
        return json.loads(self._lines[index])


def read_json(path: Path, *, limit: int | None = None) -> Sequence[Record]:
    """Records of a .json or .jsonl file: one object per line, or a single list of objects. Checked as it is read."""
    data = path.read_bytes().removeprefix(b"\xef\xbb\xbf")
    if not data.strip():
        raise DataError(f"{path} is empty")
    if _is_list(data.strip()):
        return _json_list(path, data)
    lines: list[bytes] = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        if limit is not None and len(lines) == limit:
            break
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except ValueError as error:
            if not lines and path.suffix.lower() == ".json":
                return [_json_document(path, data)]  # one object over several lines
            raise DataError(f"{path}, line {number} is not JSON ({_reason(error)}): {_beginning(line)}") from None
        if not isinstance(record, dict):
            raise DataError(
                f"{path}, line {number} is {_json_type(record)}, not an object such as "
                f'{{"input": …, "label": …}}: {_beginning(line)}'
            )
        lines.append(line)
    return JsonLines(lines)


def _is_list(data: bytes) -> bool:
    """Whether the file is one list, and not lines of which the first happens to be one."""
    first, _, rest = data.partition(b"\n")
    if not data.startswith(b"[") or not rest:
        return data.startswith(b"[")
    try:
        json.loads(first)
    except ValueError:
        return True
    return False


def _json_list(path: Path, data: bytes) -> list[Record]:
    document = _json_document(path, data)
    for number, record in enumerate(document, start=1):
        if not isinstance(record, dict):
            raise DataError(
                f"{path}, item {number} of the list is {_json_type(record)}, not an object such as "
                f'{{"input": …, "label": …}}: {_beginning(json.dumps(record).encode())}'
            )
    return document


def _json_document(path: Path, data: bytes) -> Any:
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        line = data.split(b"\n")[error.lineno - 1]
        raise DataError(f"{path}, line {error.lineno} is not JSON ({_reason(error)}): {_beginning(line)}") from None
    except ValueError as error:  # not UTF-8
        raise DataError(f"{path} is not JSON ({error})") from None


def _reason(error: ValueError) -> str:
    return f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def _json_type(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _beginning(line: bytes) -> str:
    text = line.strip().decode("utf-8", errors="replace")
    # A file of another kind must not write its control characters to the user's terminal.
    text = "".join(character if character.isprintable() else "�" for character in text)
    return text if len(text) <= 80 else text[:77] + "…"

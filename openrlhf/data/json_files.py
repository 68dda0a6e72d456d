"""JSON files as exact records.

Read here rather than by `datasets`, whose type inference changes what the user wrote: the label "007" becomes 7,
"2024-01-31" a datetime, a long integer a float. Rewards compare with labels, so records stay as they are.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from openrlhf.data.errors import DataError

logger = logging.getLogger(__name__)

Record = Mapping[str, Any]

LONG_LINE = 10 * 2**20
"""Bytes of a line that is worth a warning: usually a line break or a quotation mark is missing."""
# Half a character: an escape of U+D800 … U+DFFF, which may be one of a pair, or its three bytes, which are not UTF-8.
_MAYBE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")


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
        if len(line) > LONG_LINE:
            logger.warning(
                "%s, line %d is one record of %d MB: is a line break missing?", path, number, len(line) // 10**6
            )
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            if not lines and path.suffix.lower() == ".json":
                document = _json_document(path, data)  # one object over several lines
                _require_text(document, data, where=str(path))
                return [document]
            raise DataError(f"{path}, line {number} is not JSON ({_reason(error)}): {_beginning(line)}") from None
        if not isinstance(record, dict):
            raise DataError(
                f"{path}, line {number} is {_json_type(record)}, not an object such as "
                f'{{"input": …, "label": …}}: {_beginning(line)}'
            )
        _require_text(record, line, where=f"{path}, line {number}")
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
    suspicious = data if _MAYBE_SURROGATE.search(data) else b""
    for number, record in enumerate(document, start=1):
        if not isinstance(record, dict):
            raise DataError(
                f"{path}, item {number} of the list is {_json_type(record)}, not an object such as "
                f'{{"input": …, "label": …}}: {_beginning(json.dumps(record).encode())}'
            )
        if suspicious:
            _require_text(record, suspicious, where=f"{path}, item {number} of the list")
    return document


def _require_text(record: Record, written: bytes, *, where: str) -> None:
    """Raise DataError for half a character (a lone surrogate): Python's strings have it, and no tokenizer takes it."""
    if not _MAYBE_SURROGATE.search(written):
        return
    for key, value in record.items():
        text = json.dumps({str(key): value}, ensure_ascii=False)
        if half := re.search("[\ud800-\udfff]", text):
            raise DataError(
                f"{where} has half a character under {str(key).encode('ascii', 'backslashreplace').decode()!r} "
                f"(\\u{ord(half[0]):04x}, a surrogate without its other half), which is no text: repair or remove it"
            )


def _json_document(path: Path, data: bytes) -> Any:
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        line = data.split(b"\n")[error.lineno - 1]
        raise DataError(f"{path}, line {error.lineno} is not JSON ({_reason(error)}): {_beginning(line)}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, or lists in lists in lists …
        raise DataError(f"{path} is not JSON ({error})") from None


def _reason(error: Exception) -> str:
    return f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)


def _json_type(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _beginning(line: bytes) -> str:
    text = line.strip().decode("utf-8", errors="replace")
    # A file of another kind must not write its control characters to the user's terminal.
    text = "".join(character if character.isprintable() else "�" for character in text)
    return text if len(text) <= 80 else text[:77] + "…"

"""Records from files, folders and the Hub.

JSON is read here rather than by `datasets`, whose type inference changes what the user wrote: the label "007" becomes
7, "2024-01-31" a datetime, a long integer a float. Rewards compare with labels, so that records stay as they are.
Tables, folders and the Hub (or its cache where the Hub is out of reach) are read by `datasets`.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import os
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)


class DataError(ValueError):
    """The data the user named cannot be used. The message names the flag or the file, and what to do."""


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


_NO_DATA = "corresponds to no data"
"""How `datasets` says that a split has no records."""


class UnknownSplitError(DataError):
    def __init__(self, known: list[str]) -> None:
        super().__init__(f"unknown split; there are {known}")
        self.known = known


class HubUnreachableError(DataError):
    """Neither the Hub nor its cache has it now."""


def read_table(path: Path, kind: str) -> Sequence[Record]:
    """A .csv, .parquet or .arrow file."""
    from datasets import load_dataset

    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty")
    # Only an empty cell is a missing value: "NA", "None" and "null" are answers like any other.
    options = {"na_values": [""], "keep_default_na": False} if kind == "csv" else {}
    try:
        with _quiet():
            return _undecoded(load_dataset(kind, data_files=str(path), split="train", **options, **_cache()))
    except Exception as error:  # pandas, pyarrow and datasets have no exception in common
        if _NO_DATA in str(error):
            return []
        raise DataError(f"{path} cannot be read as {kind}: {_load_reason(error)}") from error


def read_folder(path: Path, *, data_dir: str | None, split: str) -> Sequence[Record]:
    """A folder written by `save_to_disk`, or one of data files."""
    from datasets import DatasetDict, load_from_disk

    saved = path / data_dir if data_dir else path
    if not (saved / "dataset_dict.json").is_file() and not (saved / "state.json").is_file():
        return _load(str(path), data_dir=data_dir, split=split)
    data = load_from_disk(str(saved))
    if not isinstance(data, DatasetDict):
        return _undecoded(data)
    if split not in data:
        raise UnknownSplitError(list(data))
    return _undecoded(data[split])


def read_hub(
    name: str, *, data_dir: str | None, split: str, revision: str | None = None, data_files: str | None = None
) -> Sequence[Record]:
    """A data set of the Hub, or its cached copy when the Hub cannot be reached."""
    options = {"revision": revision, "data_files": data_files}
    if hub_reachable():
        return _load(name, data_dir=data_dir, split=split, **options)
    try:
        with offline():
            return _load(name, data_dir=data_dir, split=split, **options)
    except UnknownSplitError:
        raise
    except DataError as error:
        raise HubUnreachableError(str(error)) from error


def _load(name: str, *, data_dir: str | None, split: str, **options: str | None) -> Sequence[Record]:
    from datasets import load_dataset

    given = {option: value for option, value in options.items() if value is not None}
    try:
        with _quiet():
            return _undecoded(load_dataset(name, data_dir=data_dir, split=split, **given, **_cache()))
    except ConnectionError as error:
        raise HubUnreachableError(str(error)) from error
    except Exception as error:  # whatever its many readers raise
        reason = _load_reason(error)
        if _NO_DATA in reason:
            return []
        unknown = re.match(r"Unknown split .* Should be one of (\[.*\])", reason)
        if unknown:
            raise UnknownSplitError(re.findall(r"'([^']*)'", unknown[1])) from error
        raise DataError(f"{name} cannot be loaded: {reason}") from error


def _undecoded(data: Any) -> Any:
    """Images as the bytes or paths of their files. `datasets` would decode all of a record's images whenever any of its
    keys is asked for, and a broken one would raise an error that names no record."""
    from datasets import Features, Image

    def without_pixels(feature: Any) -> Any:
        if isinstance(feature, Image):
            return Image(mode=feature.mode, decode=False)
        if isinstance(feature, dict):
            return type(feature)({name: without_pixels(inner) for name, inner in feature.items()})
        if isinstance(feature, list):
            return [without_pixels(inner) for inner in feature]
        if hasattr(feature, "feature"):  # a list of this feature
            changed = copy.copy(feature)
            changed.feature = without_pixels(feature.feature)
            return changed
        return feature

    data.info.features = Features({name: without_pixels(feature) for name, feature in data.features.items()})
    return data


def _cache() -> dict[str, str]:
    """Where `datasets` keeps what it has read, if it is to be told: a folder that goes with this process, where it
    could not write in its own, as in a container whose user has no home."""
    from datasets import config

    folder = os.path.abspath(config.HF_DATASETS_CACHE)
    while not os.path.exists(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
        return {}
    return {"cache_dir": _own_cache().name}


@functools.cache
def _own_cache() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="openrlhf-tables-")


def _load_reason(error: Exception) -> str:
    """The sentence that says what is wrong; `datasets` wraps it into one that does not."""
    return " ".join(str(error.__cause__ or error).split()) or type(error).__name__


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars and no log lines of `datasets`: what goes wrong is said in a DataError."""
    import datasets
    from datasets.utils import logging as datasets_logging

    bars, level = datasets.utils.are_progress_bars_disabled(), datasets_logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets_logging.set_verbosity(datasets_logging.CRITICAL)
    try:
        yield
    finally:
        datasets_logging.set_verbosity(level)
        if not bars:
            datasets.enable_progress_bars()


PROBE_SECONDS = 5.0


def hub_reachable() -> bool:
    """One short request: `datasets` and `transformers` retry for half a minute before they say so."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=PROBE_SECONDS)
    except Exception:  # whatever the HTTP client raises: the answer is no
        return False
    return True


@contextlib.contextmanager
def offline() -> Iterator[None]:
    """Cached copies only, without a request."""
    import datasets.config
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before

"""Where records come from: a comma list of files, folders and Hub names becomes one sequence of plain dicts.

JSON is read here rather than by `datasets`, whose type inference changes what the user wrote: the label "007"
becomes 7, "2024-01-31" a datetime, a long integer a float. Rewards compare with labels, so records stay exact.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

logger = logging.getLogger(__name__)

Record = Mapping[str, Any]

FILE_KINDS = {
    ".json": "json",
    ".jsonl": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
ACCEPTED = "a .jsonl, .json, .csv, .parquet or .arrow file, a folder, or a Hub name such as org/name"
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")
HUB_PROBE_SECONDS = 5.0

# Flags that belong to the same data set, so that an error about one of them can name it.
PROBS_FLAG = {"--data.prompt_dataset": "--data.prompt_probs", "--data.dataset": "--data.dataset_probs"}
SPLIT_FLAG = {
    "--data.prompt_dataset": "--data.prompt_split",
    "--data.dataset": "--data.dataset_split",
    "--eval.dataset": "--eval.split",
}


class DataError(ValueError):
    """The data the user named cannot be used. The message names the flag or the file, and what to do."""


@dataclass(frozen=True, slots=True)
class Source:
    """The records of one entry of the comma list."""

    name: str
    """How messages call it: the file name, or the folder's or Hub name."""
    records: Sequence[Record]


class Records(Sequence[Record]):
    """Records of one or several sources in their mixed order, each of which knows where it comes from.

    Keys may differ from source to source: a record has the keys its source gave it.
    """

    def __init__(self, sources: Sequence[Source], rows: np.ndarray) -> None:
        """`rows` int64 [N, 2]: which source, and which of its records."""
        self._sources = tuple(sources)
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Record: ...

    @overload
    def __getitem__(self, index: slice) -> Records: ...

    def __getitem__(self, index: int | slice) -> Record | Records:
        if isinstance(index, slice):
            return Records(self._sources, self._rows[index])
        source, row = self._rows[index]
        return self._sources[source].records[int(row)]

    def where(self, index: int) -> str:
        """`record 12 of train.jsonl`: the 1-based number in the source it comes from."""
        source, row = self._rows[index]
        return f"record {row + 1} of {self._sources[source].name}"


def load_records(
    spec: str,
    *,
    split: str = "train",
    max_samples: int | None = None,
    probs: str | Sequence[float] | None = None,
    seed: int = 42,
    trust_remote_code: bool = False,
    flag: str = "--data.prompt_dataset",
) -> Records:
    """The records that `flag` names: the first `max_samples` of each source, then mixed.

    `spec` is a comma list of `name[@data_dir]`. Without `probs` the sources follow one another. With them each
    next record is drawn from a source with that probability until every source has been read to its end; those
    that ended earlier start over (what `datasets.interleave_datasets` calls "all_exhausted").

    A single file has no splits: `split` applies to folders and Hub names. Raises DataError.
    """
    names = [name.strip() for name in (spec or "").split(",") if name.strip()]
    if not names:
        raise DataError(f"{flag} is empty: give {ACCEPTED}")
    if max_samples is not None and max_samples < 1:
        raise DataError(f"--data.max_samples must be >= 1, got {max_samples}")
    weights = None if probs is None else parse_probabilities(probs, count=len(names), flag=flag)
    sources = [
        _load_source(name, split=split, limit=max_samples, trust_remote_code=trust_remote_code, flag=flag)
        for name in names
    ]
    lengths = [len(source.records) for source in sources]
    rows = concatenated_rows(lengths) if weights is None else interleaved_rows(lengths, probs=weights, seed=seed)
    return Records(sources, rows)


# ---------------------------------------------------------------------------------------------- mixing


def parse_probabilities(probs: str | Sequence[float], *, count: int, flag: str) -> list[float]:
    """`0.7,0.3` or numbers, one per source, all positive, that add up to 1."""
    probs_flag = PROBS_FLAG.get(flag, f"the probabilities of {flag}")
    items = probs.split(",") if isinstance(probs, str) else list(probs)
    try:
        weights = [float(item) for item in items]
    except (TypeError, ValueError):
        raise DataError(f"{probs_flag} must be a comma list of numbers such as 0.7,0.3, got {probs!r}") from None
    if len(weights) != count:
        raise DataError(f"{probs_flag} has {len(weights)} values, {flag} has {count} data sets: give one for each")
    if not all(weight > 0 for weight in weights):
        raise DataError(
            f"{probs_flag} must be positive numbers, got {probs!r}: take a data set that is never drawn out of {flag}"
        )
    if abs(sum(weights) - 1) > 1e-6:
        raise DataError(f"{probs_flag} must add up to 1, got {probs!r} (sum {sum(weights):g})")
    return [weight / sum(weights) for weight in weights]


def concatenated_rows(lengths: Sequence[int]) -> np.ndarray:
    """int64 [N, 2]: all records of the first source, then all of the second, …"""
    return np.concatenate(
        [np.stack([np.full(n, source), np.arange(n)], axis=1) for source, n in enumerate(lengths)]
    ).astype(np.int64)


def interleaved_rows(lengths: Sequence[int], *, probs: Sequence[float], seed: int) -> np.ndarray:
    """int64 [N, 2]: sources drawn with `probs` until each has been read to its end at least once."""
    rng = np.random.default_rng(seed)
    rows: list[tuple[int, int]] = []
    positions = [0] * len(lengths)
    unfinished = set(range(len(lengths)))
    while unfinished:
        # Drawn in blocks of 1,000, as `datasets` does, so that the same seed gives the same order there.
        for source in rng.choice(len(lengths), size=1000, p=list(probs)).tolist():
            if not unfinished:
                break
            rows.append((source, positions[source]))
            positions[source] += 1
            if positions[source] == lengths[source]:
                positions[source] = 0
                unfinished.discard(source)
    return np.array(rows, dtype=np.int64)


# ---------------------------------------------------------------------------------------------- one source


def _load_source(name: str, *, split: str, limit: int | None, trust_remote_code: bool, flag: str) -> Source:
    data_dir = None
    if "@" in name and not Path(name).expanduser().exists():
        name, data_dir = name.split("@", 1)
    path = Path(name).expanduser()
    kind = FILE_KINDS.get(path.suffix.lower())
    if path.suffix == ".py":
        raise _script_refused(name, flag=flag)
    if path.is_file():
        if kind is None:
            raise DataError(f"{flag}: cannot tell what kind of data {name} is: give {ACCEPTED}")
        records = read_json(path, limit=limit) if kind == "json" else _read_table(path, kind)
        name = path.name
    elif path.is_dir():
        if (path / f"{path.resolve().name}.py").is_file():
            raise _script_refused(f"{name}/{path.resolve().name}.py", flag=flag)
        records = _read_folder(path, data_dir=data_dir, split=split, flag=flag)
    elif kind is not None or not HUB_NAME.fullmatch(name) or name.startswith("."):
        raise DataError(f"{flag}: there is no file {name} (looked in {Path.cwd()}): give {ACCEPTED}")
    else:
        records = _read_hub(name, data_dir=data_dir, split=split, trust_remote_code=trust_remote_code, flag=flag)
    if len(records) == 0:
        raise DataError(f"{flag}: {name} has no records")
    return Source(name, _First(records, limit) if limit is not None and limit < len(records) else records)


class _First(Sequence[Record]):
    """The first `count` records, without copying them."""

    def __init__(self, records: Sequence[Record], count: int) -> None:
        self._records, self._count = records, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self._records[range(self._count)[index]]


def _script_refused(name: str, *, flag: str) -> DataError:
    version = importlib.metadata.version("datasets")
    return DataError(
        f"{flag}: {name} is a loading script, which datasets {version} no longer runs: save what it yields once, "
        f"for instance with Dataset.to_json('train.jsonl'), and name that file"
    )


# ---------------------------------------------------------------------------------------------- JSON


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
    stripped = data.lstrip()
    if not stripped:
        raise DataError(f"{path} is empty")
    if stripped.startswith(b"["):
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
                return _json_object(path, data)
            raise DataError(f"{path}, line {number} is not JSON ({error}): {_beginning(line)}") from None
        if not isinstance(record, dict):
            raise DataError(
                f"{path}, line {number} is {_json_type(record)}, not an object such as "
                f'{{"input": …, "label": …}}: {_beginning(line)}'
            )
        lines.append(line)
    return JsonLines(lines)


def _json_list(path: Path, data: bytes) -> list[Record]:
    document = _json_document(path, data)
    if not isinstance(document, list):
        raise DataError(f"{path} must hold a list of objects, or one object per line")
    for number, record in enumerate(document, start=1):
        if not isinstance(record, dict):
            raise DataError(
                f"{path}, item {number} of the list is {_json_type(record)}, not an object such as "
                f'{{"input": …, "label": …}}: {_beginning(json.dumps(record).encode())}'
            )
    return document


def _json_object(path: Path, data: bytes) -> list[Record]:
    """A .json file that is one object over several lines: a single record."""
    document = _json_document(path, data)
    return [document]


def _json_document(path: Path, data: bytes) -> Any:
    try:
        return json.loads(data)
    except json.JSONDecodeError as error:
        line = data.split(b"\n")[error.lineno - 1]
        raise DataError(f"{path}, line {error.lineno} is not JSON ({error.msg}): {_beginning(line)}") from None
    except ValueError as error:  # not UTF-8
        raise DataError(f"{path} is not JSON ({error})") from None


def _json_type(value: Any) -> str:
    names = {list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}
    return names.get(type(value), "null")


def _beginning(line: bytes) -> str:
    text = line.strip().decode("utf-8", errors="replace")
    return text if len(text) <= 80 else text[:77] + "…"


# ---------------------------------------------------------------------------------------------- datasets


def _read_table(path: Path, kind: str) -> Sequence[Record]:
    """A .csv, .parquet or .arrow file."""
    from datasets import load_dataset

    # Only an empty cell is a missing value: "NA", "None" and "null" are answers like any other.
    options = {"na_values": [""], "keep_default_na": False} if kind == "csv" else {}
    if path.stat().st_size == 0:
        raise DataError(f"{path} is empty")
    try:
        with _quiet():
            return load_dataset(kind, data_files=str(path), split="train", **options)
    except Exception as error:
        reason = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
        raise DataError(f"{path} cannot be read as {kind}: {reason}") from error


def _read_folder(path: Path, *, data_dir: str | None, split: str, flag: str) -> Sequence[Record]:
    """A folder written by `save_to_disk`, or one of data files."""
    from datasets import DatasetDict, load_dataset, load_from_disk

    saved = path / data_dir if data_dir else path
    if (saved / "dataset_dict.json").is_file() or (saved / "state.json").is_file():
        data = load_from_disk(str(saved))
        if not isinstance(data, DatasetDict):
            return data
        if split not in data:
            raise _unknown_split(str(path), split, list(data), flag=flag)
        return data[split]
    try:
        with _quiet():
            return load_dataset(str(path), data_dir=data_dir, split=split)
    except Exception as error:
        raise _load_failure(error, name=str(path), split=split, flag=flag) from error


def _read_hub(name: str, *, data_dir: str | None, split: str, trust_remote_code: bool, flag: str) -> Sequence[Record]:
    """A data set of the Hub, or its cached copy when the Hub cannot be reached."""
    from datasets import load_dataset

    if trust_remote_code:
        logger.warning("--data.trust_remote_code does nothing for %s: datasets no longer runs loading scripts", name)
    reachable = _hub_reachable()
    try:
        with contextlib.nullcontext() if reachable else _offline(), _quiet():
            return load_dataset(name, data_dir=data_dir, split=split)
    except Exception as error:
        if not reachable or isinstance(error, ConnectionError):
            raise DataError(
                f"{flag}: {name} is neither a local file or folder (looked in {Path.cwd()}) nor in the Hub's cache, "
                f"and the Hub cannot be reached: download it first, or give {ACCEPTED}"
            ) from error
        raise _load_failure(error, name=name, split=split, flag=flag) from error


def _load_failure(error: Exception, *, name: str, split: str, flag: str) -> DataError:
    reason = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
    unknown = re.match(r"Unknown split .* Should be one of (\[.*\])", reason)
    if unknown:
        return _unknown_split(name, split, re.findall(r"'([^']*)'", unknown[1]), flag=flag)
    return DataError(f"{flag}: {name} cannot be loaded: {reason}")


def _unknown_split(name: str, split: str, known: list[str], *, flag: str) -> DataError:
    split_flag = SPLIT_FLAG.get(flag, "the split")
    return DataError(f"{flag}: {name} has no split {split!r}: set {split_flag} to one of {', '.join(known)}")


def _hub_reachable() -> bool:
    """One short request: `datasets` itself retries for half a minute before it says so."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_PROBE_SECONDS)
    except Exception:  # whatever the HTTP client raises: the answer is no
        return False
    return True


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Cached copies only, without a request."""
    import datasets.config
    from huggingface_hub import constants

    before = datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE
    datasets.config.HF_HUB_OFFLINE = constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE = before


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

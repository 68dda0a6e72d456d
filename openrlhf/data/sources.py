"""Sources of records: a comma list of files, folders and Hub names becomes one sequence of plain dicts."""

from __future__ import annotations

import contextlib
import functools
import glob
import importlib.metadata
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, overload
from urllib.parse import unquote

import numpy as np

from openrlhf.data.files import (
    DataError,
    HubUnreachableError,
    Record,
    UnknownSplitError,
    read_folder,
    read_hub,
    read_json,
    read_table,
)
from openrlhf.worlds.environments import is_world, world_name

logger = logging.getLogger(__name__)

__all__ = ["DataError", "Record", "Records", "load_records", "named", "warn_left_out"]

FILE_KINDS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".arrow": "arrow"}
ACCEPTED = (
    "a .jsonl, .json, .csv, .parquet or .arrow file, a pattern such as 'folder/*.jsonl', a folder, "
    "or a Hub name such as org/name"
)
HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")

DEFAULT_SPLITS = ("train", "test")
"""The default of the split flags. A single file has no splits to choose from."""

# Flags that belong to the same data set, so that an error about one of them can name it.
PROBS_FLAG = {"--data.prompt_dataset": "--data.prompt_probs", "--data.dataset": "--data.dataset_probs"}
SPLIT_FLAG = {
    "--data.prompt_dataset": "--data.prompt_split",
    "--data.dataset": "--data.dataset_split",
    "--eval.dataset": "--eval.split",
}


WorldRecords = Callable[[str, int | None], Sequence[Record]]
"""From a world's name, and the most records that are wanted, to its records. Raises DataError."""


@dataclass(frozen=True, slots=True)
class Source:
    """The records of one file, folder or Hub name."""

    name: str
    """The name in messages: that of the file, the folder, or the data set on the Hub."""
    records: Sequence[Record]
    folder: Path | None = None
    """The folder of the file, in which paths of images are looked for; None: it has none here."""
    entry: str = ""
    """A short name of the entry of the comma list that it is of; "" where that has only one."""


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

    def entry(self, index: int) -> str:
        """A short name of the data set it comes from, where there are several: `math` of `math.jsonl,data/chat`."""
        return self._sources[self._rows[index][0]].entry

    def folder(self, index: int) -> Path | None:
        """The folder of the file it comes from; None for a data set of the Hub."""
        return self._sources[self._rows[index][0]].folder


def load_records(
    spec: str,
    *,
    split: str = "train",
    max_samples: int | None = None,
    probs: str | Sequence[float] | None = None,
    seed: int = 42,
    trust_remote_code: bool = False,
    worlds: WorldRecords | None = None,
    flag: str = "--data.prompt_dataset",
) -> Records:
    """The records that `flag` names: its entries mixed, and of the mixture the first `max_samples`.

    `spec` is a comma list of `name[@data_dir]`, `file://…`, `hf://datasets/…` and patterns such as `folder/*.jsonl`,
    whose files follow one another and are one entry. Without `probs` the entries follow one another. With them each
    next record is drawn from an entry with that probability until every entry has been read to its end; those
    that ended earlier start over (what `datasets.interleave_datasets` calls "all_exhausted").

    `worlds` gives the records of an entry that names a world; None: there are none of these here.

    A single file has no splits: `split` applies to folders and Hub names. Raises DataError.
    """
    names = [name.strip() for name in (spec or "").split(",") if name.strip()]
    if not names:
        raise DataError(f"{flag} is empty: give {ACCEPTED}")
    if max_samples is not None and max_samples < 1:
        raise DataError(f"--data.max_samples must be >= 1, got {max_samples}")
    weights = None if probs is None else parse_probabilities(probs, count=len(names), flag=flag)
    entries = [
        [_load_world(name, worlds, limit=max_samples, flag=flag)]
        if is_world(name)
        else _load_entry(name, split=split, limit=max_samples, trust_remote_code=trust_remote_code, flag=flag)
        for name in names
    ]
    lengths = [sum(len(source.records) for source in entry) for entry in entries]
    rows = concatenated_rows(lengths) if weights is None else interleaved_rows(lengths, probs=weights, seed=seed)
    rows = rows[:max_samples]
    if unread := [name for number, name in enumerate(names) if not (rows[:, 0] == number).any()]:
        logger.warning("%s: --data.max_samples %s leaves no record of %s", flag, max_samples, ", ".join(unread))
    short = _short_names(names)
    sources = [replace(source, entry=short[number]) for number, entry in enumerate(entries) for source in entry]
    return Records(sources, _rows_of_files(rows, entries))


def _short_names(names: Sequence[str]) -> list[str]:
    """What metrics call each entry: the end of its path without the suffix, or all of it where ends are alike."""
    if len(names) == 1:
        return [""]
    plain = [name.removeprefix("file://").rstrip("/") for name in names]
    ends = [re.sub(r"\.(jsonl?|csv|parquet|arrow)$", "", name.rpartition("/")[2]) for name in plain]
    found = ends if len(set(ends)) == len(ends) and not any(map(glob.has_magic, ends)) else plain
    return [re.sub(r"[^\w.-]+", "_", name).strip("_") for name in found]


def warn_left_out(records: Records, rows: Sequence[int], *, why: str, what: str, flag: str) -> None:
    """One warning about records that will not be used: how many, why, and the first few."""
    if rows:
        logger.warning(
            "%s: left out %d of %d %s, which %s: %s", flag, len(rows), len(records), what, why, named(records, rows)
        )


def named(records: Records, rows: Sequence[int]) -> str:
    """The first few of these records, for messages."""
    return ", ".join([*(records.where(row) for row in rows[:5]), *(["…"] if len(rows) > 5 else [])])


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


def _rows_of_files(rows: np.ndarray, entries: Sequence[Sequence[Source]]) -> np.ndarray:
    """int64 [N, 2]: from (entry, its record) to (source, its record), the sources of all entries numbered together."""
    result = np.empty_like(rows)
    first_source = 0
    for number, entry in enumerate(entries):
        mine = rows[:, 0] == number
        starts = np.cumsum([0, *(len(source.records) for source in entry)])
        which = np.searchsorted(starts, rows[mine, 1], side="right") - 1
        result[mine] = np.stack([first_source + which, rows[mine, 1] - starts[which]], axis=1)
        first_source += len(entry)
    return result


# ---------------------------------------------------------------------------------------------- one entry


def _load_entry(name: str, *, split: str, limit: int | None, trust_remote_code: bool, flag: str) -> list[Source]:
    """The sources of one entry of the comma list: one, or the files of a pattern in the order of their names."""
    load = functools.partial(_load_source, split=split, trust_remote_code=trust_remote_code, flag=flag)
    if name.startswith("hf://"):
        return [_load_url(name, split=split, limit=limit, flag=flag)]
    if name.startswith("file://"):
        name = unquote(name.removeprefix("file://localhost").removeprefix("file://"))
    pattern = str(Path(name).expanduser())
    if not glob.has_magic(pattern) or Path(pattern).exists():
        return [load(name, limit=limit)]
    files = sorted(path for path in glob.glob(pattern, recursive=True) if Path(path).is_file())
    if not files:
        raise DataError(f"{flag}: {name} matches no file (looked in {Path.cwd()}): give {ACCEPTED}")
    sources: list[Source] = []
    for path in files:
        left = None if limit is None else limit - sum(len(source.records) for source in sources)
        if left == 0:
            break
        sources.append(load(path, limit=left))
    return sources


def _load_world(name: str, worlds: WorldRecords | None, *, limit: int | None, flag: str) -> Source:
    if worlds is None:
        raise DataError(f"{flag}: {name} is a world, whose records only reinforcement learning can use")
    return _source(world_name(name), worlds(name, limit), limit=limit, flag=flag)


def _load_url(url: str, *, split: str, limit: int | None, flag: str) -> Source:
    """`hf://datasets/org/name[@revision][/files]`, as `huggingface_hub` writes it."""
    parts = url.removeprefix("hf://").removeprefix("datasets/").strip("/").split("/")
    named = 1 if len(parts) == 2 and Path(parts[1]).suffix.lower() in FILE_KINDS else 2
    name, _, revision = "/".join(parts[:named]).partition("@")
    if not HUB_NAME.fullmatch(name):
        raise DataError(f"{flag}: {url} must be hf://datasets/ORG/NAME, with @REVISION and /FILES if need be")
    files = "/".join(parts[named:]) or None
    with _about(url, split=split, flag=flag):
        records = read_hub(name, data_dir=None, split=split, revision=revision or None, data_files=files)
    return _source(name, records, limit=limit, flag=flag)


def _source(
    name: str, records: Sequence[Record], *, limit: int | None, flag: str, folder: Path | None = None
) -> Source:
    if len(records) == 0:
        raise DataError(f"{flag}: {name} has no records")
    return Source(name, _First(records, limit) if limit is not None and limit < len(records) else records, folder)


def _load_source(name: str, *, split: str, limit: int | None, trust_remote_code: bool, flag: str) -> Source:
    data_dir = folder = None
    if "@" in name and not Path(name).expanduser().exists():
        name, data_dir = name.split("@", 1)
    path = Path(name).expanduser()
    kind = FILE_KINDS.get(path.suffix.lower())
    if path.suffix == ".py":
        raise _script_refused(name, flag=flag)
    if path.is_file():
        if kind is None:
            raise DataError(f"{flag}: cannot tell what kind of data {name} is: give {ACCEPTED}")
        records = read_json(path, limit=limit) if kind == "json" else read_table(path, kind)
        name, folder = path.name, path.parent.absolute()
        if split not in DEFAULT_SPLITS:
            logger.warning(
                "%s %s does nothing for %s, which is one file: all of it is read",
                SPLIT_FLAG.get(flag, "the split"),
                split,
                name,
            )
    elif path.is_dir():
        if (path / f"{path.resolve().name}.py").is_file():
            raise _script_refused(f"{name}/{path.resolve().name}.py", flag=flag)
        with _about(name, split=split, flag=flag):
            records = read_folder(path, data_dir=data_dir, split=split)
        folder = (path / (data_dir or "")).absolute()
    elif kind is not None or not HUB_NAME.fullmatch(name) or name.startswith("."):
        raise DataError(f"{flag}: there is no file {name} (looked in {Path.cwd()}): give {ACCEPTED}")
    else:
        if trust_remote_code:
            logger.warning("--data.trust_remote_code does nothing for %s: datasets runs no loading scripts", name)
        with _about(name, split=split, flag=flag):
            records = read_hub(name, data_dir=data_dir, split=split)
    return _source(name, records, limit=limit, flag=flag, folder=folder)


@contextlib.contextmanager
def _about(name: str, *, split: str, flag: str) -> Iterator[None]:
    """Say it in the user's words: which flag to change, and to what."""
    try:
        yield
    except UnknownSplitError as error:
        raise DataError(
            f"{flag}: {name} has no split {split!r}: set {SPLIT_FLAG.get(flag, 'the split')} to one of "
            f"{', '.join(error.known)}"
        ) from error
    except HubUnreachableError as error:
        raise DataError(
            f"{flag}: {name} is neither a local file or folder (looked in {Path.cwd()}) nor in the Hub's cache, "
            f"and the Hub cannot be reached: download it first, or give {ACCEPTED}"
        ) from error
    except DataError as error:
        raise DataError(f"{flag}: {error}") from error


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

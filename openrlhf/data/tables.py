"""Everything that `datasets` reads for us: tables, folders and the Hub, or its cache where the Hub is out of reach."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from openrlhf.data.errors import DataError
from openrlhf.data.json_files import Record

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
            return load_dataset(kind, data_files=str(path), split="train", **options, **_cache())
    except Exception as error:  # pandas, pyarrow and datasets have no exception in common
        if _NO_DATA in str(error):
            return []
        raise DataError(f"{path} cannot be read as {kind}: {_reason(error)}") from error


def read_folder(path: Path, *, data_dir: str | None, split: str) -> Sequence[Record]:
    """A folder written by `save_to_disk`, or one of data files."""
    from datasets import DatasetDict, load_from_disk

    saved = path / data_dir if data_dir else path
    if not (saved / "dataset_dict.json").is_file() and not (saved / "state.json").is_file():
        return _load(str(path), data_dir=data_dir, split=split)
    data = load_from_disk(str(saved))
    if not isinstance(data, DatasetDict):
        return data
    if split not in data:
        raise UnknownSplitError(list(data))
    return data[split]


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
            return load_dataset(name, data_dir=data_dir, split=split, **given, **_cache())
    except ConnectionError as error:
        raise HubUnreachableError(str(error)) from error
    except Exception as error:  # whatever its many readers raise
        reason = _reason(error)
        if _NO_DATA in reason:
            return []
        unknown = re.match(r"Unknown split .* Should be one of (\[.*\])", reason)
        if unknown:
            raise UnknownSplitError(re.findall(r"'([^']*)'", unknown[1])) from error
        raise DataError(f"{name} cannot be loaded: {reason}") from error


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


def _reason(error: Exception) -> str:
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

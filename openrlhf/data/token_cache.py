"""Arrays that are costly to make, made once per machine and kept in a folder.

One process makes them, under a lock; the others, and later runs, map the same files into memory. A folder that cannot
be used costs time, never the run.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np
from filelock import FileLock, Timeout

logger = logging.getLogger(__name__)

Arrays = Mapping[str, np.ndarray]

LOCK_SECONDS = 3600.0
"""How long a process waits for another one's arrays before it makes its own."""


def default_folder() -> Path:
    """Beside what `datasets` keeps; HF_HOME and HF_DATASETS_CACHE move it."""
    import datasets

    return Path(datasets.config.HF_DATASETS_CACHE) / "openrlhf"


def cached(folder: Path, key: str, make: Callable[[], Arrays], *, what: str) -> Arrays:
    """The arrays called `key`: from the folder if it has them, otherwise made, and kept there if that is possible."""
    entry = folder / key
    if (found := _load(entry)) is not None:
        return found
    with _lock(folder, key, what=what) as held:
        if not held:
            return make()
        if (found := _load(entry)) is not None:
            return found
        arrays = make()
        try:
            _save(entry, arrays)
        except OSError as error:
            logger.warning("%s cannot be kept in %s, and will be made again next time: %s", what, folder, error)
        found = _load(entry)
        return arrays if found is None else found


@contextlib.contextmanager
def _lock(folder: Path, key: str, *, what: str) -> Iterator[bool]:
    """Whether it is this process that makes the arrays for all; the others wait here until they are there."""
    lock = FileLock(folder / f"{key}.lock")
    held = False
    try:
        folder.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            logger.info("waiting for another process, which makes %s (%s)", what, lock.lock_file)
            lock.acquire(timeout=LOCK_SECONDS)
        held = True
    except Timeout:
        logger.warning("%s: waited %.0f s for another process in vain; made here as well", what, LOCK_SECONDS)
    except (OSError, NotImplementedError) as error:
        logger.warning("%s cannot be kept in %s, and will be made again next time: %s", what, folder, error)
    try:
        yield held
    finally:
        if held:
            lock.release()


def _load(entry: Path) -> Arrays | None:
    """Mapped into memory: the processes of a machine share the pages."""
    try:
        return {path.stem: np.load(path, mmap_mode="r") for path in entry.iterdir()}
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logger.warning("%s cannot be read, and is made again: %s", entry, error)
        shutil.rmtree(entry, ignore_errors=True)
        return None


def _save(entry: Path, arrays: Arrays) -> None:
    """All of them or nothing: written beside, then renamed."""
    beside = entry.with_name(f"{entry.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        beside.mkdir()
        for name, array in arrays.items():
            with (beside / f"{name}.npy").open("wb") as file:
                np.save(file, array)
                file.flush()
                os.fsync(file.fileno())
        beside.rename(entry)
    finally:
        shutil.rmtree(beside, ignore_errors=True)

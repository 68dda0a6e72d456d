"""Turns all records of a data set into tokens: checked, in parallel, and once per machine.

The result is kept in a folder as arrays. One process makes them, under a lock; the others, and later runs, map the same
files into memory. A folder that cannot be used costs time, never the run.

`datasets.Dataset.map(num_proc=…, new_fingerprint=…)` does this too, and was measured beside it (datasets 5.2, 200,000
records of 45 tokens and ten of 40,000, one process; CPU seconds, and memory on top of the records):

                      this           Dataset.map
    first time        29 s,  91 MB   36 s, 198 MB
    from the cache    1.3 s, 91 MB   2.8 s, 299 MB
    100 records       0.02 s         2.3 s, the import of `datasets`

It also needs one schema for all records, which JSON files with mixed keys do not have, and it forks this process, which
runs threads. Hence this file, with a pool that starts fresh interpreters from 8,192 records on.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import logging
import multiprocessing
import os
import pickle
import shutil
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, fields
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from filelock import FileLock, Timeout

from openrlhf.data.boundaries import Encoder, ImageTokens, Tokens, without_common_beginning
from openrlhf.data.files import DataError
from openrlhf.data.image_places import DataImages, ImagePlaces, image_sources
from openrlhf.data.images import existing_file
from openrlhf.data.reading import Format, Reading, SkipReason, Unusable
from openrlhf.data.sources import Record, Records
from openrlhf.data.templates import template_arguments
from openrlhf.models.image_processor import ImageProcessorError

logger = logging.getLogger(__name__)

CHUNK = 512
"""Records tokenised per call."""
PARALLEL_FROM = 8192
"""Records from which on other processes are worth their start of some seconds."""
MAX_WORKERS = 16

_REASONS = tuple(SkipReason)


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """The tokens of N samples, each of K sequences, end to end; and what became of the records without."""

    rows: np.ndarray
    """int64 [N]: the record of each sample."""
    values: np.ndarray
    """float64 [N]: the number that goes with it."""
    altered: np.ndarray
    """bool [N]: the chat template changed words that are learnt."""
    lengths: np.ndarray
    """int64 [N, K]"""
    truncated: np.ndarray
    """bool [N, K]"""
    images: np.ndarray
    """int64 [N, K]: how many images a sequence has."""
    image_spans: np.ndarray
    """int64 [I, 2]: where they begin and end in their sequences."""
    image_keys: np.ndarray
    """int64 [I]: equal for equal sources."""
    ids: np.ndarray
    """int32 [T]"""
    targets: np.ndarray
    """bool [T]"""
    skipped: np.ndarray
    """int64 [S]: records without a sample."""
    reasons: np.ndarray
    """int8 [S]: number of the reason."""

    def skipped_for(self, reason: SkipReason) -> np.ndarray:
        return self.skipped[self.reasons == _REASONS.index(reason)]


def tokenise(
    records: Records,
    format: Format,
    encoder: Encoder,
    *,
    images: DataImages | None = None,
    workers: int | None = None,
    cache_dir: Path | None = None,
    flag: str,
) -> Columns:
    """The samples of `records` in their order.

    `workers` processes; None: as many as are worth their start. With a `cache_dir` the processes of a machine share
    the work: one does it. `images`: how many tokens the images of the records have. Raises DataError.
    """
    work = _Work(format, encoder, images)
    if images is not None:
        workers = 1  # a processor cannot be copied into another process; of an image only its size is read
    make = functools.partial(_tokenise, records, work, workers=workers, flag=flag)
    if cache_dir is None:
        return make()
    key = _fingerprint(records, work)
    arrays = cached(cache_dir, key, lambda: _as_dict(make()), what=f"the tokens of {flag}")
    return Columns(**arrays)


# ---------------------------------------------------------------------------------------------- one chunk


class RecordError(Exception):
    """The record of row `args[0]` is wrong, and `args[1]` says why. It travels between processes."""


@dataclass(frozen=True)
class _Work:
    format: Format
    encoder: Encoder
    images: DataImages | None = None

    def run(self, first_row: int, records: Sequence[tuple[Record, Path | None]]) -> Columns:
        """The samples of neighbouring records, each with the folder of its file."""
        read: list[tuple[int, Reading]] = []
        images: list[list[ImageTokens]] = []
        out = _Builder()
        for row, (record, folder) in enumerate(records, start=first_row):
            try:
                reading = self.format.read(record, self.encoder.tokenizer, folder)
                images += self._image_tokens(reading)
                read.append((row, reading))
            except Unusable as unusable:
                out.skip(row, unusable.reason)
            except (DataError, ImageProcessorError) as error:
                raise RecordError(row, str(error)) from error
        encoded = iter(self.encoder.encode([text for _, reading in read for text in reading.texts], images))
        for row, reading in read:
            sequences = [next(encoded) for _ in reading.texts]
            if reading.undivided:
                sequences = without_common_beginning(*sequences)
            if reason := self._unusable(sequences, reading):
                out.skip(row, reason)
            else:
                out.add(row, reading, sequences)
        return out.columns()

    def _image_tokens(self, reading: Reading) -> list[list[ImageTokens]]:
        """The tokens of the images of each text. What a URL names is fetched for it."""
        if self.images is None:
            return [[] for _ in reading.texts]
        for text, sources in zip(reading.texts, reading.images, strict=True):
            self.images.places.require_tokens(text.text, sources)
        return [
            [self.images.token_ids(image) or self.images.prepare(image).token_ids for image in sources]
            for sources in reading.images
        ]

    def _unusable(self, sequences: Sequence[Tokens], reading: Reading) -> SkipReason | None:
        if any(end > self.encoder.max_len for tokens in sequences for _, end in tokens.images):
            return SkipReason.LONG_IMAGE
        # Two tokens of an answer and its end are the least that is worth a forward.
        if any(0 < tokens.prompt_length >= self.encoder.max_len - 2 for tokens in sequences):
            return SkipReason.LONG_PROMPT
        if not all(tokens.targets.any() for tokens in sequences):
            return SkipReason.NOTHING_LEFT
        same_images = len({*reading.images}) <= 1
        if len(sequences) == 2 and same_images and np.array_equal(sequences[0].ids, sequences[1].ids):
            return SkipReason.EQUAL_CUT if any(tokens.truncated for tokens in sequences) else SkipReason.EQUAL
        return None


@dataclass
class _Builder:
    samples: list[tuple[int, Reading, list[Tokens]]] = field(default_factory=list)
    skipped: list[tuple[int, int]] = field(default_factory=list)

    def add(self, row: int, reading: Reading, sequences: list[Tokens]) -> None:
        self.samples.append((row, reading, sequences))

    def skip(self, row: int, reason: SkipReason) -> None:
        self.skipped.append((row, _REASONS.index(reason)))

    def columns(self) -> Columns:
        self.skipped.sort()
        sequences = [tokens for _, _, sequences in self.samples for tokens in sequences]
        n = len(self.samples)
        return Columns(
            rows=np.array([row for row, _, _ in self.samples], dtype=np.int64),
            values=np.array([reading.value for _, reading, _ in self.samples], dtype=np.float64),
            altered=np.array([any(t.altered for t in reading.texts) for _, reading, _ in self.samples], dtype=bool),
            lengths=np.array([len(tokens.ids) for tokens in sequences], dtype=np.int64).reshape(n, -1 if n else 1),
            truncated=np.array([tokens.truncated for tokens in sequences], dtype=bool).reshape(n, -1 if n else 1),
            images=np.array([len(tokens.images) for tokens in sequences], dtype=np.int64).reshape(n, -1 if n else 1),
            image_spans=np.array([span for tokens in sequences for span in tokens.images], np.int64).reshape(-1, 2),
            image_keys=np.array(
                [_key(source) for _, reading, _ in self.samples for sources in reading.images for source in sources],
                dtype=np.int64,
            ),
            ids=np.concatenate([np.empty(0, np.int32), *(tokens.ids for tokens in sequences)]),
            targets=np.concatenate([np.empty(0, bool), *(tokens.targets for tokens in sequences)]),
            skipped=np.array([row for row, _ in self.skipped], dtype=np.int64),
            reasons=np.array([reason for _, reason in self.skipped], dtype=np.int8),
        )


def _key(source: bytes | str) -> int:
    written = source if isinstance(source, bytes) else source.encode()
    return int.from_bytes(hashlib.blake2b(written, digest_size=8).digest(), signed=True)


# ---------------------------------------------------------------------------------------------- all chunks


def _tokenise(records: Records, work: _Work, *, workers: int | None, flag: str) -> Columns:
    if workers is None:
        workers = min(_cores(), MAX_WORKERS) if len(records) >= PARALLEL_FROM else 1
    try:
        return _joined(list(_in_parallel(records, work, workers) if workers > 1 else _in_turn(records, work)))
    except BrokenProcessPool as error:
        logger.warning("%s: tokenised in one process, because others cannot be started: %s", flag, error)
        return _joined(list(_in_turn(records, work)))
    except RecordError as error:
        row, message = error.args
        raise DataError(f"{flag}, {records.where(row)}: {message}") from error
    except DataError as error:
        raise DataError(f"{flag}: {error}") from error


def _cores() -> int:
    """The cores that this process may use, where the system says so."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _chunks(records: Records) -> Iterator[tuple[int, list[tuple[Record, Path | None]]]]:
    for start in range(0, len(records), CHUNK):
        rows = range(start, min(start + CHUNK, len(records)))
        yield start, [(records[row], records.folder(row)) for row in rows]


def _in_turn(records: Records, work: _Work) -> Iterator[Columns]:
    return (work.run(start, chunk) for start, chunk in _chunks(records))


def _in_parallel(records: Records, work: _Work, workers: int) -> Iterator[Columns]:
    """Chunk after chunk; only a few records wait in memory at a time."""
    try:
        pickled = pickle.dumps(work)
    except Exception as error:  # tokenizers that come as code may hold anything
        raise BrokenProcessPool(f"this tokenizer cannot be copied ({error})") from error
    # Fresh interpreters: a fork of a process that runs threads, CUDA or a parallel tokenizer may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_start_worker, initargs=(pickled,)) as pool:
        waiting: deque[Future[Columns]] = deque()
        try:
            for start, chunk in _chunks(records):
                waiting.append(pool.submit(_run_in_worker, start, chunk))
                if len(waiting) > 2 * workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_worker_job: _Work | None = None


def _start_worker(pickled: bytes) -> None:
    global _worker_job
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    _worker_job = pickle.loads(pickled)


def _run_in_worker(start: int, chunk: list[tuple[Record, Path | None]]) -> Columns:
    assert _worker_job is not None
    return _worker_job.run(start, chunk)


def _joined(parts: list[Columns]) -> Columns:
    # A part without samples does not know how many sequences a sample has.
    width = max(part.lengths.shape[1] for part in parts)
    arrays: dict[str, list[np.ndarray]] = {name: [] for name in _as_dict(parts[0])}
    for part in parts:
        for name, array in _as_dict(part).items():
            arrays[name].append(array.reshape(-1, width) if name in ("lengths", "truncated", "images") else array)
    return Columns(**{name: np.concatenate(some) for name, some in arrays.items()})


def _as_dict(columns: Columns) -> dict[str, np.ndarray]:
    return {column.name: getattr(columns, column.name) for column in fields(columns)}


# ---------------------------------------------------------------------------------------------- identity


def _fingerprint(records: Records, work: _Work) -> str:
    """A name for the result: of everything it depends on, this code included."""
    digest = hashlib.blake2b(digest_size=16)
    tokenizer = work.encoder.tokenizer
    about = [
        *(path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.py"))),
        *(importlib.metadata.version(library) for library in ("tokenizers", "transformers")),
        repr(work.format),
        repr((work.encoder.max_len, tokenizer.eos_token_id, tokenizer.special_tokens_map)),
        type(tokenizer).__qualname__,
        json.dumps(tokenizer.chat_template),
        json.dumps(template_arguments(tokenizer)),
        tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else _slow_vocabulary(tokenizer),
        *([work.images.processor.settings, *_image_files(records, work.images.places)] if work.images else []),
    ]
    texts = (json.dumps(records[row], default=repr) for row in range(len(records)))
    for part in chain(about, texts):
        digest.update(f"{len(part)}:".encode() + part.encode("utf-8", errors="surrogatepass"))
    return digest.hexdigest()


def _image_files(records: Records, places: ImagePlaces) -> Iterator[str]:
    """Which files the images are, by their times and sizes: another image may have another number of tokens."""
    for row in range(len(records)):
        for source in image_sources(records[row], places.key):
            if isinstance(source, str) and (path := existing_file(source, records.folder(row))):
                status = os.stat(path)
                yield f"{path} {status.st_size} {status.st_mtime_ns}"


def _slow_vocabulary(tokenizer: Any) -> str:
    return repr((sorted(tokenizer.get_vocab().items()), sorted(map(str, tokenizer.init_kwargs.items()))))


# ---------------------------------------------------------------------------------------------- arrays on disk

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
    """Writes all arrays or none: they are written beside `entry`, and then renamed."""
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

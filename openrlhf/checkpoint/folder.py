"""The folder of a run's checkpoints: each appears whole or not at all, and old ones go when new ones are safe.

<folder>/global_step<N>/       a checkpoint; `manifest.json` in it lists what resuming reads, with sizes and checksums
<folder>/global_step<N>_hf/    its model, by hard links, if asked for
<folder>/best_global_step<N>/  the one with the best evaluation, by hard links, where a run has such
<folder>/latest                the name of the one to continue from
<folder>/.global_step…         what is being written (`.partial`) or deleted (`.trash`); a killed run's is removed later
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import socket
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock, SoftFileLock, Timeout

from openrlhf.utils import waits

logger = logging.getLogger(__name__)


class Disk:
    """File operations that survive a crash of the machine once they have returned. `rename` is all or nothing."""

    def make_folder(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def write_text(self, path: Path, text: str) -> None:
        with path.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def sync_tree(self, folder: Path) -> None:
        """Make everything in the folder durable, whichever process wrote it."""
        for parent, _, names in os.walk(folder):
            for name in names:
                _sync(Path(parent, name))
            _sync(Path(parent))

    def rename(self, old: Path, new: Path) -> None:
        """Within one folder. A file that is called `new` is replaced."""
        os.replace(old, new)
        _sync(new.parent)

    def link_tree(self, source: Path, target: Path, *, without: str | None = None) -> None:
        """The files of `source` under a second name, but not its folder `without`."""
        ignored = shutil.ignore_patterns(without) if without else None
        shutil.copytree(source, target, copy_function=_link, ignore=ignored)
        self.sync_tree(target)

    def remove(self, path: Path) -> None:
        """A folder with all that is in it, or a file."""
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ClaimedError(RuntimeError):
    """Another run has it. The text says which, as far as it is known."""


class Claim:
    """This process's lock of a folder. `take` takes it; `release`, or the end of the process, gives it back."""

    def __init__(self, file: Path, *, flag: str) -> None:
        """`file`: the lock's. `flag`: the folder in users' words, for messages."""
        self._file = file
        self._flag = flag
        self._lock = FileLock(file)

    def take(self) -> None:
        """Raises ClaimedError, and OSError where no file can be written."""
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ClaimedError(self._holder()) from None
        except NotImplementedError:  # filelock before 3.25; later ones keep a file that says who has it
            logger.warning("%s: this file system has no locks; start no second run on it", self._flag)
            return
        if not isinstance(self._lock, SoftFileLock):
            with contextlib.suppress(OSError):  # whoever is refused is told less
                _write_no_link(self._file, f"{os.getpid()}\n{socket.gethostname()}\n")

    def _holder(self) -> str:
        try:
            pid, host = self._file.read_text(encoding="utf-8").split()[:2]
        except (OSError, ValueError):
            return f"another run, which holds {self._file}"
        return f"the run with process id {int(pid)} on {host}" if pid.isdecimal() else f"another run ({self._file})"

    def release(self, *, remove: bool = False) -> None:
        """`remove`: remove the lock's file too. No process waits for the lock, so none can hold the removed file."""
        if remove and self._lock.is_locked:
            with contextlib.suppress(OSError):
                self._file.unlink()
        self._lock.release()


def _write_no_link(file: Path, text: str) -> None:
    descriptor = os.open(file, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "w", encoding="utf-8") as opened:
        opened.write(text)


MANIFEST = "manifest.json"
FORMAT = 1
"""The format of the checkpoints that are written. The number grows when an older version could not read them, or would
read them wrongly.

0 means checkpoints without a number: the same files, before the number was written. All formats up to this one are
read.
"""
TRAINING_STATE = "training_state"
DEEPSPEED_PARTS = ("_actor", "_critic")
"""The folders in which RL runs of other frameworks keep DeepSpeed's checkpoints of their models."""
GIB = 1 << 30


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or continued from. The message says which, why, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """How much is kept. The latest checkpoint always is."""

    max_num: int = 3
    max_gib: float = float("inf")


class CheckpointFolder:
    """Written by one process at a time: `begin`, fill the folder it gives, `commit`."""

    def __init__(self, path: Path, retention: Retention, *, link_model: str | None = None, disk: Disk | None = None):
        """`link_model`: the part of each checkpoint that is also wanted as global_step<N>_hf."""
        self.path = path
        self._retention = retention
        self._link_model = link_model
        self._disk = disk or Disk()
        self._claim = Claim(path / ".lock", flag=f"--ckpt.path {path}")

    def open(self) -> None:
        """Take the folder for this process, and remove what a killed one left half done."""
        try:
            self._disk.make_folder(self.path)
            self._claim.take()
        except ClaimedError as holder:
            raise CheckpointError(
                f"--ckpt.path {self.path}: {holder} writes checkpoints there; wait for it, or name another folder"
            ) from None
        except OSError as error:
            raise CheckpointError(f"--ckpt.path {self.path}: cannot be written ({error.strerror})") from error
        self.remove_leftovers()

    def remove_leftovers(self) -> None:
        """Remove the folders of writes that were not finished."""
        for leftover in [*self.path.glob(".global_step*"), *self.path.glob(".latest*")]:
            self._disk.remove(leftover)

    def close(self) -> None:
        self._claim.release()

    # ------------------------------------------------------------------------------------------------ reading

    @property
    def steps(self) -> list[int]:
        """The steps of all checkpoints, ascending. DeepSpeed's own checkpoints are not among them."""
        return sorted(step for step, path in tagged(self.path) if not written_by_deepspeed(path))

    @property
    def has_deepspeeds(self) -> bool:
        """Checkpoints that DeepSpeed wrote are here, under the same names as ours would have; of RL, in the folder of
        each model."""
        folders = (self.path, *(self.path / part for part in DEEPSPEED_PARTS))
        return any(written_by_deepspeed(path) for folder in folders for _, path in tagged(folder))

    def newest_complete(self) -> Path | None:
        """The latest checkpoint; if it is damaged the newest that is not, with a warning; None if there is none.

        Raises CheckpointError if all are damaged.
        """
        candidates = [self._tag(step) for step in reversed(self.steps)]
        named = self.latest
        if named is not None and named in candidates:
            candidates.remove(named)
            candidates.insert(0, named)
        elif named is not None and candidates:
            logger.warning("%s names %s, which is not there", self.path / "latest", named.name)
        found: list[str] = []
        for candidate in candidates:
            require_readable(candidate)
            if (damage := damage_of(candidate)) is None:
                if found:
                    logger.warning("%s is used instead", candidate)
                return candidate
            found.append(f"{candidate.name}: {damage}")
            logger.warning("checkpoint %s cannot be used: %s", candidate, damage)
        if found:
            raise CheckpointError(
                f"--ckpt.path {self.path}: no checkpoint there can be continued from ({'; '.join(found)}); "
                "restore one, or start anew with another folder"
            )
        return None

    @property
    def latest(self) -> Path | None:
        """The checkpoint that was written last, or the one that a user has chosen. It may be damaged."""
        try:
            return self.path / (self.path / "latest").read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError):
            return None

    def _tag(self, step: int) -> Path:
        return self.path / f"global_step{step}"

    # ------------------------------------------------------------------------------------------------ writing

    def require_room(self, expected_bytes: int) -> None:
        """CheckpointError if there is none for so much; the size of the last checkpoint is the better guess, if any."""
        if self.steps:
            expected_bytes = size_of(self._tag(self.steps[-1]))
        free = shutil.disk_usage(self.path).free
        if free < expected_bytes:
            raise CheckpointError(
                f"--ckpt.path {self.path}: a checkpoint takes about {expected_bytes / GIB:.3g} GiB, and "
                f"{free / GIB:.3g} GiB are free; make room, or lower --ckpt.max_num"
            )

    def begin(self, step: int) -> Path:
        """An empty folder to be filled, which `commit` makes the latest checkpoint."""
        if written_by_deepspeed(self._tag(step)):
            raise CheckpointError(f"{self._tag(step)} was written by DeepSpeed and stays; name another --ckpt.path")
        draft = self.draft(step)
        self.discard(step)
        self._disk.make_folder(draft)
        return draft

    def commit(self, step: int, *, best: bool = False) -> None:
        draft = self.draft(step)
        self._disk.write_text(draft / MANIFEST, json.dumps(_manifest(draft, step), indent=1))
        self._disk.sync_tree(draft)
        # The linked model first: a run that is killed after it writes this step again, one before it would not.
        if self._link_model is not None:
            linked = self._hidden(step, "hf.partial")
            self._disk.link_tree(draft / self._link_model, linked, without=TRAINING_STATE)
            self._replace(linked, self._export(step), step)
        self._replace(draft, self._tag(step), step)
        pointer = self.path / ".latest.partial"
        self._disk.write_text(pointer, f"global_step{step}\n")
        self._disk.rename(pointer, self.path / "latest")
        if best:
            self.keep_best(step)
        self._thin_out(step)

    def discard(self, step: int) -> None:
        """Remove what `begin` made, if it is there."""
        if self.draft(step).exists():
            self._disk.remove(self.draft(step))

    def draft(self, step: int) -> Path:
        """The folder in which a checkpoint is written."""
        return self._hidden(step, "partial")

    def keep_best(self, step: int) -> None:
        """A checkpoint that is there stays, under a name of its own, until another is the best."""
        linked, place = self._hidden(step, "best.partial"), self.path / f"best_global_step{step}"
        self._disk.link_tree(self._tag(step), linked)
        self._replace(linked, place, step)
        for other in self.path.glob("best_global_step*"):
            if other != place:
                self._throw_away(other, step)

    def _replace(self, new: Path, place: Path, step: int) -> None:
        """Remove what an abandoned run has left in this place."""
        if place.exists():
            self._throw_away(place, step)
        self._disk.rename(new, place)

    def _thin_out(self, newest: int) -> None:
        """Remove those that are too many. Steps after `newest` are of a run that was not continued: they go first."""
        sizes = {step: size_of(self._tag(step)) for step in self.steps}
        for step in sorted(sizes, key=lambda step: (step < newest, step)):
            full = sum(sizes.values()) > self._retention.max_gib * GIB
            if step == newest or not (full or len(sizes) > self._retention.max_num):
                continue
            for place in (self._export(step), self._tag(step)):
                if place.exists():
                    self._throw_away(place, step)
            del sizes[step]

    def _throw_away(self, place: Path, step: int) -> None:
        """Renamed first: half of it must never be taken for a checkpoint."""
        trash = self._hidden(step, f"{place.name}.trash")
        if trash.exists():
            self._disk.remove(trash)
        self._disk.rename(place, trash)
        self._disk.remove(trash)

    def _export(self, step: int) -> Path:
        return self.path / f"global_step{step}_hf"

    def _hidden(self, step: int, what: str) -> Path:
        return self.path / f".global_step{step}.{what}"


def tagged(folder: Path) -> list[tuple[int, Path]]:
    """The checkpoints in it, with their steps, whoever wrote them."""
    if not folder.is_dir():
        return []
    matches = ((re.fullmatch(r"global_step(\d+)", path.name), path) for path in folder.iterdir())
    return [(int(match[1]), path) for match, path in matches if match and path.is_dir()]


def written_by_deepspeed(checkpoint: Path) -> bool:
    return any(checkpoint.glob("*model_states.pt"))


def require_readable(checkpoint: Path) -> None:
    """CheckpointError if a later version has written it: it is whole, so an earlier one would be the wrong choice."""
    try:
        number = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8")).get("format", 0)
    except (OSError, ValueError, AttributeError):
        return  # it is damaged, which is found out later
    if isinstance(number, int) and number > FORMAT:
        raise CheckpointError(
            f"{checkpoint} was written in format {number} by a later version of openrlhf, and this version reads "
            f"formats up to {FORMAT}: continue with that version, or write the name of an earlier checkpoint into "
            f"{checkpoint.parent / 'latest'}"
        )


def damage_of(checkpoint: Path) -> str | None:
    """What is wrong with the files that resuming reads; None: nothing is."""
    try:
        files = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))["files"]
        wanted = {checkpoint / name: (entry["bytes"], entry["crc32"]) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is missing or damaged"
    for path, (size, _) in wanted.items():
        if not path.is_file():
            return f"{path.relative_to(checkpoint)} is missing"
        if path.stat().st_size != size:
            return f"{path.relative_to(checkpoint)} has {path.stat().st_size} bytes of {size}"
    try:
        checksums = _checksums(list(wanted))
    except OSError as error:
        return str(error)
    changed = [path for path, (_, checksum) in wanted.items() if checksums[path] != checksum]
    return f"{changed[0].relative_to(checkpoint)} is damaged" if changed else None


def size_of(folder: Path) -> int:
    """Bytes in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _manifest(draft: Path, step: int) -> dict[str, object]:
    """The manifest of the files that resuming reads. Model folders are not in it: other programs may change them."""
    state = [path for path in draft.glob("state.*") if path.is_file()]
    training = [path for path in draft.glob(f"*/{TRAINING_STATE}/*") if path.is_file()]
    checksums = _checksums(sorted(state + training))
    files = {
        str(path.relative_to(draft)): {"bytes": path.stat().st_size, "crc32": crc} for path, crc in checksums.items()
    }
    return {"format": FORMAT, "step": step, "files": files}


def _checksums(paths: list[Path]) -> dict[Path, int]:
    # Threads: zlib and reading let go of the interpreter.
    with ThreadPoolExecutor(max_workers=8) as pool:
        return dict(zip(paths, pool.map(_checksum, paths), strict=True))


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    waits.mark_progress()
    return value

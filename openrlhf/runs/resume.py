"""How a run is stopped, restarted and resumed.

opened_checkpoints    where checkpoints are, what the run continues from, and which run directory goes on
stoppable             a signal asks for a checkpoint and the end; the message says how to continue
restarted             a run that has lost a part of its cluster continues from its last checkpoint, in the same process
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from openrlhf.backends.ranks import ALONE, Ranks
from openrlhf.checkpoint.folder import CheckpointError, CheckpointFolder, Retention
from openrlhf.checkpoint.manager import ResumePoint, find_checkpoint, run_on_all_ranks
from openrlhf.checkpoint.universal import UniversalCheckpoint, find_universal
from openrlhf.cluster.engines import EngineLostError
from openrlhf.cluster.launch import ClusterError
from openrlhf.cluster.workers import WorkerError
from openrlhf.config.commands import Config
from openrlhf.config.fields import ConfigError
from openrlhf.config.reporting import CheckpointSection, LoggerSection, RLCheckpointSection, SupervisedCheckpointSection
from openrlhf.config.schema import to_dict
from openrlhf.runs.process import USER_ERRORS
from openrlhf.utils import interrupts
from openrlhf.utils.interrupts import Stopped, StopRequest

logger = logging.getLogger(__name__)


class Checkpoints(NamedTuple):
    """The checkpoints of a run, as they are known before anything is loaded."""

    folder: CheckpointFolder | None
    """None: it neither writes nor reads any."""
    found: ResumePoint | None
    """The checkpoint to continue from."""
    universal: UniversalCheckpoint | None = None
    """The checkpoint of DeepSpeed to start from, where there is none of our own."""


@contextlib.contextmanager
def opened_checkpoints(
    section: SupervisedCheckpointSection | RLCheckpointSection,
    *,
    model: str,
    universal_parts: Sequence[str] = (),
    ranks: Ranks = ALONE,
) -> Iterator[Checkpoints]:
    """The folder belongs to this run while open. `model`: the part of a checkpoint that `--ckpt.save_hf` links.

    `universal_parts`: without a checkpoint of our own, begin with DeepSpeed's universal ones in these folders of it
    (--ds.use_universal_ckpt). The first says how far the run has come.

    Raises CheckpointError, and ConfigError for a new run that would replace what another one left.
    """
    if section.period is None and not section.resumes:
        yield Checkpoints(None, None)
        return
    folder = CheckpointFolder(
        Path(section.folder).expanduser().resolve(),
        Retention(max_num=section.max_num, max_gib=section.max_mem),
        link_model=model if section.save_hf else None,
    )
    run_on_all_ranks(ranks, lambda: folder.open() if ranks.is_main else None)
    try:
        found, universal = None, None
        if section.resumes:
            found = find_checkpoint(folder, ranks=ranks)
            if found is None and universal_parts:
                universal, *_ = run_on_all_ranks(
                    ranks, lambda: [find_universal(folder.path / part) for part in universal_parts]
                )
            elif found is None and folder.has_deepspeeds:
                raise CheckpointError(
                    f"--ckpt.path {section.folder} holds checkpoints in DeepSpeed's format: make a universal one of "
                    "the last (python -m deepspeed.checkpoint.ds_to_universal) and add --ds.use_universal_ckpt, or "
                    "name another folder"
                )
            elif found is None:
                logger.info("no checkpoint in %s, a new run begins", folder.path)
        elif folder.steps:
            raise ConfigError(
                f"--ckpt.path {section.folder} holds checkpoints of an earlier run, up to "
                f"global_step{folder.steps[-1]}: continue it with --ckpt.load_enable or --ckpt.auto_resume, "
                "name another folder, or remove them"
            )
        yield Checkpoints(folder, found, universal)
    finally:
        if ranks.is_main:
            folder.close()


def run_directory_of(section: LoggerSection, found: ResumePoint | None) -> tuple[str, bool]:
    """Where this run writes its logs, and whether it goes on with what is there.

    A continued run goes on in the directory it began in, unless that is gone or another one is asked for. (One whose
    name was taken has a number behind it.)
    """
    noted = found.notes.get("run_directory") if found else None
    begun = Path(noted) if isinstance(noted, str) else None
    if begun is not None and begun.is_dir():
        if section.run_dir is None:
            return str(begun), True
        wanted = Path(section.run_dir).expanduser().resolve()
        if begun.parent == wanted.parent and re.fullmatch(re.escape(wanted.name) + r"(-\d+)?", begun.name):
            return str(begun), True
    return section.directory, False


def recorded_settings(config: Config) -> dict[str, Any]:
    """Flag → value, as JSON has it: what a checkpoint remembers of the run that wrote it.

    Where things are written is left out: that has no influence on what is trained.
    """
    return dict(_flat({name: value for name, value in to_dict(config).items() if name not in ("ckpt", "logger")}))


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth")
SAMPLES, SAMPLE_BYTES = 16, 4096


def weights_digest(model: str) -> str:
    """Tells a model's weights from others, also of the same shape, wherever its folder is; a Hub's name is its own.

    Of every file of weights a few blocks are read: enough for weights that were trained, and nothing beside loading.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return model
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(path for path in folder.iterdir() if path.suffix in WEIGHT_FILES and path.is_file()):
        size = path.stat().st_size
        digest.update(f"{size};".encode())
        with path.open("rb") as file:
            for sample in range(SAMPLES):
                file.seek(max(0, size - SAMPLE_BYTES) * sample // (SAMPLES - 1))
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()


ROOM_SECONDS = 600.0
"""The time for which a restart waits for a cluster with room for the run: a node that was lost may come back."""
LOOK_SECONDS = 10.0

_T = TypeVar("_T")


def with_restarts(
    attempt: Callable[[Checkpoints], _T],
    checkpoints: Checkpoints,
    section: RLCheckpointSection,
    *,
    most: int,
    sleep: Callable[[float], None] = time.sleep,
) -> _T:
    """What an attempt returns; one that loses a part of the cluster is followed by another, up to `most` times.

    Each goes on from the newest checkpoint, or, where none has been written yet, begins anew. A run that writes none
    which could be continued from is not restarted.
    """
    found, restarts, waited = checkpoints.found, 0, 0.0
    while True:
        try:
            return attempt(checkpoints._replace(found=found))
        except ClusterError as error:
            if not restarts or waited >= ROOM_SECONDS:
                raise
            logger.warning("%s; looks again in %g s", error, LOOK_SECONDS)
            sleep(LOOK_SECONDS)
            waited += LOOK_SECONDS
            continue
        except Exception as error:
            lost = lost_part(error)
            if lost is None:
                raise
            if section.period is None or section.disable_ds:
                logger.warning("the run ends: it writes no checkpoints that it could go on from (--ckpt.save_steps)")
                raise
            if restarts == most:
                logger.warning("the run ends: --train.max_restarts %d", most)
                raise
        restarts, waited = restarts + 1, 0.0
        found = _newest(checkpoints)
        where = f"goes on from {found.path}" if found else "begins anew, for there is no checkpoint yet"
        logger.warning("%s — the run %s (restart %d of %d)", lost, where, restarts, most)


def lost_part(error: BaseException | None) -> str | None:
    """What an error says is lost of the cluster: a worker that died, failed or does not answer, or an engine's node.

    None: it is something else, which would be so again. That holds for what users have to mend, wherever it was found.
    """
    while error is not None:
        if isinstance(error, EngineLostError):
            return str(error)
        if isinstance(error, WorkerError) and not isinstance(error.reason, (*USER_ERRORS, ConfigError)):
            return str(error)
        error = error.__cause__
    return None


def _newest(checkpoints: Checkpoints) -> ResumePoint | None:
    assert checkpoints.folder is not None, "who writes checkpoints has a folder for them"
    checkpoints.folder.remove_leftovers()
    return find_checkpoint(checkpoints.folder)


@contextlib.contextmanager
def stoppable(section: CheckpointSection, checkpoints: Checkpoints) -> Iterator[StopRequest]:
    """Around the training: SIGTERM and SIGUSR1 ask for a checkpoint and the end.

    Whoever accepts raises `Stopped`. That, or what else ends the run early, becomes a `Stopped` that says what to do.
    """
    folder = None if section.disable_ds else checkpoints.folder
    with interrupts.deferred(section.signal_deadline if folder else 0.0) as request:
        try:
            yield request
        except KeyboardInterrupt as end:
            by = end.by if isinstance(end, Stopped) else request.asked
            if by is None and folder is None:
                raise
            saved = isinstance(end, Stopped) and folder is not None
            text = _what_happened(by, section, saved=saved, overdue=request.overdue)
            if folder is not None:
                text = f"{text}; {_what_next(section, folder.latest)}"
            raise Stopped(by or interrupts.latest(), text, saved=saved) from None


def _what_happened(by: signal.Signals | None, section: CheckpointSection, *, saved: bool, overdue: bool) -> str:
    if by is None:
        return "interrupted"
    if saved:
        return f"stopped by {by.name} and saved"
    if overdue:
        deadline = f"{section.signal_deadline:g} s (--ckpt.signal_deadline)"
        return f"stopped by {by.name}: its step did not end within {deadline}"
    if section.disable_ds:
        return f"stopped by {by.name}: with --ckpt.disable_ds nothing is saved to go on from"
    if section.period is None and not section.resumes:
        return f"stopped by {by.name}: without --ckpt.save_steps or --ckpt.auto_resume nothing is saved to go on from"
    return f"stopped by {by.name} within its step"


def _what_next(section: CheckpointSection, latest: Path | None) -> str:
    if latest is None:
        return "there is no checkpoint yet: it would begin anew"
    flag = "" if section.resumes else " and --ckpt.load_enable"
    return f"started again with the same command{flag} it goes on from {latest}"

"""The process of a run, whatever it trains: how it is set up, what watches it, and how it ends."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from openrlhf.agents.episodes import AgentFileError
from openrlhf.agents.host import kill_every_host
from openrlhf.backends.ranks import ALONE, Ranks
from openrlhf.backends.state import NotFiniteError
from openrlhf.checkpoint.folder import CheckpointError
from openrlhf.cluster.launch import ClusterError
from openrlhf.cluster.workers import WorkerError
from openrlhf.config.commands import TrainerConfig
from openrlhf.config.fields import ConfigError
from openrlhf.config.schema import to_dict
from openrlhf.config.training import TrainSection
from openrlhf.data.sources import DataError
from openrlhf.learners.accumulation import DoesNotFitError
from openrlhf.models.loading import ModelLoadError, silence_progress_bars
from openrlhf.observability.loggers import (
    CompositeLogger,
    JsonlLogger,
    Logger,
    NullLogger,
    read_metrics,
    remote_loggers,
)
from openrlhf.observability.progress import Progress
from openrlhf.observability.report import LiveReport
from openrlhf.observability.run_directory import NoteLog, RunDirectory
from openrlhf.observability.signs import NoWarnings, RunWarnings, Warnings
from openrlhf.observability.watchdog import Watchdog
from openrlhf.rewards.base import RewardError, RewardGoneError
from openrlhf.rollout.base import EngineError
from openrlhf.rollout.runner import RolloutError
from openrlhf.utils import interrupts
from openrlhf.utils.foreign_lines import start_logging
from openrlhf.utils.waits import WaitError
from openrlhf.weight_sync.base import WeightSyncError

logger = logging.getLogger(__name__)

USER_ERRORS = (
    DataError,
    RewardError,
    RewardGoneError,
    AgentFileError,
    ModelLoadError,
    EngineError,
    RolloutError,
    CheckpointError,
    ClusterError,
    WeightSyncError,
    WaitError,
    DoesNotFitError,
    NotFiniteError,
)
"""Errors whose text is all a user needs: no traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """The result of a finished run."""

    run_dir: Path | None
    """None on ranks that have none: the main one reports for all."""
    model_dir: Path
    evaluation: dict[str, float]
    """The last one; empty if there was none."""
    ended_early: str | None = None
    """Why a callback ended it; None: it went to its end."""


@dataclass(slots=True)
class Ending:
    """How a run ended, as an exit status."""

    status: int = 0


@contextlib.contextmanager
def user_errors_end_the_run() -> Iterator[Ending]:
    """Errors that users can mend become one line and status 1; a signal 128 + its number. Defects keep a traceback."""
    ending = Ending()
    try:
        yield ending
    except USER_ERRORS as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        ending.status = 1
    except WorkerError as error:
        if not isinstance(error.reason, (*USER_ERRORS, ConfigError)):
            print(error.details, file=sys.stderr)
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        ending.status = 1
    except interrupts.Stopped as stop:
        print(stop, file=sys.stderr)
        ending.status = 128 + stop.by
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        ending.status = interrupts.exit_status()


def prepare_process(train: TrainSection, ranks: Ranks = ALONE) -> torch.device:
    """Logging, seeds, determinism; returns the device of this process."""
    start_logging(is_main=ranks.is_main)
    silence_progress_bars()
    torch.manual_seed(train.seed)
    if train.full_determinism_enable:
        torch.use_deterministic_algorithms(True)
    return process_device()


def watchdog(train: TrainSection, ranks: Ranks = ALONE) -> Watchdog:
    """Looks at what a run waits for, from its beginning to its end.

    Ranks that wait for the main one, which writes a checkpoint, say, have its signs of life nowhere: it looks for all.
    """
    return Watchdog(stall_seconds=train.stall_timeout if ranks.is_main else 0.0, at_the_end=_let_go)


def _let_go() -> None:
    """Release what a process that ends abruptly must not leave behind."""
    kill_every_host()
    if sys.stderr.isatty():
        os.write(sys.stderr.fileno(), interrupts.SHOW_CURSOR)


def process_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observers:
    """The observers of a run: progress, logs, report."""

    logger: Logger
    progress: Progress
    warnings: Warnings


@contextlib.contextmanager
def observed(
    config: TrainerConfig, run_dir: RunDirectory | None, watchdog: Watchdog, *, steps: int, title: str
) -> Iterator[Observers]:
    """The progress and logs of a run, while open; the report is written however the run ends.

    Without a directory there are none.
    """
    path = None if run_dir is None else run_dir.path
    with watchdog.stalls_count(path), _told(config, run_dir, steps=steps, title=title) as observers:
        yield observers


@contextlib.contextmanager
def _told(config: TrainerConfig, run_dir: RunDirectory | None, *, steps: int, title: str) -> Iterator[Observers]:
    if run_dir is None:
        with open(os.devnull, "w") as nowhere, Progress(steps, title, stream=nowhere, live=False) as progress:
            yield Observers(logger=NullLogger(), progress=progress, warnings=NoWarnings())
        return
    logger.info("run directory %s", run_dir.path)
    status = "failed"
    report = LiveReport(run_dir, steps=steps)
    notes = NoteLog(run_dir.notes)
    try:
        with contextlib.ExitStack() as held:
            metrics = held.enter_context(contextlib.closing(JsonlLogger(run_dir.metrics)))
            elsewhere = remote_loggers(config.logger, to_dict(config), directory=run_dir.path)
            remote = held.enter_context(contextlib.closing(elsewhere))
            notes.write("start", title)
            report.start()
            logger.info("report, written anew as the run goes: %s", run_dir.report)
            progress = held.enter_context(Progress(steps, title, notes=notes))
            held.enter_context(notes.hears_warnings())
            earlier = read_metrics(run_dir.metrics)
            warnings = RunWarnings(run_dir.warnings, progress.line, earlier=earlier)
            held.enter_context(contextlib.closing(warnings))
            # The report comes last: it is made from what the others have written.
            loggers = CompositeLogger([metrics, remote, report])
            yield Observers(logger=loggers, progress=progress, warnings=warnings)
        status = "finished"
    except KeyboardInterrupt:
        interrupts.end_at_once_on_the_next(last=kill_every_host)
        status = "interrupted"
        raise
    except Exception as error:
        what = "" if isinstance(error, USER_ERRORS) else f"{type(error).__name__}: "
        status = f"failed: {what}{' '.join(str(error).split())}"
        raise
    finally:
        notes.write("end", status)
        notes.close()
        report.finish(status)
        if status != "finished":
            logger.info("the run so far is in %s", run_dir.path)
        logger.info("report: %s", run_dir.report)


def link_model(run_dir: RunDirectory, model_dir: Path) -> None:
    """`model` in the run directory leads to the exported model, wherever that is, unless the name is taken."""
    if not os.path.lexists(run_dir.model):
        run_dir.model.symlink_to(os.path.relpath(model_dir.resolve(), run_dir.path.resolve()))


@contextlib.contextmanager
def frozen_gc() -> Iterator[None]:
    """While open, the garbage collector does not scan the objects that exist already.

    Libraries and models are a million objects. A full collection scans them all, in the middle of generation, and takes
    as long as everything else that this process does for a round of 512 samples.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()

"""A run that a signal stops: saved at the end of its step if there is time, and told how it goes on."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path

from openrlhf.config.reporting import CheckpointSection
from openrlhf.runs.resume import Checkpoints
from openrlhf.utils import interrupts
from openrlhf.utils.interrupts import Stopped, StopRequest


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

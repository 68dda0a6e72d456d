"""`openrlhf prove` from a configuration to a report: the size of the trial, the trial, and its proofs one by one."""

from __future__ import annotations

import contextlib
import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from openrlhf.config.commands import RLConfig, RMConfig, SFTConfig, TrainerConfig
from openrlhf.config.fields import ConfigError
from openrlhf.config.rules import required
from openrlhf.models.loading import LoadSettings, policy_skeleton
from openrlhf.proving import (
    proofs_credit,
    proofs_ranks,
    proofs_resume,
    proofs_rollout,
    proofs_supervised,
    proofs_update,
)
from openrlhf.proving.registry import REGISTRY, Proof, tried
from openrlhf.proving.report import Report
from openrlhf.proving.sizes import (
    Sizes,
    measured_speed,
    notes_on,
    short_data,
    sizes_for,
    trial_of_rl,
    trial_of_supervised,
)
from openrlhf.proving.trial import open_rl, open_supervised
from openrlhf.runs.launchers import LauncherFactory, make_launcher, resolve_launcher
from openrlhf.runs.local_copies import local_copies
from openrlhf.runs.preflight import reading_model
from openrlhf.runs.process import prepare_process, process_device, watchdog

FILES = (proofs_rollout, proofs_supervised, proofs_update, proofs_credit, proofs_ranks, proofs_resume)
"""Each has registered its proofs. They are tried in this order: what others rest on comes first."""
CHARACTERS_PER_TOKEN = 3.0
"""At least so many, in most texts: for the time that a trial takes."""


def prove(
    config: TrainerConfig,
    *,
    minutes: float = 5.0,
    only: Sequence[str] = (),
    sizes: Sizes | None = None,
    make: LauncherFactory = make_launcher,
    launcher: str = "",
    on_start: Callable[[Proof], None] = lambda proof: None,
    quiet: bool = True,
) -> Report:
    """Try all proofs, or those in `only`, on a small trial of this run. Raises what the run itself would raise.

    `sizes`: of the trial; None: what fits into `minutes`. `launcher`: what starts the run's processes, if it is some
    program (`torchrun`). `quiet`: the trial's own log lines are not shown.
    """
    began = time.monotonic()
    prepare_process(config.train)
    given = local_copies(config)
    proofs = [one for one in in_order() if not only or one.name in only or one.first]
    notes: list[str] = [*notes_on(given)]
    with contextlib.ExitStack() as held:
        held.enter_context(watchdog(given.train))
        held.enter_context(_less_said(quiet))
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="openrlhf-prove-")))
        several = "ranks" in only or has_several_ranks(given, launcher)
        trial = held.enter_context(
            _opened(given, folder, minutes=minutes, sizes=sizes, proofs=proofs, make=make, several_ranks=several)
        )
        verdicts = tried(trial, proofs, deadline=began + 60 * minutes, on_start=on_start)
        title = f"{Path(_model(given)).name} · {trial.kind}"
        return Report(title=title, verdicts=verdicts, notes=notes, shown=trial.shown, seconds=time.monotonic() - began)


def in_order() -> list[Proof]:
    """All proofs, in the order in which they are tried."""
    files = [file.__name__ for file in FILES]
    return sorted(REGISTRY.values(), key=lambda one: (not one.first, files.index(one.run.__module__)))


@contextlib.contextmanager
def _opened(
    given: Any,
    folder: Path,
    *,
    minutes: float,
    sizes: Sizes | None,
    proofs: Sequence[Proof],
    make: LauncherFactory,
    several_ranks: bool,
) -> Iterator[Any]:
    is_rl = isinstance(given, RLConfig)
    flag = "--data.prompt_dataset" if is_rl else "--data.dataset"
    if isinstance(given, RLConfig) and given.teacher.remote_url is not None:
        raise ConfigError("--teacher.remote_url: what servers say cannot be proved: prove the run without a teacher")
    # Three steps of two prompts, or of as many samples.
    data, limit, longest = short_data(
        given, flag, required(given.prompt_dataset if is_rl else given.data.dataset), folder, count=6
    )
    kind = "rl" if is_rl else kind_of(given)
    if sizes is None:
        gradients = sum(one.cost for one in proofs if kind in one.kinds) + 2
        sizes = sizes_for(
            _parameters(given),
            minutes=minutes,
            speed=measured_speed(process_device()),
            prompt_tokens=int(longest / CHARACTERS_PER_TOKEN),
            gradients=gradients,
        )
    if is_rl:
        config = resolve_launcher(trial_of_rl(given, sizes, folder, data=data, limit=limit))
        with open_rl(given, config, folder, make=make, several_ranks=several_ranks) as trial:
            yield trial
    else:
        config = trial_of_supervised(given, sizes, folder, data=data, limit=limit)
        with open_supervised(given, config, folder, kind=kind, several_ranks=several_ranks) as trial:
            yield trial


def has_several_ranks(config: Any, launcher: str) -> bool:
    """Whether the run trains in several processes, as far as its command says."""
    if config.ds.ranks_per_share > 1 or launcher in ("torchrun", "deepspeed", "srun"):
        return True
    if isinstance(config, RLConfig):
        return config.train.launcher == "ray" or (config.actor.world_size or 1) > 1
    return bool(config.train.backend == "deepspeed")


def kind_of(config: Any) -> str:
    """What a supervised run trains."""
    if isinstance(config, SFTConfig):
        return "sft"
    if isinstance(config, RMConfig) and config.model.loss_type == "prm":
        raise ConfigError("--model.loss_type prm: openrlhf prove has no definition of it to compare with")
    return "reward model" if isinstance(config, RMConfig) else str(config.model.objective)


def _model(config: Any) -> str:
    return required(
        config.actor.model_name_or_path if isinstance(config, RLConfig) else config.model.model_name_or_path
    )


def _parameters(config: Any) -> int:
    """Of the model that is trained, without loading it."""
    section = config.actor if isinstance(config, RLConfig) else config.model
    flag = "--actor.model_name_or_path" if isinstance(config, RLConfig) else "--model.model_name_or_path"
    images = config.data.max_images_per_prompt > 0
    settings = LoadSettings(device="cpu", model=section, trains=False, flag=flag, images=images)
    with reading_model(_model(config), flag=flag):
        return sum(p.numel() for p in policy_skeleton(_model(config), settings).parameters())


@contextlib.contextmanager
def _less_said(quiet: bool) -> Iterator[None]:
    """Log lines of the trial below errors are not shown: they are about a run that does not happen."""
    if not quiet:
        yield
        return
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)

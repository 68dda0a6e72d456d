"""A step of a run that is taken again: from a checkpoint before it and the logged rollouts, without engine or agent.

The steps from the checkpoint to the wanted one are trained on again, on the very groups that the run had
(`observability.token_log`). Their metrics are compared with those that the run has logged, and the weights with the
checkpoint after the step, where there is one. In the last step every sample is asked for its own gradient.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from openrlhf.backends.torch import TorchBackend
from openrlhf.checkpoint.folder import TRAINING_STATE, CheckpointFolder, Retention, damage_of, require_readable
from openrlhf.checkpoint.manager import ResumePoint, read_checkpoint
from openrlhf.checkpoint.training_state import random_state, read_training_state, restore_random_state
from openrlhf.config.commands import RLConfig
from openrlhf.config.fields import ConfigError
from openrlhf.config.parser import parse
from openrlhf.learners.rank import RankLearners
from openrlhf.learners.steps import MicroBatch, Step
from openrlhf.observability.loggers import is_time, read_metrics
from openrlhf.observability.metrics import Metrics
from openrlhf.observability.run_directory import RunDirectory
from openrlhf.observability.token_log import read_groups, read_index, steps
from openrlhf.runs.local_copies import local_copies
from openrlhf.runs.preflight import policy_images, policy_tokenizer
from openrlhf.runs.process import prepare_process
from openrlhf.runs.resume import Checkpoints, recorded_settings
from openrlhf.runs.rl_assembly import planned_length, prompt_stream, rl_checkpointer
from openrlhf.runs.rl_models import RLTraining, load_models
from openrlhf.types import Group, SampleKey, TrainingBatch
from openrlhf.utils import waits

logger = logging.getLogger(__name__)


class ReplayError(RuntimeError):
    """A step cannot be taken again. The text says what is missing, and which flag would have kept it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedStep:
    """The numbers of a step, as they are here and as the run has logged them."""

    step: int
    metrics: Mapping[str, float]
    logged: Mapping[str, Any] | None
    """None: the run has not logged this step (--logger.logging_steps)."""

    @property
    def differences(self) -> dict[str, tuple[Any, Any]]:
        """Metric → (in the log, here), of those that both have and that are not equal to the last bit."""
        found = {}
        for name, value in self.metrics.items():
            here = value if math.isfinite(value) else None  # as JSON has it
            if self.logged is not None and not is_time(name) and name in self.logged and self.logged[name] != here:
                found[name] = self.logged[name], here
        return found

    @property
    def bit_equal(self) -> bool | None:
        """None: there is nothing to compare with."""
        return None if self.logged is None else not self.differences


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightComparison:
    """Weights and moments after the step, and in the checkpoint of that step."""

    checkpoint: str
    tensors: int
    largest: Mapping[str, float]
    """Tensor → the largest difference of an entry, of those that are not equal to the last bit; infinite where the
    checkpoint has none of this shape."""

    @property
    def bit_equal(self) -> bool:
        return not self.largest


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerStep:
    """An optimizer step of the wanted step."""

    gradient_norm: float
    """Before it is clipped."""
    samples: int
    """Those that were run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleEffect:
    """What a sample has done to an optimizer step. g is the gradient of its own loss, G = Σ g that of the step."""

    prompt: int
    sample: int
    segment: int
    optimizer_step: int
    """From 0 on."""
    loss: float
    """Its part of the step's policy loss."""
    gradient_norm: float
    """|g|"""
    along: float
    """g·G / |G|: its part of the gradient's length. Those of all samples add up to |G|."""
    share: float
    """g·G / |G|²: the same as a part of 1. Below 0: the other samples pull the other way."""
    reward: float | None
    advantage: float
    """Mean over its action tokens."""
    logprob_gap: float | None
    """The largest distance of the trainer's log-prob before the update from the engine's; None where the engine told
    none."""
    tokens: int
    actions: int
    where: str
    """Where its prompt was read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """A step that was taken again."""

    run: str
    step: int
    origin: str | None
    """The checkpoint that it began from; None: the run's beginning."""
    origin_step: int
    replayed: Sequence[ReplayedStep]
    weights: WeightComparison | None
    """None: there is no checkpoint of this step."""
    optimizer_steps: Sequence[OptimizerStep]
    effects: Sequence[SampleEffect]
    """The largest first."""
    idle: int
    """Samples that were not run, because nothing pulls at them."""
    notes: Sequence[str]
    """Why the numbers may differ."""

    def as_json(self) -> dict[str, Any]:
        record = dataclasses.asdict(self)
        for one, step in zip(record["replayed"], self.replayed, strict=True):
            del one["logged"]
            one["bit_equal"] = step.bit_equal
            one["differences"] = {name: list(pair) for name, pair in step.differences.items()}
        if self.weights is not None:
            record["weights"]["bit_equal"] = self.weights.bit_equal
        return record


def replay(run: Path, step: int, overrides: Sequence[str] = (), *, told: Callable[[str], None] = print) -> Replay:
    """Take a step of a run again. `overrides`: flags of `openrlhf rl` in place of the run's. `told`: hears how it goes.

    Raises ReplayError, and what loading models and checkpoints raises.
    """
    given = recorded_config(run, overrides)
    checkpoints = RunCheckpoints(given, run)
    found, first = _origin(given, run, step, checkpoints)
    logged = _logged_steps(run, first, step, found)
    config, notes = _one_process(given)
    writer = found.notes.get("run_directory") if found else None
    if found and isinstance(writer, str) and Path(writer) != run.resolve():
        notes.append(f"{found.path} was written by the run in {writer}")
    device = prepare_process(config.train)
    config = local_copies(config)
    tokenizer = policy_tokenizer(config)
    total_steps = found.notes.get("optimizer_steps") if found else None
    if total_steps is None:
        total_steps = planned_length(config, prompt_stream(config, tokenizer, policy_images(config, tokenizer)))[1]
    training = RLTraining(config, load_models(config, device), total_steps=total_steps, device=device)
    kept = training.checkpointed(tokenizer)
    if found is not None:
        folder = CheckpointFolder(found.path.parent, Retention())
        manager = rl_checkpointer(
            config,
            Checkpoints(folder, found),
            kept,
            RunDirectory(run),
            recorded_settings(given),
            total_steps=total_steps,
        )
        assert manager is not None, "there is a folder"
        manager.load(lambda state: training.learners.load_state_dict(state["workers"]))
    told(f"from {found.path if found else 'the beginning of the run'}")
    learners, backend = training.learners, training.policy_backend
    assert isinstance(backend, TorchBackend), "one process trains with torch"
    records = {r["step"]: r for r in read_metrics(RunDirectory(run).metrics) if r["kind"] == "train"}
    replayed: list[ReplayedStep] = []
    inspection = Inspection(backend)
    batch, groups = TrainingBatch(samples=[]), list[Group]()
    for number, path in logged.items():
        with waits.during(f"step {number}"):
            groups = read_groups(path)
            last = number == step
            batch, metrics = _train(learners, groups, inspection if last else None)
        replayed.append(ReplayedStep(step=number, metrics=metrics.values(), logged=records.get(number)))
        told(step_line(replayed[-1]))
    weights, after = None, checkpoints.of(step)
    if after is not None:
        weights = compare_weights(after.path, {name: model.backend for name, model in kept.items()})
    return Replay(
        run=str(run),
        step=step,
        origin=None if found is None else str(found.path),
        origin_step=first - 1,
        replayed=replayed,
        weights=weights,
        optimizer_steps=inspection.steps,
        effects=inspection.effects(batch, groups),
        idle=len(batch) - len({one.key for one in inspection.measured}),
        notes=notes,
    )


def _train(learners: RankLearners, groups: Sequence[Group], inspection: Inspection | None) -> tuple[Any, Metrics]:
    """One round, as the loop takes it."""
    batch, metrics = learners.place(groups)
    learners.score(batch)
    metrics.merge(learners.assign_advantages(batch))
    metrics.merge(learners.update(batch, keep=inspection is not None, inspect=inspection))
    return batch, metrics


def recorded_config(run: Path, overrides: Sequence[str] = ()) -> RLConfig:
    """The configuration of a run, from its folder. Raises ReplayError and ConfigError."""
    directory = RunDirectory(run)
    if not run.is_dir():
        raise ReplayError(f"there is no folder {run}")
    if not directory.config.exists():
        raise ReplayError(f"{run} holds no run: it has no config.yaml")
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):  # what it says of the flags the run has said
            config = parse("train_ppo_ray", ["--config", str(directory.config), *overrides])
    except ConfigError as error:
        if overrides:
            raise
        raise ReplayError(f"{directory.config} is not of an RL run of this version: {error}") from error
    assert isinstance(config, RLConfig)
    return config


class RunCheckpoints:
    """The checkpoints of a run that can be continued from, the best one included. They are read, and nothing else."""

    def __init__(self, config: RLConfig, run: Path) -> None:
        """Raises ReplayError where the run has written some, and their folder is gone."""
        self._run = run
        self._takes_others = config.ckpt.resumes
        """A run that was continued begins with a checkpoint of another one."""
        self.folder = Path(config.ckpt.folder).expanduser().resolve()
        if config.ckpt.period is not None and not self.folder.is_dir():
            raise ReplayError(
                f"the run's checkpoints are not in {self.folder}: call this where the run was started, or say where "
                "they are (--ckpt.path)"
            )
        names = ("global_step", "best_global_step")
        found = [(name, path.name.removeprefix(name)) for name in names for path in self.folder.glob(f"{name}*")]
        steps = {int(number) for _, number in found if number.isdecimal()}
        self._steps = sorted(steps, reverse=True) if config.ckpt.uses_folder else []

    def before(self, step: int) -> tuple[ResumePoint | None, int]:
        """The nearest one before a step, and its own step; None and 0: there is none."""
        candidates = ((self.of(number), number) for number in self._steps if number < step)
        return next(((point, number) for point, number in candidates if point is not None), (None, 0))

    def of(self, step: int) -> ResumePoint | None:
        """That of a step; None: there is none, it is damaged, or another run has left it in the folder."""
        if step not in self._steps:
            return None
        for path in (self.folder / f"global_step{step}", self.folder / f"best_global_step{step}"):
            if path.is_dir() and damage_of(path) is None:
                require_readable(path)
                point = read_checkpoint(path)
                if self._is_ours(point):
                    return point
        return None

    def _is_ours(self, point: ResumePoint) -> bool:
        writer = point.notes.get("run_directory")
        if not isinstance(writer, str) or self._takes_others:
            return True
        theirs, ours = RunDirectory(Path(writer)).config, RunDirectory(self._run).config
        # The folder of a run that was moved is not where it was; that of one that was copied has the same settings.
        return not theirs.exists() or theirs.read_bytes() == ours.read_bytes()


def _origin(config: RLConfig, run: Path, step: int, checkpoints: RunCheckpoints) -> tuple[ResumePoint | None, int]:
    """The nearest checkpoint before the step (None: the run's beginning), and the first step to be taken again."""
    last = max((r["step"] for r in read_metrics(RunDirectory(run).metrics) if r["kind"] == "train"), default=0)
    last = max(last, *steps(run), 0)
    if not 1 <= step <= last:
        raise ReplayError(f"{run} has no step {step}: its steps are 1 to {last}")
    found, before = checkpoints.before(step)
    if found is None and config.ds.use_universal_ckpt:
        raise ReplayError(
            f"step {step} needs a checkpoint before it, and {checkpoints.folder} has none: the run began with "
            "--ds.use_universal_ckpt, which is not taken again"
        )
    return found, before + 1


def _logged_steps(run: Path, first: int, last: int, found: ResumePoint | None) -> dict[int, Path]:
    """The files of the steps to be taken again. Raises ReplayError where one is missing, or has not all groups."""
    files = steps(run)
    keep_all = "the run must keep every group of every step: --logger.rollouts_per_step -1"
    if not files:
        raise ReplayError(f"{run} has no token log; {keep_all}")
    wanted = range(first, last + 1)
    missing = [step for step in wanted if step not in files]
    partial = [step for step in wanted if step in files and not read_index(files[step]).complete]
    if missing or partial:
        what = "is not in" if missing else "has only some of its groups in"
        origin = f"from {found.path.name} on" if found else "from the beginning on, for no checkpoint is before it"
        more = "" if found else "; with checkpoints (--ckpt.save_steps, --ckpt.max_num) fewer steps are needed"
        raise ReplayError(
            f"step {(missing or partial)[0]} {what} {run / 'tokens'}, and step {last} is taken again {origin}; "
            f"{keep_all}{more}"
        )
    return {step: files[step] for step in wanted}


def _one_process(config: RLConfig) -> tuple[RLConfig, list[str]]:
    """The same training in one process, and why its numbers may differ from the run's."""
    notes = []
    if config.train.launcher == "ray":
        notes.append("the run had several processes, which add numbers up in another order: last digits differ")
    alone = dataclasses.replace(config.ds, ring_attn_size=1, tensor_parallel_size=1)
    return dataclasses.replace(config, train=dataclasses.replace(config.train, launcher="local"), ds=alone), notes


def compare_weights(checkpoint: Path, backends: Mapping[str, Any]) -> WeightComparison:
    """What is trained against what a checkpoint has of it: weights, moments and averages."""
    largest, count = {}, 0
    for model, backend in backends.items():
        _, saved = read_training_state(checkpoint / model / TRAINING_STATE)
        for name, tensor in backend.tensor_state():
            count += 1
            here, there = tensor.cpu(), saved.get(name)
            if there is None or here.shape != there.shape:
                largest[f"{model}/{name}"] = math.inf
            elif not torch.equal(here, there):
                largest[f"{model}/{name}"] = float((here.double() - there.double()).abs().max())
    return WeightComparison(checkpoint=str(checkpoint), tensors=count, largest=largest)


# ------------------------------------------------------------------------------------------------ samples' gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    key: SampleKey
    optimizer_step: int
    loss: float
    norm: float
    dot: float
    """With the step's gradient."""


@dataclass(slots=True)
class Inspection:
    """Asks every sample of an optimizer step for its own gradient, before the step is taken.

    The step's gradient is computed first, then each sample's alone, at the same weights; all are dropped again, and the
    random generators are put back: the step that follows does not know of it.
    """

    backend: TorchBackend
    steps: list[OptimizerStep] = field(default_factory=list)
    measured: list[_Measured] = field(default_factory=list)

    def __call__(self, step: Step, run: Callable[[MicroBatch, Metrics], Tensor]) -> None:
        generators = random_state()
        for micro in step.micro_batches():
            if not micro.is_filler:
                run(micro, Metrics())
        total = [None if part is None else part.clone() for part in self.backend.gradients()]
        self.backend.drop_gradients()
        count = 0
        for micro in step.single_samples():
            loss = float(run(micro, Metrics()).detach())
            own = self.backend.gradients()
            self.measured.append(
                _Measured(
                    key=micro.keys[0],
                    optimizer_step=len(self.steps),
                    loss=loss,
                    norm=math.sqrt(_dot(own, own)),
                    dot=_dot(own, total),
                )
            )
            self.backend.drop_gradients()
            waits.mark_progress()
            count += 1
        self.steps.append(OptimizerStep(gradient_norm=math.sqrt(_dot(total, total)), samples=count))
        restore_random_state(generators)

    def effects(self, batch: TrainingBatch, groups: Sequence[Group]) -> list[SampleEffect]:
        """Of every sample of the batch that was run, in every optimizer step; the largest first."""
        columns = {sample.key: index for index, sample in enumerate(batch.samples)}
        trajectories = {t.key: (t, group.prompt) for group in groups for t in group.trajectories}
        found = []
        for one in self.measured:
            norm = self.steps[one.optimizer_step].gradient_norm
            trajectory, prompt = trajectories[one.key._replace(segment=0)]
            actions = batch.actions_of(columns[one.key])
            assert batch.advantages_A is not None, "it was trained on"
            found.append(
                SampleEffect(
                    prompt=one.key.prompt,
                    sample=one.key.sample,
                    segment=one.key.segment,
                    optimizer_step=one.optimizer_step,
                    loss=one.loss,
                    gradient_norm=one.norm,
                    along=one.dot / norm if norm else 0.0,
                    share=one.dot / norm / norm if norm else 0.0,
                    reward=trajectory.reward,
                    advantage=float(batch.advantages_A[actions].mean()),
                    logprob_gap=_gap(batch, actions),
                    tokens=len(batch.samples[columns[one.key]]),
                    actions=actions.stop - actions.start,
                    where=prompt.where,
                )
            )
        return sorted(found, key=_size, reverse=True)


def _size(effect: SampleEffect) -> tuple[bool, bool, float, float]:
    """How much of the gradient is the sample's. One whose own gradient is not finite is the largest, and of several of
    them (a comparison passes NaN on) one that earned or was told such a number."""
    broken = not math.isfinite(effect.gradient_norm)
    source = not all(map(math.isfinite, (effect.reward or 0.0, effect.logprob_gap or 0.0)))
    along, norm = (number if math.isfinite(number) else 0.0 for number in (effect.along, effect.gradient_norm))
    return broken, source, abs(along), norm


def _gap(batch: TrainingBatch, actions: slice) -> float | None:
    """Before the update, where the trainer has computed it then: with one optimizer step it is the same."""
    told_A, own_A = batch.rollout_logprobs_A, batch.old_logprobs_A
    own_A = batch.seen_A.get("new_logprobs") if own_A is None else own_A
    if told_A is None or own_A is None:
        return None
    gaps = (own_A[actions] - told_A[actions]).abs().numpy()
    return None if np.isnan(gaps).all() else float(np.nanmax(gaps))


def _dot(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> float:
    parts = [(a * b).sum(dtype=torch.float64) for a, b in _both(one, other)]
    return float(torch.stack(parts).sum()) if parts else 0.0


def _both(one: Sequence[Tensor | None], other: Sequence[Tensor | None]) -> Iterator[tuple[Tensor, Tensor]]:
    for a, b in zip(one, other, strict=True):
        if a is not None and b is not None:
            yield a, b


# ---------------------------------------------------------------------------------------------------------- in words


MOST_DIFFERENCES = 5
"""Metrics of a step that are shown."""


def step_line(step: ReplayedStep) -> str:
    """One line: a step, its loss and gradient norm, and whether they are those of the run."""
    numbers = "  ".join(
        f"{said} {step.metrics[name]:.6g}"
        for name, said in (
            ("policy_loss", "loss"),
            ("actor_grad_norm", "gradient norm"),
            ("critic_loss", "critic loss"),
        )
        if name in step.metrics
    )
    if step.bit_equal is None:
        return f"step {step.step}  not logged (--logger.logging_steps)  {numbers}"
    if step.bit_equal:
        return f"step {step.step}  bit-equal  {numbers}"
    differing = step.differences
    shown = [f"{name} was {then}, is {here}" for name, (then, here) in list(differing.items())[:MOST_DIFFERENCES]]
    more = f", and {len(differing) - len(shown)} more" if len(differing) > len(shown) else ""
    return f"step {step.step}  differs: {'; '.join(shown)}{more}"


def table(replay: Replay, *, most: int | None = 10) -> list[str]:
    """The lines of a table of samples, the largest part of the gradient first. `most`: rows, None: all."""
    several = len(replay.optimizer_steps) > 1
    head = ["share", "gradient norm", "loss", "reward", "advantage", "log-prob gap", "tokens", "sample"]
    rows = [head] + [_row(effect, several=several) for effect in replay.effects[:most]]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head) - 1)]
    lines = ["  ".join([*(cell.rjust(w) for cell, w in zip(row, widths, strict=False)), row[-1]]) for row in rows]
    left = len(replay.effects) - len(rows) + 1
    return [*lines, f"… and {left} more (--all)"] if left else lines


def _row(effect: SampleEffect, *, several: bool) -> list[str]:
    name = f"prompt {effect.prompt} sample {effect.sample}"
    name += f" segment {effect.segment}" if effect.segment else ""
    name += f" in optimizer step {effect.optimizer_step + 1}" if several else ""
    return [
        f"{effect.share:.1%}",
        f"{effect.gradient_norm:.4g}",
        f"{effect.loss:.4g}",
        "" if effect.reward is None else f"{effect.reward:.4g}",
        f"{effect.advantage:.4g}",
        "" if effect.logprob_gap is None else f"{effect.logprob_gap:.4g}",
        str(effect.tokens),
        f"{name} ({effect.where})" if effect.where else name,
    ]


def summary(replay: Replay) -> list[str]:
    """What the steps came to, in lines."""
    lines = []
    if (weights := replay.weights) is not None:
        if weights.bit_equal:
            lines.append(f"weights and moments: bit-equal to {weights.checkpoint} ({weights.tensors} tensors)")
        else:
            name, gap = max(weights.largest.items(), key=lambda item: item[1])
            lines.append(
                f"weights and moments: {len(weights.largest)} of {weights.tensors} tensors differ from "
                f"{weights.checkpoint}, most of all {name} by {gap:.3g}"
            )
    if any(step.bit_equal is False for step in replay.replayed) or (weights is not None and not weights.bit_equal):
        lines += [f"note: {note}" for note in replay.notes]
    if not replay.optimizer_steps:
        return [*lines, "the policy was not updated in this step: it waits for its critic (--critic.freezing_steps)"]
    norms = ", ".join(f"{one.gradient_norm:.6g}" for one in replay.optimizer_steps)
    samples = sum(one.samples for one in replay.optimizer_steps)
    times = f" in {len(replay.optimizer_steps)} optimizer steps" if len(replay.optimizer_steps) > 1 else ""
    idle = f"; {replay.idle} more have an advantage of 0 and were left out" if replay.idle else ""
    lines.append(f"the gradient of step {replay.step} has norm {norms}{times}, of {samples} samples{idle}")
    return lines

"""The supervised loop: one loop for fine-tuning, reward models and preference training, which are its objectives."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from openrlhf.backends.base import Backend
from openrlhf.backends.ranks import ALONE, Ranks
from openrlhf.checkpoint.manager import Checkpointer, NoCheckpoints
from openrlhf.data.schedule import divide
from openrlhf.learners.accumulation import (
    MAX_SKIPPED,
    Accumulated,
    MicroBatching,
    MicroBatchSizer,
    SkippedSteps,
    accumulate,
)
from openrlhf.observability.loggers import Logger
from openrlhf.observability.metrics import Metrics, PhaseClock
from openrlhf.observability.progress import Progress
from openrlhf.observability.signs import NoWarnings, Warnings
from openrlhf.trainers.callbacks import Callbacks
from openrlhf.utils import waits
from openrlhf.utils.interrupts import Stopped, StopRequest


class Batch(Protocol):
    """The samples of one optimizer step, as indices into the data set. `data.schedule.ScheduledStep` is one."""

    @property
    def samples(self) -> Sequence[int]:
        """The samples of all ranks. The weights of the loss follow from them."""
        ...

    @property
    def micro_batches(self) -> Sequence[Sequence[int]]:
        """The samples of this rank, forward by forward. Every rank has the same number of lists; some may be empty."""
        ...


class WholeSet(NamedTuple):
    """A whole evaluation set as one batch."""

    samples: Sequence[int]
    micro_batches: Sequence[Sequence[int]]


class SupervisedMicroBatches:
    """The micro-batches of a step: as scheduled, or smaller ones after memory has run out."""

    filler: Sequence[int] = ()

    def __init__(self, batch: Batch, lengths: Sequence[int], fitting: MicroBatchSizer, ranks: Ranks) -> None:
        self.fitting = fitting
        self._batch = batch
        self._lengths = lengths
        self._ranks = ranks

    def micro_batches(self) -> Sequence[Sequence[int]]:
        budget = self.fitting.batching.tokens
        if budget is None:
            return self._batch.micro_batches
        cut = divide(self._batch.samples, self._lengths, ranks=self._ranks.count, token_budget=budget)
        return cut[self._ranks.index]

    def size(self, micro: Sequence[int]) -> tuple[int, int]:
        return sum(self._lengths[i] for i in micro), len(micro)


class StepSchedule(Protocol):
    """The samples of every optimizer step. `data.schedule.Schedule` is one."""

    @property
    def steps_per_epoch(self) -> int: ...

    def __len__(self) -> int:
        """The number of steps of the whole run."""
        ...

    def __iter__(self) -> Iterator[Batch]:
        """The steps that are left to do."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class MicroBatchLoss(NamedTuple):
    """The contribution of one micro-batch to its step."""

    loss: Tensor
    """The weighted loss. The losses of all micro-batches add up to the loss of the step, and so do their gradients."""
    metrics: Metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricNames:
    """The names under which an objective's metrics are logged."""

    evaluation: dict[str, str]
    """Metric → its name in an evaluation. Other metrics are not logged there."""
    smoothed: dict[str, str]
    """Metric of a training step → the name of its running mean."""


class Objective(Protocol):
    """A data set and the loss that is trained on it: L = Σ_i w_i l_i over the samples of an optimizer step."""

    names: MetricNames

    @property
    def lengths(self) -> Sequence[int]:
        """The number of tokens of each sample."""
        ...

    def begin(self, module: nn.Module, batch: Batch) -> Callable[[Sequence[int]], MicroBatchLoss]:
        """Compute what needs the whole step, above all the weights w. Returns the function that computes the loss of a
        micro-batch.

        Because the weights are fixed before the step is cut, cutting and order cannot change the gradient.
        """
        ...

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run could not compute again to the last bit."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Periods:
    """How often to evaluate, save and log, in optimizer steps. The end of every epoch is evaluated in any case."""

    eval_every: int | None = None
    save_every: int | None = None
    log_every: int = 1


@dataclass(slots=True)
class RunningMeans:
    """Exponential running means, unbiased from the first step on: m_t = Σ_k ρ^k x_{t−k} / Σ_k ρ^k."""

    decay: float = 0.9
    totals: dict[str, float] = field(default_factory=dict)
    weights: dict[str, float] = field(default_factory=dict)

    def update(self, name: str, value: float) -> float:
        self.totals[name] = self.decay * self.totals.get(name, 0.0) + value
        self.weights[name] = self.decay * self.weights.get(name, 0.0) + 1.0
        return self.totals[name] / self.weights[name]


class SupervisedTrainer:
    """Runs the supervised loop. Its parts hold no reference to it."""

    def __init__(
        self,
        *,
        backend: Backend,
        objective: Objective,
        evaluation: Objective | None,
        schedule: StepSchedule,
        periods: Periods,
        tokens_per_forward: int,
        logger: Logger,
        progress: Progress,
        checkpointer: Checkpointer | None = None,
        ranks: Ranks = ALONE,
        stop: StopRequest | None = None,
        warnings: Warnings | None = None,
        max_skipped: int = MAX_SKIPPED,
        callbacks: Callbacks | None = None,
    ) -> None:
        """`evaluation`: the same objective on the evaluation set. `tokens_per_forward`: the token budget of its
        forwards. `stop`: a request to end the run after a checkpoint. `max_skipped`: the number of optimizer steps in
        a row that may be left out before the run fails. `callbacks`: of the program that called the run; those of any
        rank may end it.

        Every rank runs this loop, and computes its part of every step.
        """
        self.backend = backend
        self.objective = objective
        self.evaluation = evaluation
        self.schedule = schedule
        self.periods = periods
        self.tokens_per_forward = tokens_per_forward
        self.logger = logger
        self.progress = progress
        self.checkpointer = checkpointer or NoCheckpoints()
        self.ranks = ranks
        self.stop = stop or StopRequest()
        self.warnings = warnings or NoWarnings()
        self.callbacks = callbacks or Callbacks()
        self._skipped = SkippedSteps("", most=max_skipped, ranks=ranks)
        self.clock = PhaseClock(on_phase=progress.phase)
        self.steps_done = 0
        self.means = RunningMeans()
        self.last_evaluation: dict[str, float] = {}
        self.evaluated_after: int | None = None
        self._fitting = MicroBatchSizer(MicroBatching(remedy="a lower --train.micro_batch_size"))

    def fit(self) -> dict[str, float]:
        """Train to the end, from the latest checkpoint if there is one. Returns the last evaluation, empty if none.

        When any rank was asked to stop, all ranks save a checkpoint and raise Stopped. A run that a callback ends has
        saved too, and ends like any other.
        """
        if self.checkpointer.load(self.load_state_dict) is not None and self._evaluation_is_due():
            self.evaluate()  # the run that was stopped has saved and left its evaluation to this one
        self.clock.take()  # loading is no part of the first step's time
        for batch in self.schedule:
            metrics = self.step(batch)
            self.steps_done += 1
            self.report(metrics)
            # A signal reaches some of the ranks, at different times. They must agree, or some would wait for others.
            asked = self.stop.accept() or self.callbacks.ended
            stopped_by = cast("signal.Signals | str | None", self.ranks.agree(asked))
            if stopped_by is None and self._evaluation_is_due():
                self.evaluate()
                stopped_by = self.ranks.agree(self.callbacks.ended)
            if stopped_by is not None or self._checkpoint_is_due():
                with self.clock.phase("checkpoint"):
                    self.checkpointer.save(self.steps_done, self.state_dict())
                self.clock.take()  # checkpoints are no part of the next step's time
            if isinstance(stopped_by, signal.Signals):
                raise Stopped(stopped_by)
            if stopped_by is not None:
                self.progress.end_early(stopped_by)
                break
        return self.last_evaluation

    def step(self, batch: Batch) -> Metrics:
        """One optimizer step."""
        with self.clock.phase("train"):
            self.backend.module.train()
            _, own, odd = self._accumulate(batch)
            metrics, rate, norm = Metrics(), self.backend.learning_rate, self.backend.step()
            if self._skipped.after(self.backend.left_out, own, functools.partial(_losses_of, odd)):
                own = Metrics({"skipped_steps": own.reductions["skipped_steps"]}, own.notes)
            if self.backend.left_out is None:
                metrics.last("grad_norm", norm)
            metrics = Metrics.merged([*self.ranks.gather(own), metrics])
            metrics.last("lr", rate)
        timings = self.clock.take()
        tokens = sum(self.objective.lengths[i] for i in batch.samples)
        for name, seconds in timings.items():
            metrics.last(name, seconds)
        metrics.last("perf/tokens_per_second", tokens / max(timings["timing/step_total"], 1e-9))
        return metrics

    def _accumulate(self, batch: Batch) -> Accumulated:
        """Add up the gradient of the step, over this rank's samples."""
        compute_loss = self.objective.begin(self.backend.module, batch)

        def run(micro: Sequence[int], metrics: Metrics) -> Tensor:
            computed = compute_loss(micro) if micro else _filler_loss(compute_loss, batch)
            self.backend.backward(computed.loss)
            metrics.merge(computed.metrics)
            return computed.loss

        cut = SupervisedMicroBatches(batch, self.objective.lengths, self._fitting, self.ranks)
        return accumulate(cut, run, self.backend, ranks=self.ranks)

    def report(self, metrics: Metrics) -> None:
        values = metrics.values()
        for source, name in self.objective.names.smoothed.items():
            if source in values:
                values[name] = self.means.update(name, values[source])
        self.progress.step(self.steps_done, values)
        self.warnings.after(self.steps_done, values, metrics.notes)
        if self.steps_done % self.periods.log_every == 0:
            self.logger.log(self.steps_done, {**values, "global_step": self.steps_done}, kind="train")
        self.callbacks.step(self.steps_done, values)

    def _evaluation_is_due(self) -> bool:
        every = self.periods.eval_every
        ends_epoch = self.steps_done % self.schedule.steps_per_epoch == 0 or self.steps_done == len(self.schedule)
        due = ends_epoch or (every is not None and self.steps_done % every == 0)
        return due and self.evaluated_after != self.steps_done

    def _checkpoint_is_due(self) -> bool:
        return self.periods.save_every is not None and self.steps_done % self.periods.save_every == 0

    def evaluate(self) -> None:
        self.evaluated_after = self.steps_done
        if self.evaluation is None:
            return
        with self.clock.phase("evaluation"):
            self.last_evaluation = measure(
                self.evaluation, self.backend.module, tokens_per_forward=self.tokens_per_forward, ranks=self.ranks
            )
        self.clock.take()  # evaluation is no part of the next step's time
        self.progress.evaluation(self.steps_done, self.last_evaluation)
        self.logger.log(self.steps_done, {**self.last_evaluation, "global_step": self.steps_done}, kind="eval")
        self.callbacks.evaluation(self.steps_done, self.last_evaluation)

    def state_dict(self) -> dict[str, Any]:
        """The loop's own state. The checkpointer asks the backend for its tensors separately, one by one."""
        return {
            "steps": self.steps_done,
            "schedule": self.schedule.state_dict(),
            "objective": self.objective.state_dict(),
            "running_means": {"totals": dict(self.means.totals), "weights": dict(self.means.weights)},
            "last_evaluation": dict(self.last_evaluation),
            "evaluated_after": self.evaluated_after,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.schedule.load_state_dict(state["schedule"])
        self.steps_done = state["steps"]
        self.objective.load_state_dict(state["objective"])
        self.means = RunningMeans(**state["running_means"])
        self.last_evaluation, self.evaluated_after = dict(state["last_evaluation"]), state["evaluated_after"]


def state_after(steps: int, *, schedule: dict[str, Any], objective: Objective) -> dict[str, Any]:
    """The state of a loop after so many steps, where nothing else is known. `schedule`: the schedule's state then."""
    return {
        "steps": steps,
        "schedule": schedule,
        "objective": objective.state_dict(),
        "running_means": {},
        "last_evaluation": {},
        "evaluated_after": steps,
    }


def micro_batch_losses(objective: Objective, module: nn.Module, batch: Batch) -> Iterator[MicroBatchLoss]:
    """The loss and metrics of each micro-batch of this rank.

    Ranks that share weights run every forward together. So a rank whose micro-batch is empty runs a sample with
    weight 0.
    """
    compute_loss = objective.begin(module, batch)
    for micro in batch.micro_batches:
        waits.mark_progress()
        if micro:
            yield compute_loss(micro)
        else:
            yield _filler_loss(compute_loss, batch)


def _losses_of(odd: Sequence[Sequence[int]]) -> list[str]:
    samples = sorted({sample for micro in odd for sample in micro})
    more = f" and {len(samples) - 5} more" if len(samples) > 5 else ""
    return [f"the loss of sample {', '.join(map(str, samples[:5]))}{more} of the data set"] if samples else []


def _filler_loss(compute_loss: Callable[[Sequence[int]], MicroBatchLoss], batch: Batch) -> MicroBatchLoss:
    return MicroBatchLoss(0.0 * compute_loss(batch.samples[:1]).loss, Metrics())


@torch.no_grad()
def measure(
    objective: Objective, module: nn.Module, *, tokens_per_forward: int, ranks: Ranks = ALONE
) -> dict[str, float]:
    """The metrics of an objective over its whole data set, without training, by their names in an evaluation."""
    module.eval()
    samples = range(len(objective.lengths))
    cut = divide(samples, objective.lengths, ranks=ranks.count, token_budget=tokens_per_forward)
    own = Metrics.merged(
        one.metrics for one in micro_batch_losses(objective, module, WholeSet(samples, cut[ranks.index]))
    )
    values = Metrics.merged(ranks.gather(own)).values()
    return {name: values[source] for source, name in objective.names.evaluation.items() if source in values}


if TYPE_CHECKING:
    from openrlhf.learners.accumulation import MicroBatchSource

    _: type[MicroBatchSource[Sequence[int]]] = SupervisedMicroBatches

"""The RL loop: one loop for every algorithm, execution mode and pipeline, which are the business of its parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.checkpoint.manager import Checkpointer, NoCheckpoints
from openrlhf.learners.workers import Workers
from openrlhf.observability.ledger import TrainedLedger
from openrlhf.observability.loggers import Logger
from openrlhf.observability.metrics import Metrics, PhaseClock
from openrlhf.observability.progress import Progress
from openrlhf.observability.rollout_log import RolloutLog
from openrlhf.observability.signs import NoWarnings, Warnings
from openrlhf.observability.startup import StartUp
from openrlhf.observability.token_log import NoTokenLog
from openrlhf.rollout.collector import PromptsExhausted, rollout_metrics, source_metrics
from openrlhf.rollout.runner import RolloutError
from openrlhf.trainers.callbacks import Callbacks, EndedEarly
from openrlhf.trainers.evaluation import BestMetric
from openrlhf.trainers.pipelines import Pipeline
from openrlhf.types import Group
from openrlhf.utils import waits
from openrlhf.utils.interrupts import Stopped, StopRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPeriods:
    """When a run evaluates, saves, logs and ends."""

    rounds: int
    """Rounds of the whole run; fewer when the prompts run out before."""
    eval_every: int | None = None
    """None: only at the ends, if at all."""
    eval_at_ends: bool = False
    """Before the first round and after the last."""
    save_every: int | None = None
    """None: no checkpoints."""
    log_every: int = 1
    max_length: int = 0
    """The most tokens that a sample may have; `response_clip_ratio` counts those that reach it."""
    by_source: bool = False
    """Whether scores and rewards are logged for each data source as well."""

    def evaluates_after(self, step: int) -> bool:
        return self.eval_every is not None and step % self.eval_every == 0

    def saves_after(self, step: int, *, best: bool) -> bool:
        """Whether a checkpoint is due: at its period, and after the best evaluation so far."""
        return self.save_every is not None and (best or step % self.save_every == 0)


class RLTrainer:
    """The RL loop. It drives its parts, and none of them holds a reference to it."""

    def __init__(
        self,
        *,
        pipeline: Pipeline,
        workers: Workers,
        best: BestMetric,
        schedule: RunPeriods,
        logger: Logger,
        rollout_log: RolloutLog,
        ledger: TrainedLedger,
        progress: Progress,
        token_log: NoTokenLog | None = None,
        checkpointer: Checkpointer | None = None,
        stop: StopRequest | None = None,
        warnings: Warnings | None = None,
        start: StartUp | None = None,
        callbacks: Callbacks | None = None,
    ) -> None:
        """`stop`: the request to end the run after a checkpoint; None: the run cannot be asked. `start`: the clock of
        what has been done so far; the first step tells of it. `callbacks`: of the program that called the run."""
        self.pipeline = pipeline
        self.workers = workers
        self.best = best
        self.schedule = schedule
        self.logger = logger
        self.rollout_log = rollout_log
        self.token_log = token_log or NoTokenLog()
        self.ledger = ledger
        self.progress = progress
        self.checkpointer = checkpointer or NoCheckpoints()
        self.stop = stop or StopRequest()
        self.warnings = warnings or NoWarnings()
        self.start = start or StartUp()
        self.callbacks = callbacks or Callbacks()
        self.clock = PhaseClock(on_phase=progress.phase)
        self.rounds_done = 0
        self.version = 0
        self.last_evaluation: dict[str, float] = {}
        self.evaluated_after: int | None = None
        """The step whose weights were measured last, or are being measured."""
        self.evaluating = False
        self.saved_after: int | None = None

    def fit(self) -> dict[str, float]:
        """Train to the end, from the latest checkpoint if there is one; returns the last evaluation, empty if none.

        Raises Stopped when it was asked to stop and has saved, and RolloutError when there was nothing to train on. A
        run that a callback ends has saved too, and ends like any other.
        """
        state = self.checkpointer.load(self.load_state_dict)
        if state is not None:
            self.start.mark("checkpoint")
        self.token_log.begin(after=self.version)
        self.pipeline.start(self.version)
        self.start.mark("push")
        try:
            # A checkpoint has the very weights whose evaluation it interrupted.
            if self.schedule.eval_at_ends if state is None else state.get("evaluating"):
                self.evaluate()
                self.callbacks.check()
            elif state is not None and self._evaluation_is_due():
                self.conclude()  # the run that was stopped has saved and left its evaluation to this one
            self.clock.take()  # loading and the first push are no part of the first round's time
            while self.rounds_done < self.schedule.rounds:
                with waits.during(f"round {self.rounds_done + 1}"):
                    metrics = self.step()
                self.rounds_done += 1
                self.report(metrics)
                self.conclude()
        except PromptsExhausted as end:
            if end.rejected_prompts:
                self.ledger.write(self.version + 1, [], rejected_prompts=end.rejected_prompts)
            if not self.rounds_done:
                raise RolloutError(f"not one group was trained on: {end}") from end
            self.progress.end_early(str(end))
        except EndedEarly as end:
            self.progress.end_early(str(end))
        self.take_evaluation(wait=True)
        if self.schedule.eval_at_ends and self.callbacks.ended is None and self.evaluated_after != self.rounds_done:
            self.evaluate()
            self.take_evaluation(wait=True)
        if self.best.value is not None:
            self.progress.note(f"best {self.best.key} {self.best.value:.3f}, after step {self.best.step}")
        return self.last_evaluation

    def conclude(self) -> None:
        """After a round: evaluate, save and stop, as far as each is due. A run that is to stop saves at once."""
        self.take_evaluation()
        stops = self.stop.asked is not None or self.callbacks.ended is not None
        best = not stops and self._evaluation_is_due() and self.evaluate()
        stops = self.stop.accept() is not None or self.callbacks.ended is not None
        if stops or self.schedule.saves_after(self.rounds_done, best=best or self.may_be_best):
            self.save(best=best)
            if (by := self.stop.accept()) is not None:
                raise Stopped(by)
        self.callbacks.check()

    def _evaluation_is_due(self) -> bool:
        due = self.pipeline.evaluation is not None and self.schedule.evaluates_after(self.rounds_done)
        return due and self.evaluated_after != self.rounds_done

    def step(self) -> Metrics:
        """One round: roll out, score, update, hand the new weights to the engine."""
        with self.clock.phase("generation"):
            groups, metrics, rejected_prompts = self.pipeline.next_batch()
        with self.clock.phase("make_experience"):
            metrics.merge(self.pipeline.begin_training())
            batch, placed = self.workers.place(groups)
            metrics.merge(placed)
            self.workers.score(batch)
            metrics.merge(self.workers.assign_advantages(batch))
        with self.clock.phase("ppo_train"):
            metrics.merge(self.workers.update(batch, keep=self.token_log.wants(self.version + 1)))
        with self.clock.phase("broadcast"):
            self.version += 1
            metrics.merge(self.pipeline.finish_training(self.version))
        self.rollout_log.write(self.version, groups)
        self.token_log.write(self.version, groups, lambda keys: self.workers.columns(batch, keys))
        self.ledger.write(self.version, groups, rejected_prompts=rejected_prompts)
        metrics.merge(self.measure(groups))
        return metrics

    def measure(self, groups: Sequence[Group]) -> Metrics:
        """The metrics of a round's rollouts, its seconds by phase, and its tokens per second."""
        metrics = rollout_metrics(groups, max_length=self.schedule.max_length)
        if self.schedule.by_source:
            metrics.merge(source_metrics(groups))
        timings = self.clock.take()
        for name, seconds in timings.items():
            metrics.last(name, seconds)
        judged = [t for group in groups for t in group.scored]
        seconds = max(timings["timing/step_total"], 1e-9)
        metrics.last("perf/tokens_per_second", sum(t.num_tokens for t in judged) / seconds)
        metrics.last("perf/generated_tokens_per_second", sum(t.num_actions for t in judged) / seconds)
        return metrics

    def report(self, metrics: Metrics) -> None:
        if parts := self.start.take():
            self.progress.note(self.start.line())
            metrics.last("startup/total", self.start.total)
            for part, seconds in parts.items():
                metrics.last(f"startup/{part}", seconds)
        values = metrics.values()
        self.progress.step(self.rounds_done, values)
        self.warnings.after(self.rounds_done, values, metrics.notes)
        if self.rounds_done % self.schedule.log_every == 0:
            self.logger.log(self.rounds_done, {**values, "global_step": self.rounds_done}, kind="train")
        self.callbacks.step(self.rounds_done, values)

    def evaluate(self) -> bool:
        """Measure the present weights. Returns whether they are known to be the best: not while it still goes on."""
        if self.pipeline.evaluation is None:
            return False
        with waits.during(f"evaluation after step {self.rounds_done}"), self.clock.phase("evaluation"):
            self.pipeline.evaluate()
            self.evaluating, self.evaluated_after = True, self.rounds_done
            best = self.take_evaluation()
        self.clock.take()  # evaluation is no part of the next round's time
        return best

    def take_evaluation(self, *, wait: bool = False) -> bool:
        """Log the result of an evaluation, if there is one, under its step. Returns whether it is the best so far."""
        evaluation = self.pipeline.evaluation
        values = evaluation.result(wait=wait) if evaluation is not None and self.evaluating else None
        if values is None:
            return False
        step, self.last_evaluation, self.evaluating = self.evaluated_after, values, False
        assert step is not None  # `evaluate` has set it
        self.progress.evaluation(step, values)
        is_best = self.best.update(step, values)
        best = {} if self.best.value is None else {"eval_best": self.best.value}
        self.logger.log(step, {**values, **best, "global_step": step}, kind="eval")
        self.callbacks.evaluation(step, values)
        if is_best and self.saved_after == step:
            self.checkpointer.keep_best(step)
        return is_best

    @property
    def may_be_best(self) -> bool:
        """Whether the present weights may turn out to be the best: by the time it is known they will have changed."""
        return self.evaluating and self.best.follows

    def save(self, *, best: bool) -> None:
        with waits.during(f"checkpoint of step {self.rounds_done}"), self.clock.phase("checkpoint"):
            self.token_log.flush()  # a step that is never taken again must be in it
            self.checkpointer.save(self.rounds_done, self.state_dict(), best=best)
        self.saved_after = self.rounds_done
        self.clock.take()  # checkpoints are no part of the next round's time

    def state_dict(self) -> dict[str, Any]:
        """The state between two rounds, without the models: the checkpointer has these."""
        return {
            "rounds": self.rounds_done,
            "version": self.version,
            "collector": self.pipeline.state_dict(),
            "workers": self.workers.state_dict(),
            "best": self.best.state_dict(),
            "last_evaluation": dict(self.last_evaluation),
            "evaluated_after": self.evaluated_after,
            "evaluating": self.evaluating,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.pipeline.load_state_dict(state["collector"])
        self.workers.load_state_dict(state["workers"])
        self.best.load_state_dict(state["best"])
        self.rounds_done, self.version = state["rounds"], state["version"]
        self.saved_after = self.rounds_done
        self.last_evaluation, self.evaluated_after = dict(state["last_evaluation"]), state["evaluated_after"]


def state_after(rounds: int, prompts: int, *, pipeline: Pipeline, workers: Workers, best: BestMetric) -> dict[str, Any]:
    """The state of a loop that has not begun, after so many rounds of another run, where nothing else is known.

    The order of prompts is ours: as many are left out as that run took. The KL coefficient is the one to start with.
    """
    collector = pipeline.state_dict()
    return {
        "rounds": rounds,
        "version": rounds,
        "collector": collector | {"prompts": collector["prompts"] | {"next_ordinal": prompts}},
        "workers": workers.state_dict() | {"rounds": rounds},
        "best": best.state_dict(),
        "last_evaluation": {},
        "evaluated_after": rounds,
        "evaluating": False,
    }

"""The RL loop. One loop for every algorithm, execution mode and pipeline: those are its parts' business."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from openrlhf.checkpoint.base import Checkpointer, NoCheckpoints
from openrlhf.learners.base import Workers
from openrlhf.observability.loggers import Logger
from openrlhf.observability.metrics import Metrics
from openrlhf.observability.progress import Progress
from openrlhf.observability.rollout_log import RolloutLog
from openrlhf.observability.timing import PhaseClock
from openrlhf.rollout.collector import PromptsExhausted, Round
from openrlhf.rollout.statistics import rollout_metrics
from openrlhf.trainers.evaluation import BestMetric
from openrlhf.types import Group
from openrlhf.utils import waits
from openrlhf.weight_sync.base import WeightSync


class Collector(Protocol):
    """Where training batches come from: agents and rewards on an engine, in whatever order it sees fit."""

    def next_batch(self) -> Round:
        """Raises PromptsExhausted when there is nothing left to train on."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class Evaluation(Protocol):
    """Measures the policy on prompts it does not train on."""

    def run(self) -> dict[str, float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """When things happen."""

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
    """Tokens a sample may have; what `response_clip_ratio` counts."""

    def evaluates_after(self, step: int) -> bool:
        return self.eval_every is not None and step % self.eval_every == 0

    def saves_after(self, step: int, *, best: bool) -> bool:
        """At its period, and when no evaluation was better."""
        return self.save_every is not None and (best or step % self.save_every == 0)


class RLTrainer:
    """Drives the parts; they do not know it."""

    def __init__(
        self,
        *,
        collector: Collector,
        workers: Workers,
        weights: WeightSync,
        evaluation: Evaluation | None,
        best: BestMetric,
        schedule: Schedule,
        logger: Logger,
        rollout_log: RolloutLog,
        progress: Progress,
        checkpointer: Checkpointer | None = None,
    ) -> None:
        self.collector = collector
        self.workers = workers
        self.weights = weights
        self.evaluation = evaluation
        self.best = best
        self.schedule = schedule
        self.logger = logger
        self.rollout_log = rollout_log
        self.progress = progress
        self.checkpointer = checkpointer or NoCheckpoints()
        self.clock = PhaseClock(on_phase=progress.phase)
        self.rounds_done = 0
        self.version = 0
        self.last_evaluation: dict[str, float] = {}
        self.evaluated_after: int | None = None

    def fit(self) -> dict[str, float]:
        """Train to the end, from the latest checkpoint if there is one; returns the last evaluation, empty if none."""
        if (state := self.checkpointer.load()) is not None:
            self.load_state_dict(state)
        # An engine begins with whatever its files hold, or with nothing.
        self.weights.push(version=self.version)
        if state is None and self.schedule.eval_at_ends:
            self.evaluate()
        try:
            while self.rounds_done < self.schedule.rounds:
                metrics = self.step()
                self.rounds_done += 1
                self.report(metrics)
                best = self.schedule.evaluates_after(self.rounds_done) and self.evaluate()
                if self.schedule.saves_after(self.rounds_done, best=best):
                    self.save(best=best)
        except PromptsExhausted as end:
            self.progress.end_early(str(end))
        if self.schedule.eval_at_ends and self.evaluated_after != self.rounds_done:
            self.evaluate()
        if self.best.value is not None:
            self.progress.note(f"best {self.best.key} {self.best.value:.3f}, after step {self.best.step}")
        return self.last_evaluation

    def step(self) -> Metrics:
        """One round: roll out, score, update, hand the new weights to the engine."""
        with waits.during(f"round {self.rounds_done + 1}"):
            return self._step()

    def _step(self) -> Metrics:
        with self.clock.phase("generation"):
            groups, metrics = self.collector.next_batch()
        with self.clock.phase("make_experience"):
            batch = self.workers.place(groups)
            self.workers.score(batch)
            metrics.merge(self.workers.assign_advantages(batch))
        with self.clock.phase("ppo_train"):
            metrics.merge(self.workers.update(batch))
        with self.clock.phase("broadcast"):
            self.version += 1
            metrics.merge(self.weights.push(version=self.version))
        self.rollout_log.write(self.version, groups)
        metrics.merge(self.measure(groups))
        return metrics

    def measure(self, groups: Sequence[Group]) -> Metrics:
        """What the round's rollouts were like, and how long it all took."""
        metrics = rollout_metrics(groups, max_length=self.schedule.max_length)
        timings = self.clock.take()
        for name, seconds in timings.items():
            metrics.last(name, seconds)
        tokens = sum(t.num_tokens for group in groups for t in group.trajectories)
        metrics.last("perf/tokens_per_second", tokens / max(timings["timing/step_total"], 1e-9))
        return metrics

    def report(self, metrics: Metrics) -> None:
        values = metrics.values()
        self.progress.step(self.rounds_done, values)
        if self.rounds_done % self.schedule.log_every == 0:
            self.logger.log(self.rounds_done, {**values, "global_step": self.rounds_done}, kind="train")

    def evaluate(self) -> bool:
        """Whether it is the best so far."""
        if self.evaluation is None:
            return False
        with waits.during(f"evaluation after step {self.rounds_done}"), self.clock.phase("evaluation"):
            values = self.evaluation.run()
        self.clock.take()  # evaluation is no part of the next round's time
        self.last_evaluation, self.evaluated_after = values, self.rounds_done
        self.progress.evaluation(self.rounds_done, values)
        is_best = self.best.update(self.rounds_done, values)
        best = {} if self.best.value is None else {"eval_best": self.best.value}
        self.logger.log(self.rounds_done, {**values, **best, "global_step": self.rounds_done}, kind="eval")
        return is_best

    def save(self, *, best: bool) -> None:
        with waits.during(f"checkpoint of step {self.rounds_done}"), self.clock.phase("checkpoint"):
            self.checkpointer.save(self.rounds_done, self.state_dict(), best=best)
        self.clock.take()  # nor are checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Between two rounds. Without the models: whoever keeps checkpoints knows them."""
        return {
            "rounds": self.rounds_done,
            "version": self.version,
            "collector": self.collector.state_dict(),
            "workers": self.workers.state_dict(),
            "best": self.best.state_dict(),
            "last_evaluation": dict(self.last_evaluation),
            "evaluated_after": self.evaluated_after,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.collector.load_state_dict(state["collector"])
        self.workers.load_state_dict(state["workers"])
        self.best.load_state_dict(state["best"])
        self.rounds_done, self.version = state["rounds"], state["version"]
        self.last_evaluation, self.evaluated_after = dict(state["last_evaluation"]), state["evaluated_after"]

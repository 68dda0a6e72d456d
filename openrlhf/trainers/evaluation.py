"""Evaluation on prompts that are not trained on, at once or beside training; and which evaluation was the best."""

from __future__ import annotations

import difflib
import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Protocol

from openrlhf.algorithms.reduction import pass_at_k
from openrlhf.config.fields import ConfigError
from openrlhf.observability.metrics import Metrics
from openrlhf.rollout.runner import EpisodeRunner, RolloutError
from openrlhf.types import Group, Outcome, Prompt, SamplingParams
from openrlhf.utils.event_loops import BackgroundRunner, LoopRunner

logger = logging.getLogger(__name__)


class Evaluation(Protocol):
    """Measures the policy on prompts that are not trained on."""

    def start(self) -> None:
        """Measure the weights that the engine has now, to the end or beside the next round."""
        ...

    def result(self, *, wait: bool = False) -> dict[str, float] | None:
        """The metrics, once; None before it is over and after they were taken. `wait`: until it is over."""
        ...


class PromptEvaluation:
    """Plays every evaluation prompt `samples_per_prompt` times, with the same randomness every time."""

    def __init__(
        self,
        *,
        prompts: Sequence[Prompt],
        runner: EpisodeRunner,
        loop: LoopRunner,
        samples_per_prompt: int,
        sampling_params: SamplingParams,
    ) -> None:
        self._prompts = prompts
        self._runner = runner
        self._loop = loop
        self._samples_per_prompt = samples_per_prompt
        self._sampling_params = sampling_params
        self._found: dict[str, float] | None = None

    def start(self) -> None:
        self._found = self._loop.run(self.play())

    def result(self, *, wait: bool = False) -> dict[str, float] | None:
        found, self._found = self._found, None
        return found

    async def play(self) -> dict[str, float]:
        groups = await self._runner.play_all(
            self._prompts,
            n=self._samples_per_prompt,
            sampling_params=self._sampling_params,
            purpose="eval",
        )
        if not any(group.scored for group in groups):
            reason = next(t.error for group in groups for t in group.trajectories if t.failed)
            raise RolloutError(f"all {len(groups)} evaluation groups failed; first reason: {reason}")
        return evaluation_metrics(groups, k=self._samples_per_prompt).values()


class BackgroundEvaluation:
    """An evaluation that goes on while the policy is trained. Before the engine's weights change, `wait` for it."""

    def __init__(self, evaluation: PromptEvaluation, loop: BackgroundRunner) -> None:
        self._evaluation = evaluation
        self._loop = loop
        self._found: Future[dict[str, float]] | None = None

    def start(self) -> None:
        self._found = self._loop.submit(self._evaluation.play())

    def result(self, *, wait: bool = False) -> dict[str, float] | None:
        found = self._found
        if found is None or not (wait or found.done()):
            return None
        self._found = None
        return found.result()

    def wait(self) -> None:
        """Until what was started is over: it measures the weights that it began with."""
        if self._found is not None:
            self._found.exception()  # `result` raises it


def evaluation_metrics(groups: Sequence[Group], *, k: int) -> Metrics:
    """`eval_<source>_pass1` (mean score), `_pass<k>`, `_mean` (mean raw reward), lengths, truncation, counts."""
    metrics = Metrics()
    for group in groups:
        source = f"eval_{group.prompt.datasource}"
        members = group.scored
        count = len(members)
        failed = len(group.trajectories) - count
        metrics.sum("eval_failed", failed)
        if not members:
            continue
        scores = group.scores
        lengths = sum(t.num_actions for t in members)
        truncated = sum(t.outcome is Outcome.TRUNCATED for t in members)
        metrics.mean(f"{source}_pass1", sum(scores), count)
        if 1 < k <= count:
            metrics.mean(f"{source}_pass{k}", pass_at_k(count, sum(score >= 1 for score in scores), k), 1)
        metrics.mean(f"{source}_mean", sum(group.rewards), count)
        for agent, own in group.by_agent.items():
            if agent:
                metrics.mean(f"{source}_score_{agent}", sum(t.score or 0.0 for t in own), len(own))
        metrics.mean(f"{source}_response_length_mean", lengths, count)
        metrics.mean(f"{source}_truncated_rate", truncated, count)
        metrics.mean("eval_response_length_mean", lengths, count)
        metrics.mean("eval_truncated_rate", truncated, count)
        metrics.sum("eval_num_samples", count)
    return metrics


def evaluation_names(sources: Iterable[str], *, k: int) -> list[str]:
    """The names of the metrics that `evaluation_metrics` gives where every sample is judged."""
    kinds = ["pass1", *([f"pass{k}"] if k > 1 else []), "mean", "response_length_mean", "truncated_rate"]
    of_sources = [f"{source}_{kind}" for source in sources for kind in kinds]
    return [f"eval_{name}" for name in (*of_sources, "failed", "response_length_mean", "truncated_rate", "num_samples")]


class BestMetric:
    """Follows one number through a run's evaluations: how high it was at best, and when. Higher is better."""

    def __init__(self, wanted: str = "") -> None:
        """`wanted` is --ckpt.best_metric_key: a metric's name, "" for the first `*_pass1` by name, "none" for none."""
        self._wanted = wanted
        self.key: str | None = None
        """The name of the metric that is followed; known from the first evaluation on."""
        self.value: float | None = None
        self.step: int | None = None

    @property
    def is_named(self) -> bool:
        """Whether the user named a metric."""
        return self._wanted not in ("", "none")

    @property
    def follows(self) -> bool:
        """Whether there is anything to follow."""
        return self._wanted != "none"

    def update(self, step: int, evaluation: Mapping[str, float]) -> bool:
        """Take in the evaluation after `step`; whether it is the best so far. Of equals the first is.

        An evaluation without the metric (all samples of a source failed), or where it is not finite, is never the best.
        Raises ConfigError when the very first has no metric of the wanted name.
        """
        if self.key is None:
            self.key = self._choose(evaluation)
        value = evaluation.get(self.key, math.nan) if self.key is not None else math.nan
        if not math.isfinite(value) or (self.value is not None and value <= self.value):
            return False
        self.value, self.step = value, step
        return True

    def _choose(self, evaluation: Mapping[str, float]) -> str | None:
        if self._wanted == "none":
            return None
        if not self._wanted:
            return min((name for name in evaluation if name.endswith("_pass1")), default=None)
        self.require(evaluation)
        return self._wanted

    def require(self, names: Collection[str]) -> None:
        """Raise ConfigError if evaluations that have these metrics cannot have the wanted one."""
        if self._wanted not in ("", "none", *names):
            near = difflib.get_close_matches(self._wanted, names, n=1)
            raise ConfigError(
                f"--ckpt.best_metric_key {self._wanted}: evaluations have no such metric"
                f"{f' (did you mean {near[0]}?)' if near else ''}; they have {', '.join(sorted(names))}"
            )

    def state_dict(self) -> dict[str, Any]:
        return {"key": self.key, "value": self.value, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`; from nothing if it followed another metric than is wanted now."""
        if self._wanted not in ("", state["key"]):
            logger.warning(
                "the checkpoint's best is that of %s: --ckpt.best_metric_key %s begins anew", state["key"], self._wanted
            )
            return
        self.key, self.value, self.step = state["key"], state["value"], state["step"]


if TYPE_CHECKING:
    _: list[type[Evaluation]] = [PromptEvaluation, BackgroundEvaluation]

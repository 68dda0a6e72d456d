"""Evaluation on prompts that are not trained on, per data source."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from openrlhf.algorithms.evaluation import pass_at_k
from openrlhf.observability.metrics import Metrics
from openrlhf.rollout.runner import EpisodeRunner, RolloutError
from openrlhf.types import Group, Outcome, Prompt, SamplingParams


class PromptEvaluation:
    """Plays every evaluation prompt `samples_per_prompt` times, with the same randomness every time."""

    def __init__(
        self,
        *,
        prompts: Sequence[Prompt],
        runner: EpisodeRunner,
        loop: asyncio.Runner,
        samples_per_prompt: int,
        sampling_params: SamplingParams,
    ) -> None:
        self._prompts = prompts
        self._runner = runner
        self._loop = loop
        self._samples_per_prompt = samples_per_prompt
        self._sampling_params = sampling_params

    def run(self) -> dict[str, float]:
        groups = self._loop.run(
            self._runner.play_all(
                self._prompts,
                n=self._samples_per_prompt,
                sampling_params=self._sampling_params,
                purpose="eval",
            )
        )
        if not any(group.scored for group in groups):
            reason = next(t.error for group in groups for t in group.trajectories if t.failed)
            raise RolloutError(f"all {len(groups)} evaluation groups failed; first reason: {reason}")
        return evaluation_metrics(groups, k=self._samples_per_prompt).values()


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
        scores = [t.score for t in members]
        lengths = sum(t.num_actions for t in members)
        truncated = sum(t.outcome is Outcome.TRUNCATED for t in members)
        metrics.mean(f"{source}_pass1", sum(scores), count)
        if 1 < k <= count:
            metrics.mean(f"{source}_pass{k}", pass_at_k(count, sum(score >= 1 for score in scores), k), 1)
        metrics.mean(f"{source}_mean", sum(t.reward for t in members), count)
        metrics.mean(f"{source}_response_length_mean", lengths, count)
        metrics.mean(f"{source}_truncated_rate", truncated, count)
        metrics.mean("eval_response_length_mean", lengths, count)
        metrics.mean("eval_truncated_rate", truncated, count)
        metrics.sum("eval_num_samples", count)
    return metrics

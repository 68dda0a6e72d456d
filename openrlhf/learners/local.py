"""The workers of one process: models, scoring and updates all right here."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from openrlhf.algorithms.advantages import Estimator, Moments, rewards_to_come, whiten
from openrlhf.learners.policy import PolicyLearner
from openrlhf.learners.samples import training_samples
from openrlhf.learners.scorer import Scorer
from openrlhf.observability.metrics import Metrics
from openrlhf.types import Group, TrainingBatch

logger = logging.getLogger(__name__)


class LocalWorkers:
    """One rank. Implements `learners.base.Workers`."""

    def __init__(
        self,
        *,
        policy: PolicyLearner,
        scorer: Scorer,
        estimator: Estimator,
        gamma: float,
        divide_by_std: bool,
        clip_range: tuple[float, float],
    ) -> None:
        self._policy = policy
        self._scorer = scorer
        self._estimator = estimator
        self._gamma = gamma
        self._divide_by_std = divide_by_std
        self._clip_range = clip_range
        self._rounds = 0
        self._warned_of_clipping = False
        self._placed = Metrics()

    def place(self, groups: Sequence[Group]) -> TrainingBatch:
        shaped = training_samples(groups, estimator=self._estimator, clip_range=self._clip_range)
        self._placed = Metrics()
        self._placed.mean("reward_clipped", shaped.clipped_rewards, shaped.rewards)
        self._placed.last("rollout/left_alone", shaped.lonely)
        if shaped.clipped_rewards and not self._warned_of_clipping:
            logger.warning(
                "%d of %d rewards lie outside --reward.clip_range %g %g and were clipped; widen it if they are meant",
                shaped.clipped_rewards,
                shaped.rewards,
                *self._clip_range,
            )
            self._warned_of_clipping = True
        return TrainingBatch(samples=shaped.samples)

    def score(self, batch: TrainingBatch) -> None:
        if not self._policy.settings.on_policy and len(batch):
            batch.old_logprobs_A = self._scorer.logprobs(batch)

    def assign_advantages(self, batch: TrainingBatch) -> Metrics:
        metrics = self._placed
        columns = []
        for sample in batch.samples:
            rewards_A = sample.segment.turn_rewards[sample.segment.action_mask]
            returns_A = rewards_to_come(rewards_A, gamma=self._gamma, later=sample.later_reward)
            columns.append((returns_A - sample.baseline) / sample.scale)
        advantages_A = torch.cat(columns) if columns else torch.empty(0)
        # What the first action token stands to gain is what the episode is worth after shaping.
        metrics.mean("return", sum(float(column[0]) for column in columns), len(columns))
        if self._estimator.whiten:
            advantages_A = whiten(advantages_A, Moments.of(advantages_A), divide_by_std=self._divide_by_std)
        batch.advantages_A = advantages_A
        return metrics

    def update(self, batch: TrainingBatch) -> Metrics:
        self._rounds += 1
        return self._policy.update(batch, round_index=self._rounds)

    def state_dict(self) -> dict[str, int]:
        return {"rounds": self._rounds}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._rounds = state["rounds"]

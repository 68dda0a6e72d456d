"""One rank's part of scoring and training: its own samples, and sums over those of all ranks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from openrlhf.algorithms.kl import KLController, KLEstimator
from openrlhf.backends.ranks import ALONE, Ranks
from openrlhf.learners.accumulation import MicroBatchSizer
from openrlhf.learners.advantages import (
    AdvantageSettings,
    KLCost,
    SampleMaker,
    TeacherReward,
    assign_advantages,
    may_get_advantages,
)
from openrlhf.learners.critic import CriticLearner
from openrlhf.learners.policy import Inspector, PolicyLearner, SeenColumns
from openrlhf.learners.scorer import Scorer
from openrlhf.learners.steps import Step, StepSettings, optimizer_steps
from openrlhf.learners.teacher import Teacher
from openrlhf.learners.workers import Placed, sample_columns
from openrlhf.observability.metrics import Metrics
from openrlhf.types import Group, SampleKey, TrainingBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class KLTerm:
    """KL to the reference model, and its price."""

    estimator: KLEstimator
    controller: KLController
    as_loss: bool
    """A term of the loss; otherwise a cost in every token's reward."""
    reference: Scorer | None
    """None: its log-probs come with the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherTerm:
    """A teacher, and what its word is."""

    teacher: Teacher | None
    """None: what it says comes with the batch."""
    reward: TeacherReward | None
    """None: its word is a term of the loss, which the policy's learner knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticPart:
    """A critic: how it is asked, and how it learns."""

    scorer: Scorer
    learner: CriticLearner


class RankLearners:
    """Scores and trains this rank's samples together with the other ranks. Methods are collective.

    What is the same on all ranks: settings, rounds, the price of KL, and every number that is returned. Implements
    `Workers` for a run in one process, whose rank has all samples.
    """

    def __init__(
        self,
        *,
        policy: PolicyLearner,
        policy_scorer: Scorer,
        steps: StepSettings,
        advantages: AdvantageSettings,
        critic: CriticPart | None = None,
        freezing_steps: int = -1,
        kl: KLTerm | None = None,
        teacher: TeacherTerm | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`critic`: None without one, or where its values come with the batch and it learns elsewhere.

        `freezing_steps`: the policy waits for its critic, and is not trained in rounds 0 … N, which are N + 1.
        """
        self._policy = policy
        self._policy_scorer = policy_scorer
        self._steps = steps
        self._advantages = advantages
        self._make_samples = SampleMaker(advantages)
        self._critic = critic
        self._freezing_steps = freezing_steps
        self._kl = kl
        self._teacher = teacher
        self._ranks = ranks
        self._fitting = MicroBatchSizer(steps.batching)
        self._rounds = 0
        self._sampled_kl: float | None = None

    @property
    def rounds(self) -> int:
        """The number of rounds in which the policy was updated."""
        return self._rounds

    def place(self, groups: Sequence[Group]) -> Placed:
        """Steps 1 and 2 of `learners.advantages`, where this rank has all samples. On clusters the driver does it."""
        made = self._make_samples(groups)
        return Placed(TrainingBatch(samples=made.samples), made.metrics)

    def score(self, batch: TrainingBatch) -> None:
        """All the log-probs and values that advantages and the update need, from weights that do not change."""
        if self._kl is not None and self._kl.reference is not None:
            batch.reference_logprobs_A = self._kl.reference.score(batch)
        if self._teacher is not None and self._teacher.teacher is not None:
            self._teacher.teacher.tell(batch)
        batch.old_logprobs_A = self._old_logprobs(batch)
        if self._critic is not None:
            batch.values_A = self._critic.scorer.score(batch)

    def _old_logprobs(self, batch: TrainingBatch) -> Tensor | None:
        """Log-probs of the policy before the update; None where nothing needs them."""
        priced = self._kl is not None and not self._kl.as_loss
        if priced or self._teacher_reward is not None:
            return self._policy_scorer.score(batch)  # a part of the reward is that of the policy as it sampled
        on_policy = self._steps.on_policy(self._episodes(batch))
        if self._is_frozen:
            return None
        if self._steps.chosen is not None:
            return self._policy_scorer.score(batch)
        if on_policy:  # the single step of a round begins with these very weights
            return None
        trained = may_get_advantages(batch, self._advantages) if self._steps.skip_idle else None
        return self._policy_scorer.score(batch, trained)

    def assign_advantages(self, batch: TrainingBatch) -> Metrics:
        """Steps 3 to 6 of `learners.advantages`."""
        kl = self._kl
        cost = None if kl is None or kl.as_loss else KLCost(kl.estimator, kl.controller.coef)
        metrics = assign_advantages(
            batch, self._advantages, kl_cost=cost, teacher=self._teacher_reward, ranks=self._ranks
        )
        if kl is not None:
            metrics.last("kl_coef", kl.controller.coef)
        self._sampled_kl = metrics.values().get("kl")
        return metrics

    def update(self, batch: TrainingBatch, *, keep: bool = False, inspect: Inspector | None = None) -> Metrics:
        """Critic, then policy, on micro-batches that are cut and packed once. `inspect`: of the policy's steps."""
        frozen = self._is_frozen
        seen = SeenColumns() if keep else None
        self._rounds += 1
        own = Metrics()
        steps = self._cut(batch, frozen=frozen)
        if self._critic is not None:
            own.merge(self._critic.learner.update(steps))
        if not frozen:
            kl_coef = self._kl.controller.coef if self._kl else 0.0
            own.merge(self._policy.update(steps, kl_coef=kl_coef, seen=seen, inspect=inspect))
        batch.seen_A = {} if seen is None else seen.columns(batch.num_actions)
        if self._fitting.shrunk and self._fitting.batching.tokens is not None:
            own.last("perf/max_tokens_per_gpu", self._fitting.batching.tokens)
        metrics = Metrics.merged(self._ranks.gather(own))
        self._adapt_kl(batch, metrics)
        return metrics

    def columns(self, batch: TrainingBatch, keys: Collection[SampleKey]) -> dict[SampleKey, dict[str, np.ndarray]]:
        """Of the samples that this rank has."""
        return sample_columns(batch, keys)

    @property
    def _teacher_reward(self) -> TeacherReward | None:
        return None if self._teacher is None else self._teacher.reward

    @property
    def _is_frozen(self) -> bool:
        """Whether the policy waits for its critic in this round."""
        return self._rounds <= self._freezing_steps

    def _cut(self, batch: TrainingBatch, *, frozen: bool) -> list[Step]:
        steps = dataclasses.replace(self._steps, chosen=None) if frozen else self._steps
        return optimizer_steps(batch, steps, round_index=self._rounds, fitting=self._fitting, ranks=self._ranks)

    def _episodes(self, batch: TrainingBatch) -> int:
        """The number of episodes of the round, on all ranks. Collective."""
        return sum(self._ranks.gather(len(batch.episode_offsets) - 1))

    def _adapt_kl(self, batch: TrainingBatch, updated: Metrics) -> None:
        """Tell the controller what the round's KL was: as the policy sampled, or as the loss saw it."""
        if self._kl is None:
            return
        episodes = self._episodes(batch)
        kl = updated.values().get("kl") if self._kl.as_loss else self._sampled_kl
        if kl is not None and math.isfinite(kl):
            self._kl.controller.update(kl, episodes)

    def state_dict(self) -> dict[str, Any]:
        return {"rounds": self._rounds, "kl": self._kl.controller.state_dict() if self._kl else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rounds = state["rounds"]
        if self._kl is not None and state.get("kl") is not None:
            self._kl.controller.load_state_dict(state["kl"])


class CriticLearners:
    """A critic by itself: the policy is trained elsewhere, on the same rounds. Methods are collective."""

    def __init__(self, critic: CriticPart, steps: StepSettings, *, ranks: Ranks = ALONE) -> None:
        self._critic = critic
        self._steps = dataclasses.replace(steps, chosen=None)  # that is the policy's loss's business
        self._ranks = ranks
        self._fitting = MicroBatchSizer(steps.batching)
        self._rounds = 0

    def score(self, batch: TrainingBatch) -> None:
        batch.values_A = self._critic.scorer.score(batch)

    def update(self, batch: TrainingBatch) -> Metrics:
        """Towards the returns that came with the batch, in the policy's optimizer steps."""
        self._rounds += 1
        steps = optimizer_steps(batch, self._steps, round_index=self._rounds, fitting=self._fitting, ranks=self._ranks)
        return Metrics.merged(self._ranks.gather(self._critic.learner.update(steps)))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The policy's: what counts here is the number of rounds."""
        self._rounds = state["rounds"]


if TYPE_CHECKING:
    from openrlhf.learners.workers import Workers

    _: type[Workers] = RankLearners

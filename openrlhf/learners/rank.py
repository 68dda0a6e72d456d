"""One rank's part of scoring and training: its own samples, and sums over those of all ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from openrlhf.algorithms.advantages import Moments, whiten
from openrlhf.algorithms.kl import KLController, KLEstimator
from openrlhf.backends.ranks import ALONE, Ranks
from openrlhf.learners.credit import CreditSettings, give_credit
from openrlhf.learners.critic import CriticLearner
from openrlhf.learners.microbatch import MicroBatchSizer
from openrlhf.learners.policy import PolicyLearner
from openrlhf.learners.scorer import Scorer
from openrlhf.learners.steps import Step, StepSettings, optimizer_steps, trained_samples
from openrlhf.observability.metrics import Metrics
from openrlhf.types import TrainingBatch


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
class CriticPart:
    """A critic: how it is asked, and how it learns."""

    scorer: Scorer
    learner: CriticLearner


class RankLearners:
    """Scores and trains this rank's samples together with the other ranks. Methods are collective.

    What is the same on all ranks: settings, rounds, the price of KL, and every number that is returned.
    """

    def __init__(
        self,
        *,
        policy: PolicyLearner,
        policy_scorer: Scorer,
        steps: StepSettings,
        credit: CreditSettings,
        critic: CriticPart | None = None,
        freezing_steps: int = -1,
        kl: KLTerm | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        """`critic`: None without one, or where its values come with the batch and it learns elsewhere.

        `freezing_steps`: the policy waits for its critic, and is not trained in rounds 0 … N, which are N + 1.
        """
        self._policy = policy
        self._policy_scorer = policy_scorer
        self._steps = steps
        self._credit = credit
        self._critic = critic
        self._freezing_steps = freezing_steps
        self._kl = kl
        self._ranks = ranks
        self._fitting = MicroBatchSizer(steps.batching)
        self._rounds = 0
        self._sampled_kl: float | None = None

    @property
    def rounds(self) -> int:
        """In which the policy was updated."""
        return self._rounds

    def score(self, batch: TrainingBatch) -> None:
        if self._kl is not None:
            if self._kl.reference is not None:
                batch.reference_logprobs_A = self._kl.reference.score(batch)
            if not self._kl.as_loss:  # a cost in the reward is that of the policy as it sampled
                batch.old_logprobs_A = self._policy_scorer.score(batch)
        if self._critic is not None:
            batch.values_A = self._critic.scorer.score(batch)

    def assign_advantages(self, batch: TrainingBatch) -> Metrics:
        own, costs_A = Metrics(), None
        if self._kl is not None:
            own.last("kl_coef", self._kl.controller.coef)
            if not self._kl.as_loss:
                assert batch.old_logprobs_A is not None  # from `score`
                assert batch.reference_logprobs_A is not None
                kl_A = self._kl.estimator(batch.old_logprobs_A, batch.reference_logprobs_A)
                own.mean("kl", float(kl_A.sum()), batch.num_actions)
                costs_A = self._kl.controller.coef * kl_A
        credit = give_credit(batch, self._credit, costs_A=costs_A)
        own.mean("return", float(credit.totals_E.sum()), len(credit.totals_E))
        advantages_A = credit.advantages_A
        if self._credit.estimator.whiten:
            moments = Moments.merged(self._ranks.gather(Moments.of(advantages_A)))
            advantages_A = whiten(advantages_A, moments, divide_by_std=self._credit.divide_by_std)
        batch.advantages_A = advantages_A
        batch.returns_A = credit.returns_A
        metrics = Metrics.merged(self._ranks.gather(own))
        self._sampled_kl = metrics.values().get("kl")
        return metrics

    def update(self, batch: TrainingBatch) -> Metrics:
        """Critic, then policy, on micro-batches that are cut and packed once."""
        frozen = self._rounds <= self._freezing_steps
        self._rounds += 1
        own = Metrics()
        on_policy = self._steps.on_policy(self._episodes(batch))
        if not on_policy and not frozen and batch.old_logprobs_A is None:
            batch.old_logprobs_A = self._policy_scorer.score(batch, trained_samples(batch, self._steps))
        steps = self._cut(batch)
        if self._critic is not None:
            own.merge(self._critic.learner.update(steps))
        if not frozen:
            own.merge(self._policy.update(steps, kl_coef=self._kl.controller.coef if self._kl else 0.0))
        if self._fitting.shrunk and self._fitting.batching.tokens is not None:
            own.last("perf/max_tokens_per_gpu", self._fitting.batching.tokens)
        metrics = Metrics.merged(self._ranks.gather(own))
        self._adapt_kl(batch, metrics)
        return metrics

    def _cut(self, batch: TrainingBatch) -> list[Step]:
        return optimizer_steps(batch, self._steps, round_index=self._rounds, fitting=self._fitting, ranks=self._ranks)

    def _episodes(self, batch: TrainingBatch) -> int:
        """Of the round, on all ranks. Collective."""
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
        self._steps = steps
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

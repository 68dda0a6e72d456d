"""The critic update: values of action tokens towards their returns, on the same micro-batches as the policy."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from openrlhf.algorithms.losses import load_balancing_loss, value_loss
from openrlhf.backends.base import Backend
from openrlhf.backends.ranks import ALONE, Ranks
from openrlhf.learners.accumulation import MAX_SKIPPED, SkippedSteps, accumulate
from openrlhf.learners.policy import BalanceSettings
from openrlhf.learners.steps import MicroBatch, Step
from openrlhf.models.body import RouterLog
from openrlhf.observability.metrics import Metrics


class CriticLearner:
    """Updates the critic through its backend. The loss is a mean over a step's action tokens, and of a mixture of
    experts the balancing loss of each micro-batch by its share of the tokens, as for the policy."""

    def __init__(
        self,
        backend: Backend,
        *,
        value_clip: float,
        device: torch.device,
        balance: BalanceSettings | None = None,
        ranks: Ranks = ALONE,
        max_skipped: int = MAX_SKIPPED,
    ) -> None:
        """`balance`: None: experts, if there are any, are left to themselves. `max_skipped`: as in `PolicyLearner`."""
        self._backend = backend
        self._balance = balance
        self._skipped = SkippedSteps("critic_", most=max_skipped, ranks=ranks)
        self._value_clip = value_clip
        self._device = device
        self._ranks = ranks

    def update(self, steps: Sequence[Step]) -> Metrics:
        """One optimizer step per `Step`. Metrics of this rank."""
        metrics = Metrics()
        self._backend.module.train()
        for step in steps:
            loss, seen, odd = accumulate(step, self._accumulate, self._backend, ranks=self._ranks)
            rate, norm = self._backend.learning_rate, self._backend.step()
            metrics.last("critic_lr", rate)
            if self._skipped.after(self._backend.left_out, metrics, functools.partial(step.suspects, odd)):
                continue
            metrics.merge(seen)
            metrics.mean("critic_loss", loss, 1 / self._ranks.count)  # the sum of all ranks' is the step's
            if self._backend.left_out is None:
                metrics.mean("critic_grad_norm", norm, 1)
        self._skipped.mended(self._backend.require_finite(), metrics)
        return metrics

    def _accumulate(self, micro: MicroBatch, metrics: Metrics) -> Tensor:
        packed, metrics = micro.packed.to(self._device), Metrics() if micro.is_filler else metrics
        if packed.values_A is None or packed.returns_A is None:
            raise ValueError("a critic update needs the values before it, and returns")
        router_log = RouterLog() if self._balance else None
        values_A = self._backend.module(
            packed.tokens, positions=packed.tokens.action_positions - 1, router_log=router_log
        )
        result = value_loss(values_A, packed.values_A, packed.returns_A, value_clip=self._value_clip)
        loss = value = (micro.value_weights_A.to(self._device) * result.loss_A).sum()
        if self._balance is not None and router_log is not None:
            tokens = packed.tokens.num_tokens
            balance = load_balancing_loss(router_log.logits, top_k=self._balance.top_k)
            loss = value + self._balance.coef * micro.token_share * balance
            metrics.mean("critic_aux_loss", balance.detach().double() * tokens, tokens)
        self._backend.backward(loss)
        count = packed.tokens.num_actions
        metrics.mean("values", values_A.detach().sum(), count)
        metrics.mean("critic_clip_ratio", result.clipped_A.sum(), count)
        return value

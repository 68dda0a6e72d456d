"""The policy update: a round's samples, in a fixed number of optimizer steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from openrlhf.agents.seeds import derive_seed
from openrlhf.algorithms.losses import LossInputs, LossSettings, get_policy_loss
from openrlhf.algorithms.reduction import Aggregation, sample_weights
from openrlhf.backends.base import Backend
from openrlhf.data.packing import evenly
from openrlhf.learners.microbatch import MicroBatching
from openrlhf.observability.metrics import Metrics
from openrlhf.types import PackedBatch, TrainingBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """What the policy update is told."""

    loss: str
    clip_low: float
    clip_high: float
    aggregation: Aggregation
    constant_length: int | None
    """Divisor of constant aggregation."""
    temperature: float
    """That of sampling: log-probs are those of the distribution sampled from."""
    log_entropy: bool
    epochs: int
    steps_per_epoch: int
    batching: MicroBatching
    seed: int

    @property
    def steps_per_round(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def on_policy(self) -> bool:
        """With one optimizer step per rollout, the weights that are updated are those before the round."""
        return self.steps_per_round == 1


class PolicyLearner:
    """Updates the policy through its backend."""

    def __init__(self, backend: Backend, settings: PolicySettings, *, device: torch.device) -> None:
        self._backend = backend
        self._settings = settings
        self._loss = get_policy_loss(settings.loss)
        self._device = device

    @property
    def settings(self) -> PolicySettings:
        return self._settings

    def update(self, batch: TrainingBatch, *, round_index: int) -> Metrics:
        """`steps_per_round` optimizer steps. What failures left is split evenly over them."""
        metrics = Metrics()
        self._backend.module.train()
        for epoch in range(self._settings.epochs):
            order = shuffled(batch, seed=derive_seed(self._settings.seed, "order", round_index, epoch))
            for indices in evenly(order, parts=self._settings.steps_per_epoch):
                if indices:
                    self._step(batch, indices, metrics)
        return metrics

    def _step(self, batch: TrainingBatch, indices: Sequence[int], metrics: Metrics) -> None:
        counts = [batch.samples[i].segment.num_actions for i in indices]
        weights = dict(
            zip(
                indices,
                sample_weights(self._settings.aggregation, counts, constant_length=self._settings.constant_length),
                strict=True,
            )
        )
        loss = 0.0
        for micro in self._settings.batching.cut(batch, indices):
            packed = batch.pack(micro).to(self._device)
            weights_A = torch.tensor([weights[i] for i in micro])[packed.tokens.action_sequences().cpu()]
            loss += self._accumulate(packed, weights_A.to(self._device), metrics)
        metrics.mean("policy_loss", loss, 1)
        metrics.last("actor_lr", self._backend.learning_rate)
        metrics.mean("actor_grad_norm", self._backend.step(), 1)

    def _accumulate(self, packed: PackedBatch, weights_A: torch.Tensor, metrics: Metrics) -> float:
        """Add one micro-batch's gradient; returns its share of the step's loss."""
        output = self._backend.module(
            packed.tokens, temperature=self._settings.temperature, with_entropy=self._settings.log_entropy
        )
        current_A = output.logprobs_A
        old_A = current_A.detach() if packed.old_logprobs_A is None else packed.old_logprobs_A
        token_loss = self._loss.function(
            LossInputs(current_A, old_A, packed.advantages_A, packed.tokens.action_sequences()),
            LossSettings(clip_low=self._settings.clip_low, clip_high=self._settings.clip_high),
        )
        loss = (weights_A * token_loss.loss_A).sum()
        self._backend.backward(loss)
        count = packed.tokens.num_actions
        metrics.mean("ppo_clip_ratio", float(token_loss.clipped_A.sum()), count)
        metrics.mean("ppo_kl", float((old_A - current_A.detach()).sum()), count)
        if packed.rollout_logprobs_A is not None:
            gap_A = packed.rollout_logprobs_A - old_A
            metrics.mean("vllm_kl", float(gap_A.sum()), count)
            metrics.mean("logprobs_diff", float(gap_A.abs().sum()), count)
        if output.entropy_A is not None:
            metrics.mean("entropy_loss", float(output.entropy_A.detach().sum()), count)
        return float(loss.detach())


def shuffled(batch: TrainingBatch, *, seed: int) -> list[int]:
    """The samples in random order, those of a prompt side by side: they share its forward."""
    by_prompt: dict[int, list[int]] = {}
    for index, sample in enumerate(batch.samples):
        by_prompt.setdefault(sample.key.prompt, []).append(index)
    prompts = list(by_prompt.values())
    random.Random(seed).shuffle(prompts)
    return [index for prompt in prompts for index in prompt]

"""How a round becomes optimizer steps, and a step micro-batches: cut and packed once, for critic and policy alike."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from openrlhf.agents.seeds import derive_seed
from openrlhf.algorithms.reduction import Aggregation, sample_weights
from openrlhf.data.packing import evenly
from openrlhf.learners.microbatch import MicroBatching
from openrlhf.types import PackedBatch, TrainingBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings:
    """How a round is cut."""

    epochs: int
    steps_per_epoch: int
    batching: MicroBatching
    aggregation: Aggregation
    """Of the policy loss."""
    regulariser_aggregation: Aggregation = Aggregation.TOKEN
    """Of KL and entropy terms."""
    constant_length: int | None = None
    """Divisor of constant aggregation."""
    skip_idle: bool = False
    """Samples whose advantages are all 0 get no forward. Right only where nothing but the advantage pulls at them."""
    seed: int

    @property
    def steps_per_round(self) -> int:
        return self.epochs * self.steps_per_epoch

    @property
    def on_policy(self) -> bool:
        """With one optimizer step per rollout, the weights that are updated are those before the round."""
        return self.steps_per_round == 1


class MicroBatch(NamedTuple):
    """A packed batch and what each of its action tokens weighs in the step's losses."""

    packed: PackedBatch
    policy_weights_A: Tensor
    regulariser_weights_A: Tensor
    value_weights_A: Tensor


Step = list[MicroBatch]


def optimizer_steps(batch: TrainingBatch, settings: StepSettings, *, round_index: int) -> list[Step]:
    """The round's optimizer steps, a fixed number; what failures and filtering left is split evenly over them.

    A step without a sample is left out. Weights are worked out over all of a step's samples before any is skipped
    or packed: an idle sample costs no forward and still counts in the denominators, of which it is a part.
    """
    steps = []
    for epoch in range(settings.epochs):
        order = shuffled(batch, seed=derive_seed(settings.seed, "order", round_index, epoch))
        parts = evenly(order, parts=settings.steps_per_epoch)
        steps += [_step(batch, indices, settings) for indices in parts if indices]
    return steps


def shuffled(batch: TrainingBatch, *, seed: int) -> list[int]:
    """The samples in random order, those of a prompt side by side: they share its forward."""
    by_prompt: dict[int, list[int]] = {}
    for index, sample in enumerate(batch.samples):
        by_prompt.setdefault(sample.key.prompt, []).append(index)
    prompts = list(by_prompt.values())
    random.Random(seed).shuffle(prompts)
    return [index for prompt in prompts for index in prompt]


def trained_samples(batch: TrainingBatch, settings: StepSettings) -> list[int]:
    """Samples that an update will run forward: all, or those whose advantages are not all 0."""
    if not settings.skip_idle or batch.advantages_A is None:
        return list(range(len(batch)))
    return [i for i in range(len(batch)) if bool(batch.advantages_A[batch.actions_of(i)].any())]


def _step(batch: TrainingBatch, indices: Sequence[int], settings: StepSettings) -> Step:
    counts = [batch.samples[i].segment.num_actions for i in indices]
    columns = [
        _column(batch, indices, sample_weights(aggregation, counts, constant_length=settings.constant_length))
        for aggregation in (settings.aggregation, settings.regulariser_aggregation, Aggregation.TOKEN)
    ]
    trained = set(trained_samples(batch, settings))
    # A step of idle samples alone has the gradient 0, and the optimizer's momentum goes on: one sample shows it that.
    kept = [i for i in indices if i in trained] or [min(indices, key=lambda i: len(batch.samples[i]))]
    step = []
    for micro in settings.batching.cut(batch, kept):
        packed = batch.pack(micro)
        step.append(MicroBatch(packed, *(column[packed.rows] for column in columns)))
    return step


def _column(batch: TrainingBatch, indices: Sequence[int], weights: Sequence[float]) -> Tensor:
    """[A] over the whole batch; 0 outside this step."""
    per_sample = [0.0] * len(batch)
    for index, weight in zip(indices, weights, strict=True):
        per_sample[index] = weight
    return batch.per_action(per_sample)

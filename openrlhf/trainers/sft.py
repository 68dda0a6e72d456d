"""Supervised fine-tuning: the mean negative log-likelihood of the tokens to be learnt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from openrlhf.observability.metrics import Metrics
from openrlhf.trainers.supervised import Batch, MetricNames, MicroBatchLoss
from openrlhf.types import PackedTokens

if TYPE_CHECKING:
    from openrlhf.data.examples import Example, ExampleSet


class SFTObjective:
    """L = −Σ log π(token | tokens before it) / (number of targets in the step).

    This is a mean over the tokens of the whole step, so the weight of a token does not depend on its micro-batch.
    """

    names = MetricNames(evaluation={"gpt_loss": "eval gpt_loss"}, smoothed={"gpt_loss": "loss_mean"})

    def __init__(self, examples: ExampleSet, *, device: torch.device) -> None:
        self._examples = examples
        self._device = device
        self._target_counts = examples.target_counts
        self.lengths = examples.lengths

    def begin(self, module: nn.Module, batch: Batch) -> Callable[[Sequence[int]], MicroBatchLoss]:
        targets = sum(self._target_counts[i] for i in batch.samples)

        def compute_loss(micro: Sequence[int]) -> MicroBatchLoss:
            tokens = pack([self._examples[i] for i in micro]).to(self._device)
            nll = -module(tokens, temperature=1.0).logprobs_A.sum()
            metrics = Metrics()
            metrics.mean("gpt_loss", nll.detach(), tokens.num_actions)
            return MicroBatchLoss(nll / targets, metrics)

        return compute_loss

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def pack(examples: Sequence[Example]) -> PackedTokens:
    """Lay examples end to end; their targets are the actions."""
    return PackedTokens.from_sequences(
        [e.token_ids for e in examples], [e.target_mask for e in examples], images=[e.images for e in examples]
    )


if TYPE_CHECKING:
    from openrlhf.trainers.supervised import Objective

    _: type[Objective] = SFTObjective

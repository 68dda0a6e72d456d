"""Forwards without gradient: the log-probs that an update compares itself with."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from openrlhf.learners.microbatch import MicroBatching
from openrlhf.types import TrainingBatch


class Scorer:
    """Log-probs of a batch's actions under some weights."""

    def __init__(self, module: nn.Module, *, batching: MicroBatching, temperature: float, device: torch.device) -> None:
        self._module = module
        self._batching = batching
        self._temperature = temperature
        self._device = device

    @torch.no_grad()
    def logprobs(self, batch: TrainingBatch) -> Tensor:
        """float32 [A] for the whole batch, on CPU."""
        result = torch.empty(batch.num_actions)
        self._module.eval()
        for indices in self._batching.cut(batch, range(len(batch))):
            packed = batch.pack(indices)
            output = self._module(packed.tokens.to(self._device), temperature=self._temperature)
            result[packed.rows] = output.logprobs_A.float().cpu()
        return result

"""Forwards without gradient: what an update compares itself with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from openrlhf.backends.parking import visiting
from openrlhf.backends.ranks import ALONE, Ranks
from openrlhf.learners.filler import filler
from openrlhf.learners.microbatch import MicroBatching
from openrlhf.types import PackedTokens, TrainingBatch


class Scorer:
    """One number per action token of a batch, from a frozen forward of some model."""

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[[nn.Module, PackedTokens], Tensor],
        *,
        batching: MicroBatching,
        device: torch.device,
        offload: bool = False,
        ranks: Ranks = ALONE,
    ) -> None:
        """`forward` gives the [A] numbers of a packed stream. `offload`: the weights are on `device` only meanwhile."""
        self._module = module
        self._forward = forward
        self._batching = batching
        self._device = device
        self._offload = offload
        self._ranks = ranks

    @torch.no_grad()
    def score(self, batch: TrainingBatch, indices: Sequence[int] | None = None) -> Tensor:
        """float32 [A] for this rank's batch, on CPU; 0 for samples that are not in `indices` (None: all are).

        Collective: weights may be shared out over ranks, who then run as many forwards as the one with the most.
        """
        result = torch.zeros(batch.num_actions)
        self._module.eval()
        cut = self._batching.cut(batch, range(len(batch)) if indices is None else indices)
        missing = max(self._ranks.gather(len(cut))) - len(cut)
        with visiting(self._module, self._device, offload=self._offload):
            for micro in cut:
                packed = batch.pack(micro)
                result[packed.rows] = self._forward(self._module, packed.tokens.to(self._device)).float().cpu()
            for _ in range(missing):
                self._forward(self._module, filler().tokens.to(self._device))
        return result


def logprobs(temperature: float) -> Callable[[nn.Module, PackedTokens], Tensor]:
    """A policy's log-probs of the action tokens."""
    return lambda module, tokens: module(tokens, temperature=temperature).logprobs_A


def values(module: nn.Module, tokens: PackedTokens) -> Tensor:
    """A critic's values before the action tokens."""
    return module(tokens, positions=tokens.action_positions - 1)

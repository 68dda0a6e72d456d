"""Forwards without gradient: what an update compares itself with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

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
    ) -> None:
        """`forward` gives the [A] numbers of a packed stream. `offload`: the weights are on `device` only meanwhile."""
        self._module = module
        self._forward = forward
        self._batching = batching
        self._device = device
        self._offload = offload

    @torch.no_grad()
    def score(self, batch: TrainingBatch, indices: Sequence[int] | None = None) -> Tensor:
        """float32 [A] for the whole batch, on CPU; 0 for samples that are not in `indices` (None: all are)."""
        result = torch.zeros(batch.num_actions)
        self._module.eval()
        with self._on_device():
            for micro in self._batching.cut(batch, range(len(batch)) if indices is None else indices):
                packed = batch.pack(micro)
                result[packed.rows] = self._forward(self._module, packed.tokens.to(self._device)).float().cpu()
        return result

    @contextlib.contextmanager
    def _on_device(self) -> Iterator[None]:
        if not self._offload:
            yield
            return
        self._module.to(self._device)
        try:
            yield
        finally:
            self._module.to("cpu")


def logprobs(temperature: float) -> Callable[[nn.Module, PackedTokens], Tensor]:
    """A policy's log-probs of the action tokens."""
    return lambda module, tokens: module(tokens, temperature=temperature).logprobs_A


def values(module: nn.Module, tokens: PackedTokens) -> Tensor:
    """A critic's values before the action tokens."""
    return module(tokens, positions=tokens.action_positions - 1)

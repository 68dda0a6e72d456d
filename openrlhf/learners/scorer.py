"""Forwards without gradient: what an update compares itself with."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from openrlhf.backends.offload import on_device
from openrlhf.backends.ranks import ALONE, Ranks
from openrlhf.learners.accumulation import (
    DoesNotFitError,
    MicroBatching,
    MicroBatchSizer,
    Overflow,
    give_memory_back,
    single_sample_error,
)
from openrlhf.learners.steps import filler
from openrlhf.types import PackedTokens, TrainingBatch
from openrlhf.utils import waits

Columns = Tensor | tuple[Tensor, ...]
"""[A] numbers, or several columns of A rows."""
ONE_NUMBER = (torch.zeros(0),)
_PENDING_BYTES = 64 << 20
"""Results that stay on the device until they are read: one number each of 16 million tokens. A teacher's likeliest
tokens are hundreds of bytes for each token, and a round of these may be larger than a model."""


class Scorer:
    """One number per action token of a batch, or several, from a frozen forward of some model."""

    def __init__(
        self,
        module: nn.Module,
        forward: Callable[[nn.Module, PackedTokens], Columns],
        *,
        batching: MicroBatching,
        device: torch.device,
        offload: bool = False,
        forwards_together: bool = False,
        ranks: Ranks = ALONE,
        columns: Sequence[Tensor] = ONE_NUMBER,
    ) -> None:
        """`forward` gives the columns of a packed stream. `offload`: the weights are on `device` only meanwhile.

        `columns`: what it gives for a stream without actions: the number of columns, their dtypes and widths.
        `forwards_together`: ranks share the weights or the tokens out, so that each forward is one of several ranks.
        """
        self._module = module
        self._forward = forward
        self._fitting = MicroBatchSizer(batching)
        self._forwards_together = forwards_together
        self._empty = columns
        self._device = device
        self._offload = offload
        self._ranks = ranks

    def score(self, batch: TrainingBatch, indices: Sequence[int] | None = None) -> Tensor:
        """float32 [A]: the first of `columns`."""
        return self.columns(batch, indices)[0]

    @torch.no_grad()
    def columns(self, batch: TrainingBatch, indices: Sequence[int] | None = None) -> list[Tensor]:
        """A row for each action token of this rank's batch, on CPU; 0 for samples that are not in `indices` (None: all
        are).

        Collective: weights may be shared out over ranks, which then run as many forwards as the rank with the most.
        """
        result = [empty.new_zeros((batch.num_actions, *empty.shape[1:])) for empty in self._empty]
        self._module.eval()
        left = list(range(len(batch)) if indices is None else indices)
        with on_device(self._module, self._device, offload=self._offload):
            while True:
                left, overflow = self._score(batch, left, result)
                overflows = [one for one in self._ranks.gather(overflow) if one is not None]
                if not overflows:
                    return result
                self._fitting.shrink(overflows)

    def _score(
        self, batch: TrainingBatch, indices: Sequence[int], result: Sequence[Tensor]
    ) -> tuple[list[int], Overflow | None]:
        """Into `result`; returns the samples for which memory was not enough."""
        cut = self._fitting.batching.cut(batch, indices)
        missing = max(self._ranks.gather(len(cut))) - len(cut)
        left, overflow = [], None
        pending = _Pending(result)
        for micro in cut:
            packed = batch.pack(micro)
            try:
                pending.add(packed.rows, self._forward(self._module, packed.tokens.to(self._device)))
                waits.mark_progress()
                continue
            except torch.OutOfMemoryError as error:
                overflow = Overflow(packed.tokens.num_tokens, len(micro), self._ranks.index)
                self._require_another_try(overflow, error)
                left += micro
            give_memory_back()
        for _ in range(missing):
            self._forward(self._module, filler().tokens.to(self._device))
        pending.read()
        return left, overflow

    def _require_another_try(self, overflow: Overflow, error: Exception) -> None:
        if self._forwards_together:
            if overflow.samples == 1:
                raise single_sample_error(overflow) from error
            raise DoesNotFitError(
                f"memory ran out in a micro-batch of {overflow.tokens} tokens (rank {overflow.rank}) that several "
                f"ranks were computing together; begin with {self._fitting.remedy(overflow.tokens // 2)}"
            ) from error


class _Pending:
    """Results of forwards, which are read when all are launched: a device would be waited for at each. Where they are
    large, some of them before."""

    def __init__(self, result: Sequence[Tensor]) -> None:
        """`result`: the columns on CPU that they are read into."""
        self._result = result
        self._scored: list[tuple[Tensor, tuple[Tensor, ...]]] = []
        self._bytes = 0

    def add(self, rows: Tensor, given: Columns) -> None:
        columns = given if isinstance(given, tuple) else (given,)
        self._scored.append((rows, columns))
        self._bytes += sum(column.nbytes for column in columns)
        if self._bytes > _PENDING_BYTES:
            self.read()

    def read(self) -> None:
        for rows, given in self._scored:
            for column, numbers_A in zip(self._result, given, strict=True):
                column[rows] = numbers_A.to(column.dtype).cpu()
        self._scored.clear()
        self._bytes = 0


def logprobs(temperature: float) -> Callable[[nn.Module, PackedTokens], Tensor]:
    """The policy's log-probs of the action tokens; of a mixture, through the experts that the engine chose."""
    return lambda module, tokens: module(tokens, temperature=temperature).logprobs_A


def reference_logprobs(temperature: float) -> Callable[[nn.Module, PackedTokens], Tensor]:
    """Another model's, whose routers choose themselves; it may be the policy without its adapter."""
    own = logprobs(temperature)
    return lambda module, tokens: own(module, tokens.without_routes())


def likeliest(temperature: float, k: int, *, vocabulary: int) -> Callable[[nn.Module, PackedTokens], Columns]:
    """A teacher's k likeliest tokens and their log-probs, of so many that it shares with the policy."""
    return lambda module, tokens: tuple(
        module(tokens.without_routes(), temperature=temperature, top_k=k, vocabulary=vocabulary)
    )


def values(module: nn.Module, tokens: PackedTokens) -> Tensor:
    """A critic's values before the action tokens."""
    return module(tokens, positions=tokens.action_positions - 1)

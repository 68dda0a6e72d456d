"""The gradient of one optimizer step, whatever memory allows: micro-batches that do not fit are cut again.

A backward that fails may have added a part of its gradient, and nobody knows which. So the whole step is begun again:
all gradients since the last optimizer step are dropped, and the same samples are run in smaller micro-batches. What
they weigh was worked out before they were cut, so the gradient is the same; metrics of what was dropped go with it.

Ranks agree before the optimizer step: each tells the others whether it failed. One that did goes on with micro-batches
that count for nothing, because the others, who do not know yet, may be waiting for its part of a sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import torch

from openrlhf.backends.base import Backend
from openrlhf.backends.ranks import Ranks
from openrlhf.learners.microbatch import DoesNotFitError, MicroBatchSizer, Overflow, give_memory_back
from openrlhf.observability.metrics import Metrics
from openrlhf.utils import waits

M = TypeVar("M")


class MicroBatchSource(Protocol[M]):
    """The samples of a step that are this rank's, in micro-batches."""

    filler: M
    """One that counts for nothing."""
    fitting: MicroBatchSizer

    def micro_batches(self) -> Sequence[M]:
        """As they fit at the moment, as many on every rank. Collective."""
        ...

    def size(self, micro: M) -> tuple[int, int]:
        """Tokens and samples."""
        ...


class Accumulated(NamedTuple):
    """What a step's micro-batches of this rank came to; their gradient is in the backend."""

    loss: float
    metrics: Metrics
    odd: list[Any]
    """Micro-batches whose loss is not finite."""


def accumulate(
    cut: MicroBatchSource[M], run: Callable[[M, Metrics], float], backend: Backend, *, ranks: Ranks
) -> Accumulated:
    """Collective. `run` adds a micro-batch's gradient and metrics, and gives its loss. Raises DoesNotFitError."""
    while True:
        metrics, loss, overflow, odd = Metrics(), 0.0, None, []
        for micro in cut.micro_batches():
            if overflow is None:
                try:
                    share = run(micro, metrics)
                    loss += share
                    if not math.isfinite(share):
                        odd.append(micro)
                    waits.mark_progress()
                    continue
                except torch.OutOfMemoryError as error:
                    overflow = Overflow(*cut.size(micro), ranks.index)
                    _require_another_try(backend, cut.fitting, overflow, error)
                backend.drop_gradients()
                give_memory_back()
            if ranks.count == 1:
                break
            run(cut.filler, Metrics())
        overflows = [one for one in ranks.gather(overflow) if one is not None]
        if not overflows:
            return Accumulated(loss, metrics, odd)
        backend.drop_gradients()
        cut.fitting.shrink(overflows)


def _require_another_try(backend: Backend, fitting: MicroBatchSizer, overflow: Overflow, error: Exception) -> None:
    if (reason := backend.retry_blocker()) is not None:
        raise DoesNotFitError(
            f"memory ran out in a micro-batch of {overflow.tokens} tokens (rank {overflow.rank}), and the step cannot "
            f"be begun again: {reason}; begin with {fitting.remedy(overflow.tokens // 2)}"
        ) from error

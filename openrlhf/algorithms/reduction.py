"""How token losses become the loss of one optimizer step: L = Σ_i w_i Σ_t l_{i,t}, one weight per sample.

The weights are functions of the whole step's samples, worked out before it is cut into micro-batches. So a
micro-batch contributes its plain weighted sum, and the gradient is the same however the step is cut or ordered.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum


class Aggregation(StrEnum):
    """Which mean over a step's action tokens the loss is."""

    TOKEN = "token"
    """Over all tokens alike (DAPO, arXiv:2503.14476): w_i = 1 / Σ_j |o_j|."""
    SEQUENCE = "sequence"
    """Over samples, each the mean over its own tokens (GRPO, arXiv:2402.03300): w_i = 1 / (N |o_i|)."""
    CONSTANT = "constant"
    """Over samples, each a sum divided by a fixed length L (Dr. GRPO, arXiv:2503.20783): w_i = 1 / (N L)."""


def sample_weights(
    aggregation: Aggregation, action_counts: Sequence[int], *, constant_length: int | None = None
) -> list[float]:
    """w_i for each sample of a step, from their numbers of action tokens |o_i|. Samples without one weigh 0."""
    total = sum(action_counts)
    samples = sum(count > 0 for count in action_counts)
    if total == 0:
        return [0.0] * len(action_counts)
    match aggregation:
        case Aggregation.TOKEN:
            return [1.0 / total if count else 0.0 for count in action_counts]
        case Aggregation.SEQUENCE:
            return [1.0 / (samples * count) if count else 0.0 for count in action_counts]
        case Aggregation.CONSTANT:
            if not constant_length:
                raise ValueError("constant aggregation needs the length to divide by")
            return [1.0 / (samples * constant_length) if count else 0.0 for count in action_counts]

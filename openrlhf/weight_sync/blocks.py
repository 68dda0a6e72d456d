"""Weights on their way: many tensors laid end to end in one block, so that a push is a few messages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class WeightBlock:
    """Tensors of one dtype, end to end: every one begins at a whole element.

    A block is also the message that an engine gets. Each transport puts into `payload` what its receivers need.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    """As torch names it, without `torch.`."""
    payload: Any
    """The bytes themselves, or where the receiver finds them: see `weight_sync.transports`."""
    checksum: int | None = None
    """CRC-32 of the bytes; None: the receiver does not compare."""

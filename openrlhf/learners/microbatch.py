"""How a list of samples is cut into forwards, as the flags say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openrlhf.data.packing import by_count, by_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatching:
    """Either a token budget (never exceeded) or a number of samples. Packed without padding both ways."""

    samples: int = 1
    tokens: int | None = None
    """Token budget; set, it takes the place of `samples`."""

    def cut(self, indices: Sequence[int], lengths: Sequence[int]) -> list[list[int]]:
        """Micro-batches of sample indices; `lengths[i]` is that of sample i."""
        if self.tokens is not None:
            return by_tokens(indices, lengths, budget=self.tokens)
        return by_count(indices, size=self.samples)

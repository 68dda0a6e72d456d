"""How a list of samples is cut into forwards, as the flags say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from openrlhf.data.packing import by_count, by_tokens
from openrlhf.types import TrainingBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatching:
    """Either a token budget (never exceeded) or a number of samples. Packed without padding both ways."""

    samples: int = 1
    tokens: int | None = None
    """Token budget; set, it takes the place of `samples`."""

    def cut(self, batch: TrainingBatch, indices: Sequence[int]) -> list[list[int]]:
        """Micro-batches of these samples. A prompt's samples stay together where they can: they share its forward.

        The budget counts every sample whole, as if none were shared: what it bounds is memory, and attention still
        holds each sample's keys.
        """
        if self.tokens is None:
            return by_count(indices, size=self.samples)
        prompts = [sample.key.prompt for sample in batch.samples]
        return by_tokens(indices, batch.lengths, budget=self.tokens, families=prompts)

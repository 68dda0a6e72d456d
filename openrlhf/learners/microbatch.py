"""How a list of samples is cut into forwards: as the flags say, until memory runs out, and smaller from then on."""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from openrlhf.data.packing import by_count, by_tokens
from openrlhf.types import TrainingBatch

logger = logging.getLogger(__name__)


class DoesNotFitError(RuntimeError):
    """Memory ran out, and smaller micro-batches are no help. The text says what is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatching:
    """Either a token budget (never exceeded) or a number of samples. Packed without padding both ways."""

    samples: int = 1
    tokens: int | None = None
    """Token budget; set, it takes the place of `samples`."""
    remedy: str = "--train.max_tokens_per_gpu {tokens} with --train.dynamic_batch_enable"
    """What people can do to begin with so many tokens."""

    def cut(self, batch: TrainingBatch, indices: Sequence[int]) -> list[list[int]]:
        """Micro-batches of these samples. A prompt's samples stay together where they can: they share its forward.

        The budget counts every sample whole, as if none were shared: what it bounds is memory, and attention still
        holds each sample's keys.
        """
        if self.tokens is None:
            return by_count(indices, size=self.samples)
        prompts = [sample.key.prompt for sample in batch.samples]
        return by_tokens(indices, batch.lengths, budget=self.tokens, families=prompts)


class Overflow(NamedTuple):
    """A micro-batch for which the memory of a rank's device was not enough."""

    tokens: int
    samples: int
    rank: int


class MicroBatchSizer:
    """The cut of the moment. It is the same on all ranks."""

    def __init__(self, batching: MicroBatching) -> None:
        self.batching = batching
        self.shrunk = False

    def shrink(self, overflows: Sequence[Overflow]) -> None:
        """Half the tokens of the smallest micro-batch that did not fit, for the rest of the run.

        `overflows`: of all ranks. Raises DoesNotFitError where one of them was a single sample.
        """
        smallest = min(overflows)
        for tokens, samples, rank in overflows:
            if samples == 1:
                raise DoesNotFitError(
                    f"memory ran out on a single sample of {tokens} tokens (rank {rank}), which cannot be cut: lower "
                    "--data.max_len, or make room with gradient checkpointing, a higher --ds.zero_stage, "
                    "--ds.adam_offload, or in RL a lower --vllm.gpu_memory_utilization"
                )
        budget, self.shrunk = smallest.tokens // 2, True
        self.batching = MicroBatching(tokens=budget, remedy=self.batching.remedy)
        logger.warning(
            "memory ran out in a micro-batch of %d tokens (rank %d): from now on they have at most %d; gradients and "
            "metrics stay what they were. To begin with that: %s",
            smallest.tokens,
            smallest.rank,
            budget,
            self.remedy(budget),
        )

    def remedy(self, tokens: int) -> str:
        """For people whose micro-batches are to have at most so many tokens."""
        return self.batching.remedy.format(tokens=tokens)


def give_memory_back() -> None:
    """What a forward that failed has left. Not inside the `except`: its error holds every frame and their tensors."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

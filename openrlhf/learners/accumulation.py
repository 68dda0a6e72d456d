"""The gradient of one optimizer step, whatever memory allows.

MicroBatching     how a list of samples is cut into forwards
MicroBatchSizer   as the flags say until memory runs out, and smaller from then on
accumulate        the gradient of a step; micro-batches that do not fit are cut again
SkippedSteps      steps that are left out because something in them is not finite: counted, named, and not for ever

A backward that fails may have added a part of its gradient, and it is not known which. So the whole step is begun
again: all gradients since the last optimizer step are dropped, and the same samples are run in smaller micro-batches.
What they weigh was worked out before they were cut, so the gradient is the same; metrics of what was dropped go with
it.

Ranks agree before the optimizer step: each tells the others whether it failed. A rank that did goes on with
micro-batches that count for nothing, because the others, which do not know yet, may be waiting for its part of a sum.
"""

from __future__ import annotations

import dataclasses
import gc
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from openrlhf.backends.base import Backend
from openrlhf.backends.ranks import Ranks
from openrlhf.backends.state import LeftOut, NotFiniteError
from openrlhf.data.packing import by_count, by_tokens
from openrlhf.observability.metrics import Metrics
from openrlhf.types import TrainingBatch
from openrlhf.utils import waits

logger = logging.getLogger(__name__)


class DoesNotFitError(RuntimeError):
    """Memory ran out, and smaller micro-batches are no help. The text says what is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatching:
    """Either a token budget (never exceeded) or a number of samples. Packed without padding both ways."""

    samples: int = 1
    tokens: int | None = None
    """Token budget of one device; set, it takes the place of `samples`."""
    devices: int = 1
    """So many compute each micro-batch together, and it may have as many times the tokens of one."""
    remedy: str = "--train.max_tokens_per_gpu {tokens} with --train.dynamic_batch_enable"
    """The advice for a run that is to begin with `tokens` tokens."""

    def cut(self, batch: TrainingBatch, indices: Sequence[int]) -> list[list[int]]:
        """Micro-batches of these samples. A prompt's samples stay together where they can: they share its forward.

        The budget counts every sample whole, as if none were shared: what it bounds is memory, and attention still
        holds each sample's keys.
        """
        if self.tokens is None:
            return by_count(indices, size=self.samples)
        prompts = [sample.key.prompt for sample in batch.samples]
        return by_tokens(indices, batch.lengths, budget=self.tokens * self.devices, families=prompts)


class Overflow(NamedTuple):
    """A micro-batch for which the memory of a rank's device was not enough."""

    tokens: int
    samples: int
    rank: int


def single_sample_error(overflow: Overflow) -> DoesNotFitError:
    """Of an overflow that was a single sample: there is nothing left to cut."""
    return DoesNotFitError(
        f"memory ran out on a single sample of {overflow.tokens} tokens (rank {overflow.rank}), which cannot be cut: "
        "lower --data.max_len, or make room with gradient checkpointing, a higher --ds.zero_stage, more ranks for each "
        "sample (--ds.ring_attn_size), --ds.adam_offload, or in RL a lower --vllm.gpu_memory_utilization"
    )


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
        for overflow in overflows:
            if overflow.samples == 1:
                raise single_sample_error(overflow)
        budget, self.shrunk = smallest.tokens // 2, True
        tokens = max(1, budget // self.batching.devices)
        self.batching = dataclasses.replace(self.batching, tokens=tokens)
        logger.warning(
            "memory ran out in a micro-batch of %d tokens (rank %d): from now on they have at most %d; gradients and "
            "metrics stay what they were. To begin with that: %s",
            smallest.tokens,
            smallest.rank,
            budget,
            self.remedy(budget),
        )

    def remedy(self, tokens: int) -> str:
        """The advice for micro-batches of at most so many tokens."""
        return self.batching.remedy.format(tokens=tokens // self.batching.devices)


def give_memory_back() -> None:
    """Free what a failed forward has left. Not inside the `except`: its error holds every frame and their tensors."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


M = TypeVar("M")


class MicroBatchSource(Protocol[M]):
    """The samples of a step that are this rank's, in micro-batches."""

    filler: M
    """One that counts for nothing."""
    fitting: MicroBatchSizer

    def micro_batches(self) -> Sequence[M]:
        """The micro-batches, cut as they fit at the moment, as many on every rank. Collective."""
        ...

    def size(self, micro: M) -> tuple[int, int]:
        """Tokens and samples."""
        ...


class Accumulated(NamedTuple):
    """The losses and metrics of this rank's micro-batches of a step; their gradient is in the backend."""

    loss: float
    metrics: Metrics
    odd: list[Any]
    """Micro-batches whose loss is not finite."""


def accumulate(
    cut: MicroBatchSource[M], run: Callable[[M, Metrics], Tensor], backend: Backend, *, ranks: Ranks
) -> Accumulated:
    """Collective. `run` adds a micro-batch's gradient and metrics, and gives its loss. Raises DoesNotFitError.

    Nothing of a micro-batch is read before all are launched: a GPU would be idle until the next one arrives there.
    """
    while True:
        metrics, overflow = Metrics(), None
        ran: list[M] = []
        losses: list[Tensor] = []
        for micro in cut.micro_batches():
            if overflow is None:
                try:
                    losses.append(run(micro, metrics).detach())
                    ran.append(micro)
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
            shares = torch.stack(losses).tolist() if losses else []
            metrics.settle()
            odd = [micro for micro, share in zip(ran, shares, strict=True) if not math.isfinite(share)]
            return Accumulated(sum(shares), metrics, odd)
        backend.drop_gradients()
        cut.fitting.shrink(overflows)


def _require_another_try(backend: Backend, fitting: MicroBatchSizer, overflow: Overflow, error: Exception) -> None:
    if (reason := backend.retry_blocker()) is not None:
        if overflow.samples == 1:
            raise single_sample_error(overflow) from error
        raise DoesNotFitError(
            f"memory ran out in a micro-batch of {overflow.tokens} tokens (rank {overflow.rank}), and the step cannot "
            f"be begun again: {reason}; begin with {fitting.remedy(overflow.tokens // 2)}"
        ) from error


MAX_SKIPPED = 5
"""How many steps in a row may be skipped; the default of --train.max_skipped_steps."""


class SkippedSteps:
    """The skipped steps of one model, which the metric `<owner>skipped_steps` counts."""

    def __init__(self, owner: str, *, most: int = MAX_SKIPPED, ranks: Ranks) -> None:
        """`owner`: `actor_`, `critic_`, or nothing where there is one model. `most`: in a row until the run ends."""
        self._owner = owner
        self._most = most
        self._ranks = ranks
        self._in_a_row = 0

    def after(self, left_out: LeftOut | None, metrics: Metrics, suspects: Callable[[], Sequence[str]]) -> bool:
        """Whether a step was left out and its numbers do not count; `metrics` is told. Collective if so.

        `suspects`: what of this rank's samples was not finite, in words. Raises NotFiniteError, on all ranks, when too
        many were left out in a row. Where fp16 looks for its loss scale the losses are as good as ever.
        """
        if left_out is None:
            self._in_a_row = 0
            return False
        self._in_a_row += not left_out.expected
        metrics.sum(f"{self._owner}skipped_steps", 1 / self._ranks.count)
        if left_out.expected:
            return False
        found = dict.fromkeys(text for texts in self._ranks.gather(list(suspects())) for text in texts)
        who = {"actor_": " of the policy", "critic_": " of the critic"}.get(self._owner, "")
        why = "; ".join([left_out.reason, *(f"not finite: {text}" for text in found)])
        if self._in_a_row >= self._most:
            raise NotFiniteError(
                f"{self._in_a_row} optimizer steps{who} in a row were left out (--train.max_skipped_steps), the last "
                f"one because {why}. The last checkpoint is good: go on from it with a lower learning rate, with bf16 "
                "or fp32 in place of fp16, or without these samples"
            )
        metrics.note(f"an optimizer step{who} was left out: {why}")
        return True

    def mended(self, said: Sequence[str], metrics: Metrics) -> None:
        """What was brought back after the last step, before anybody was given it."""
        for text in said:
            metrics.note(text)

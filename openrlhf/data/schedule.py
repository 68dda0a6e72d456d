"""The schedule of training: the samples of each optimizer step, and each rank's part of them.

Everything here is a pure function of (lengths, settings, step number): a resumed run, and every rank of a run, work it
out for themselves and agree.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from openrlhf.data.files import DataError
from openrlhf.data.packing import balance, best_fit, by_count
from openrlhf.utils.randomness import shuffled

logger = logging.getLogger(__name__)

MicroBatches = list[list[int]]


class ScheduledStep(NamedTuple):
    """One optimizer step, as one rank sees it."""

    number: int
    """Counted from 0 over all epochs."""
    epoch: int
    samples: list[int]
    """All samples of the step, over all ranks."""
    micro_batches: MicroBatches
    """This rank's share, one list per forward: as many on every rank, because ranks compute together. A rank that has
    fewer samples than forwards has empty lists at the end."""


class Schedule:
    """`epochs` passes over the samples, each in an order of (seed, epoch), `batch_size` samples per optimizer step.

    What is left at the end of an epoch, fewer than `batch_size` samples, is not used in it. Which samples a step has
    does not depend on the number of ranks, so a run can be resumed on another number.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        batch_size: int,
        epochs: int = 1,
        total_steps: int | None = None,
        seed: int = 42,
        rank: int = 0,
        ranks: int = 1,
        token_budget: int | None = None,
        micro_batch_size: int | None = None,
    ) -> None:
        """`lengths[i]`: tokens of sample i. `total_steps`: the most steps of the run; None: as many as the epochs have.
        `token_budget`, `micro_batch_size`: see `divide`; one of them.
        """
        if not 0 <= rank < ranks:
            raise ValueError(f"rank {rank} of {ranks}")
        if len(lengths) < batch_size:
            raise DataError(
                f"--train.batch_size {batch_size} is more than the {len(lengths)} samples there are: make it smaller"
            )
        self._lengths = list(lengths)
        self._batch_size = batch_size
        self._total = min(total_steps or sys.maxsize, epochs * (len(lengths) // batch_size))
        self._seed = seed
        self._rank = rank
        self._divide = functools.partial(
            divide, lengths=self._lengths, ranks=ranks, token_budget=token_budget, micro_batch_size=micro_batch_size
        )
        self._order = functools.lru_cache(maxsize=1)(lambda epoch: shuffled(len(lengths), seed=seed, epoch=epoch))
        self._next = 0

    @property
    def steps_per_epoch(self) -> int:
        return len(self._lengths) // self._batch_size

    def __len__(self) -> int:
        """Steps of all epochs together."""
        return self._total

    @property
    def next_step(self) -> int:
        return self._next

    @property
    def consumed_samples(self) -> int:
        return self._next * self._batch_size

    def step(self, number: int) -> ScheduledStep:
        """ScheduledStep `number`, whatever was taken before."""
        if not 0 <= number < len(self):
            raise IndexError(f"step {number} of {len(self)}")
        epoch, place = divmod(number, self.steps_per_epoch)
        start = place * self._batch_size
        samples = self._order(epoch)[start : start + self._batch_size].tolist()
        return ScheduledStep(number, epoch, samples, self._divide(samples)[self._rank])

    def __iter__(self) -> Iterator[ScheduledStep]:
        """The steps that were not taken yet. One counts as taken as soon as it is handed out."""
        while self._next < len(self):
            self._next += 1
            yield self.step(self._next - 1)

    def state_dict(self) -> dict[str, Any]:
        return self.state_dict_after(self._next)

    def state_dict_after(self, steps: int) -> dict[str, Any]:
        """The state after so many steps."""
        return {
            "consumed_samples": steps * self._batch_size,
            "batch_size": self._batch_size,
            "seed": self._seed,
            "size": len(self._lengths),
            "digest": self._digest,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises DataError when the steps would not be the same."""
        for name, flag, now in (
            ("seed", "--train.seed", self._seed),
            ("batch_size", "--train.batch_size", self._batch_size),
        ):
            if state[name] != now:
                raise DataError(
                    f"the checkpoint was made with {flag} {state[name]}, now it is {now}: resume with the same"
                )
        if state["size"] != len(self._lengths):
            raise DataError(
                f"the checkpoint was made with {state['size']} samples, now there are {len(self._lengths)}: resume "
                "with the same data and limits, or start a new run from the checkpoint's model"
            )
        if state["digest"] != self._digest:
            logger.warning("the samples have other lengths than those the checkpoint was made with")
        self._next = state["consumed_samples"] // self._batch_size

    @functools.cached_property
    def _digest(self) -> str:
        return hashlib.blake2b(np.array(self._lengths, dtype=np.int64).tobytes(), digest_size=8).hexdigest()


def divide(
    samples: Sequence[int],
    lengths: Sequence[int],
    *,
    ranks: int = 1,
    token_budget: int | None = None,
    micro_batch_size: int | None = None,
) -> list[MicroBatches]:
    """[rank][micro-batch][sample]: tokens even over ranks, micro-batches as many on each.

    With a `token_budget`, as few micro-batches as best-fit decreasing finds for the rank that needs most; none is over
    the budget but a sample that is so by itself, and goes alone. With a `micro_batch_size`, ranks get equally many
    samples (up to one), and micro-batches at most that many.
    """
    if (token_budget is None) == (micro_batch_size is None):
        raise ValueError("give either a token budget or a micro-batch size")
    longest_first = sorted(samples, key=lambda i: (-lengths[i], i))
    if token_budget is None:
        assert micro_batch_size is not None
        shares = balance(longest_first, lengths, count=ranks, at_most=-(-len(samples) // ranks))
        cut = [by_count(share, size=micro_batch_size) for share in shares]
        count = max(map(len, cut))
    else:
        shares = balance(longest_first, lengths, count=ranks)
        cut = [best_fit(share, lengths, budget=token_budget) for share in shares]
        count = max(map(len, cut))
        cut = [_fill(bins, lengths, count=count, budget=token_budget) for bins in cut]
    return [[sorted(bin_) for bin_ in bins] + [[]] * (count - len(bins)) for bins in cut]


def _fill(bins: MicroBatches, lengths: Sequence[int], *, count: int, budget: int) -> MicroBatches:
    """The same samples in `count` bins, or one each if they are fewer: evenly if the budget allows it."""
    longest_first = sorted((i for bin_ in bins for i in bin_), key=lambda i: (-lengths[i], i))
    count = min(count, len(longest_first))
    even = balance(longest_first, lengths, count=count)
    if all(len(bin_) == 1 or sum(lengths[i] for i in bin_) <= budget for bin_ in even):
        return even
    bins = [list(bin_) for bin_ in bins]
    while len(bins) < count:
        fullest = max((bin_ for bin_ in bins if len(bin_) > 1), key=lambda bin_: sum(lengths[i] for i in bin_))
        halves = balance(sorted(fullest, key=lambda i: (-lengths[i], i)), lengths, count=2)
        bins.remove(fullest)
        bins += halves
    return bins


if TYPE_CHECKING:
    from openrlhf.trainers.supervised import Batch, StepSchedule

    _: tuple[type[StepSchedule], type[Batch]] = (Schedule, ScheduledStep)

"""Sequences that wait at the same time share a forward, whichever request they belong to; first come, first served.

Who waits on whom:
    score      puts its sequences in the queue, waits for their futures
    _drive     one task while anything is queued: yields to the loop, takes what has come meanwhile up to the token
               budget, runs one forward, resolves its futures; ends when the queue is empty
So no request waits for a batch to fill: the more requests there are, the more share a forward.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from itertools import zip_longest
from typing import NamedTuple

from torch import Tensor

from openrlhf.types import PlacedImage


class Item(NamedTuple):
    """One sequence of a batch."""

    token_ids: Tensor
    """int64 [T], on CPU."""
    shared: int
    """Leading tokens it has in common with the sequence queued before it."""
    images: tuple[PlacedImage, ...] = ()
    places: tuple[int, ...] = ()
    """The tokens that are judged, ascending; empty: the last one."""


Forward = Callable[[Sequence[Item]], Sequence[float]]
"""The scores of a batch, in order: of each item one, or one for each of its places. What the first item shares is not
in the batch."""


class _Waiting(NamedTuple):
    item: Item
    scores: asyncio.Future[list[float]]


class Batcher:
    """Runs one forward at a time over what waits. Belongs to one event loop."""

    def __init__(
        self,
        forward: Forward,
        *,
        max_tokens: int,
        max_sequences: int | None = None,
        executor: Executor | None = None,
    ) -> None:
        """
        Args:
            max_tokens: most tokens in a forward; a longer sequence goes alone.
            executor: where the forward runs while the event loop goes on. None: right here, between two turns of the
                loop, for those whose other forwards run there too.
        """
        self._forward = forward
        self._max_tokens = max_tokens
        self._max_sequences = max_sequences
        self._executor = executor
        self._waiting: deque[_Waiting] = deque()
        self._task: asyncio.Task[None] | None = None

    async def score(self, sequences: Sequence[Tensor], images: Sequence[tuple[PlacedImage, ...]] = ()) -> list[float]:
        """One score per sequence (int64 [T], not empty), in order; raises what the forward of one of them raised.

        `images`: those of each sequence; empty when there are none.
        """
        return [score for (score,) in await self.score_places(sequences, ((),) * len(sequences), images)]

    async def score_places(
        self,
        sequences: Sequence[Tensor],
        places: Sequence[tuple[int, ...]],
        images: Sequence[tuple[PlacedImage, ...]] = (),
    ) -> list[list[float]]:
        """The same with one score for each of the places of each sequence; for the last token where it has none."""
        if not sequences:
            return []
        loop = asyncio.get_running_loop()
        # One number for the whole request, not one per pair: samples that share the same beginning form one group.
        placed = images or ((),) * len(sequences)
        shared = _common_prefix(sequences, placed)
        items = [Item(s, shared if i else 0, placed[i], places[i]) for i, s in enumerate(sequences)]
        waiting = [_Waiting(item, loop.create_future()) for item in items]
        self._waiting.extend(waiting)
        if self._task is None or self._task.done():
            self._task = loop.create_task(self._drive(), name="reward model")
        try:
            return await asyncio.gather(*(one.scores for one in waiting))
        finally:
            for one in waiting:  # of a request that has failed, the rest need not be computed
                one.scores.cancel()

    async def _drive(self) -> None:
        while self._waiting:
            await asyncio.sleep(0)
            batch = self._take()
            if not batch:
                continue
            try:
                scores = await self._run([one.item for one in batch])
            except Exception as error:
                for one in batch:
                    if not one.scores.done():
                        one.scores.set_exception(error)
            else:
                start = 0
                for one in batch:
                    end = start + max(1, len(one.item.places))
                    if not one.scores.done():  # cancelled meanwhile
                        one.scores.set_result(list(scores[start:end]))
                    start = end

    async def _run(self, items: Sequence[Item]) -> Sequence[float]:
        if self._executor is None:
            return self._forward(items)
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._forward, items)

    def _take(self) -> list[_Waiting]:
        """Sequences for one forward, in order of arrival. Those whose request was cancelled are dropped."""
        batch: list[_Waiting] = []
        tokens = 0
        while self._waiting and len(batch) != self._max_sequences:
            first = self._waiting[0]
            if first.scores.done():
                self._waiting.popleft()
                continue
            if batch and tokens + len(first.item.token_ids) > self._max_tokens:
                break
            tokens += len(first.item.token_ids)
            batch.append(self._waiting.popleft())
        return batch


def _common_prefix(sequences: Sequence[Tensor], images: Sequence[tuple[PlacedImage, ...]]) -> int:
    """How many tokens, and images among them, all sequences begin with, each keeping at least one token of its own."""
    room = min(len(sequence) for sequence in sequences) - 1
    first = sequences[0][:room]
    for other in sequences[1:]:
        differs = (first != other[: len(first)]).nonzero()
        first = first[: int(differs[0])] if len(differs) else first
    length = len(first)
    # Two images of one size have the same tokens; and a beginning that is shared never ends inside of an image.
    for nth in zip_longest(*images):
        found = [placed for placed in nth if placed is not None]
        same = len(found) == len(nth) and len({(placed.start, placed.image.digest) for placed in found}) == 1
        if not same or found[0].end > length:
            return min(length, *(placed.start for placed in found))
    return length

"""The ranks that share one packed stream, as attention sees them: three ways to pass tensors on.

`ProcessExchange` is a group of processes. `ThreadExchange` plays all ranks in one process, each in a thread of its own,
so that a single device can check and measure what several would do (`play`).

None of them knows of gradients: who uses them says what the backward pass is. Shapes: N ranks.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


class Exchange(Protocol):
    """Methods are collective: all ranks call them in the same order, with tensors of the same shape."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_to_all(self, parts: Tensor) -> Tensor:
        """[N, …]: part i goes to rank i → [N, …]: what came, by sender."""
        ...

    def all_gather(self, own: Tensor) -> Tensor:
        """[…] → [N, …]: everybody's, by rank."""
        ...

    def shift(self, own: Tensor) -> Callable[[], Tensor]:
        """To the next rank, the last one's to the first → call it for what the rank before has sent.

        It is under way between the two calls: whoever has something else to do does it there, and leaves `own` as it
        is. What came is the caller's.
        """
        ...


class ProcessExchange:
    """Ranks of a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._next = dist.get_global_rank(group, (self.rank + 1) % self.size)
        self._before = dist.get_global_rank(group, (self.rank - 1) % self.size)

    def all_to_all(self, parts: Tensor) -> Tensor:
        parts = parts.contiguous()
        came = torch.empty_like(parts)
        dist.all_to_all_single(came, parts, group=self._group)
        return came

    def all_gather(self, own: Tensor) -> Tensor:
        everybodys = own.new_empty((self.size, *own.shape))
        dist.all_gather(list(everybodys.unbind(0)), own.contiguous(), group=self._group)
        return everybodys

    def shift(self, own: Tensor) -> Callable[[], Tensor]:
        own = own.contiguous()
        came = torch.empty_like(own)
        send = dist.P2POp(dist.isend, own, self._next, group=self._group)
        receive = dist.P2POp(dist.irecv, came, self._before, group=self._group)
        return partial(_wait, dist.batch_isend_irecv([send, receive]), own, came)


def _wait(works: list[dist.Work], sent: Tensor, came: Tensor) -> Tensor:
    """`sent` is an argument so that its memory is not used again before it has gone."""
    for work in works:
        work.wait()
    return came


_PLAY_SECONDS = 600.0
"""A rank that waits longer for the others ends the play: one of them has failed."""


class ThreadExchange:
    """One rank of several that are threads of this process."""

    def __init__(self, rank: int, table: _Table) -> None:
        self.rank = rank
        self.size = table.size
        self._table = table

    def all_to_all(self, parts: Tensor) -> Tensor:
        return torch.stack([theirs[self.rank] for theirs in self._table.swap(self.rank, parts)])

    def all_gather(self, own: Tensor) -> Tensor:
        return torch.stack(self._table.swap(self.rank, own))

    def shift(self, own: Tensor) -> Callable[[], Tensor]:
        theirs = self._table.swap(self.rank, own)[self.rank - 1]
        return theirs.clone


class _Table:
    """Where threads lay their tensors out for each other."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=_PLAY_SECONDS)
        # Two rounds: a thread that is quick lays out its next tensor while others still read the last ones.
        self._places: list[list[Tensor | None]] = [[None] * size, [None] * size]
        self._rounds = [0] * size

    def swap(self, rank: int, own: Tensor) -> list[Tensor]:
        places = self._places[self._rounds[rank] % 2]
        self._rounds[rank] += 1
        places[rank] = own.detach()
        self._barrier.wait()
        return [place for place in places if place is not None]

    def abort(self) -> None:
        self._barrier.abort()


def play(size: int, run: Callable[[Exchange], T]) -> list[T]:
    """What each of so many ranks makes of `run`, all in this process. The first error of a rank is raised.

    A backward pass runs in the thread that asks for it, so ranks can wait for each other in it. On a GPU all threads
    use one stream: they take turns there, and what one has laid out is done before another reads it.
    """
    table = _Table(size)
    results: list[T | None] = [None] * size
    errors: list[BaseException] = []

    def rank_thread(rank: int) -> None:
        try:
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = run(ThreadExchange(rank, table))
        except threading.BrokenBarrierError as error:
            errors.append(error)  # another rank has failed, or one did not come
        except BaseException as error:
            errors.insert(0, error)
            table.abort()

    threads = [threading.Thread(target=rank_thread, args=(rank,), name=f"rank {rank}") for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [result for result in results if result is not None]


if TYPE_CHECKING:
    _: tuple[type[Exchange], type[Exchange]] = (ProcessExchange, ThreadExchange)

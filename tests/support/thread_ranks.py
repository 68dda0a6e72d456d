"""Ranks that are threads of one process: collective code without a process group."""

import threading
from concurrent.futures import ThreadPoolExecutor

from openrlhf.backends.torch import Distribution, TorchBackend


class ThreadRanks:
    """Implements `Ranks`."""

    def __init__(self, index: int, barrier: threading.Barrier, shelf: list) -> None:
        self.index = index
        self.count = barrier.parties
        self.is_main = index == 0
        self._barrier, self._shelf = barrier, shelf

    def gather(self, value):
        self._shelf[self.index] = value
        self._barrier.wait(timeout=60)
        values = list(self._shelf)
        self._barrier.wait(timeout=60)
        return values

    def gather_processes(self, value):
        return self.gather(value)

    def agree(self, value):
        return next((value for value in self.gather(value) if value is not None), None)

    def barrier(self, name: str) -> None:
        self._barrier.wait(timeout=60)

    def close(self) -> None:
        pass


def outcomes(count: int, function) -> list:
    """What `function(ranks)` returned or raised on each of so many ranks, each by itself."""
    barrier, shelf = threading.Barrier(count), [None] * count

    def run(index: int):
        try:
            return function(ThreadRanks(index, barrier, shelf))
        except Exception as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def together(count: int, function) -> list:
    """`function(ranks)` on so many ranks at once; what each returned."""
    barrier, shelf = threading.Barrier(count), [None] * count

    def run(index: int):
        try:
            return function(ThreadRanks(index, barrier, shelf))
        except BaseException:
            barrier.abort()  # the others wait for this one
            raise

    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(run, index) for index in range(count)]
        broken = [f.exception() for f in futures if f.exception()]
        for error in sorted(broken, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]


class SummingBackend(TorchBackend):
    """Every rank has the whole model, and steps on the sum of all gradients."""

    def __init__(self, *args, ranks: ThreadRanks, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._ranks = ranks

    def step(self) -> float:
        gradients = self._ranks.gather([m.grad for m in self._masters.values()])
        for master, *parts in zip(self._masters.values(), *gradients, strict=True):
            present = [part for part in parts if part is not None]
            master.grad = sum(present) if present else None
        return super().step()


class ThreadDistribution(Distribution):
    def train(self, module, optimizer, *, total_steps, ema_beta=None):
        return SummingBackend(module, optimizer, total_steps=total_steps, ema_beta=ema_beta, ranks=self.ranks)

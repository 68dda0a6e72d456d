"""The experts that tokens went to in the steps of one vLLM worker. Imports no vLLM: what a step was is told.

`compat.RouteCapture` tells it, where vLLM does not return routes itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

Message = tuple[list[int], list[int], str, bytes]
"""Routes of one worker on their way: its layers, shape, dtype, the numbers. vLLM passes nothing else on everywhere."""


class StepPart(NamedTuple):
    """The tokens that one request has in a step."""

    name: str
    start: int
    """The first one's position."""
    num_tokens: int
    blocks: np.ndarray
    """Where its keys and values are, from its beginning to these tokens: numbers of blocks in vLLM's cache."""
    resumed: bool = False
    """It had lost its blocks, and may have been given others' that begin alike."""


class RouteStore:
    """Routes of requests, by name, and of the slots of vLLM's cache.

    A token that is in the cache already is not read again: its route is that of the slot, which whoever read it left
    there. A request has its routes for itself too, since its slots are given to others when it has ended, or has to
    make room. What it reads again, it overwrites.
    """

    def __init__(
        self, *, num_blocks: int, block_size: int, layers: Sequence[int], top_k: int, num_experts: int, keep: int
    ) -> None:
        """`layers`: those with experts that this worker has. `keep`: requests that have ended and were not taken."""
        self._block_size = block_size
        self._layers = list(layers)
        self._keep = keep
        shape = (num_blocks * block_size, len(layers), top_k)
        self._by_slot = np.zeros(shape, np.uint8 if num_experts <= 256 else np.int16)  # pages that are used take memory
        self._by_name: dict[str, _Routes] = {}
        self._ended: dict[str, None] = {}
        """Names, the oldest first."""

    def copy_blocks(self, copies: Iterable[tuple[int, int]]) -> None:
        """(from, to): what vLLM did with keys and values, before the step."""
        blocks = self._by_slot.reshape(-1, self._block_size, *self._by_slot.shape[1:])
        for source, target in copies:
            blocks[target] = blocks[source]

    def add_step(self, parts: Sequence[StepPart], rows_TLK: np.ndarray) -> None:
        """`rows_TLK`: of all tokens, part after part; L: this worker's layers."""
        rows_TLK = rows_TLK.astype(self._by_slot.dtype, copy=False)
        begins = np.cumsum([0, *(part.num_tokens for part in parts)])
        # First all slots: a request may begin with what another reads in the same step.
        for part, begin in zip(parts, begins, strict=False):
            slots = self._slots(part.blocks, part.start, part.start + part.num_tokens)
            self._by_slot[slots] = rows_TLK[begin : begin + part.num_tokens]
        for part, begin in zip(parts, begins, strict=False):
            routes = self._by_name.setdefault(part.name, _Routes())
            if part.resumed or routes.end != part.start:
                routes.write(0, self._by_slot[self._slots(part.blocks, 0, part.start)])
            routes.write(part.start, rows_TLK[begin : begin + part.num_tokens])

    def end(self, names: Iterable[str]) -> None:
        """These requests read nothing more."""
        self._ended.update((name, None) for name in names if name in self._by_name)
        while len(self._ended) > self._keep:
            self._drop(next(iter(self._ended)))

    def take(self, name: str, read: int) -> Message | None:
        """The routes of its first `read` tokens. None: it has not read so many, or too many others have ended since."""
        routes = self._by_name.get(name)
        self._drop(name)
        if routes is None or routes.end < read:
            return None
        rows_RLK = routes.rows[:read]
        return self._layers, list(rows_RLK.shape), rows_RLK.dtype.name, rows_RLK.tobytes()

    def _slots(self, blocks: np.ndarray, start: int, end: int) -> np.ndarray:
        positions = np.arange(start, end)
        return blocks[positions // self._block_size].astype(np.int64) * self._block_size + positions % self._block_size

    def _drop(self, name: str) -> None:
        self._by_name.pop(name, None)
        self._ended.pop(name, None)


@dataclass(slots=True)
class _Routes:
    """Of one request, in an array that doubles."""

    rows: np.ndarray = field(default_factory=lambda: np.zeros((0, 0, 0), np.uint8))
    end: int = 0
    """Tokens that it has read up to now."""

    def write(self, start: int, rows_TLK: np.ndarray) -> None:
        self.end = start + len(rows_TLK)
        if self.end > len(self.rows):
            grown = np.zeros((max(64, 2 * self.end), *rows_TLK.shape[1:]), rows_TLK.dtype)
            grown[:start] = self.rows[:start] if start else 0
            self.rows = grown
        self.rows[start : self.end] = rows_TLK


def merged(messages: Iterable[Message | None], *, num_layers: int, routed: Sequence[int]) -> np.ndarray | None:
    """[R, L, K] from what each worker has: stages of a pipeline have layers of their own, and a worker that computes
    the same as another says None. None: not all of the layers that route are there."""
    parts = [message for message in messages if message is not None]
    if not parts or sorted(layer for own, *_ in parts for layer in own) != sorted(routed):
        return None
    _, (read, _, top_k), dtype, _ = parts[0]
    routes_RLK = np.zeros((read, num_layers, top_k), dtype)
    for own, shape, _, data in parts:
        routes_RLK[:, own] = np.frombuffer(data, dtype).reshape(shape)
    return routes_RLK

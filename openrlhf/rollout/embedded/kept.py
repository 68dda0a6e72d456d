"""Histories of finished requests, kept for the next turn: an episode comes back with all it has read and said.

A history is found by its blocks of BLOCK tokens. Each block is known by a hash of itself and of everything before it,
so the last block of a prompt that is known names the history with the longest common beginning, in time linear in
the prompt. Tokens are compared before anything is used: a hash may lie, the comparison does not.

Shapes: L tokens, H key-value heads, D head dimension.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

BLOCK = 8
"""Beginnings shorter than this are read again."""


@dataclass(frozen=True, slots=True, eq=False)
class History:
    """Tokens and what the layers have stored for them."""

    token_ids: tuple[int, ...]
    keys: dict[int, Tensor]
    """[H, L, D] by layer index."""
    values: dict[int, Tensor]
    num_bytes: int


class Known(NamedTuple):
    """The part of a prompt that need not be read."""

    history: History
    length: int
    """How many of its first tokens are those of the prompt."""
    number: int
    """The history's, for `make_room`."""


class KeptHistories:
    """The histories used last, up to a number of bytes. None of them is the beginning of another."""

    def __init__(self) -> None:
        self._histories: OrderedDict[int, History] = OrderedDict()
        """By number of arrival, the one used last at the end."""
        self._by_block: dict[int, int] = {}
        self._arrivals = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._histories)

    def find(self, token_ids: tuple[int, ...]) -> Known | None:
        """The history with the longest beginning in common with `token_ids`, if that is at least a block."""
        found = None
        for end, block in _blocks(token_ids):
            if block in self._by_block:
                found = self._by_block[block], end
        if found is None:
            return None
        number, length = found
        history = self._histories[number]
        if history.token_ids[:length] != token_ids[:length]:
            return None
        longest = min(len(history.token_ids), len(token_ids))
        while length < longest and history.token_ids[length] == token_ids[length]:
            length += 1
        self._histories.move_to_end(number)
        return Known(history, length, number)

    def make_room(
        self, token_ids: tuple[int, ...], num_bytes: int, *, budget: int, wanted: Container[int] = ()
    ) -> bool:
        """Whether a history of these tokens is worth keeping and fits, once others have gone.

        Those used longest ago go first, but none that is `wanted`: where more conversations take turns than fit, each
        would otherwise be dropped just before its turn, and none ever found.
        """
        if num_bytes > budget or len(token_ids) < BLOCK:
            return False
        known = self.find(token_ids)
        if known is not None and known.length == len(token_ids):
            return False
        if known is not None and known.length == len(known.history.token_ids):
            self._remove(known.number)
        for number in [number for number in self._histories if number not in wanted]:
            if self.num_bytes + num_bytes <= budget:
                break
            self._remove(number)
        return self.num_bytes + num_bytes <= budget

    def add(self, history: History) -> None:
        self._histories[self._arrivals] = history
        self._by_block.update((block, self._arrivals) for _, block in _blocks(history.token_ids))
        self._arrivals += 1
        self.num_bytes += history.num_bytes

    def clear(self) -> None:
        self._histories.clear()
        self._by_block.clear()
        self.num_bytes = 0

    def _remove(self, number: int) -> None:
        history = self._histories.pop(number)
        self.num_bytes -= history.num_bytes
        for _, block in _blocks(history.token_ids):
            if self._by_block.get(block) == number:
                del self._by_block[block]


def _blocks(token_ids: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """(where it ends, hash of everything up to there) of each whole block."""
    before = 0
    for end in range(BLOCK, len(token_ids) + 1, BLOCK):
        before = hash((before, token_ids[end - BLOCK : end]))
        yield end, before

"""The router decides which of several engines gets a request, whether an agent or the driver itself asks."""

from __future__ import annotations

import contextlib
import zlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from openrlhf.types import PlacedImage

HEAD = 64
"""Tokens by which prompts are told apart."""
SLACK = 8
"""Requests that an engine may have more than the least busy one, and still be the choice for what it has seen."""
REMEMBERED = 65536
"""How many beginnings of prompts are remembered, the latest."""


def beginning_of(token_ids: Sequence[int], images: Sequence[PlacedImage] = ()) -> int:
    """A number for the first tokens of a request and the images among them, whose tokens are alike; the same in every
    process, as Python's hashes of integers are."""
    seen = (zlib.crc32(placed.image.digest.encode()) for placed in images if placed.start < HEAD)
    return hash((*token_ids[:HEAD], *seen))


class Router:
    """Chooses the engine with the fewest requests, or one that has cached the beginning if it is not much busier.

    So the samples of a prompt, and the turns of an episode, mostly stay together, and no engine waits for another.
    """

    def __init__(self, engines: int) -> None:
        self.running = [0] * engines
        """Requests under way at each engine."""
        self.open = frozenset(range(engines))
        """Engines that requests go to. While there are none, any engine is chosen: its failure says more."""
        self._seen: OrderedDict[int, int] = OrderedDict()

    def close_to(self, engine: int) -> None:
        """No requests go there until `open_to`."""
        self.open -= {engine}

    def open_to(self, engine: int) -> None:
        self.open |= {engine}

    @contextlib.contextmanager
    def chosen(self, beginning: int) -> Iterator[int]:
        """The engine of a request with this beginning (`beginning_of`), which is under way while open."""
        engine = self._choose(beginning)
        self.running[engine] += 1
        try:
            yield engine
        finally:
            self.running[engine] -= 1

    def _choose(self, beginning: int) -> int:
        candidates = self.open or range(len(self.running))
        fewest = min(map(self.running.__getitem__, candidates))
        known = self._seen.pop(beginning, None)
        if known is None or known not in self.open or self.running[known] > fewest + SLACK:
            known = min(engine for engine in candidates if self.running[engine] == fewest)
        self._seen[beginning] = known
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return known

"""Which of several engines gets a request."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

HEAD = 64
"""Tokens by which prompts are told apart."""
SLACK = 8
"""Requests that an engine may have more than the least busy one, and still be the choice for what it has seen."""
REMEMBERED = 65536
"""Beginnings of prompts, the latest."""


class Balancer:
    """The engine with the fewest requests; or one that has cached the beginning of this one, if it is not much busier.

    So the samples of a prompt, and the turns of an episode, mostly stay together, and no engine waits for another.
    """

    def __init__(self, engines: int) -> None:
        self.running = [0] * engines
        self.open = frozenset(range(engines))
        """Engines that requests go to. While there are none any of all is chosen: its failure says more."""
        self._seen: OrderedDict[int, int] = OrderedDict()

    def close_to(self, engine: int) -> None:
        """No requests go there until `open_to`."""
        self.open -= {engine}

    def open_to(self, engine: int) -> None:
        self.open |= {engine}

    @contextlib.contextmanager
    def chosen(self, token_ids: Sequence[int]) -> Iterator[int]:
        """The engine of a request that is under way while open."""
        engine = self._choose(hash(tuple(token_ids[:HEAD])))
        self.running[engine] += 1
        try:
            yield engine
        finally:
            self.running[engine] -= 1

    def _choose(self, beginning: int) -> int:
        least = min(sorted(self.open) or range(len(self.running)), key=self.running.__getitem__)
        known = self._seen.pop(beginning, None)
        if known is None or known not in self.open or self.running[known] > self.running[least] + SLACK:
            known = least
        self._seen[beginning] = known
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        return known

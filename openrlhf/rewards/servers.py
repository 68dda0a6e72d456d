"""Which reward server is asked next: the least busy one that works.

A server is *up*, or *down* after a few failures in a row. One that is down is left alone for a while, longer each time,
and is then asked one thing at a time until it answers. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass

logger = logging.getLogger(__name__)

DOWN_AFTER = 3
"""Failures in a row."""
FIRST_REST, LONGEST_REST = 5.0, 60.0
"""Seconds for which a server that is down is left alone."""


class NoServerError(Exception):
    """No server may be asked for as long as the caller can wait."""


@dataclass(slots=True, eq=False)
class Server:
    """One server, as far as the choice of servers is concerned."""

    url: str
    requests: int = 0
    """Under way."""
    samples: int = 0
    """Under way."""
    samples_ever: int = 0
    failures: int = 0
    """The number of failures in a row."""
    rests_until: float = 0.0
    reason: str = ""
    """The reason of the last failure."""

    @property
    def down(self) -> bool:
        return self.failures >= DOWN_AFTER


@dataclass(frozen=True, slots=True)
class RequestPermit:
    """The right to send one request to `server`."""

    server: Server
    waited: float
    """Seconds for which no server could be asked. Waiting for a busy one does not count."""


class ServerPool:
    """Servers that give the same answers. Belongs to one event loop."""

    def __init__(
        self, urls: Sequence[str], *, max_concurrency: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """At most `max_concurrency` requests at once go to each server."""
        self.servers = [Server(url) for url in urls]
        self._max_concurrency = max_concurrency
        self._clock = clock
        self._waiting: set[asyncio.Future[None]] = set()

    @contextlib.asynccontextmanager
    async def turn(
        self,
        samples: int,
        *,
        patience: float,
        not_first: Collection[Server] = (),
        never: Collection[Server] = (),
    ) -> AsyncIterator[RequestPermit]:
        """The least busy server, for the length of the block; any other comes before those of `not_first`.

        Waits until a server may be asked: without limit while one that is up is merely busy, else `patience` seconds in
        all. Raises NoServerError.
        """
        turn = await self._choose(patience, not_first, [s for s in self.servers if s not in never])
        server = turn.server
        server.requests += 1
        server.samples += samples
        server.samples_ever += samples
        try:
            yield turn
        finally:
            server.requests -= 1
            server.samples -= samples
            self._wake()

    def worked(self, server: Server) -> None:
        if server.down:
            logger.info("reward server %s answers again", server.url)
        server.failures = 0

    def failed(self, server: Server, reason: str, *, times: int = 1) -> None:
        was_down = server.down
        server.failures += times
        server.reason = reason
        if server.down:
            self.rest(server, min(FIRST_REST * 2 ** (server.failures - DOWN_AFTER), LONGEST_REST), reason)
            if not was_down:
                others = sum(not other.down for other in self.servers)
                logger.warning(
                    "reward server %s is down (%s); it is asked again now and then. Others that work: %d",
                    server.url,
                    reason,
                    others,
                )

    def rest(self, server: Server, seconds: float, reason: str) -> None:
        """Leave the server alone for so long."""
        server.reason = reason
        server.rests_until = self._clock() + seconds
        self._wake()

    def rested(self, *, except_for: Collection[Server]) -> bool:
        """Whether a server outside `except_for` may be asked now."""
        return any(s not in except_for and s.rests_until <= self._clock() for s in self.servers)

    async def _choose(self, patience: float, not_first: Collection[Server], servers: Sequence[Server]) -> RequestPermit:
        waited = 0.0
        while True:
            now = self._clock()
            awake = [s for s in servers if s.rests_until <= now]
            free = [s for s in awake if s.requests < (1 if s.down else self._max_concurrency)]
            if free:
                return RequestPermit(min(free, key=lambda s: (s in not_first, s.samples, s.samples_ever)), waited)
            if any(not s.down for s in awake):
                await self._change(None)
                continue
            # What is awake is being tried by somebody else; what rests cannot be asked before its time.
            next_change = min((s.rests_until - now for s in servers if s not in awake), default=float("inf"))
            left = patience - waited
            if left <= 0 or (not awake and next_change > left):
                raise NoServerError
            await self._change(min(next_change, left))
            waited += self._clock() - now

    async def _change(self, seconds: float | None) -> None:
        """Until something happened, or for so long."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.add(waiter)
        try:
            await asyncio.wait([waiter], timeout=seconds)
        finally:
            self._waiting.discard(waiter)

    def _wake(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

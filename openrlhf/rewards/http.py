"""Rewards from HTTP servers, one or several that give the same answers.

POST {"query": […], "prompts": […], "labels": […]} is answered with {"rewards": […], "scores": […], "extra_logs": {name:
[…]}}, of which only the rewards are needed. After an attempt that gave no rewards:

    no server there, 429, 502, 503, 504   it may be back soon: again, until the time is up
    other 5xx, no answer, a useless one   perhaps these samples are to blame: again, `MOST_FAILURES` times in all
    other statuses                        asked wrongly: one other server may see it differently, then no more

A new attempt goes to another server at once; when all have been asked, after a pause that doubles.

`ServerPool` chooses the least busy server that works. A server is *up*, or *down* after a few failures in a row. One
that is down is left alone for a while, longer each time, and is then asked one thing at a time until it answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import aiohttp

from openrlhf.agents.values import BadValueError
from openrlhf.rewards.base import Reward, RewardError, RewardRequest
from openrlhf.rewards.values import parse_rewards
from openrlhf.utils import waits

logger = logging.getLogger(__name__)

T = TypeVar("T")
DOWN_AFTER = 3
"""The failures in a row after which a server is down."""
FIRST_REST, LONGEST_REST = 5.0, 60.0
"""Seconds for which a server that is down is left alone."""


class NoServerError(Exception):
    """No server may be asked for as long as the caller can wait."""


@dataclass(slots=True, eq=False)
class Server:
    """One server, as far as the choice of servers is concerned."""

    url: str
    requests: int = 0
    """The requests under way."""
    samples: int = 0
    """The samples under way."""
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
        self,
        urls: Sequence[str],
        *,
        max_concurrency: int,
        clock: Callable[[], float] = time.monotonic,
        what: str = "reward server",
    ) -> None:
        """At most `max_concurrency` requests at once go to each server. `what`: their name in messages."""
        self._what = what
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
            logger.info("%s %s answers again", self._what, server.url)
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
                    "%s %s is down (%s); it is asked again now and then. Others that work: %d",
                    self._what,
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
        """Wait until a server has become free or has failed, for at most so long."""
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


DEFAULT_PATH = "/get_reward"
MOST_FAILURES = 5
CONNECT_SECONDS = 10.0
REACH_SECONDS = 5.0
"""Seconds for the check of each server before the first step."""
IDLE_SECONDS = 4.0
"""Idle connections are closed before servers do it (uvicorn after 5 s), which would fail a request sent just then."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
LONGEST_RETRY_AFTER = 30.0
SHOWN_CHARACTERS = 200


class Remedy(enum.Enum):
    """The remedy for a failed attempt."""

    TIME = enum.auto()
    LUCK = enum.auto()
    ANOTHER_SERVER = enum.auto()


class AttemptError(Exception):
    """One attempt gave no rewards. The text names the server."""

    def __init__(self, text: str, remedy: Remedy, *, retry_after: float | None = None, blame: bool = True) -> None:
        super().__init__(text)
        self.remedy = remedy
        self.retry_after = retry_after
        """Seconds for which the server asked to be left alone."""
        self.blame = blame
        """Whether the failure speaks against the server rather than the request."""


@dataclass(slots=True)
class _Effort:
    """The attempts for one prompt so far."""

    left: float
    """The seconds that are left."""
    attempts: int = 0
    unlucky: int = 0
    """Attempts that only luck would have helped."""
    rounds: int = 0
    """How often all servers have been asked."""
    asked: set[Server] = field(default_factory=set)
    """The servers that were asked in this round."""
    refused: set[Server] = field(default_factory=set)
    """The servers that refused the request."""

    def note(self, server: Server, failure: AttemptError) -> None:
        self.attempts += 1
        self.asked.add(server)
        self.unlucky += failure.remedy is Remedy.LUCK
        if failure.remedy is Remedy.ANOTHER_SERVER:
            self.refused.add(server)

    def hopeless(self, servers: int) -> bool:
        return self.unlucky >= MOST_FAILURES or len(self.refused) >= min(2, servers)


class HttpServers:
    """Several servers that give the same answers to requests in JSON.

    A request may take `timeout` seconds from when it is first sent, all attempts and pauses together; while another
    server is left to ask, an attempt gets half of what remains. Belongs to one event loop.
    """

    what = "reward server"
    timeout_flag = "--reward.timeout"
    error: type[Exception] = RewardError
    """What is raised where no server answers."""
    useless = Remedy.LUCK
    """The remedy for an answer that cannot be used."""

    def __init__(
        self, urls: Sequence[str], *, timeout: float, api_key: str | None = None, max_concurrency: int = 32
    ) -> None:
        """`api_key` goes to every server as a bearer token; at most `max_concurrency` requests at once to each."""
        self._timeout = timeout
        self._api_key = "".join(
            (api_key or "").split()
        )  # a token has no spaces, but files of tokens end in a line break
        self._pool = ServerPool(urls, max_concurrency=max_concurrency, what=self.what)
        self._session: aiohttp.ClientSession | None = None
        self._random = random.Random()  # pauses are no part of what a seed fixes

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def ask(self, body: bytes, *, samples: int, name: str, parse: Callable[[Any], T]) -> T:
        """What `parse` makes of an answer; it raises BadValueError where it can make nothing of it. `name`: what the
        request is about, for errors. Raises `error`."""
        effort = _Effort(left=self._timeout)
        while True:
            try:
                async with self._pool.turn(
                    samples, patience=effort.left, not_first=effort.asked, never=effort.refused
                ) as turn:
                    effort.left -= turn.waited
                    before = time.monotonic()
                    try:
                        return await self._attempt(turn.server, body, parse, seconds=self._share(turn.server, effort))
                    except AttemptError as error:
                        failure = error
            except NoServerError:
                raise self._all_down(name) from None
            effort.left -= time.monotonic() - before
            effort.note(turn.server, failure)
            pause = self._pause(turn.server, failure, effort)
            if effort.hopeless(len(self._pool.servers)) or effort.left <= pause:
                times = "1 attempt" if effort.attempts == 1 else f"{effort.attempts} attempts"
                raise self.error(
                    f"{name}: {failure} (given up after {times} in {self._timeout - effort.left:.1f} s; "
                    f"{self.timeout_flag} {self._timeout:g})"
                ) from failure
            await asyncio.sleep(pause)
            effort.left -= pause

    def _share(self, server: Server, effort: _Effort) -> float:
        """Seconds for an attempt at `server`: half of what is left while there is another one to ask."""
        return effort.left / 2 if self._pool.rested(except_for=effort.asked | {server}) else effort.left

    def _pause(self, server: Server, failure: AttemptError, effort: _Effort) -> float:
        """Seconds before the next attempt, after one at `server`: none if another server can be asked."""
        if self._pool.rested(except_for=effort.asked) or failure.retry_after is not None:
            return 0.0
        effort.asked = {server}  # a new round: the others come first
        effort.rounds += 1
        return min(FIRST_PAUSE * 2 ** (effort.rounds - 1), LONGEST_PAUSE) * self._random.uniform(0.5, 1.5)

    async def _attempt(self, server: Server, body: bytes, parse: Callable[[Any], T], *, seconds: float) -> T:
        """One request. Keeps the pool informed. Raises AttemptError."""
        try:
            with waits.doing(f"at the {self.what} {server.url}"):
                async with asyncio.timeout(seconds):
                    values = await self._post(server.url, body, parse)
        except AttemptError as error:
            failure = error
        except aiohttp.ConnectionTimeoutError:
            failure = AttemptError(f"{server.url}: no connection in {CONNECT_SECONDS:g} s", Remedy.TIME)
        except TimeoutError:
            failure = AttemptError(f"{server.url} did not answer in {seconds:.3g} s", Remedy.LUCK)
        except (aiohttp.ClientError, OSError) as error:
            failure = AttemptError(f"{server.url}: {_described(error)}", Remedy.TIME)
        else:
            self._pool.worked(server)
            return values
        if failure.retry_after is not None:
            self._pool.rest(server, failure.retry_after, str(failure))
        elif failure.blame:
            self._pool.failed(server, str(failure))
        raise failure

    async def _post(self, url: str, body: bytes, parse: Callable[[Any], T]) -> T:
        # A redirect would carry the key to another host, and turn POST into GET.
        async with self._client().post(url, data=body, allow_redirects=False) as response:
            raw = await response.read()
        status = response.status
        shown = self._shown(raw)
        if not 200 <= status < 300:
            text = f"{url} answered {status} {response.reason}: {shown}"
            if 300 <= status < 400:
                text = f"{url} answered {status}: it leads to {response.headers.get('Location', 'nowhere')}; name that"
            wish = response.headers.get("Retry-After")
            if status == 429 or (status == 503 and wish):
                raise AttemptError(text, Remedy.TIME, retry_after=_retry_after(wish))
            if status in (502, 503, 504):
                raise AttemptError(text, Remedy.TIME)
            if status >= 500 or status == 408:
                raise AttemptError(text, Remedy.LUCK)
            raise AttemptError(text, Remedy.ANOTHER_SERVER, blame=status in (401, 403, 404, 405) or status < 400)
        try:
            return parse(json.loads(raw))
        except BadValueError as error:
            raise AttemptError(f"{url}: what it answered cannot be used: {error}", self.useless) from None
        except (ValueError, RecursionError):
            raise AttemptError(f"{url} answered something that is not JSON: {shown}", Remedy.LUCK) from None

    async def _look_at(self, server: Server) -> str | None:
        """Why the server cannot be reached. Any answer will do, even that there is no /health."""
        parts = urlsplit(server.url)
        try:
            async with (
                asyncio.timeout(REACH_SECONDS),
                self._client().get(urlunsplit((parts.scheme, parts.netloc, "/health", "", "")), allow_redirects=False),
            ):
                return None
        except TimeoutError:
            # Somebody who accepts connections and is busy: the first request will tell.
            port = parts.port or (443 if parts.scheme == "https" else 80)
            if await _accepts_connections(parts.hostname, port):
                return None
            return f"{server.url}: no connection in {REACH_SECONDS:g} s"
        except (aiohttp.ClientError, OSError) as error:
            return f"{server.url}: {_described(error)}"

    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:
            headers = {"Content-Type": "application/json"}
            if self._api_key:
                headers["Authorization"] = f"Bearer {self._api_key}"
            self._session = aiohttp.ClientSession(
                headers=headers,
                # How many requests go out at once is the pool's business, how long they take the attempt's.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
            )
        return self._session

    def _shown(self, raw: bytes) -> str:
        text = " ".join(raw.decode(errors="replace").split())
        if self._api_key:
            text = text.replace(self._api_key, "<redacted>")
        return text[:SHOWN_CHARACTERS] or "(nothing)"

    def _all_down(self, name: str) -> Exception:
        servers = self._pool.servers
        which = f"all {len(servers)} {self.what}s are" if len(servers) > 1 else f"the {self.what} is"
        reasons = "; ".join(server.reason for server in servers if server.reason)
        return self.error(f"{name}: {which} down or busy: {reasons} ({self.timeout_flag} {self._timeout:g})")


class HttpReward(HttpServers):
    """Judges each prompt group with one request to one of several servers that give the same answers."""

    def __init__(
        self, urls: Sequence[str], *, timeout: float, api_key: str | None = None, max_concurrency: int = 32
    ) -> None:
        super().__init__(
            [endpoint(url) for url in urls], timeout=timeout, api_key=api_key, max_concurrency=max_concurrency
        )
        self._said_repeated = False

    async def start(self) -> None:
        """Raises RewardError when no server can be reached."""
        servers = self._pool.servers
        problems = await asyncio.gather(*(self._look_at(server) for server in servers))
        if all(problems):
            raise RewardError(f"--reward.remote_url: no reward server can be reached: {'; '.join(map(str, problems))}")
        for server, problem in zip(servers, problems, strict=True):
            if problem:
                self._pool.failed(server, problem, times=DOWN_AFTER)

    async def score(self, request: RewardRequest) -> Sequence[Reward]:
        count = len(request.queries)
        values = await self.ask(
            _encode(request), samples=count, name=request.name, parse=lambda found: parse_rewards(found, count=count)
        )
        if values.repeated and not self._said_repeated:
            self._said_repeated = True
            logger.warning(
                "a reward server answered with one number for %d samples, so each gets it; it is asked once per "
                "prompt, with all samples of the prompt",
                count,
            )
        return Reward.each(values)


def endpoint(url: str) -> str:
    """The address that is asked: the URL as given, with `/get_reward` where it has no path."""
    parts = urlsplit(url)
    return url if parts.path.strip("/") else urlunsplit(parts._replace(path=DEFAULT_PATH))


def _encode(request: RewardRequest) -> bytes:
    lists = {"query": request.queries, "prompts": request.prompts, "labels": request.labels}
    try:
        return json.dumps(lists, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise RewardError(f"{request.name}: its label cannot be sent to a reward server as JSON: {error}") from error


def _retry_after(value: str | None) -> float:
    """Seconds, from the header's two forms; a pause of our own where it is missing or makes no sense."""
    try:
        seconds = float(value or FIRST_PAUSE)
    except ValueError:
        try:
            seconds = (parsedate_to_datetime(value or "") - datetime.now(UTC)).total_seconds()
        except (TypeError, ValueError):
            seconds = FIRST_PAUSE
    return min(max(0.0, seconds), LONGEST_RETRY_AFTER)


async def _accepts_connections(host: str | None, port: int) -> bool:
    try:
        async with asyncio.timeout(1.0):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:  # TimeoutError is one
        return False
    writer.close()
    return True


def _described(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


if TYPE_CHECKING:
    from openrlhf.rewards.base import RewardSource

    _: type[RewardSource] = HttpReward

"""A reward model behind HTTP: POST /get_reward, GET /health, GET /metrics.

POST {"query": ["text", …]} is answered with {"rewards": […], "scores": […], "extra_logs": {"dummy_scores": […]}}, three
times the same numbers in the order of the queries; other keys ("prompts", "labels") are not looked at. Any other answer
says in {"detail": "…"} why it has no rewards:

    400  the body is not JSON             413  more bytes, queries or characters than the limits allow
    401  the key is missing or wrong      422  JSON, but not texts that the model can read
    408  the body came too slowly
    500  the model failed                 503  loading, full or stopping; Retry-After says when to ask again

Who waits on whom:
    a request       reads its body, waits for the reading thread, then for the batcher; it is cancelled when its caller
                    disconnects
    reading thread  tokenises one request after the other
    model thread    runs one forward after the other, over what the batcher has collected meanwhile
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import prometheus_client as prometheus
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from torch import Tensor

from openrlhf.rewards.base import RewardError
from openrlhf.rewards.batching import Batcher, Item
from openrlhf.rewards.model import UnreadableError

logger = logging.getLogger(__name__)

FULL_SECONDS, LOADING_SECONDS = 1, 5
"""The `Retry-After` of a server that is full, and of one that is loading or stopping."""
MOST_HEADER_BYTES = 32 << 10
"""The limit on a request's first line and headers together."""
LINGER_SECONDS = 2.0
"""How long a connection is still read after its request was refused, so that the caller gets to read the answer."""
CLOSE_SECONDS = 0.1
"""The pause between closing the listener and closing idle connections: requests that have arrived are begun in it."""
BACKLOG = 1024
"""Connections that the system holds until they are accepted."""
CLIENT_GONE = 499
"""The status under which a request is counted whose caller disconnected before the answer."""
BATCH_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
SECOND_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class ScoringModel(Protocol):
    """The model that a server needs; see `rewards.model.RewardModel`."""

    def read(self, texts: Sequence[str]) -> list[Tensor]: ...

    def score(self, batch: Sequence[Item]) -> list[float]: ...

    def checked(self, scores: Sequence[float]) -> Sequence[float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """The limits on requests and on forwards."""

    max_request_bytes: int
    max_query_chars: int
    max_queue: int
    """Queries accepted and not answered yet, of all callers together."""
    max_batch_tokens: int
    max_batch_queries: int | None = None
    read_seconds: float = 60.0
    """How long the headers of a request may take to arrive, and how long its body."""


class Refusal(Exception):
    """A request is answered with this status and {"detail": …}."""

    def __init__(self, status: int, detail: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(detail)
        self.status = status
        self.headers = headers


class ServerMetrics:
    """The counters behind /metrics. The model's thread observes batches, the event loop the rest."""

    def __init__(self) -> None:
        # Without this, each counter and histogram also exports the time at which it was made.
        prometheus.disable_created_metrics()
        self._registry = prometheus.CollectorRegistry()
        options: dict[str, Any] = {"namespace": "openrlhf_reward", "registry": self._registry}
        self.ready = prometheus.Gauge("ready", "1 once the model is loaded", **options)
        self.under_way = prometheus.Gauge("queries_under_way", "queries accepted and not answered yet", **options)
        self.requests = prometheus.Counter(
            "requests_total", "requests to /get_reward by the status of the answer", ["status"], **options
        )
        self.queries = prometheus.Counter("queries_total", "queries scored", **options)
        self.tokens = prometheus.Counter("tokens_total", "tokens in forwards", **options)
        self.batches = prometheus.Histogram("batch_queries", "queries per forward", buckets=BATCH_BOUNDS, **options)
        self.seconds = prometheus.Histogram(
            "request_seconds", "from the request to its answer, whatever the status", buckets=SECOND_BOUNDS, **options
        )

    def response(self) -> web.Response:
        text = prometheus.generate_latest(self._registry)
        return web.Response(body=text, headers={"Content-Type": prometheus.CONTENT_TYPE_PLAIN_0_0_4})


class RewardServer:
    """Answers requests once `serve_model` has given it a model. It belongs to one event loop."""

    def __init__(self, *, limits: ServerLimits, api_key: str | None = None) -> None:
        """`api_key`: callers of /get_reward must send it as a bearer token."""
        self.model_thread: Executor = ThreadPoolExecutor(1, thread_name_prefix="model")
        """The thread that the model is to be loaded in, and runs in."""
        self._reading_thread = ThreadPoolExecutor(1, thread_name_prefix="reading")
        self._limits = limits
        # Clients send the key without white space; a file with a key ends in a line break.
        self._api_key = None if api_key is None else "".join(api_key.split())
        self._metrics = ServerMetrics()
        self._metrics.ready.set_function(lambda: self._model is not None)
        self._metrics.under_way.set_function(lambda: self.under_way)
        self.under_way = 0
        """Queries accepted and not answered yet."""
        self.given_up = 0
        """Queries that were under way when `give_up` was called."""
        self._model: ScoringModel | None = None
        self._batcher: Batcher | None = None
        self._runner: web.AppRunner | None = None
        self._stopping = False
        self._connections: dict[asyncio.Task[Any], web.RequestHandler] = {}
        """The connection of each request that is not answered yet."""
        self._deadlines: set[asyncio.Timeout] = set()
        """The time limits of the requests under way: none, until `give_up` ends them all."""

    async def listen(self, listener: socket.socket) -> None:
        """Answer requests that come to this socket, from now until `stop`."""
        app = web.Application(middlewares=[self._answer])
        app.router.add_post("/get_reward", self._get_reward)
        app.router.add_get("/health", self._health, allow_head=False)
        app.router.add_get("/metrics", self._show_metrics, allow_head=False)
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,  # a caller who disconnects cancels its request
            access_log=None,
            logger=_BadRequests(logger, {}),
            # aiohttp closes a connection if this long after it was made, or after its last answer, no request has
            # been read up to the end of its headers: this is also the limit on the headers.
            keepalive_timeout=self._limits.read_seconds,
            lingering_time=LINGER_SECONDS,
            max_line_size=MOST_HEADER_BYTES,
            max_field_size=MOST_HEADER_BYTES,
            auto_decompress=False,
            shutdown_timeout=CLOSE_SECONDS,
        )
        await self._runner.setup()
        await web.SockSite(self._runner, listener, backlog=BACKLOG).start()

    def serve_model(self, model: ScoringModel) -> None:
        def forward(batch: Sequence[Item]) -> list[float]:
            self._metrics.batches.observe(len(batch))
            self._metrics.tokens.inc(sum(len(item.token_ids) for item in batch))
            return model.score(batch)

        self._model = model
        self._batcher = Batcher(
            forward,
            max_tokens=self._limits.max_batch_tokens,
            max_sequences=self._limits.max_batch_queries,
            executor=self.model_thread,
        )

    def give_up(self) -> None:
        """Answer every request that is under way with 503, now."""
        self.given_up = self.under_way
        now = asyncio.get_running_loop().time()
        for deadline in self._deadlines:
            deadline.reschedule(now)

    async def stop(self, seconds: float) -> None:
        """Accept no more requests, answer those under way (after `seconds` with 503), and close every connection.

        Without `listen` before it, it does nothing.
        """
        runner, self._runner = self._runner, None
        if runner is None or runner.server is None:
            return
        for site in runner.sites:
            await site.stop()
        self._stopping = True
        await asyncio.sleep(CLOSE_SECONDS)
        # aiohttp would stop reading the bodies of requests under way, so that only idle connections are left to it.
        busy = set(self._connections.values())
        idle = [connection for connection in runner.server.connections if connection not in busy]
        for connection in idle:
            connection.close()
        await asyncio.gather(*(connection.shutdown(CLOSE_SECONDS) for connection in idle))
        late = asyncio.get_running_loop().call_later(seconds, self.give_up)
        if self._connections:
            await asyncio.wait(self._connections, timeout=seconds + LINGER_SECONDS)
        late.cancel()
        await runner.cleanup()

    async def close(self, seconds: float) -> bool:
        """End the threads; whether they were done with what they did, in so many seconds."""
        threads = (self._reading_thread, self.model_thread)
        loop = asyncio.get_running_loop()
        last = [loop.run_in_executor(thread, _nothing) for thread in threads]
        _, busy = await asyncio.wait(last, timeout=seconds)
        for thread in threads:
            thread.shutdown(wait=False, cancel_futures=True)
        return not busy

    @web.middleware
    async def _answer(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Turn refusals into answers, and know which connections wait for one."""
        task = asyncio.current_task()
        assert task is not None
        self._connections[task] = request.protocol
        task.add_done_callback(self._connections.pop)
        try:
            if sum(len(name) + len(value) for name, value in request.raw_headers) > MOST_HEADER_BYTES:
                raise Refusal(400, f"the headers have more than {MOST_HEADER_BYTES} bytes", {"Connection": "close"})
            response = await handler(request)
        except Refusal as refusal:
            response = _json({"detail": str(refusal)}, status=refusal.status, headers=refusal.headers)
        except web.HTTPException as error:  # no such path, or not with this method
            allow = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else None
            response = _json({"detail": error.reason}, status=error.status, headers=allow)
        if self._stopping or "Connection" in response.headers:
            response.force_close()
        return response

    async def _get_reward(self, request: web.Request) -> web.Response:
        started, status = time.perf_counter(), 500
        try:
            self._authorise(request)
            rewards = await self._rewards(request)
            status = 200
            return _json({"rewards": rewards, "scores": rewards, "extra_logs": {"dummy_scores": rewards}})
        except Refusal as refusal:
            status = refusal.status
            raise
        except asyncio.CancelledError:
            status = CLIENT_GONE
            raise
        finally:
            self._metrics.requests.labels(status).inc()
            self._metrics.seconds.observe(time.perf_counter() - started)

    async def _health(self, request: web.Request) -> web.Response:
        ready = self._model is not None
        return _json({"status": "ready" if ready else "loading"}, status=200 if ready else 503)

    async def _show_metrics(self, request: web.Request) -> web.Response:
        return self._metrics.response()

    def _authorise(self, request: web.Request) -> None:
        if self._api_key is None:
            return
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = token.strip().encode(errors="surrogateescape")
        # The time that this comparison takes does not tell how much of the key is right.
        if scheme.lower() != "bearer" or not hmac.compare_digest(given, self._api_key.encode()):
            raise Refusal(
                401, "send the server's --api_key as 'Authorization: Bearer KEY'", {"WWW-Authenticate": "Bearer"}
            )

    async def _rewards(self, request: web.Request) -> Sequence[float]:
        if self._model is None or self._batcher is None:
            raise _unavailable("the model is still being loaded", LOADING_SECONDS)
        try:
            async with asyncio.timeout(None) as deadline:
                self._deadlines.add(deadline)
                queries = parse_queries(await self._body(request), self._limits)
                rewards = await self._score(self._model, self._batcher, queries)
        except TimeoutError:
            raise _unavailable("the server is being stopped", LOADING_SECONDS) from None
        finally:
            self._deadlines.discard(deadline)
        self._metrics.queries.inc(len(queries))
        return rewards

    async def _body(self, request: web.Request) -> bytes:
        most = self._limits.max_request_bytes
        too_large = Refusal(413, f"the request has more than {most} bytes (--max_request_bytes)")
        if (request.content_length or 0) > most:
            raise too_large
        body = bytearray()
        seconds = self._limits.read_seconds
        try:
            async with asyncio.timeout(seconds):
                async for part in request.content.iter_any():
                    body += part
                    if len(body) > most:
                        raise too_large
        except TimeoutError:
            raise Refusal(
                408, f"the body was not there after {seconds:g} s (--read_timeout)", {"Connection": "close"}
            ) from None
        except web.RequestPayloadError as error:
            raise Refusal(400, f"the body cannot be read: {error}", {"Connection": "close"}) from None
        return bytes(body)

    async def _score(self, model: ScoringModel, batcher: Batcher, queries: Sequence[str]) -> Sequence[float]:
        if self.under_way + len(queries) > self._limits.max_queue:
            raise _unavailable(
                f"{self.under_way} queries are under way, and at most {self._limits.max_queue} may be (--max_queue)",
                FULL_SECONDS,
            )
        self.under_way += len(queries)
        try:
            sequences = await asyncio.get_running_loop().run_in_executor(self._reading_thread, model.read, queries)
            return model.checked(await batcher.score(sequences))
        except UnreadableError as error:
            raise Refusal(422, f"query[{error.index}]: {error}") from error
        except RewardError as error:
            logger.error("%s", error)
            raise Refusal(500, str(error)) from error
        except Exception as error:
            logger.exception("the reward model failed")
            raise Refusal(500, f"the reward model failed: {error}") from error
        finally:
            self.under_way -= len(queries)


class _BadRequests(logging.LoggerAdapter[logging.Logger]):
    """aiohttp's log: a request that is not HTTP is a warning of one line, not an error with a traceback."""

    def exception(self, msg: object, *args: object, exc_info: Any = True, **options: Any) -> None:
        if isinstance(exc_info, HttpProcessingError):
            self.warning(f"{msg}: %s", *args, exc_info.message.splitlines()[0])
        else:
            super().exception(msg, *args, exc_info=exc_info, **options)


def parse_queries(body: bytes, limits: ServerLimits) -> list[str]:
    """The texts of a request; raises Refusal."""
    try:
        question = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise Refusal(400, f"the body is not JSON: {error}") from None
    queries = question.get("query") if isinstance(question, dict) else None
    if not isinstance(queries, list):
        if not isinstance(question, dict):
            got = f"a JSON {_kind(question)}"
        elif "query" in question:
            got = f'"query" as {_kind(queries)}'
        else:
            got = f"keys {sorted(question)[:8]}"
        raise Refusal(422, f'expected {{"query": ["text", …]}}, got {got}')
    if len(queries) > limits.max_queue:
        raise Refusal(413, f"{len(queries)} queries; a request may have {limits.max_queue} (--max_queue)")
    for index, query in enumerate(queries):
        if not isinstance(query, str):
            raise Refusal(422, f"query[{index}] must be a text, got {_kind(query)}")
        if len(query) > limits.max_query_chars:
            raise Refusal(
                413,
                f"query[{index}] has {len(query)} characters; it may have {limits.max_query_chars} (--max_query_chars)",
            )
        try:
            query.encode()
        except UnicodeEncodeError as error:  # half of a character pair, which JSON can spell
            raise Refusal(422, f"query[{index}] is not Unicode text: {error.reason}") from None
    return queries


def _nothing() -> None:
    """The last call of a thread: once it has run, all others have."""


def _kind(value: Any) -> str:
    """The type of a value as JSON calls it."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _unavailable(detail: str, seconds: int) -> Refusal:
    return Refusal(503, detail, {"Retry-After": str(seconds)})


def _json(content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> web.Response:
    body = json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode()
    return web.Response(body=body, status=status, headers=headers, content_type="application/json")

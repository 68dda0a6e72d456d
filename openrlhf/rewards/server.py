"""A reward model behind HTTP: POST /get_reward, GET /health, GET /metrics.

POST {"query": ["text", …]} is answered with {"rewards": […], "scores": […], "extra_logs": {"dummy_scores": […]}}, three
times the same numbers in the order of the queries; other keys ("prompts", "labels") are not looked at. Whatever is not
answered with rewards says why in {"detail": "…"}:

    400  the body is not JSON             413  more bytes, queries or characters than the limits allow
    401  the key is missing or wrong      422  JSON, but not texts that the model can read
    408  the body came too slowly
    500  the model failed                 503  loading, full or stopping; Retry-After says when to ask again

Who waits on whom:
    a request       reads its body, waits for the reading thread, then for the batcher; ends when its caller has gone
    reading thread  tokenises one request after the other
    model thread    one forward after the other, over whatever the batcher has collected meanwhile
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

import h11
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, PlainTextResponse
from starlette.requests import ClientDisconnect
from torch import Tensor
from uvicorn.protocols.http.h11_impl import H11Protocol

from openrlhf.rewards.base import RewardError
from openrlhf.rewards.batching import Batcher, Item
from openrlhf.rewards.model import UnreadableError
from openrlhf.rewards.server_metrics import CONTENT_TYPE, ServerMetrics

logger = logging.getLogger(__name__)

FULL_SECONDS, LOADING_SECONDS = 1, 5
"""When to ask again."""
MOST_HEADER_BYTES = 32 << 10
"""Of a request's first line and headers."""
LINGER_SECONDS = 2.0
"""How much longer than a request may take its connection is kept, for the answer that says so."""
CLIENT_GONE = 499
"""The status under which a request is counted whose caller did not wait for the answer."""


class ScoringModel(Protocol):
    """What is served; see `rewards.model.RewardModel`."""

    def read(self, texts: Sequence[str]) -> list[Tensor]: ...

    def score(self, batch: Sequence[Item]) -> list[float]: ...

    def checked(self, scores: Sequence[float]) -> Sequence[float]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What callers may ask for, and what a forward may hold."""

    max_request_bytes: int
    max_query_chars: int
    max_queue: int
    """Queries accepted and not answered yet, of all callers together."""
    max_batch_tokens: int
    max_batch_queries: int | None = None
    read_seconds: float = 60.0
    """How long the headers of a request may take to arrive, and how long its body."""


class RewardServer:
    """`app` is an ASGI application that answers once `serve_model` has given it a model. Belongs to one event loop."""

    def __init__(self, *, limits: ServerLimits, api_key: str | None = None) -> None:
        """`api_key`: callers of /get_reward must send it as a bearer token."""
        self.model_thread: Executor = ThreadPoolExecutor(1, thread_name_prefix="model")
        """Where the model is to be loaded, and runs."""
        self._reading_thread = ThreadPoolExecutor(1, thread_name_prefix="reading")
        self._limits = limits
        # As clients send it: files of keys end in a line break.
        self._api_key = None if api_key is None else "".join(api_key.split())
        self._metrics = ServerMetrics()
        self._under_way = 0
        self.given_up = 0
        """Queries that were under way when `give_up` was called."""
        self._model: ScoringModel | None = None
        self._batcher: Batcher | None = None
        self._out_of_time = asyncio.Event()
        # No pages about the interface: they load scripts from elsewhere and need no key.
        self.app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        self.app.add_api_route("/get_reward", self._get_reward, methods=["POST"])
        self.app.add_api_route("/health", self._health, methods=["GET"])
        self.app.add_api_route("/metrics", self._show_metrics, methods=["GET"])

    def web_config(self, **options: Any) -> uvicorn.Config:
        """How `app` is to be served: requests that come too slowly, or with too many headers, hold nothing."""
        connection = type("Connection", (_Connection,), {"read_seconds": self._limits.read_seconds})
        return uvicorn.Config(
            self.app,
            http=connection,
            ws="none",
            h11_max_incomplete_event_size=MOST_HEADER_BYTES,
            lifespan="off",
            log_level="warning",
            **options,
        )

    @property
    def under_way(self) -> int:
        """Queries accepted and not answered yet."""
        return self._under_way

    def serve_model(self, model: ScoringModel) -> None:
        def forward(batch: Sequence[Item]) -> list[float]:
            self._metrics.batch(queries=len(batch), tokens=sum(len(item.token_ids) for item in batch))
            return model.score(batch)

        self._model = model
        self._batcher = Batcher(
            forward,
            max_tokens=self._limits.max_batch_tokens,
            max_sequences=self._limits.max_batch_queries,
            executor=self.model_thread,
        )

    def give_up(self) -> None:
        """Answer whatever is under way with 503, now."""
        self.given_up = self._under_way
        self._out_of_time.set()

    async def close(self, seconds: float) -> bool:
        """End the threads; whether they were done with what they did, in so many seconds."""
        threads = (self._reading_thread, self.model_thread)
        loop = asyncio.get_running_loop()
        last = [loop.run_in_executor(thread, _nothing) for thread in threads]
        _, busy = await asyncio.wait(last, timeout=seconds)
        for thread in threads:
            thread.shutdown(wait=False, cancel_futures=True)
        return not busy

    async def _get_reward(self, request: Request) -> JSONResponse:
        started, status = time.perf_counter(), 500
        try:
            self._authorise(request)
            rewards = await self._rewards(request)
            status = 200
            return JSONResponse({"rewards": rewards, "scores": rewards, "extra_logs": {"dummy_scores": rewards}})
        except HTTPException as refusal:
            status = refusal.status_code
            raise
        finally:
            self._metrics.request(status, seconds=time.perf_counter() - started)

    async def _health(self) -> JSONResponse:
        ready = self._model is not None
        return JSONResponse({"status": "ready" if ready else "loading"}, status_code=200 if ready else 503)

    async def _show_metrics(self) -> PlainTextResponse:
        text = self._metrics.render(ready=self._model is not None, under_way=self._under_way)
        return PlainTextResponse(text, media_type=CONTENT_TYPE)

    def _authorise(self, request: Request) -> None:
        if self._api_key is None:
            return
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        # Compared in a time that does not tell how much of it is right.
        if scheme.lower() != "bearer" or not hmac.compare_digest(token.strip().encode(), self._api_key.encode()):
            raise HTTPException(
                401,
                "send the server's --api_key as 'Authorization: Bearer KEY'",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _rewards(self, request: Request) -> Sequence[float]:
        if self._model is None or self._batcher is None:
            raise _unavailable("the model is still being loaded", LOADING_SECONDS)
        queries = parse_queries(await self._body(request), self._limits)
        if self._under_way + len(queries) > self._limits.max_queue:
            raise _unavailable(
                f"{self._under_way} queries are under way, and at most {self._limits.max_queue} may be (--max_queue)",
                FULL_SECONDS,
            )
        self._under_way += len(queries)
        try:
            rewards = await self._unless_hopeless(request, self._score(self._model, self._batcher, queries))
        finally:
            self._under_way -= len(queries)
        self._metrics.scored(len(queries))
        return rewards

    async def _body(self, request: Request) -> bytes:
        most = self._limits.max_request_bytes
        too_large = HTTPException(413, f"the request has more than {most} bytes (--max_request_bytes)")
        declared = request.headers.get("Content-Length", "")
        if declared.isdecimal() and int(declared) > most:
            raise too_large
        body = bytearray()
        seconds = self._limits.read_seconds
        try:
            async with asyncio.timeout(seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise too_large
        except ClientDisconnect:
            raise _gone() from None
        except TimeoutError:
            raise HTTPException(
                408, f"the body was not there after {seconds:g} s (--read_timeout)", headers={"Connection": "close"}
            ) from None
        return bytes(body)

    async def _score(self, model: ScoringModel, batcher: Batcher, queries: Sequence[str]) -> Sequence[float]:
        loop = asyncio.get_running_loop()
        try:
            sequences = await loop.run_in_executor(self._reading_thread, model.read, queries)
            return model.checked(await batcher.score(sequences))
        except UnreadableError as error:
            raise HTTPException(422, f"query[{error.index}]: {error}") from error
        except RewardError as error:
            logger.error("%s", error)
            raise HTTPException(500, str(error)) from error
        except Exception as error:
            logger.exception("the reward model failed")
            raise HTTPException(500, f"the reward model failed: {error}") from error

    async def _unless_hopeless(self, request: Request, scoring: Any) -> Sequence[float]:
        """What `scoring` gives, unless the caller goes away or the time of this server is up before it."""
        answer = asyncio.ensure_future(scoring)
        gone = asyncio.ensure_future(_disconnection(request))
        late = asyncio.ensure_future(self._out_of_time.wait())
        try:
            await asyncio.wait((answer, gone, late), return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                return answer.result()
            if gone.done():
                raise _gone()
            raise _unavailable("the server is being stopped", LOADING_SECONDS)
        finally:
            for task in (answer, gone, late):
                task.cancel()


class _Connection(H11Protocol):
    """Is closed when headers do not come in `read_seconds`, or a body some time later; uvicorn would wait for ever.

    The application answers a slow body with 408 itself. Here it is made sure that whoever is refused does not keep the
    connection by sending on.
    """

    read_seconds: float

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._waits_for: str | None = None
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_for(None)
        super().connection_lost(exc)

    def _watch(self) -> None:
        """After every piece. Between two requests uvicorn's own timer runs, until the first byte of the next."""
        state = self.conn.their_state
        self._wait_for("headers" if state is h11.IDLE else "body" if state is h11.SEND_BODY else None)

    def _wait_for(self, what: str | None) -> None:
        if what == self._waits_for:
            return
        self._waits_for = what
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if what is not None:
            seconds = self.read_seconds + (LINGER_SECONDS if what == "body" else 0.0)
            self._timer = self.loop.call_later(seconds, self._give_up)

    def _give_up(self) -> None:
        if not self.transport.is_closing():
            self.transport.abort()


def parse_queries(body: bytes, limits: ServerLimits) -> list[str]:
    """The texts of a request; raises HTTPException."""
    try:
        question = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from None
    queries = question.get("query") if isinstance(question, dict) else None
    if not isinstance(queries, list):
        if not isinstance(question, dict):
            got = f"a JSON {_kind(question)}"
        elif "query" in question:
            got = f'"query" as {_kind(queries)}'
        else:
            got = f"keys {sorted(question)[:8]}"
        raise HTTPException(422, f'expected {{"query": ["text", …]}}, got {got}')
    if len(queries) > limits.max_queue:
        raise HTTPException(413, f"{len(queries)} queries; a request may have {limits.max_queue} (--max_queue)")
    for index, query in enumerate(queries):
        if not isinstance(query, str):
            raise HTTPException(422, f"query[{index}] must be a text, got {_kind(query)}")
        if len(query) > limits.max_query_chars:
            raise HTTPException(
                413,
                f"query[{index}] has {len(query)} characters; it may have {limits.max_query_chars} (--max_query_chars)",
            )
        try:
            query.encode()
        except UnicodeEncodeError as error:  # half of a character pair, which JSON can spell
            raise HTTPException(422, f"query[{index}] is not Unicode text: {error.reason}") from None
    return queries


def _nothing() -> None:
    """What a thread does when it has done everything else."""


def _kind(value: Any) -> str:
    """As JSON calls it."""
    names = {dict: "object", list: "array", str: "string", bool: "boolean", type(None): "null"}
    return names.get(type(value), "number")


def _unavailable(detail: str, seconds: int) -> HTTPException:
    return HTTPException(503, detail, headers={"Retry-After": str(seconds)})


def _gone() -> HTTPException:
    """Nobody reads it; it is for the metrics."""
    return HTTPException(CLIENT_GONE, "the caller has gone")


async def _disconnection(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass

"""The HTTP side of the agent endpoint: one per process, for all its episodes, in the protocols of OpenAI and Anthropic.

    GET  /health
    GET  /v1/models
    POST /tokenize              {"prompt": text} or {"messages": […]} → {"count", "max_model_len", "tokens"}
    POST /v1/chat/completions   OpenAI's
    POST /v1/messages           Anthropic's
    POST /v1/messages/count_tokens

Each is also there under `/session/<id>`, which says whose request it is; otherwise the header `X-Session-Id` does, or
the field `session_id` of the request or of its `metadata`. All but `/health` need a session: its id is a secret of the
episode's program.

The loop that serves all episodes only moves bytes; JSON is read, templates are rendered and text is tokenised in a few
threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
import weakref
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import urlsplit

from aiohttp import web

from openrlhf.agents.anthropic_protocol import ANTHROPIC
from openrlhf.agents.chat_protocol import MODEL, AnswerWriter, ApiError, Dialect, parse_body
from openrlhf.agents.openai_protocol import OPENAI, parse_chat_request
from openrlhf.agents.openai_session import LEAST_LIMIT, ChatSession, ChatTurn
from openrlhf.agents.values import shown

logger = logging.getLogger(__name__)

T = TypeVar("T")

MOST_THREADS = 4
"""The number of threads in which requests are read, rendered and tokenised. Further requests wait."""
BODY_SECONDS = 60.0
"""How long a client may take to send a request."""
MOST_SESSIONS = 4096
HOST = "127.0.0.1"
NO_RETRY = {"X-Should-Retry": "false"}
"""Tells clients that asking again would give the same answer."""


class AgentServer:
    """Listens on a free port of this machine only, from when it is made until it is forgotten.

    In a thread with an event loop of its own: an agent that blocks the loop it runs on, with a client that is not
    async, is answered all the same.
    """

    def __init__(self) -> None:
        self._sessions: dict[str, ChatSession] = {}
        self._loop = asyncio.new_event_loop()
        # Bound right here, so that requests wait from now on, even if the thread is late.
        listening = socket.create_server((HOST, 0), backlog=1024)
        self.port: int = listening.getsockname()[1]
        work = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="openai-work")
        app = _App(self._sessions, work).app()
        threading.Thread(target=_serve, args=(self._loop, app, listening), name="openai-server", daemon=True).start()
        weakref.finalize(self, _stop, self._loop, work)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    def open(self, session: ChatSession) -> None:
        if len(self._sessions) >= MOST_SESSIONS:
            raise RuntimeError(f"more than {MOST_SESSIONS} episodes at once on one server")
        self._sessions[session.id] = session

    async def close(self, session: ChatSession) -> None:
        """Requests under way are given up; later ones find no session."""
        self._sessions.pop(session.id, None)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_give_up(session), self._loop))


def _serve(loop: asyncio.AbstractEventLoop, app: web.Application, listening: socket.socket) -> None:
    asyncio.set_event_loop(loop)
    # A client that goes away cancels its request.
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
    loop.run_until_complete(runner.setup())
    loop.run_until_complete(web.SockSite(runner, listening).start())
    loop.run_forever()
    loop.run_until_complete(runner.cleanup())
    loop.close()


def _stop(loop: asyncio.AbstractEventLoop, work: ThreadPoolExecutor) -> None:
    work.shutdown(wait=False, cancel_futures=True)
    with contextlib.suppress(RuntimeError):  # closed already
        loop.call_soon_threadsafe(loop.stop)


async def _give_up(session: ChatSession) -> None:
    tasks = list(session.tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class _App:
    """The routes. All on the server's loop."""

    def __init__(self, sessions: dict[str, ChatSession], work: ThreadPoolExecutor) -> None:
        self._sessions = sessions
        self._work = work

    def app(self) -> web.Application:
        app = web.Application(middlewares=[_errors_as_objects, _only_from_here])
        for prefix in ("", "/session/{session}"):
            app.router.add_get(f"{prefix}/health", self._health)
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_post(f"{prefix}/tokenize", self._tokenize)
            app.router.add_post(f"{prefix}/v1/chat/completions", self._chat)
            app.router.add_post(f"{prefix}/v1/messages", self._chat)
            app.router.add_post(f"{prefix}/v1/messages/count_tokens", self._count)
        return app

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        self._session(_named(request))
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "openrlhf"}
        model |= {"type": "model", "display_name": MODEL, "created_at": "1970-01-01T00:00:00Z"}  # Anthropic's words
        pages = {"has_more": False, "first_id": MODEL, "last_id": MODEL}
        return web.json_response({"object": "list", "data": [model], **pages})

    async def _tokenize(self, request: web.Request) -> web.Response:
        session, body = await self._read(request)
        ids = await self._off_the_loop(_tokens, session, body)
        return web.json_response({"count": len(ids), "max_model_len": session.max_length, "tokens": ids})

    async def _count(self, request: web.Request) -> web.Response:
        session, body = await self._read(request)
        chat = await self._off_the_loop(ANTHROPIC.parse, body)
        prompt = await self._off_the_loop(session.prompt, chat)
        return web.json_response({"input_tokens": len(prompt.token_ids)})

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        dialect = _dialect(request)
        session, body = await self._read(request)
        chat = await self._off_the_loop(dialect.parse, body)
        task = asyncio.current_task()
        assert task is not None
        session.tasks.add(task)
        try:
            with session.answering() as ticket:
                turn = await self._off_the_loop(session.begin, chat, ticket)
                writer = dialect.writer(
                    request=chat, id=session.next_id(), prompt=turn.prompt, tokenizer=session.tokenizer
                )
                if chat.stream:
                    return await _send(request, turn, writer)
                answer = await turn.whole()
                return web.json_response(await self._off_the_loop(writer.whole, answer, turn.written))
        finally:
            session.tasks.discard(task)

    async def _read(self, request: web.Request) -> tuple[ChatSession, dict[str, Any]]:
        """Whose request it is, and what is in it."""
        named = _named(request)
        if named is not None:
            session = self._session(named)
            return session, await self._off_the_loop(parse_body, await _content(request, session.most_bytes, session))
        most = max((session.most_bytes for session in list(self._sessions.values())), default=LEAST_LIMIT)
        content = await _content(request, most)
        body = await self._off_the_loop(parse_body, content)
        session = self._session(_named_inside(body))
        if len(content) > session.most_bytes:
            raise _too_large(session.most_bytes, session)
        return session, body

    def _session(self, name: Any) -> ChatSession:
        if not isinstance(name, str):
            raise ApiError(
                "the request names no session: use the episode's base URL, /session/<id>/v1, or the field session_id"
            )
        session = self._sessions.get(name)
        if session is None:
            raise ApiError(f"there is no session {name}, or it has ended", status=404, code="session_not_found")
        return session

    async def _off_the_loop(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._work, function, *args)


def _named(request: web.Request) -> str | None:
    return request.match_info.get("session") or request.headers.get("X-Session-Id")


def _named_inside(body: dict[str, Any]) -> Any:
    """Anthropic's client has `metadata` for what is the program's own, and names a `user_id` there."""
    metadata = body.get("metadata")
    inside = metadata if isinstance(metadata, dict) else {}
    names = (body.get("session_id"), inside.get("session_id"), inside.get("user_id"))
    return next((name for name in names if name is not None), None)


def _dialect(request: web.Request) -> Dialect:
    """The protocol that the client speaks, by the path; where there is nothing behind it, by what the client says."""
    path = request.path.removesuffix("/count_tokens")
    return ANTHROPIC if path.endswith("/v1/messages") or "anthropic-version" in request.headers else OPENAI


async def _content(request: web.Request, most: int, session: ChatSession | None = None) -> bytes:
    """The body of the request, if it has no more than `most` bytes."""
    if (request.content_length or 0) > most:
        raise _too_large(most, session)
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.content.iter_any():
                content += part
                if len(content) > most:
                    raise _too_large(most, session)
    except TimeoutError:
        raise ApiError(f"the request was not there after {BODY_SECONDS:g} s", status=408) from None
    return bytes(content)


def _too_large(most: int, session: ChatSession | None) -> ApiError:
    if session is not None:
        session.refused_for_length = True
    return ApiError(
        f"Request Entity Too Large: more than {most} bytes cannot fit into the model's context",
        status=413,
        code="request_too_large",
    )


def _tokens(session: ChatSession, body: dict[str, Any]) -> list[int]:
    if "messages" in body:
        return session.prompt(parse_chat_request(body)).token_ids
    if not isinstance(body.get("prompt"), str):
        raise ApiError("give prompt (text) or messages")
    special = bool(body.get("add_special_tokens", True))
    ids: list[int] = session.tokenizer(body["prompt"], add_special_tokens=special)["input_ids"]
    return ids


async def _send(request: web.Request, turn: ChatTurn, writer: AnswerWriter) -> web.StreamResponse:
    """One answer as server-sent events."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})

    async def write(events: list[str]) -> None:
        if events:
            await response.write("".join(events).encode())

    await response.prepare(request)
    try:
        await write(writer.opening())
        async with contextlib.aclosing(turn.parts()) as parts:
            async for part in parts:
                await write(writer.part(part, turn.written))
    except ConnectionError:
        pass  # the client has gone; what it asked for is given up
    except Exception as error:
        with contextlib.suppress(ConnectionError):
            await write(writer.error(_failure(error)))
    return response


@web.middleware
async def _errors_as_objects(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:  # no such path, too large
        twice = "; Anthropic's client adds /v1 itself: its base URL is anthropic_base_url"
        hint = twice if "/v1/v1/" in request.path else ""
        refused = ApiError(f"{request.method} {request.path}: {error.reason}{hint}", status=error.status)
    except Exception as error:
        refused = _failure(error)
    return web.json_response(_dialect(request).error(refused), status=refused.status, headers=NO_RETRY)


@web.middleware
async def _only_from_here(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """A page in a browser on this machine can send requests here: by a name that its owner has made to mean 127.0.0.1
    (then `Host` is that name), or from its own origin (then `Origin` says so). No program of ours does either."""
    host = request.headers.get("Host", "")
    if not _is_here(host):
        raise ApiError(f"the server is 127.0.0.1 or localhost to its clients, not {shown(host)} (Host)", status=403)
    origin = request.headers.get("Origin")
    if origin is not None and origin != f"http://{host}":
        raise ApiError(f"requests from {shown(origin)} (Origin) are not answered", status=403)
    return await handler(request)


def _is_here(host: str) -> bool:
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or ip_address(name).is_loopback
    except ValueError:
        return False


def _failure(error: Exception) -> ApiError:
    """The answer for an error on our side. The episode learns of it too, by the engine's record or this log."""
    if isinstance(error, ApiError):
        return error
    logger.debug("a request failed", exc_info=error)
    return ApiError(f"{type(error).__name__}: {error}", status=500, kind="server_error")

"""A reward server in a thread: real sockets, and whatever behaviour a test gives it."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Answer = dict[str, Any] | list[Any] | web.Response
Behaviour = Callable[[dict[str, Any], int], Answer | Awaitable[Answer]]
"""From the question and how many came before it to the answer."""


def lengths(question: dict[str, Any], before: int = 0) -> dict[str, Any]:
    """One reward per query: how many characters follow the prompt."""
    pairs = zip(question["query"], question["prompts"], strict=True)
    return {"rewards": [len(query) - len(prompt) for query, prompt in pairs]}


@dataclass
class RewardServer:
    """Answers POST /get_reward as `behaviour` says. A context manager; may be stopped and started again."""

    behaviour: Behaviour = lengths
    port: int = 0
    health: bool = True
    models: Any = None
    """The answer of GET /v1/models; None: there is none. POST /v1/completions is answered as /get_reward is."""
    questions: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    connections: set[int] = field(default_factory=set)
    most_at_once: int = 0
    _at_once: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/get_reward"

    def start(self) -> "RewardServer":
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        asyncio.run_coroutine_threadsafe(self._listen(), self._loop).result(timeout=10)
        return self

    def stop(self) -> None:
        """Without a word: open connections break."""
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._runner.cleanup(), self._loop).result(timeout=10)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    __enter__ = start

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def _listen(self) -> None:
        app = web.Application(client_max_size=1 << 26)
        app.router.add_post("/get_reward", self._answer)
        app.router.add_post("/v1/completions", self._answer)
        if self.models is not None:
            app.router.add_get("/v1/models", self._models)
        if self.health:
            app.router.add_get("/health", self._healthy)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = site._server.sockets[0].getsockname()[1]

    async def _healthy(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(self.models)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        question = await request.json()
        before = len(self.questions)
        self.questions.append(question)
        self.headers.append(dict(request.headers))
        self.connections.add(request.transport.get_extra_info("peername")[1])
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            answer = self.behaviour(question, before)
            if asyncio.iscoroutine(answer):
                answer = await answer
        finally:
            self._at_once -= 1
        return answer if isinstance(answer, web.StreamResponse) else web.json_response(answer)


def free_port() -> int:
    """One that nobody listens on."""
    with RewardServer() as server:
        return server.port

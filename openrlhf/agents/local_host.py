"""A service in this process, for a debugger: `--rollout.agent_hosts 0`."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import pickle
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextvars import Context, copy_context
from typing import TYPE_CHECKING, Any

from openrlhf.agents.host import HostClosedError, HostError, HostStartError, RemoteError, Reply
from openrlhf.agents.host_answers import Answers, Asked
from openrlhf.agents.host_calls import CallRunner, make_service
from openrlhf.agents.host_messages import (
    Answered,
    Ask,
    Call,
    Cancel,
    CancelAsk,
    Done,
    Failed,
    Part,
    Refused,
    Said,
    describe,
)

logger = logging.getLogger(__name__)


class LocalHost:
    """As `HostProcess`, but users' code runs here: coroutines on the event loop that started it, which is also the only
    one that may call it; plain functions in threads.

    No time limit ends anything, a step that blocks the loop blocks the engine too, and a crash is the end of the run.
    What crosses is pickled all the same, so that what works here works there.
    """

    def __init__(
        self,
        target: str,
        *args: Any,
        name: str,
        answer: Callable[..., Awaitable[Any]] | None = None,
        answer_stream: Callable[..., AsyncGenerator[Any, None]] | None = None,
    ) -> None:
        self._target = target
        self._args = args
        self._name = name
        self._answers = Answers(answer, answer_stream)
        self._runner: CallRunner | None = None
        self._closed = False
        self._ids = itertools.count()
        self._pending: dict[int, tuple[asyncio.Future[Reply], Context]] = {}
        self._asks: dict[int, Asked] = {}
        self._said: set[str] = set()

    async def start(self) -> None:
        """Make the service. Raises HostStartError."""
        self._made()

    async def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """What `method` returns. Raises RemoteError. `timeout` is not enforced."""
        return (await self.call_timed(method, *args, timeout=timeout)).value

    async def call_timed(self, method: str, *args: Any, timeout: float | None = None) -> Reply:
        """As `call`, with how long users' code took."""
        runner = self._made()
        call_id = next(self._ids)
        answer: asyncio.Future[Reply] = runner.loop.create_future()
        self._pending[call_id] = answer, copy_context()
        runner.handle(Call(call_id, method, pickle.dumps(args)))
        try:
            return await answer
        except asyncio.CancelledError:
            runner.handle(Cancel(call_id))
            raise

    async def close(self) -> None:
        """Cancel what runs. What is unanswered gets HostClosedError."""
        self._closed = True
        for call_id, (answer, _) in self._pending.items():
            if not answer.done():
                answer.set_exception(HostClosedError(f"{self._name} was closed"))
            if self._runner is not None:
                self._runner.handle(Cancel(call_id))
        if self._runner is not None:
            self._runner.close()

    def _made(self) -> CallRunner:
        if self._closed:
            raise HostClosedError(f"{self._name} is closed")
        if self._runner is None:
            runner = CallRunner(self._receive, pinned=True, loop=asyncio.get_running_loop())
            try:
                runner.service = make_service(self._target, self._args)
            except (Exception, SystemExit) as error:
                failure = describe(error)
                raise HostStartError(f"{failure.kind}: {failure.text}", failure) from error
            self._runner = runner
        return self._runner

    def _receive(self, message: Any) -> None:
        """From any thread."""
        assert self._runner is not None
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._runner.loop.call_soon_threadsafe(self._handle, message)

    def _handle(self, message: Any) -> None:
        match message:
            case Done(call_id):
                answer, _ = self._pending.pop(call_id)
                if not answer.done():
                    _resolve(answer, message)
            case Failed(call_id, failure):
                answer, _ = self._pending.pop(call_id)
                if not answer.done():
                    answer.set_exception(RemoteError(failure))
            case Ask(call_id):
                self._on_ask(message, self._pending[call_id][1])
            case CancelAsk(_, ask_id):
                if asked := self._asks.pop(ask_id, None):
                    asked.cancel()
            case Said(text) if text not in self._said:
                self._said.add(text)
                logger.warning("%s: %s", self._name, text)

    def _on_ask(self, ask: Ask, context: Context) -> None:
        assert self._runner is not None
        runner = self._runner

        def send(message: Part | Answered | Refused) -> None:
            if not isinstance(message, Part):
                self._asks.pop(ask.id, None)
            runner.handle(message)

        asked = Asked(ask, self._answers, loop=runner.loop, context=context.copy(), send=send)
        self._asks[ask.id] = asked
        asked.start()


def _resolve(answer: asyncio.Future[Reply], done: Done) -> None:
    try:
        value = pickle.loads(done.value)
    except Exception as error:
        answer.set_exception(HostError(f"its result cannot be read here: {error!r}"))
    else:
        answer.set_result(Reply(value, done.users_seconds, done.slowest))


if TYPE_CHECKING:
    from openrlhf.agents.host import Host

    _: type[Host] = LocalHost

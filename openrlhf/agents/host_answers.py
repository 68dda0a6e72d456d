"""Answers to what calls in a host ask, given on the event loop of whoever awaits the call."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from openrlhf.agents.host_messages import Answered, Ask, Failure, Part, Refused, describe

_under_way: set[asyncio.Task[Answered | Refused]] = set()
"""An event loop does not keep its tasks alive by itself."""


@dataclass(frozen=True, slots=True)
class Answers:
    """What a host's parent answers with. `answer(name, *args)` gives the answer, `answer_stream` its parts."""

    answer: Callable[..., Awaitable[Any]] | None = None
    answer_stream: Callable[..., AsyncGenerator[Any, None]] | None = None


class Asked:
    """One ask that is being answered. `start` and `cancel` may be called from any thread, in this order.

    `send` gets the parts, if any, and one last word, on the loop; after `cancel` too.
    """

    def __init__(
        self,
        ask: Ask,
        answers: Answers,
        *,
        loop: asyncio.AbstractEventLoop,
        context: Context,
        send: Callable[[Part | Answered | Refused], None],
    ) -> None:
        self._ask = ask
        self._answers = answers
        self._loop = loop
        self._context = context
        self._send = send
        self._task: asyncio.Task[Answered | Refused] | None = None

    def start(self) -> None:
        self._on_loop(self._start)

    def cancel(self) -> None:
        self._on_loop(self._cancel)

    def _on_loop(self, function: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it all that ran there is over
            self._loop.call_soon_threadsafe(function)

    def _start(self) -> None:
        self._task = self._loop.create_task(self._run(), context=self._context)
        _under_way.add(self._task)
        self._task.add_done_callback(self._end)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> Answered | Refused:
        ask = self._ask
        try:
            args = pickle.loads(ask.args)
            value = await (self._stream(args) if ask.stream else self._answer(args))
            return Answered(ask.id, pickle.dumps(value))
        except Exception as error:
            return Refused(ask.id, describe(error))

    def _end(self, task: asyncio.Task[Answered | Refused]) -> None:
        """Whatever became of the task, the ask gets a last word."""
        _under_way.discard(task)
        if task.cancelled():
            self._send(Refused(self._ask.id, Failure("CancelledError", "the answer was cancelled", "")))
        elif (error := task.exception()) is not None:
            self._send(Refused(self._ask.id, describe(error)))
        else:
            self._send(task.result())

    async def _answer(self, args: tuple[Any, ...]) -> Any:
        if self._answers.answer is None:
            raise LookupError(f"nobody answers {self._ask.name!r} here")
        return await self._answers.answer(self._ask.name, *args)

    async def _stream(self, args: tuple[Any, ...]) -> None:
        if self._answers.answer_stream is None:
            raise LookupError(f"nobody answers {self._ask.name!r} in parts here")
        async with contextlib.aclosing(self._answers.answer_stream(self._ask.name, *args)) as parts:
            async for part in parts:
                self._send(Part(self._ask.id, pickle.dumps(part)))

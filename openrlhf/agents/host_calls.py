"""Calls under way in a host, and what their code may do there: ask the parent, run users' code, say a line.

Imports the standard library only: hosts start with it. `CallRunner` is fed with messages and sends messages, whether
its parent is another process (`host_worker.py`) or this one (`local_host.py`).

Where users' code runs, so that a step that blocks harms its own call only:

    SHARED  coroutines share one event loop, as users' code expects: a semaphore of the file may count all its episodes
    OWN     a coroutine blocked that loop, so each call gets a thread with a loop of its own
    PINNED  that failed, because calls share something that belongs to a loop; a new process, in which coroutines stay
            on the shared one

Plain functions always run in their call's own thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import importlib
import inspect
import itertools
import logging
import pickle
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from typing import Any

from openrlhf.agents.host_clock import CallClock, LoopWatch, WatchedLoop, current_clock, current_function
from openrlhf.agents.host_lane import EpisodeThread
from openrlhf.agents.host_messages import (
    Answered,
    Ask,
    Call,
    Cancel,
    CancelAsk,
    Done,
    Failed,
    Failure,
    Part,
    Ping,
    Pinned,
    Pong,
    Refused,
    Said,
    Slowest,
    describe,
)

logger = logging.getLogger(__name__)

WRONG_LOOP = (
    "attached to a different loop",
    "bound to a different event loop",
    "belongs to a different loop",
    "Event loop is closed",
    "Timeout context manager should be used inside a task",
)
"""What asyncio and aiohttp say when something is used on another loop than the one it was made on."""


class AskError(Exception):
    """The parent could not answer. Its exception, as text."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.kind}: {failure.text}")
        self.failure = failure


# ------------------------------------------------------------------------------------ for services


def ask(name: str, *args: Any) -> Coroutine[Any, Any, Any]:
    """The parent's answer. Raises AskError with what was raised there.

    The call that asks is found by context when `ask` is called, so tasks and `asyncio.to_thread` may use it; for other
    threads and for servers keep a `contextvars.copy_context()` of the call and await `context.run(ask, …)`.
    """
    return _current("ask").ask(name, args)


def ask_stream(name: str, *args: Any) -> AsyncGenerator[Any, None]:
    """The parts of the parent's answer as they come. Closing the iterator cancels the answer there."""
    return _current("ask_stream").ask_stream(name, args)


async def run_user(function: Callable[..., Any], *args: Any, thread: bool | None = None) -> Any:
    """What a users' function returns; awaited if it can be. Whatever it does, other calls go on.

    `thread`: run it in the call's own thread (True) or wherever its coroutines run (False), as makes sense for the
    constructor of something with coroutine methods. By default plain functions get the thread. Functions of one call
    that block run one after another. Outside of a call it runs right here.
    """
    call = _call.get()
    if call is None:
        return _result(await _outcome(function, args))
    return await call.run_user(function, args, own=not _is_async(function) if thread is None else thread)


def say(text: str) -> None:
    """A line for the log of the run. The parent says each text once."""
    call = _call.get()
    if call is None:
        logger.warning("%s", text)
    else:
        call.say(text)


def make_service(target: str, args: tuple[Any, ...]) -> Any:
    """`target` is `module:callable`."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)(*args)


# ------------------------------------------------------------------------------------ one call


class _Inbox:
    """Where the answer to one ask arrives: on the loop that waits for it."""

    def __init__(self, call: _Call) -> None:
        self.call = call
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[Part | Answered | Refused] = asyncio.Queue()

    def put(self, message: Part | Answered | Refused) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._messages.put_nowait, message)

    async def get(self) -> Part | Answered:
        message = await self._messages.get()
        if isinstance(message, Refused):
            raise AskError(message.failure)
        return message


class _Call:
    """One life of a call."""

    def __init__(self, runner: CallRunner, call: Call) -> None:
        self.message = call
        self.clock = CallClock(runner.watch)
        self.asks: set[int] = set()
        self.task: asyncio.Task[_Outcome] | Future[Any] | None = None
        """What can be cancelled."""
        self.waiter: asyncio.Task[None] | None = None
        """What replies when it has ended."""
        self.cancelled = False
        self.ended = False
        self.users_seconds = 0.0
        self.slowest: Slowest | None = None
        self.functions: list[str] = []
        """Users' functions that run now."""
        self.misplaced: Callable[..., Any] | None = None
        """A function that failed because it did not run on the shared loop."""
        self.shared = False
        """Whether a coroutine of users has run on the shared loop."""
        self._runner = runner
        self._lane: EpisodeThread | None = None

    async def ask(self, name: str, args: tuple[Any, ...]) -> Any:
        with self._runner.asking(self, name, args, stream=False) as inbox:
            return pickle.loads((await inbox.get()).value)

    async def ask_stream(self, name: str, args: tuple[Any, ...]) -> AsyncGenerator[Any, None]:
        with self._runner.asking(self, name, args, stream=True) as inbox:
            while isinstance(message := await inbox.get(), Part):
                yield pickle.loads(message.value)

    def say(self, text: str) -> None:
        self._runner.send(Said(text))

    async def run_user(self, function: Callable[..., Any], args: tuple[Any, ...], *, own: bool) -> Any:
        name = _name(function)
        context = copy_context()
        context.run(current_function.set, function)
        began = self.clock.without_waits()
        self.functions.append(name)
        try:
            # A task of its own, so that it is decided when its turn has come where it runs: by then a sibling may
            # have shown that the function blocks.
            placed = self._place(function, args, own=own)
            if asyncio.get_running_loop() is self._runner.loop:
                return _result(await self._runner.loop.create_task(placed, context=context))
            submitted = context.run(asyncio.run_coroutine_threadsafe, placed, self._runner.loop)
            return _result(await asyncio.wrap_future(submitted))
        finally:
            self.functions.remove(name)
            seconds = self.clock.without_waits() - began
            self.users_seconds += seconds
            if self.slowest is None or seconds > self.slowest.seconds:
                self.slowest = Slowest(name, seconds)

    async def _place(self, function: Callable[..., Any], args: tuple[Any, ...], *, own: bool) -> _Outcome:
        lane = self._lane_for(own=own)
        if lane is None:
            return await _outcome(function, args)
        outcome: _Outcome = await asyncio.wrap_future(lane.submit(_outcome(function, args)))
        error = outcome[1]
        if not own and isinstance(error, RuntimeError | ValueError) and any(text in str(error) for text in WRONG_LOOP):
            self.misplaced = function
        return outcome

    def _lane_for(self, *, own: bool) -> EpisodeThread | None:
        """None: the shared loop. A call that was in a thread first stays there."""
        if self.ended:
            raise RuntimeError("its call has ended")
        place = self._runner.place
        if not own and (place is Place.PINNED or (place is Place.SHARED and (self._lane is None or self.shared))):
            self.shared = True
            return None
        if self._lane is None:
            self._lane = self._runner.take_lane()
        return self._lane

    async def end(self) -> None:
        """Until users' code of the call has ended, however long that takes."""
        self.ended = True
        if self._lane is not None:
            await asyncio.wrap_future(self._lane.clear())
            self._runner.give_lane(self._lane)


class Place(enum.Enum):
    """Of users' coroutines; see the top of this file."""

    SHARED = enum.auto()
    OWN = enum.auto()
    PINNED = enum.auto()


_Outcome = tuple[Any, Exception | SystemExit | None]

_call: ContextVar[_Call | None] = ContextVar("call", default=None)


def _current(what: str) -> _Call:
    call = _call.get()
    if call is None:
        raise RuntimeError(f"{what}() is for code that runs in a call of a host")
    return call


async def _outcome(function: Callable[..., Any], args: tuple[Any, ...]) -> _Outcome:
    """What it returned or raised. A task that raised SystemExit would end its loop, and a TimeoutError on its way from
    another thread would lose its traceback."""
    try:
        returned = function(*args)
        if inspect.isawaitable(returned):
            returned = await returned
    except (Exception, SystemExit) as error:
        return None, error
    return returned, None


def _result(outcome: _Outcome) -> Any:
    returned, error = outcome
    if error is not None:
        raise error
    return returned


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _name_and_file(function: Callable[..., Any]) -> str:
    """`step() of /home/me/agent.py`"""
    code = getattr(inspect.unwrap(function), "__code__", None)
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    file = getattr(module, "__file__", None) if code is None else code.co_filename
    return f"{_name(function)}()" + (f" of {file}" if file else "")


# ------------------------------------------------------------------------------------ all calls


class CallRunner:
    """Runs methods of one service. Coroutine methods share `loop`; a plain one has a thread for as long as it runs.

    `handle` may be called from any thread and never waits; `send` is called from any thread.
    """

    def __init__(
        self,
        send: Callable[[Any], None],
        *,
        pinned: bool = False,
        own: bool = False,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """Without `loop` it makes one whose time it watches; somebody must run it."""
        self.send = send
        self.place = Place.PINNED if pinned else Place.OWN if own else Place.SHARED
        self.service: Any = None
        """To be set before the first call."""
        self.watch = LoopWatch(on_block=self._on_block)
        self.loop: asyncio.AbstractEventLoop = WatchedLoop(self.watch) if loop is None else loop
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._inboxes: dict[int, _Inbox] = {}
        self._ask_ids = itertools.count()
        self._closed = False
        self._idle_lanes: list[EpisodeThread] = []

    def close(self) -> None:
        """Threads of lanes end as soon as nothing runs in them. On the loop."""
        self._closed = True
        for lane in self._idle_lanes:
            lane.close()
        self._idle_lanes.clear()

    def handle(self, message: Any) -> None:
        match message:
            case Call():
                self._begin(message)
            case Cancel(call_id):
                self.loop.call_soon_threadsafe(self._cancel, call_id)
            case Ping():
                self.send(self._pong())
            case Part(ask_id):
                if inbox := self._inboxes.get(ask_id):
                    inbox.put(message)
            case Answered(ask_id) | Refused(ask_id):
                if inbox := self._settle(ask_id):
                    inbox.put(message)

    # -------------------------------------------------------------------------------- calls

    def _begin(self, message: Call) -> None:
        call = _Call(self, message)
        with self._lock:
            self._calls[message.id] = call
        if inspect.iscoroutinefunction(getattr(self.service, message.method, None)):
            self.loop.call_soon_threadsafe(self._start, call)
        else:
            name = f"call-{message.id}"
            threading.Thread(target=self._run_in_thread, args=(call,), name=name, daemon=True).start()

    def _start(self, call: _Call) -> None:
        context = copy_context()
        context.run(_bind, call)
        task = self.loop.create_task(_outcome(self._invoke, (call,)), context=context)
        call.task = task
        call.waiter = self.loop.create_task(self._wait_for(call, task), context=context)

    async def _wait_for(self, call: _Call, task: asyncio.Task[_Outcome]) -> None:
        """Not part of the task, which may be cancelled at any time, even before it has begun."""
        reply: Done | Failed
        try:
            reply = self._done(call, _result(await task))
        except BaseException as error:  # sys.exit() in a call fails the call, not the host
            reply = Failed(call.message.id, describe(error))
        await call.end()
        self._reply(call, reply)

    def _run_in_thread(self, call: _Call) -> None:
        _bind(call)
        reply: Done | Failed
        try:
            returned = self._invoke(call)
            if inspect.isawaitable(returned):
                call.task = asyncio.run_coroutine_threadsafe(_wait(returned), self.loop)
                returned = call.task.result()
            reply = self._done(call, returned)
        except BaseException as error:
            reply = Failed(call.message.id, describe(error))
        asyncio.run_coroutine_threadsafe(call.end(), self.loop).result()
        self._reply(call, reply)

    def _invoke(self, call: _Call) -> Any:
        return getattr(self.service, call.message.method)(*pickle.loads(call.message.args))

    @staticmethod
    def _done(call: _Call, value: Any) -> Done:
        return Done(call.message.id, pickle.dumps(value), call.users_seconds, call.slowest)

    def _reply(self, call: _Call, reply: Done | Failed) -> None:
        with self._lock:
            left = list(call.asks)  # by tasks that outlive the call
        for ask_id in left:
            if inbox := self._unask(ask_id):
                inbox.put(Refused(ask_id, Failure("RuntimeError", "its call has ended", "")))
        if call.misplaced is not None and not call.cancelled:
            self._on_misplaced(call, call.misplaced)
            return
        with self._lock:
            del self._calls[call.message.id]
        self.send(reply)

    def _cancel(self, call_id: int) -> None:
        call = self._calls.get(call_id)
        if call is not None:
            call.cancelled = True
            if call.task is not None:
                call.task.cancel()

    def _pong(self) -> Pong:
        with self._lock:
            calls = dict(self._calls)
        doing = {call_id: call.functions[:1] for call_id, call in calls.items()}
        holder = self.watch.holder
        return Pong(
            spent={call_id: call.clock.spent() for call_id, call in calls.items()},
            doing={call_id: functions[0] for call_id, functions in doing.items() if functions},
            holder=next((call_id for call_id, call in calls.items() if call.clock is holder), None),
        )

    # -------------------------------------------------------------------------------- where users' code runs

    def take_lane(self) -> EpisodeThread:
        """On the loop, as `give_lane`."""
        return self._idle_lanes.pop() if self._idle_lanes else EpisodeThread("users-code")

    def give_lane(self, lane: EpisodeThread) -> None:
        if self._closed:
            lane.close()
        else:
            self._idle_lanes.append(lane)

    def _on_block(self, function: Callable[..., Any]) -> None:
        if self.place is Place.SHARED:
            self.place = Place.OWN
            self.send(
                Said(
                    f"{_name_and_file(function)} blocks its event loop (time.sleep, requests?); "
                    f"it runs in threads from now on"
                )
            )

    def _on_misplaced(self, call: _Call, function: Callable[..., Any]) -> None:
        """Something was used on two loops. A call that moved from one to the other in the middle runs again, with its
        own loop from the start; if it had that, the thing belongs to all calls."""
        if call.shared:
            self._begin(call.message)
            return
        self.send(
            Said(
                f"{_name_and_file(function)} uses something that belongs to the event loop of all calls; "
                f"it runs there from now on, and when it blocks, all wait"
            )
        )
        self.send(Pinned())

    # -------------------------------------------------------------------------------- asks

    @contextlib.contextmanager
    def asking(self, call: _Call, name: str, args: tuple[Any, ...], *, stream: bool) -> Iterator[_Inbox]:
        """Takes the ask back unless it has been answered by the end."""
        payload = pickle.dumps(args)
        inbox = _Inbox(call)
        ask_id = next(self._ask_ids)
        with self._lock:
            if call.ended:
                raise RuntimeError(f"ask({name!r}) of a call that has ended")
            call.asks.add(ask_id)
            self._inboxes[ask_id] = inbox
        call.clock.ask()
        self.send(Ask(call.message.id, ask_id, name, payload, stream))
        try:
            yield inbox
        finally:
            self._unask(ask_id)

    def _unask(self, ask_id: int) -> _Inbox | None:
        inbox = self._settle(ask_id)
        if inbox is not None:
            self.send(CancelAsk(inbox.call.message.id, ask_id))
        return inbox

    def _settle(self, ask_id: int) -> _Inbox | None:
        with self._lock:
            inbox = self._inboxes.pop(ask_id, None)
            if inbox is not None:
                inbox.call.asks.discard(ask_id)
        if inbox is not None:
            inbox.call.clock.answer()
        return inbox


def _bind(call: _Call) -> None:
    _call.set(call)
    current_clock.set(call.clock)


async def _wait(value: Any) -> Any:
    return await value

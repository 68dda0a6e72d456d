"""The inside of a host process: it runs one service object's methods on request. Imports the standard library only.

Messages (`host_messages.py`) come and go on two private descriptors. When the requests end, the parent is gone or done,
and the host ends. Services import from here what their calls may do: `ask`, `ask_stream`, `run_user`, `say`.

Where code runs:

    main thread     loads the service, then runs the host's event loop
    host-requests   reads messages, and never runs users' code
    users-code      one thread with an event loop of its own for each call, in which the whole call runs. Whatever
                    blocks there, a coroutine too, stops this call alone.

With `shared_loop` (an attribute of the service, or of `Hello`) calls run on the host's event loop instead, so that they
can share what belongs to one loop: a client, a lock, a semaphore. Plain functions of users still run in the thread of
their call; a coroutine that blocks makes all calls wait.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import inspect
import itertools
import logging
import os
import pickle
import resource
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import Context, ContextVar, copy_context
from typing import Any, BinaryIO, TypeVarTuple

from openrlhf.agents.host_messages import (
    Answered,
    Ask,
    Call,
    Cancel,
    CancelAsk,
    Cancelling,
    Done,
    Failed,
    Failure,
    Hello,
    LogLine,
    NeedsSharedLoop,
    Part,
    Ready,
    Refused,
    Slowest,
    describe,
)

logger = logging.getLogger(__name__)

Ts = TypeVarTuple("Ts")

EXIT_SECONDS = 1.0
"""How long exit handlers of users' code may take."""

MOST_THREADS = 256
"""Threads of `asyncio.to_thread` on the host's event loop: no call waits there for another call's."""

MOST_FILES = 65536
"""File descriptors that a host may have open where the system lets it: each event loop needs three."""

WRONG_LOOP = (
    "attached to a different loop",
    "bound to a different event loop",
    "belongs to a different loop",
    "Event loop is closed",
    "Timeout context manager should be used inside a task",
)
"""The messages of asyncio and aiohttp for something that is used on another loop than the one it was made on."""


class AskError(Exception):
    """The parent could not answer. Its exception, as text."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.kind}: {failure.text}")
        self.failure = failure


# ------------------------------------------------------------------------------------ for services


def ask(name: str, *args: Any, keep: bool = True) -> Coroutine[Any, Any, Any]:
    """The parent's answer. Raises AskError with what was raised there. `keep`: as `host_messages.Ask.keep`.

    The call that asks is found by context when `ask` is called, so tasks and `asyncio.to_thread` may use it; for other
    threads and for servers keep a `contextvars.copy_context()` of the call and await `context.run(ask, …)`.
    """
    return _current("ask").ask(name, args, keep=keep)


def ask_stream(name: str, *args: Any) -> AsyncGenerator[Any, None]:
    """The parts of the parent's answer as they come. Closing the iterator cancels the answer there."""
    return _current("ask_stream").ask_stream(name, args)


async def run_user(function: Callable[..., Any], *args: Any, thread: bool | None = None) -> Any:
    """The result of a users' function, awaited if it can be. Its time is counted.

    `thread`: where calls share an event loop, whether it runs in the call's own thread (True) or on the loop (False),
    as makes sense for the constructor of something with coroutine methods. By default plain functions get the thread.
    Outside of a call it runs right here.
    """
    call = current_call.get()
    if call is None:
        return await _call_user(function, args)
    return await call.run_user(function, args, own=not _is_async(function) if thread is None else thread)


def say(text: str) -> None:
    """Write a line to the log of the run. The parent writes each text once."""
    call = current_call.get()
    if call is None:
        logger.warning("%s", text)
    else:
        call.say(text)


def make_service(target: str, args: tuple[Any, ...]) -> Any:
    """`target` is `module:callable`."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)(*args)


async def invoke(service: Any, method: str, args: bytes) -> Any:
    """The result of the method, whether it is a coroutine or not; its arguments are pickled."""
    return await _call_user(getattr(service, method), pickle.loads(args))


def _current(what: str) -> UserCall:
    call = current_call.get()
    if call is None:
        raise RuntimeError(f"{what}() is for code that runs in a call of a host")
    return call


# ------------------------------------------------------------------------------------ threads with an event loop


class EpisodeLoop(asyncio.SelectorEventLoop):
    """The event loop of one thread, which notices when code on another loop uses it.

    asyncio does not notice it: it would put the callback into a queue that is not read until this loop wakes up for
    another reason. So a lock that two episodes share may hang rather than raise. Here the loop is woken.
    """

    def __init__(self, on_foreign_use: Callable[[], None]) -> None:
        super().__init__()
        self.thread: int | None = None
        self._on_foreign_use = on_foreign_use

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if threading.get_ident() == self.thread:
            return super().call_soon(callback, *args, context=context)
        self._note_foreign_use()
        return self.call_soon_threadsafe(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        if threading.get_ident() != self.thread:
            self._note_foreign_use()
        return super().call_at(when, callback, *args, context=context)

    def _note_foreign_use(self) -> None:
        if asyncio._get_running_loop() is not None:  # not a plain thread that gives a result
            self._on_foreign_use()


class EpisodeThread:
    """A thread with an event loop of its own, for the users' code of one call.

    What is submitted may block. Plain functions of a call all meet the same thread, as sqlite connections, browsers
    and simulators ask for; its coroutines meet the same loop, which runs on between them.
    """

    def __init__(self, on_foreign_use: Callable[[], None]) -> None:
        self.loop = EpisodeLoop(on_foreign_use)
        self._closing = False
        threading.Thread(target=self._run, name="users-code", daemon=True).start()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        """Run it in a copy of the present context. Cancelling the future cancels the coroutine."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop)

    def close(self) -> None:
        """End the thread, when it can."""
        self._closing = True
        self.loop.call_soon_threadsafe(self.loop.stop)

    def _run(self) -> None:
        self.loop.thread = threading.get_ident()
        asyncio.set_event_loop(self.loop)
        while not self._closing:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # of a task: it ends the task, not the thread
                self.loop.run_forever()
        self.loop.close()


class EpisodeThreads:
    """Threads that calls hand on, because each costs a few milliseconds to make. From any thread."""

    def __init__(self, on_foreign_use: Callable[[], None] = lambda: None) -> None:
        self._on_foreign_use = on_foreign_use
        self._idle: deque[EpisodeThread] = deque()

    def take(self) -> EpisodeThread:
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        return EpisodeThread(self._on_foreign_use)

    def give(self, thread: EpisodeThread) -> None:
        self._idle.append(thread)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


async def cancel_other_tasks() -> None:
    """End what users' code has left behind on this loop."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)


# ------------------------------------------------------------------------------------ one call


class UserCall:
    """What the code of one call may do: run users' functions and, in subclasses, ask the parent and write to its log.

    Time in users' functions is counted, without the time for which an ask is unanswered.
    """

    def __init__(self, threads: EpisodeThreads, *, shared_loop: bool) -> None:
        self.ended = False
        self.users_seconds = 0.0
        self.slowest: Slowest | None = None
        self.functions: list[str] = []
        """Users' functions that run now, the outermost first."""
        self._shared_loop = shared_loop
        self._threads = threads
        self._thread: EpisodeThread | None = None
        """The thread for plain functions, where calls share a loop."""
        self._clock_lock = threading.Lock()
        self._asks = 0
        self._waited = 0.0
        self._waits_since = 0.0

    def ask(self, name: str, args: tuple[Any, ...], *, keep: bool = True) -> Coroutine[Any, Any, Any]:
        raise NotImplementedError

    def ask_stream(self, name: str, args: tuple[Any, ...]) -> AsyncGenerator[Any, None]:
        raise NotImplementedError

    def say(self, text: str) -> None:
        raise NotImplementedError

    async def run_user(self, function: Callable[..., Any], args: tuple[Any, ...], *, own: bool) -> Any:
        if self.ended:
            raise RuntimeError("its call has ended")
        name = getattr(function, "__name__", type(function).__name__)
        began = self._clock()
        self.functions.append(name)
        try:
            return await _call_user(function, args, self._own_thread() if own and self._shared_loop else None)
        finally:
            self.functions.remove(name)
            seconds = self._clock() - began
            self.users_seconds += seconds
            if self.slowest is None or seconds > self.slowest.seconds:
                self.slowest = Slowest(name, seconds)

    @contextlib.contextmanager
    def waiting_for_answer(self) -> Iterator[None]:
        with self._clock_lock:
            if self._asks == 0:
                self._waits_since = time.monotonic()
            self._asks += 1
        try:
            yield
        finally:
            with self._clock_lock:
                self._asks -= 1
                if self._asks == 0:
                    self._waited += time.monotonic() - self._waits_since

    async def end(self) -> None:
        """Wait until users' code of the call has ended, however long that takes."""
        self.ended = True
        if not self._shared_loop:
            await cancel_other_tasks()
        elif self._thread is not None:
            await asyncio.wrap_future(self._thread.submit(cancel_other_tasks()))
            self._threads.give(self._thread)

    def _own_thread(self) -> EpisodeThread:
        if self._thread is None:
            self._thread = self._threads.take()
        return self._thread

    def _clock(self) -> float:
        """Seconds to take differences of. The clock stands still while an ask is unanswered."""
        with self._clock_lock:
            return (self._waits_since if self._asks else time.monotonic()) - self._waited


current_call: ContextVar[UserCall | None] = ContextVar("current_call", default=None)

_Outcome = tuple[Any, Exception | SystemExit | None]


async def _call_user(function: Callable[..., Any], args: tuple[Any, ...], thread: EpisodeThread | None = None) -> Any:
    if thread is None:
        returned = function(*args)
    else:
        returned = _result(await asyncio.wrap_future(thread.submit(_outcome(_called(function, args)))))
    return await returned if inspect.isawaitable(returned) else returned


async def _called(function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return function(*args)


async def _outcome(coroutine: Coroutine[Any, Any, Any]) -> _Outcome:
    """The result or exception of a task, as a value. A task that raised SystemExit would end its loop, and a
    TimeoutError that comes from another thread would lose its traceback."""
    try:
        return await coroutine, None
    except (Exception, SystemExit) as error:
        return None, error


def _result(outcome: _Outcome) -> Any:
    returned, error = outcome
    if error is not None:
        raise error
    return returned


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__)


class _Inbox:
    """Receives the answer to one ask on the loop that waits for it."""

    def __init__(self, call: _Call) -> None:
        self.call = call
        self._loop = asyncio.get_running_loop()
        self._messages: asyncio.Queue[Part | Answered | Refused] = asyncio.Queue()

    def put(self, message: Part | Answered | Refused) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits there
            self._loop.call_soon_threadsafe(self._messages.put_nowait, message)

    async def get(self) -> Part | Answered:
        message = await self._messages.get()
        if isinstance(message, Refused):
            raise AskError(message.failure)
        return message


class _Call(UserCall):
    """A call of the parent."""

    def __init__(self, runner: CallRunner, message: Call, thread: EpisodeThread | None) -> None:
        super().__init__(runner.threads, shared_loop=thread is None)
        self.message = message
        self.loop: asyncio.AbstractEventLoop = runner.loop if thread is None else thread.loop
        self.asks: set[int] = set()
        self.cancelled = False
        self.task: asyncio.Task[_Outcome] | None = None
        self._runner = runner

    async def ask(self, name: str, args: tuple[Any, ...], *, keep: bool = True) -> Any:
        with self._runner.asking(self, name, args, stream=False, keep=keep) as inbox:
            return pickle.loads((await inbox.get()).value)

    async def ask_stream(self, name: str, args: tuple[Any, ...]) -> AsyncGenerator[Any, None]:
        with self._runner.asking(self, name, args, stream=True) as inbox:
            while isinstance(message := await inbox.get(), Part):
                yield pickle.loads(message.value)

    def say(self, text: str) -> None:
        self._runner.send(LogLine(text))

    def cancel(self) -> None:
        """On its loop."""
        if self.task is not None:
            self.task.cancel()


# ------------------------------------------------------------------------------------ all calls


class CallRunner:
    """Runs methods of one service. `handle` may be called from any thread and never waits; so does `send`."""

    def __init__(self, send: Callable[[Any], None]) -> None:
        self.send = send
        self.service: Any = None
        """The service; it must be set before the first call, like `shared_loop`."""
        self.shared_loop = False
        self.loop = asyncio.new_event_loop()
        self.threads = EpisodeThreads(self._on_foreign_use)
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._inboxes: dict[int, _Inbox] = {}
        self._ask_ids = itertools.count()
        self._needs_shared_loop = False

    def handle(self, message: Any) -> None:
        match message:
            case Call():
                self._begin(message)
            case Cancel(call_id):
                # By way of the host's loop: where users' coroutines block it, the parent must hear nothing.
                self.loop.call_soon_threadsafe(self._cancel, call_id)
            case Part(ask_id):
                if inbox := self._inboxes.get(ask_id):
                    inbox.put(message)
            case Answered(ask_id) | Refused(ask_id):
                if inbox := self._close_inbox(ask_id):
                    inbox.put(message)

    def _begin(self, message: Call) -> None:
        thread = None if self.shared_loop else self.threads.take()
        call = _Call(self, message, thread)
        with self._lock:
            self._calls[message.id] = call
        context = copy_context()
        context.run(current_call.set, call)
        context.run(asyncio.run_coroutine_threadsafe, self._run(call, thread), call.loop)

    async def _run(self, call: _Call, thread: EpisodeThread | None) -> None:
        """The code of the call is a task of its own, which may be cancelled at any time, even before it has begun."""
        call.task = asyncio.create_task(_outcome(invoke(self.service, call.message.method, call.message.args)))
        if call.cancelled:
            call.task.cancel()
        await asyncio.wait([call.task])
        reply: Done | Failed
        try:
            value = pickle.dumps(_result(call.task.result()))
            reply = Done(call.message.id, value, call.users_seconds, call.slowest)
        except BaseException as error:  # sys.exit() in a call fails the call, not the host
            reply = Failed(call.message.id, describe(error))
        await call.end()
        self._reply(call, reply)
        if thread is not None:
            self.threads.give(thread)

    def _reply(self, call: _Call, reply: Done | Failed) -> None:
        with self._lock:
            left = list(call.asks)  # by tasks on other loops, which outlive the call
        for ask_id in left:
            if inbox := self._take_back(ask_id):
                inbox.put(Refused(ask_id, Failure("RuntimeError", "its call has ended", "")))
        if not self.shared_loop and not call.cancelled and _names_wrong_loop(reply):
            self._on_foreign_use()
            return
        with self._lock:
            del self._calls[call.message.id]
        self.send(reply)

    def _cancel(self, call_id: int) -> None:
        call = self._calls.get(call_id)
        if call is not None:
            functions = call.functions[:1]
            self.send(Cancelling(call_id, functions[0] if functions else None))
            call.cancelled = True
            call.loop.call_soon_threadsafe(call.cancel)

    def _on_foreign_use(self) -> None:
        """Users' code that was written for one loop runs unchanged: the parent begins again with a shared loop. Without
        this, a client that a file keeps between episodes would need `SHARED_LOOP`."""
        if not self._needs_shared_loop:
            self._needs_shared_loop = True
            self.send(
                NeedsSharedLoop(
                    "its episodes share something that works on one event loop only (a client, a lock); they begin "
                    "again on one loop, where a coroutine that blocks stops them all. SHARED_LOOP = True in the file "
                    "does so from the start (docs/agents.md)"
                )
            )

    # -------------------------------------------------------------------------------- asks

    @contextlib.contextmanager
    def asking(
        self, call: _Call, name: str, args: tuple[Any, ...], *, stream: bool, keep: bool = True
    ) -> Iterator[_Inbox]:
        """Ask, and take it back unless it has been answered by the end."""
        payload = pickle.dumps(args)
        inbox = _Inbox(call)
        ask_id = next(self._ask_ids)
        with call.waiting_for_answer():
            with self._lock:
                if call.ended:
                    raise RuntimeError(f"ask({name!r}) of a call that has ended")
                call.asks.add(ask_id)
                self._inboxes[ask_id] = inbox
            self.send(Ask(call.message.id, ask_id, name, payload, stream, keep))
            try:
                yield inbox
            finally:
                self._take_back(ask_id)

    def _take_back(self, ask_id: int) -> _Inbox | None:
        inbox = self._close_inbox(ask_id)
        if inbox is not None:
            self.send(CancelAsk(inbox.call.message.id, ask_id))
        return inbox

    def _close_inbox(self, ask_id: int) -> _Inbox | None:
        with self._lock:
            inbox = self._inboxes.pop(ask_id, None)
            if inbox is not None:
                inbox.call.asks.discard(ask_id)
        return inbox


def _names_wrong_loop(reply: Done | Failed) -> bool:
    return isinstance(reply, Failed) and any(text in reply.failure.traceback for text in WRONG_LOOP)


# ------------------------------------------------------------------------------------ the process


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Run until `requests` ends. Never returns."""
    # Python-level output of users' code appears line by line, not when a buffer is full.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    allow_many_files()
    hello = pickle.load(requests)
    _Host(requests, replies).run(hello)


class _Host:
    def __init__(self, requests: BinaryIO, replies: BinaryIO) -> None:
        self._requests = requests
        self._replies = replies
        self._reply_lock = threading.Lock()
        self._runner = CallRunner(self._reply)
        self._closing = False

    def run(self, hello: Hello) -> None:
        threading.Thread(target=self._read, name="host-requests", daemon=True).start()
        loop = self._runner.loop
        loop.set_default_executor(ThreadPoolExecutor(MOST_THREADS))
        asyncio.set_event_loop(loop)
        try:
            service = make_service(hello.target, hello.args)
        except BaseException as error:  # SystemExit too: a file that calls sys.exit() has not loaded
            self._reply(describe(error))
            end()
        self._runner.service = service
        self._runner.shared_loop = hello.shared_loop or getattr(service, "shared_loop", False)
        self._reply(Ready())
        while not self._closing:
            with contextlib.suppress(SystemExit, KeyboardInterrupt):  # of a user's task: it ends the task, not the host
                loop.run_forever()
        end()

    def _read(self) -> None:
        while True:
            try:
                message = pickle.load(self._requests)
            except (EOFError, OSError, pickle.UnpicklingError):  # the last two: the parent died within a message
                break
            self._runner.handle(message)
        self._closing = True
        self._runner.loop.call_soon_threadsafe(self._runner.loop.stop)
        # The main thread may be inside a user's file that never ends.
        time.sleep(EXIT_SECONDS)
        kill_group()

    def _reply(self, message: Any) -> None:
        payload = pickle.dumps(message)
        with self._reply_lock, contextlib.suppress(OSError):  # the parent is gone: the reading thread ends the host
            self._replies.write(payload)
            self._replies.flush()


def allow_many_files() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


def end() -> None:
    """Run exit handlers, then end this host and its children. Never returns."""
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    with contextlib.suppress(Exception):
        sys.stdout.flush()
    kill_group()


def kill_group() -> None:
    """End this process at once, with whatever users' code has started when it leads a group of its own."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)

"""Users' code in a process of its own: a crash, an endless loop or a blocking call there touches nothing here.

`HostProcess` starts the process, sends it calls, answers what they ask, and gives their results to coroutines. When a
call takes too long, or the process dies, only that call fails. The others go on, or run again in another process, and
the coroutines that wait for them do not notice.

Only users' time counts: a call's clock stands still while it waits for an answer. A call that is late is cancelled, and
the host says in which function it is. Then:

    the host answers        the call hangs in its own thread: it has failed, and the others go on where they are. If it
                            cannot be cancelled, new calls go to another process, and the old one ends with the last
                            call in it.
    the host is silent, or the process died
                            the process is replaced, and what it ran is tried once more, each call alone in a process
                            (a few at the same time). A call that is silent or dies alone has failed. Calls that were
                            waiting for an answer were not running, so they run again together, unless that has happened
                            to them a few times: otherwise one crash would make a hundred episodes play one by one.

A call that runs again gets the answers that it has had, or that are still being worked out: what it asked before, in
the same words, is not asked again. So it comes quickly to where it was, if users' code does the same again.

Threads of one host, none of which ever waits for another's lock:

    supervisor  owns all state; runs what the others post (the `_on_…` methods), and minds deadlines
    reader      replies of a process → events
    writer      requests → a process, whose pipe may be full while a call holds its interpreter lock
    waiter      a process's end → an event, after its last reply has been read

`LocalHost` runs a service in this process, for a debugger.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import pickle
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Iterable
from concurrent.futures import Future, InvalidStateError
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol

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
from openrlhf.agents.host_worker import AskError, EpisodeThreads, UserCall, current_call, invoke, make_service
from openrlhf.utils import parent_death, waits
from openrlhf.utils.stack_probe import Address, stacks

logger = logging.getLogger(__name__)

SILENT_SECONDS = 2.0
"""How long a host has to say that it cancels a late call. One that does not is held up by some call."""

MOST_ALONE = 4
"""Processes in which calls are tried again alone, at the same time."""

MOST_SPARED = 4
"""How often a process may be lost while a call in it waits for an answer, before the call is tried alone too."""

# Before anything is imported: the protocol's pipes move to private descriptors, so that users' code (and programs it
# starts) can neither print into the replies nor read the requests; stdout becomes stderr. SIGINT gets a handler that
# does nothing instead of SIG_IGN, which programs started from here would inherit. And the process gets a stack probe
# (`utils/stack_probe.py`), in a file that it is given.
BOOTSTRAP = """
import faulthandler, os, pickle, signal, sys
signal.signal(signal.SIGINT, lambda *_: None)
probe = int(sys.argv.pop())
os.set_inheritable(probe, False)
faulthandler.register(signal.SIGUSR2, probe)
requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(2, 1)
sys.path[:] = pickle.load(requests)
from openrlhf.agents.host_worker import serve
serve(requests, replies)
"""


_hosts: weakref.WeakSet[HostProcess] = weakref.WeakSet()


def kill_every_host() -> None:
    """End the processes of all hosts without telling their callers, because this process is about to end too."""
    for host in list(_hosts):
        host.kill()


class HostError(Exception):
    """A call could not be answered."""


class HostStartError(HostError):
    """The service could not be made."""

    def __init__(self, message: str, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.failure = failure
        """The exception of the service's constructor; None if the process died or took too long."""


class HostTimeoutError(HostError):
    """The call took too long between two asks."""

    def __init__(self, message: str, function: str | None = None) -> None:
        super().__init__(message)
        self.function = function
        """The users' function it was in, where that is known."""


class HostCrashError(HostError):
    """The process died while it ran this call and nothing else."""


class HostClosedError(HostError):
    """The host was closed before the call was answered."""


class RemoteError(HostError):
    """The method raised."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.kind}: {failure.text}")
        self.failure = failure


class Reply(NamedTuple):
    """The result of a call, and how long users' code took for it."""

    value: Any
    users_seconds: float
    """The seconds spent in functions that the service ran with `run_user`."""
    slowest: Slowest | None


class Host(Protocol):
    """A service and its calls: in a process of its own (`HostProcess`) or in this one (`LocalHost`)."""

    async def start(self) -> None: ...

    async def call(self, method: str, *args: Any, timeout: float | None = None) -> Any: ...

    async def call_timed(self, method: str, *args: Any, timeout: float | None = None) -> Reply: ...

    async def close(self) -> None: ...


# ------------------------------------------------------------------------------------ answers


_under_way: set[asyncio.Task[Answered | Refused]] = set()
"""An event loop does not keep its tasks alive by itself."""


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers to what calls in a host ask their parent. `answer(name, *args)` gives the answer, `answer_stream` its
    parts."""

    answer: Callable[..., Awaitable[Any]] | None = None
    answer_stream: Callable[..., AsyncGenerator[Any, None]] | None = None

    async def whole(self, name: str, args: tuple[Any, ...]) -> Any:
        if self.answer is None:
            raise LookupError(f"this host's parent does not answer {name!r}")
        return await self.answer(name, *args)

    def parts(self, name: str, args: tuple[Any, ...]) -> AsyncGenerator[Any, None]:
        if self.answer_stream is None:
            raise LookupError(f"this host's parent does not answer {name!r} in parts")
        return self.answer_stream(name, *args)


class Asked:
    """One ask that is being answered, on the event loop and in the context of the coroutine that awaits the call.

    `start` and `cancel` may be called from any thread, in this order. `send` gets the parts, if any, and one last
    message, on the loop; after `cancel` too.
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
            if not ask.stream:
                return Answered(ask.id, pickle.dumps(await self._answers.whole(ask.name, args)))
            async with contextlib.aclosing(self._answers.parts(ask.name, args)) as parts:
                async for part in parts:
                    self._send(Part(ask.id, pickle.dumps(part)))
            return Answered(ask.id, pickle.dumps(None))
        except Exception as error:
            return Refused(ask.id, describe(error))

    def _end(self, task: asyncio.Task[Answered | Refused]) -> None:
        """Whatever became of the task, the ask gets a last message."""
        _under_way.discard(task)
        if task.cancelled():
            self._send(Refused(self._ask.id, Failure("CancelledError", "the answer was cancelled", "")))
        elif (error := task.exception()) is not None:
            self._send(Refused(self._ask.id, describe(error)))
        else:
            self._send(task.result())


# ------------------------------------------------------------------------------------ records of the supervisor


@dataclass(slots=True, eq=False)
class _Question:
    """One thing that a call has asked, and the answer so far."""

    text: tuple[str, bytes, bool]
    """Name and arguments, and whether it is a stream."""
    asked_by: tuple[_Process, int] | None = None
    """The process that wants the answer and its id for the ask; None: the call has not asked it again since its process
    was lost."""
    asked: Asked | None = None
    messages: list[Part | Answered] = field(default_factory=list)
    keep: bool = True
    """As `host_messages.Ask.keep`."""

    @property
    def is_open(self) -> bool:
        return self.asked_by is not None and not (self.messages and isinstance(self.messages[-1], Answered))


@dataclass(slots=True, eq=False)
class _Pending:
    """A call that has not been answered yet."""

    id: int
    payload: bytes
    timeout: float | None
    answer: Future[Reply]
    loop: asyncio.AbstractEventLoop
    context: Context
    """The context of the coroutine that awaits the call; what the call asks is answered in it."""
    process: _Process | None = None
    """The process in which it runs."""
    questions: list[_Question] = field(default_factory=list)
    """The questions that it has asked, in this process or in an earlier one."""
    deadline: float = float("inf")
    """When it is late; infinite while a question is open."""
    losses: int = 0
    """How many processes were lost under it."""

    @property
    def waits_for_answer(self) -> bool:
        return any(question.is_open for question in self.questions)

    def give_up_questions(self, _: Future[Reply] | None = None) -> None:
        """Their answers are not wanted any more. From any thread."""
        for question in list(self.questions):
            if question.asked is not None:
                question.asked.cancel()


@dataclass(slots=True, eq=False)
class _Process:
    """One process of the host."""

    popen: subprocess.Popen[bytes]
    outbox: queue.SimpleQueue[bytes | None]
    deadline: float
    """The time by which the process must be ready."""
    probe: Address
    ready: bool = False
    killed: bool = False
    running: dict[int, _Pending] = field(default_factory=dict)
    given_up: set[int] = field(default_factory=set)
    """Failed calls that still run there. While there is one, the process gets no new calls."""
    soonest: float = float("inf")
    """No deadline of a running call is earlier."""
    late: dict[int, float] = field(default_factory=dict)
    """For each call that is late: the time by which the host must say that it cancels it."""

    def next_deadline(self) -> float:
        if self.killed:
            return float("inf")
        return min((self.soonest, *self.late.values())) if self.ready else self.deadline

    def send(self, message: Any) -> None:
        self.outbox.put(pickle.dumps(message))


class HostProcess:
    """A service in a process of its own.

    `target` is `module:callable`; the process imports it and calls it with `args`, and `call` names methods of what
    it returns, coroutines or not. At most `max_concurrency` calls run at once; a call waits for its turn here, and its
    time counts from when it is sent. Arguments and results are pickled.

    While a call runs, its code may `ask` (`host_worker.py`). `answer(name, *args)` is a coroutine function that gives
    the answer, `answer_stream(name, *args)` an async generator of its parts. They run on the loop and in the context
    of the coroutine that awaits the call, and are cancelled when the answer is not wanted any more.

    May be used from any thread and from any number of event loops.
    """

    def __init__(
        self,
        target: str,
        *args: Any,
        name: str,
        start_timeout: float = 120.0,
        max_concurrency: int = 16,
        max_crashes: int = 1,
        answer: Callable[..., Awaitable[Any]] | None = None,
        answer_stream: Callable[..., AsyncGenerator[Any, None]] | None = None,
    ) -> None:
        """`name` is for messages. A call that is alone when the process dies, and under which more than `max_crashes`
        processes were lost, has failed."""
        if max_concurrency < 1:
            raise ValueError(f"max_concurrency must be >= 1, got {max_concurrency}")
        self._import_path = pickle.dumps(list(sys.path))
        self._hello = Hello(target, args)
        pickle.dumps(self._hello)  # what cannot be sent is refused here, not in a thread
        self._name = name
        self._start_timeout = start_timeout
        self._max_concurrency = max_concurrency
        self._max_crashes = max_crashes
        self._answers = Answers(answer, answer_stream)
        self._ids = itertools.count()
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """What the supervisor is to do."""
        self._thread: threading.Thread | None = None
        self._thread_lock = threading.Lock()
        self._closed = False
        # What follows belongs to the supervisor.
        self._processes: list[_Process] = []
        self._main: _Process | None = None
        """The process that gets new calls."""
        self._grace: float | None = None
        """How long processes have to end by themselves, once the host is closed."""
        self._starters: list[Future[None]] = []
        self._waiting: deque[_Pending] = deque()
        self._alone: deque[_Pending] = deque()
        """Calls that are tried again alone."""
        self._log_lines: set[str] = set()
        _hosts.add(self)
        waits.peers.add(self)

    # ------------------------------------------------------------------------------------ for callers

    async def start(self) -> None:
        """Make the service. Raises HostStartError."""
        answer: Future[None] = Future()
        self._post(partial(self._on_start, answer))
        await asyncio.wrap_future(answer)

    async def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """What `method` returns. Raises RemoteError, HostTimeoutError, HostCrashError or HostStartError.

        `timeout` bounds each stretch of its own time: from its start or the last answer to its next ask or its end.
        """
        return (await self.call_timed(method, *args, timeout=timeout)).value

    async def call_timed(self, method: str, *args: Any, timeout: float | None = None) -> Reply:
        """As `call`, with how long users' code took."""
        call_id = next(self._ids)
        payload = pickle.dumps(Call(call_id, method, pickle.dumps(args)))
        call = _Pending(call_id, payload, timeout, Future(), asyncio.get_running_loop(), copy_context())
        self._post(partial(self._on_submit, call))
        try:
            return await asyncio.wrap_future(call.answer)
        except asyncio.CancelledError:
            with contextlib.suppress(HostClosedError):
                self._post(partial(self._on_cancel, call))
            raise

    async def close(self, *, grace: float = 1.5) -> None:
        """End the process; after `grace` seconds by force. What is unanswered gets HostClosedError."""
        with self._thread_lock:
            self._closed = True
            thread = self._thread
        if thread is not None and thread.is_alive():
            self._events.put(partial(self._on_close, grace))
            await asyncio.to_thread(thread.join)

    def kill(self) -> None:
        """End the process as it is. Its callers find it dead."""
        for process in list(self._processes):
            if process.popen.returncode is None:
                self._kill(process)

    def stacks(self) -> dict[str, str]:
        """As `waits.PeerProcesses` gives them."""
        shown = {}
        for process in list(self._processes):
            calls = list(process.running.values())
            asking = sum(call.waits_for_answer for call in calls)
            name = f"{self._name}, process {process.popen.pid}: {len(calls)} calls, {asking} of them wait for us"
            shown[name] = stacks(process.probe)
        return shown

    def idle_seconds(self) -> float:
        """Infinite: work of users' code is no sign of life, because it has deadlines of its own."""
        return float("inf")

    @property
    def pid(self) -> int | None:
        """The pid of the process that gets new calls; it changes after a restart."""
        process = self._main
        return None if process is None else process.popen.pid

    def _post(self, event: Callable[[], None]) -> None:
        with self._thread_lock:
            if self._closed:
                raise HostClosedError(f"{self._name} is closed")
            if self._thread is None:
                self._thread = threading.Thread(target=self._supervise, name=f"host {self._name}", daemon=True)
                self._thread.start()
            self._events.put(event)

    # ------------------------------------------------------------------------------------ the supervisor

    def _supervise(self) -> None:
        try:
            self._handle_events()
        except Exception:  # no caller may wait for a thread that is gone
            logger.exception("%s: its supervisor failed", self._name)
            self._closed = True
            self._shut_down(grace=0.0)

    def _handle_events(self) -> None:
        while self._grace is None:
            with contextlib.suppress(queue.Empty):
                self._events.get(timeout=self._seconds_to_deadline())()
            for process in list(self._processes):
                self._on_deadlines(process)
            self._dispatch()
        self._shut_down(self._grace)

    def _on_start(self, answer: Future[None]) -> None:
        self._starters.append(answer)

    def _on_submit(self, call: _Pending) -> None:
        call.answer.add_done_callback(call.give_up_questions)
        self._waiting.append(call)

    def _on_close(self, grace: float) -> None:
        self._grace = grace

    def _seconds_to_deadline(self) -> float | None:
        soonest = min((process.next_deadline() for process in self._processes), default=float("inf"))
        return None if soonest == float("inf") else max(0.0, soonest - time.monotonic())

    def _dispatch(self) -> None:
        """Send what may be sent; start and end processes as there is something to do."""
        unused = [p for p in self._processes if p is not self._main and p.ready and not p.running]
        idle = [process for process in unused if not process.given_up]
        if self._main is None and (self._starters or self._waiting):
            self._main = idle.pop() if idle else self._spawn()
        if self._main is not None and self._main.ready:
            for starter in self._starters:
                _resolve(starter, None)
            self._starters.clear()
            while self._waiting and self._num_running() < self._max_concurrency:
                self._send(self._main, self._waiting.popleft())
        while self._alone and idle:
            self._send(idle.pop(), self._alone.popleft())
        for process in unused:
            if process is not self._main and not process.running:
                self._end(process)
        others = [process for process in self._processes if process is not self._main]
        loading = sum(not process.ready for process in others)
        for _ in range(min(MOST_ALONE - len(others), len(self._alone) - loading)):
            self._spawn()

    def _num_running(self) -> int:
        return sum(len(process.running) for process in self._processes)

    def _send(self, process: _Process, call: _Pending) -> None:
        process.running[call.id] = call
        call.process = process
        self._set_clock(call)
        process.outbox.put(call.payload)

    def _set_clock(self, call: _Pending) -> None:
        """The clock stands while a question is open, and begins anew after the last answer."""
        call.deadline = float("inf")
        if call.timeout is not None and call.process is not None and not call.waits_for_answer:
            call.deadline = time.monotonic() + call.timeout
            call.process.soonest = min(call.process.soonest, call.deadline)

    def _on_reply(self, process: _Process, message: Any) -> None:
        if process not in self._processes:
            return  # it was ended meanwhile
        running = process.running
        match message:
            case Ready():
                process.ready = True
            case Failure():
                process.outbox.put(None)  # it ends by itself, but exit handlers of users' code may hang
                self._fail_start(process, HostStartError(f"{message.kind}: {message.text}", message))
            case Done(call_id) if call_id in running:
                _resolve_with(self._take(running[call_id]).answer, message)
            case Failed(call_id, failure) if call_id in running:
                _refuse(self._take(running[call_id]).answer, RemoteError(failure))
            case Done(call_id) | Failed(call_id) if call_id in process.given_up:
                process.given_up.remove(call_id)
                if not process.given_up and self._main is None:
                    self._main = process
            case Cancelling(call_id, function) if call_id in process.late:
                self._on_hanging(process, running[call_id], function)
            case Ask(call_id) if call_id in running:
                self._on_ask(process, running[call_id], message)
            case CancelAsk(call_id, ask_id) if call_id in running:
                self._on_cancel_ask(running[call_id], (process, ask_id))
            case LogLine(text):
                self._log(text)
            case NeedsSharedLoop(text):
                self._log(text)
                self._hello = replace(self._hello, shared_loop=True)
                self._waiting.extendleft(self._take(call) for call in reversed(running.copy().values()))
                self._end(process)

    def _log(self, text: str) -> None:
        if text not in self._log_lines:
            self._log_lines.add(text)
            logger.warning("%s: %s", self._name, text)

    def _take(self, call: _Pending) -> _Pending:
        """Take the call from its process."""
        assert call.process is not None
        del call.process.running[call.id]
        call.process.late.pop(call.id, None)
        call.process = None
        call.deadline = float("inf")
        for question in call.questions:
            question.asked_by = None
        return call

    def _on_cancel(self, call: _Pending) -> None:
        """Its caller is gone. It leaves its process when the host says so, and has its time to do so."""
        call.give_up_questions()
        if call.process is not None:
            call.process.send(Cancel(call.id))
        for waiting in (self._waiting, self._alone):
            with contextlib.suppress(ValueError):
                waiting.remove(call)

    # ------------------------------------------------------------------------------------ questions

    def _on_ask(self, process: _Process, call: _Pending, ask: Ask) -> None:
        if call.answer.cancelled():
            process.send(Refused(ask.id, Failure("CancelledError", "its caller is gone", "")))
            return
        text = (ask.name, ask.args, ask.stream)
        known = (question for question in call.questions if question.asked_by is None and question.text == text)
        question = next(known, None)
        if question is None:
            question = _Question(text, keep=ask.keep)
            call.questions.append(question)
        question.asked_by = process, ask.id
        for message in question.messages:
            process.send(replace(message, ask=ask.id))
        if question.asked is None:
            self._answer(call, question, ask)
        self._set_clock(call)

    def _answer(self, call: _Pending, question: _Question, ask: Ask) -> None:
        def send(message: Part | Answered | Refused) -> None:  # on the caller's loop
            self._events.put(partial(self._on_answer, call, question, message))

        question.asked = Asked(ask, self._answers, loop=call.loop, context=call.context.copy(), send=send)
        question.asked.start()

    def _on_answer(self, call: _Pending, question: _Question, message: Part | Answered | Refused) -> None:
        if question not in call.questions:
            return  # taken back
        if isinstance(message, Refused) or (isinstance(message, Answered) and not question.keep):
            call.questions.remove(question)
        else:
            question.messages.append(message)
        if question.asked_by is not None:
            process, ask_id = question.asked_by
            process.send(replace(message, ask=ask_id))
            if not isinstance(message, Part):
                self._set_clock(call)

    def _on_cancel_ask(self, call: _Pending, asked_by: tuple[_Process, int]) -> None:
        for question in call.questions:
            if question.is_open and question.asked_by == asked_by:
                call.questions.remove(question)
                if question.asked is not None:
                    question.asked.cancel()
                self._set_clock(call)
                return

    # ------------------------------------------------------------------------------------ time limits and deaths

    def _on_deadlines(self, process: _Process) -> None:
        now = time.monotonic()
        if now < process.next_deadline():
            return
        if not process.ready:
            self._kill(process)
            self._fail_start(process, HostStartError(f"it was not ready after {self._start_timeout:g} s"))
        elif now >= min(process.late.values(), default=float("inf")):
            self._on_silence(process)
        else:
            for call in process.running.values():
                if now >= call.deadline:
                    call.deadline = float("inf")
                    process.late[call.id] = now + SILENT_SECONDS
                    process.send(Cancel(call.id))
            process.soonest = min((call.deadline for call in process.running.values()), default=float("inf"))

    def _on_hanging(self, process: _Process, call: _Pending, function: str | None) -> None:
        """The host answers, so the call hangs by itself."""
        _blame(self._take(call), function)
        process.given_up.add(call.id)
        if process is self._main:
            self._main = None
        logger.warning(
            "%s: a call took too long and was given up; other calls go on: %d", self._name, len(process.running)
        )

    def _on_silence(self, process: _Process) -> None:
        """Some call holds the interpreter, or the event loop that all share; the late ones may be its victims."""
        if _is_alone(process):
            (call,) = process.running.values()
            _blame(self._take(call), None)
        logger.warning(
            "%s: ended because a call took too long; other calls run again: %d", self._name, len(process.running)
        )
        self._try_again(process)
        self._end(process)

    def _on_exit(self, process: _Process) -> None:
        """The process has ended."""
        if process not in self._processes:
            return  # by us
        how = _how_it_ended(process.popen.returncode)
        if not process.ready:
            self._fail_start(process, HostStartError(f"the process {how} while it loaded"))
            return
        self._remove(process)
        if _is_alone(process):
            (call,) = process.running.values()
            if call.losses >= self._max_crashes:
                _refuse(self._take(call).answer, HostCrashError(f"the process {how}"))
        logger.warning("%s: the process %s; calls run again: %d", self._name, how, len(process.running))
        self._try_again(process)

    def _try_again(self, process: _Process) -> None:
        """Calls of a lost process; see the top of this file."""
        together: list[_Pending] = []
        for call in list(process.running.values()):
            call.losses += 1
            spared = call.waits_for_answer and call.losses <= MOST_SPARED
            (together if spared else self._alone).append(self._take(call))
        self._waiting.extendleft(reversed(together))

    def _fail_start(self, process: _Process | None, error: HostStartError) -> None:
        """Calls do not wait for a service that cannot be made; a later call tries again."""
        if process is not None:
            self._remove(process)
        calls = [*self._alone]
        self._alone.clear()
        if self._main is None:
            self._refuse_all(self._starters, error)
            self._starters.clear()
            calls += self._waiting
            self._waiting.clear()
        self._refuse_all([call.answer for call in calls], error)

    # ------------------------------------------------------------------------------------ the process

    def _spawn(self) -> _Process | None:
        try:
            with tempfile.TemporaryFile() as file:
                probe = file.fileno()
                popen = subprocess.Popen(
                    [sys.executable, "-c", BOOTSTRAP, str(probe)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    # Its own session: Ctrl-C goes to us alone, and ending the group ends what users' code has started.
                    start_new_session=True,
                    pass_fds=[probe],
                )
        except OSError as error:
            self._fail_start(None, HostStartError(f"no process could be started: {error}"))
            return None
        parent_death.guard.watch(popen.pid)
        outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        deadline = time.monotonic() + self._start_timeout
        process = _Process(popen, outbox, deadline, Address(popen.pid, probe))
        assert popen.stdin is not None
        assert popen.stdout is not None
        outbox.put(self._import_path + pickle.dumps(self._hello))
        reader = threading.Thread(target=self._read, args=(process, popen.stdout), daemon=True)
        for thread in (
            reader,
            threading.Thread(target=_write, args=(popen.stdin, outbox), daemon=True),
            threading.Thread(target=self._wait_for_end, args=(process, reader), daemon=True),
        ):
            thread.start()
        self._processes.append(process)
        return process

    def _read(self, process: _Process, replies: IO[bytes]) -> None:
        # Half a message means that the process is dead; the waiter says so.
        with contextlib.suppress(EOFError, OSError, pickle.UnpicklingError), replies:
            while True:
                self._events.put(partial(self._on_reply, process, pickle.load(replies)))

    def _wait_for_end(self, process: _Process, reader: threading.Thread) -> None:
        process.popen.wait()
        process.outbox.put(None)
        # Programs it started may hold the pipe open; replies already written are still read.
        _signal_group(process.popen.pid)
        parent_death.guard.forget(process.popen.pid)
        reader.join(timeout=1.0)
        self._events.put(partial(self._on_exit, process))

    def _kill(self, process: _Process) -> None:
        process.killed = True
        _signal_group(process.popen.pid)

    def _end(self, process: _Process) -> None:
        self._kill(process)
        self._remove(process)

    def _remove(self, process: _Process) -> None:
        self._processes.remove(process)
        if process is self._main:
            self._main = None

    def _shut_down(self, grace: float) -> None:
        while not self._events.empty():  # calls that were posted just before the end must not wait for ever
            with contextlib.suppress(Exception):
                self._events.get_nowait()()
        error = HostClosedError(f"{self._name} was closed")
        running = [call for process in self._processes for call in process.running.values()]
        self._refuse_all(self._starters, error)
        self._refuse_all([call.answer for call in (*running, *self._alone, *self._waiting)], error)
        for call in running:
            self._take(call)
        deadline = time.monotonic() + grace
        for process in self._processes:
            process.outbox.put(None)
        for process in self._processes:
            try:
                process.popen.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                self._kill(process)
                process.popen.wait()
        self._processes.clear()
        self._main = None

    @staticmethod
    def _refuse_all(answers: Iterable[Future[Any]], error: Exception) -> None:
        for answer in answers:
            _refuse(answer, error)


def _write(requests: IO[bytes], outbox: queue.SimpleQueue[bytes | None]) -> None:
    """Until None, whereupon the pipe closes and the host ends itself."""
    with contextlib.suppress(OSError), requests:
        while (payload := outbox.get()) is not None:
            requests.write(payload)
            requests.flush()


def _is_alone(process: _Process) -> bool:
    """Whether one call runs in it and nothing else."""
    return len(process.running) == 1 and not process.given_up


def _blame(call: _Pending, function: str | None) -> None:
    what = "no answer after" if function is None else f"{function}() took longer than"
    _refuse(call.answer, HostTimeoutError(f"{what} {call.timeout:g} s", function))


def _resolve_with(answer: Future[Reply], done: Done) -> None:
    try:
        value = pickle.loads(done.value)
    except Exception as error:  # a class that exists over there only
        _refuse(answer, HostError(f"its result cannot be read here: {error!r}"))
    else:
        _resolve(answer, Reply(value, done.users_seconds, done.slowest))


def _resolve(answer: Future[Any], value: Any) -> None:
    with contextlib.suppress(InvalidStateError):  # its caller has given up
        answer.set_result(value)


def _refuse(answer: Future[Any], error: Exception) -> None:
    with contextlib.suppress(InvalidStateError):
        answer.set_exception(error)


def _signal_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _how_it_ended(returncode: int | None) -> str:
    if returncode is None:
        return "ended"
    if returncode >= 0:
        return f"ended with exit code {returncode}"
    name = signal.Signals(-returncode).name
    return f"was killed by {name}" + (" (out of memory?)" if -returncode == signal.SIGKILL else "")


# ------------------------------------------------------------------------------------ in this process


class LocalHost:
    """As `HostProcess`, but the service's coroutines run right here, on the event loop that calls them, and plain
    functions of users in threads: `--rollout.agent_hosts 0`, for a debugger.

    No time limit ends anything, a step that blocks the loop blocks the engine too, and a crash is the end of the run.
    Arguments and results are pickled all the same, so that what works here works in a host process.
    """

    def __init__(
        self,
        target: str,
        *args: Any,
        name: str,
        answer: Callable[..., Awaitable[Any]] | None = None,
        answer_stream: Callable[..., AsyncGenerator[Any, None]] | None = None,
    ) -> None:
        self.answers = Answers(answer, answer_stream)
        self.threads = EpisodeThreads()
        self._target = target
        self._args = args
        self._name = name
        self._service: Any = None
        self._log_lines: set[str] = set()

    async def start(self) -> None:
        """Make the service. Raises HostStartError."""
        try:
            self._service = make_service(self._target, self._args)
        except (Exception, SystemExit) as error:
            failure = describe(error)
            raise HostStartError(f"{failure.kind}: {failure.text}", failure) from error

    async def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """What `method` returns. Raises RemoteError. `timeout` is not enforced."""
        return (await self.call_timed(method, *args, timeout=timeout)).value

    async def call_timed(self, method: str, *args: Any, timeout: float | None = None) -> Reply:
        """As `call`, with how long users' code took."""
        call = _LocalCall(self)
        before = current_call.set(call)
        try:
            value = await invoke(self._service, method, pickle.dumps(args))
            return Reply(pickle.loads(pickle.dumps(value)), call.users_seconds, call.slowest)
        except (Exception, SystemExit) as error:
            raise RemoteError(describe(error)) from error
        finally:
            current_call.reset(before)
            await call.end()

    async def close(self) -> None:
        """Threads of users' code end as soon as nothing runs in them."""
        self.threads.close()

    def log(self, text: str) -> None:
        if text not in self._log_lines:
            self._log_lines.add(text)
            logger.warning("%s: %s", self._name, text)


class _LocalCall(UserCall):
    """A call in this process. Threads and servers of users' code ask on the loop that awaits it."""

    def __init__(self, host: LocalHost) -> None:
        super().__init__(host.threads, shared_loop=True)
        self._host = host
        self._loop = asyncio.get_running_loop()

    async def ask(self, name: str, args: tuple[Any, ...], *, keep: bool = True) -> Any:
        with self.waiting_for_answer():
            return await self._on_its_loop(self._host.answers.whole(name, args))

    async def ask_stream(self, name: str, args: tuple[Any, ...]) -> AsyncGenerator[Any, None]:
        with self.waiting_for_answer():
            parts = self._host.answers.parts(name, args)
            try:
                while (part := await self._on_its_loop(_next(parts))) is not None:
                    yield part[0]
            finally:
                await self._on_its_loop(parts.aclose())

    def say(self, text: str) -> None:
        self._host.log(text)

    async def _on_its_loop(self, asking: Coroutine[Any, Any, Any]) -> Any:
        try:
            if asyncio.get_running_loop() is self._loop:
                return await asking
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(asking, self._loop))
        except Exception as error:
            raise AskError(describe(error)) from error


async def _next(parts: AsyncGenerator[Any, None]) -> tuple[Any] | None:
    """The next part, in a tuple; None at the end."""
    async for part in parts:
        return (part,)
    return None


if TYPE_CHECKING:
    _: tuple[type[Host], type[Host]] = (HostProcess, LocalHost)

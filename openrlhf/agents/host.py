"""Users' code in a process of its own: a crash, an endless loop or a blocking call there touches nothing here.

`HostProcess` starts the process, sends it calls, answers what they ask, and gives their results to coroutines. When a
call takes too long, or the process dies, only that call fails. The others go on, or run again in another process,
unnoticed by those who wait for them.

Only users' time counts: a call's clock stands still while it waits for an answer. And which call is to blame is found
out, not guessed. When one is late here, the host is asked how long each call has really had (`host_clock.py`); those
that exceed their time by that clock are it. What becomes of the calls beside them:

    a call hangs by itself    it is given up and cancelled; the others go on where they are. New calls go to another
                              process, and the old one ends with the last of them, unless what hung has ended before.
    it holds the event loop   the others cannot go on there: they run again in another process, in which every call has
                              a loop of its own.
    it holds the interpreter, or the process died
                              the others run again. One of those that were not waiting for an answer did it; these run
                              alone, several at a time in processes of their own, and the one that does it alone is it.
                              The rest run together at once.

A call that runs again gets the answers that it has had, or that are still being worked out: what it asked before, in
the same words, is not asked again. So it comes quickly to where it was, if users' code does the same again. A process
that is left over from this is kept, with everything loaded, for the next time.

Threads of one host, none of which ever waits for another's lock:

    supervisor  owns all state; consumes events (submit, cancel, reply, answer, exit, close) and deadlines
    reader      replies of a process → events
    writer      requests → a process, whose pipe may be full while a call holds its interpreter lock
    waiter      a process's end → an event, after its last reply has been read
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
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextvars import Context, copy_context
from dataclasses import dataclass, field, replace
from typing import IO, TYPE_CHECKING, Any, NamedTuple, Protocol

from openrlhf.agents.host_answers import Answers, Asked
from openrlhf.agents.host_messages import (
    Answered,
    Ask,
    Call,
    Cancel,
    CancelAsk,
    Done,
    Failed,
    Failure,
    Hello,
    Part,
    Ping,
    Pinned,
    Pong,
    Ready,
    Refused,
    Said,
    Slowest,
)
from openrlhf.utils import parent_death as owners
from openrlhf.utils import waits
from openrlhf.utils.stack_probe import Address, stacks

logger = logging.getLogger(__name__)

LATE_SECONDS = 0.1
"""How long after a deadline the host is asked about it, so that calls that hang together end together."""

PING_SECONDS = 1.0
"""How long a host whose call is late has to show that its interpreter still runs."""

MOST_ALONE = 4
"""Processes in which suspects run alone, at the same time."""

MOST_BELIEVED = 4
"""How often a call may have waited for an answer while a process died under it and others, before it is suspect too."""

# Before anything is imported: the protocol's pipes move to private descriptors, so that users' code (and programs it
# starts) can neither print into the replies nor read the requests; stdout becomes stderr. SIGINT gets a handler that
# does nothing instead of SIG_IGN, which programs started from here would inherit. And the process gets a beacon
# (`utils/stack_probe.py`), in a file that it is given.
BOOTSTRAP = """
import faulthandler, os, pickle, signal, sys
signal.signal(signal.SIGINT, lambda *_: None)
beacon = int(sys.argv.pop())
os.set_inheritable(beacon, False)
faulthandler.register(signal.SIGUSR2, beacon)
requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(2, 1)
sys.path[:] = pickle.load(requests)
from openrlhf.agents.host_worker import serve
serve(requests, replies)
"""


_hosts: weakref.WeakSet[HostProcess] = weakref.WeakSet()


def kill_every_host() -> None:
    """End the processes of all hosts, without a word to those who wait for them: this process is about to end too."""
    for host in list(_hosts):
        host.kill()


class HostError(Exception):
    """A call could not be answered."""


class HostStartError(HostError):
    """The service could not be made."""

    def __init__(self, message: str, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.failure = failure
        """What the service's constructor raised; None if it died or took too long."""


class HostTimeoutError(HostError):
    """The call took too long between two asks; the process was ended."""

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
    """What a call gave, and how long users' code took for it."""

    value: Any
    users_seconds: float
    """In functions that the service ran with `run_user`."""
    slowest: Slowest | None


class Host(Protocol):
    """Where a service lives: a process of its own (`HostProcess`) or this one (`LocalHost`)."""

    async def start(self) -> None: ...

    async def call(self, method: str, *args: Any, timeout: float | None = None) -> Any: ...

    async def call_timed(self, method: str, *args: Any, timeout: float | None = None) -> Reply: ...

    async def close(self) -> None: ...


@dataclass(slots=True, eq=False)
class _Pending:
    """A call that has not been answered yet."""

    id: int
    payload: bytes
    timeout: float | None
    answer: Future[Reply]
    loop: asyncio.AbstractEventLoop
    context: Context
    """Of whoever awaits it; what it asks is answered there."""
    process: _Process | None = None
    """Where it runs."""
    asks: dict[int, _Open] = field(default_factory=dict)
    """Not answered yet; while there is one the deadline is infinite."""
    left: list[_Open] = field(default_factory=list)
    """What its former life has asked and was not answered yet: this one will most likely ask it too."""
    deadline: float = float("inf")
    answered: list[_Exchange] = field(default_factory=list)
    """What it has asked in this life, in the order of the answers."""
    known: dict[_Question, deque[_Exchange]] = field(default_factory=dict)
    """What it has asked in its former life and not yet in this one."""
    believed: int = 0
    """How often a process has died under it and others while it waited for an answer."""
    excused: bool = False
    """Whether it was late beside a call that hung, and so perhaps because of it; it is given its time once more."""
    deaths: int = 0
    """How often the process died under it while it ran alone."""

    def give_up_asks(self, _: Future[Reply] | None = None) -> None:
        """Nobody waits for their answers. From any thread."""
        for open_ask in (*self.asks.values(), *self.left):
            if open_ask.asked is not None:
                open_ask.asked.cancel()


_Question = tuple[str, bytes, bool]
"""Name and arguments of an ask, and whether it is a stream."""


class _Exchange(NamedTuple):
    """An ask that was answered."""

    question: _Question
    messages: tuple[Part | Answered, ...]


@dataclass(slots=True, eq=False)
class _Open:
    """An ask that is being answered."""

    question: _Question
    process: _Process | None
    """Where the answer is wanted; None: its process is gone, and the next one has not asked yet."""
    id: int
    """Of the ask, in that process."""
    asked: Asked | None = None
    parts: list[Part] = field(default_factory=list)
    """Of the answer, so far."""


@dataclass(slots=True, eq=False)
class _Process:
    """One life of the host."""

    popen: subprocess.Popen[bytes]
    outbox: queue.SimpleQueue[bytes | None]
    deadline: float
    """By when it must be ready."""
    beacon: Address
    alone: bool
    """Whether it runs one call at a time."""
    ready: bool = False
    killed: bool = False
    running: dict[int, _Pending] = field(default_factory=dict)
    given_up: set[int] = field(default_factory=set)
    """Calls that still run there and that nobody waits for. While there is one, the process gets no new calls."""
    soonest: float = float("inf")
    """No deadline of a running call is earlier."""
    ping_deadline: float | None = None
    """By when the host must have answered a Ping."""


@dataclass(slots=True)
class _Submit:
    call: _Pending


@dataclass(slots=True)
class _Cancel:
    call: _Pending


@dataclass(slots=True)
class _Start:
    answer: Future[None]


@dataclass(slots=True)
class _Reply:
    process: _Process
    message: Any


@dataclass(slots=True)
class _Answer:
    call: _Pending
    ask: _Open
    message: Part | Answered | Refused


@dataclass(slots=True)
class _Exit:
    process: _Process


@dataclass(slots=True)
class _Close:
    grace: float


_Event = _Submit | _Cancel | _Start | _Reply | _Answer | _Exit | _Close


class HostProcess:
    """A service in a process of its own.

    `target` is `module:callable`; the process imports it and calls it with `args`, and `call` names methods of what
    it returns. Sync methods run in threads, coroutines on one event loop, at most `max_concurrency` calls at once;
    a call waits for its turn here, and its time counts from when it is sent. Arguments and results are pickled.

    While a call runs, its code may `ask` (`host_worker.py`). `answer(name, *args)` is a coroutine function that gives
    the answer, `answer_stream(name, *args)` an async generator of its parts. They run on the loop and in the context
    of whoever awaits the call, and are cancelled when the answer is not wanted any more.

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
        """`name` is for messages. A call under which the process dies `max_crashes` + 1 times is given up."""
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
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._thread_lock = threading.Lock()
        self._closed = False
        # What follows belongs to the supervisor.
        self._processes: list[_Process] = []
        self._main: _Process | None = None
        """Of the processes, the one that gets new calls."""
        self._starters: list[_Start] = []
        self._waiting: deque[_Pending] = deque()
        self._suspects: deque[_Pending] = deque()
        """A process has died under them and others: they run alone."""
        self._said: set[str] = set()
        _hosts.add(self)
        waits.peers.add(self)

    # ------------------------------------------------------------------------------------ for callers

    async def start(self) -> None:
        """Make the service. Raises HostStartError."""
        answer: Future[None] = Future()
        self._post(_Start(answer))
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
        self._post(_Submit(call))
        try:
            return await asyncio.wrap_future(call.answer)
        except asyncio.CancelledError:
            with contextlib.suppress(HostClosedError):
                self._post(_Cancel(call))
            raise

    async def close(self, *, grace: float = 1.5) -> None:
        """End the process; after `grace` seconds by force. What is unanswered gets HostClosedError."""
        with self._thread_lock:
            self._closed = True
            thread = self._thread
        if thread is not None and thread.is_alive():
            self._events.put(_Close(grace))
            await asyncio.to_thread(thread.join)

    def kill(self) -> None:
        """End the process as it is. Whoever waits for an answer finds the process dead."""
        for process in list(self._processes):
            if process.popen.returncode is None:
                self._kill(process)

    def stacks(self) -> dict[str, str]:
        """As `waits.PeerProcesses` gives them."""
        shown = {}
        for process in list(self._processes):
            calls = list(process.running.values())
            asking = sum(bool(call.asks) for call in calls)
            name = f"{self._name}, process {process.popen.pid}: {len(calls)} calls, {asking} of them wait for us"
            shown[name] = stacks(process.beacon)
        return shown

    def idle_seconds(self) -> float:
        """What users' code does is no sign of life: it has deadlines of its own."""
        return float("inf")

    @property
    def pid(self) -> int | None:
        """Of the process that gets new calls; another after a restart."""
        process = self._main
        return None if process is None else process.popen.pid

    def _post(self, event: _Event) -> None:
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
        except Exception:  # nobody may wait for a thread that is gone
            logger.exception("%s: its supervisor failed", self._name)
            self._closed = True
            self._shut_down(grace=0.0)

    def _handle_events(self) -> None:
        while True:
            event: _Event | None
            try:
                event = self._events.get(timeout=self._seconds_to_deadline())
            except queue.Empty:
                event = None
            match event:
                case _Submit(call):
                    call.answer.add_done_callback(call.give_up_asks)
                    self._waiting.append(call)
                case _Cancel(call):
                    self._on_cancel(call)
                case _Answer(call, ask, message):
                    self._on_answer(call, ask, message)
                case _Start():
                    self._starters.append(event)
                case _Reply(process, message) if process in self._processes:
                    self._on_reply(process, message)
                case _Exit(process) if process in self._processes:
                    self._on_exit(process)
                case _Close(grace):
                    self._shut_down(grace)
                    return
            for process in list(self._processes):
                self._on_deadlines(process)
            self._dispatch()

    def _seconds_to_deadline(self) -> float | None:
        soonest = min((_next_deadline(process) for process in self._processes), default=float("inf"))
        return None if soonest == float("inf") else max(0.0, soonest - time.monotonic())

    def _dispatch(self) -> None:
        """Send what may be sent; start processes if there is something to do and none to do it."""
        self._tidy()
        if self._main is None and (self._starters or self._waiting):
            self._main = self._idle_one() or self._spawn(alone=False)
        main = self._main
        if main is not None and main.ready:
            main.alone = False
            for starter in self._starters:
                _resolve(starter.answer, None)
            self._starters.clear()
            while self._waiting and self._num_running() < self._max_concurrency:
                self._send(main, self._waiting.popleft())
        while self._suspects and (process := self._idle_one()) is not None:
            self._send(process, self._suspects.popleft())
        alone = [process for process in self._processes if process.alone]
        loading = sum(not process.ready for process in alone)
        for _ in range(min(MOST_ALONE - len(alone), len(self._suspects) - loading)):
            self._spawn(alone=True)

    def _tidy(self) -> None:
        """Processes that hung end when nothing is left to go on in them; of those that are idle one is kept."""
        spare = False
        for process in list(self._processes):
            if process is self._main or not process.ready or process.running:
                continue
            if process.given_up:
                self._end(process)
            elif not self._suspects and self._main is not None:
                if spare:
                    self._end(process)
                process.alone = spare = True

    def _idle_one(self) -> _Process | None:
        idle = (p for p in self._processes if p.alone and p.ready and not p.running and not p.given_up)
        return next(idle, None)

    def _num_running(self) -> int:
        return sum(len(process.running) for process in self._processes)

    def _send(self, process: _Process, call: _Pending) -> None:
        if not call.answer.cancelled():
            process.running[call.id] = call
            call.process = process
            self._start_clock(call)
            process.outbox.put(call.payload)

    def _start_clock(self, call: _Pending) -> None:
        if call.timeout is not None and call.process is not None:
            call.deadline = time.monotonic() + call.timeout
            call.process.soonest = min(call.process.soonest, call.deadline)

    def _on_reply(self, process: _Process, message: Any) -> None:
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
            case Ask(call_id) if call_id in running:
                self._on_ask(process, running[call_id], message)
            case CancelAsk(call_id, ask_id) if call_id in running:
                self._settle(running[call_id], ask_id, cancel=True)
            case Pong():
                self._on_pong(process, message)
            case Said(text) if text not in self._said:
                self._said.add(text)
                logger.warning("%s: %s", self._name, text)
            case Pinned():
                self._hello = replace(self._hello, pinned=True)
                self._run_again(self._take_all(process))
                self._end(process)

    def _take(self, call: _Pending) -> _Pending:
        """It has no process any more."""
        assert call.process is not None
        del call.process.running[call.id]
        call.process = None
        for ask in call.asks.values():
            ask.process = None
        call.left += call.asks.values()
        call.asks.clear()
        return call

    def _on_cancel(self, call: _Pending) -> None:
        """Nobody waits for it. It leaves when the host says so, and has its time to do so."""
        if call.process is None:
            return  # `_send` passes it over
        call.give_up_asks()
        call.process.outbox.put(pickle.dumps(Cancel(call.id)))

    # ------------------------------------------------------------------------------------ asks

    def _on_ask(self, process: _Process, call: _Pending, ask: Ask) -> None:
        if call.answer.cancelled():
            refusal = Refused(ask.id, Failure("CancelledError", "nobody waits for its call", ""))
            process.outbox.put(pickle.dumps(refusal))
            return
        question = (ask.name, ask.args, ask.stream)
        if known := call.known.get(question):
            exchange = known.popleft()
            call.answered.append(exchange)
            self._start_clock(call)
            for message in exchange.messages:
                process.outbox.put(pickle.dumps(replace(message, ask=ask.id)))
            return
        call.deadline = float("inf")
        left = next((left for left in call.left if left.question == question), None)
        if left is not None:
            call.left.remove(left)
            left.process, left.id = process, ask.id
            call.asks[ask.id] = left
            for part in left.parts:
                process.outbox.put(pickle.dumps(replace(part, ask=ask.id)))
            return
        asking = _Open(question, process, ask.id)

        def send(message: Part | Answered | Refused) -> None:  # on the caller's loop
            self._events.put(_Answer(call, asking, message))

        asking.asked = Asked(ask, self._answers, loop=call.loop, context=call.context.copy(), send=send)
        call.asks[ask.id] = asking
        asking.asked.start()

    def _on_answer(self, call: _Pending, ask: _Open, message: Part | Answered | Refused) -> None:
        exchange = _Exchange(ask.question, (*ask.parts, message)) if isinstance(message, Answered) else None
        if ask in call.left:
            if isinstance(message, Part):
                ask.parts.append(message)
                return
            call.left.remove(ask)
            if exchange is not None:
                call.known.setdefault(ask.question, deque()).append(exchange)
        elif ask.process is not None and call.asks.get(ask.id) is ask:
            ask.process.outbox.put(pickle.dumps(replace(message, ask=ask.id)))
            if isinstance(message, Part):
                ask.parts.append(message)
                return
            self._settle(call, ask.id, cancel=False)
            if exchange is not None:
                call.answered.append(exchange)

    def _settle(self, call: _Pending, ask_id: int, *, cancel: bool) -> None:
        """The clock goes on after the last one."""
        ask = call.asks.pop(ask_id, None)
        if ask is None:
            return
        if cancel and ask.asked is not None:
            ask.asked.cancel()
        if not call.asks:
            self._start_clock(call)

    # ------------------------------------------------------------------------------------ time limits and deaths

    def _on_deadlines(self, process: _Process) -> None:
        now = time.monotonic()
        if process.killed:
            return
        if not process.ready:
            if now >= process.deadline:
                self._kill(process)
                self._fail_start(process, HostStartError(f"it was not ready after {self._start_timeout:g} s"))
            return
        if process.ping_deadline is not None:
            if now >= process.ping_deadline:
                self._on_silence(process)
        elif now >= process.soonest + LATE_SECONDS:
            _find_soonest(process)
            if now >= process.soonest + LATE_SECONDS:
                process.ping_deadline = now + PING_SECONDS
                process.outbox.put(pickle.dumps(Ping()))

    def _on_pong(self, process: _Process, pong: Pong) -> None:
        """The interpreter runs, so each call that has had more than its time hangs by itself. The others that are late
        were kept waiting and get what they have left."""
        process.ping_deadline = None
        now = time.monotonic()
        hanging = []
        for call in process.running.values():
            if call.timeout is None or now < call.deadline:
                continue
            left = call.timeout - pong.spent.get(call.id, 0.0)
            if left <= 0:
                hanging.append(call)
            else:
                call.deadline = now + left
        _find_soonest(process)
        if hanging:
            self._on_hanging(process, hanging, pong)

    def _on_hanging(self, process: _Process, calls: Sequence[_Pending], pong: Pong) -> None:
        hung_before = bool(process.given_up)
        for call in calls:
            process.outbox.put(pickle.dumps(Cancel(call.id)))
            process.given_up.add(call.id)
            self._take(call)
            if hung_before and not call.excused:
                call.excused = True
                self._run_again([call])
            else:
                _blame(call, pong.doing.get(call.id))
        if pong.holder in process.given_up:
            self._hello = replace(self._hello, own=True)
            self._replace(process)
            return
        if process is self._main:
            self._main = None
        logger.warning(
            "%s: a call took too long and was given up; other calls go on: %d", self._name, len(process.running)
        )

    def _on_silence(self, process: _Process) -> None:
        """Some call holds the interpreter, and the late ones may just be its victims."""
        if len(process.running) == 1 and not process.given_up:
            (call,) = process.running.values()
            _blame(self._take(call), None)
        self._replace(process, suspect=True)

    def _replace(self, process: _Process, *, suspect: bool = False) -> None:
        """End a process in which calls cannot go on."""
        calls = self._take_all(process, suspect=suspect)
        logger.warning("%s: ended because a call took too long; other calls run again: %d", self._name, len(calls))
        self._run_again(calls)
        self._end(process)

    def _end(self, process: _Process) -> None:
        self._kill(process)
        self._remove(process)

    def _remove(self, process: _Process) -> None:
        self._processes.remove(process)
        if process is self._main:
            self._main = None

    def _on_exit(self, process: _Process) -> None:
        """The process died by itself."""
        how = _how_it_ended(process.popen.returncode)
        if not process.ready:
            self._fail_start(process, HostStartError(f"the process {how} while it loaded"))
            return
        self._remove(process)
        alone = len(process.running) == 1 and not process.given_up
        calls = list(process.running.values())
        if alone:
            calls[0].deaths += 1
            if calls[0].deaths > self._max_crashes:
                _refuse(self._take(calls.pop()).answer, HostCrashError(f"the process {how}"))
        logger.warning("%s: the process %s; calls run again: %d", self._name, how, len(calls))
        self._run_again(self._take_all(process, suspect=True))

    def _take_all(self, process: _Process, *, suspect: bool = False) -> list[_Pending]:
        """Calls that are to run again together. With `suspect` one call of the process did it, most likely one that was
        not waiting for an answer: those run alone. Who did wait is believed a few times."""
        calls = list(process.running.values())
        somebody_ran = any(not call.asks for call in calls)
        believed = []
        for call in calls:
            if not suspect:
                believed.append(call)
            elif call.asks and somebody_ran and call.believed < MOST_BELIEVED:
                call.believed += 1
                believed.append(call)
            else:
                self._suspects.append(call)
                _begin_again(call)
            self._take(call)
        return believed

    def _run_again(self, calls: Sequence[_Pending]) -> None:
        """Back to where they waited, from scratch."""
        for call in calls:
            _begin_again(call)
        self._waiting.extendleft(reversed(calls))

    def _fail_start(self, process: _Process | None, error: HostStartError) -> None:
        """Nobody waits for a service that cannot be made; a later call tries again."""
        if process is not None:
            self._remove(process)
        calls = [*self._suspects]
        self._suspects.clear()
        if self._main is None:
            for starter in self._starters:
                _refuse(starter.answer, error)
            self._starters.clear()
            calls += self._waiting
            self._waiting.clear()
        for call in calls:
            _refuse(call.answer, error)

    # ------------------------------------------------------------------------------------ the process

    def _spawn(self, *, alone: bool) -> _Process | None:
        try:
            with tempfile.TemporaryFile() as file:
                beacon = file.fileno()
                popen = subprocess.Popen(
                    [sys.executable, "-c", BOOTSTRAP, str(beacon)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    # Its own session: Ctrl-C goes to us alone, and ending the group ends what users' code has started.
                    start_new_session=True,
                    pass_fds=[beacon],
                )
        except OSError as error:
            self._fail_start(None, HostStartError(f"no process could be started: {error}"))
            return None
        owners.guard.watch(popen.pid)
        outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        deadline = time.monotonic() + self._start_timeout
        process = _Process(popen, outbox, deadline, Address(popen.pid, beacon), alone)
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
                self._events.put(_Reply(process, pickle.load(replies)))

    def _wait_for_end(self, process: _Process, reader: threading.Thread) -> None:
        process.popen.wait()
        process.outbox.put(None)
        # Programs it started may hold the pipe open; replies already written are still read.
        _signal_group(process.popen.pid)
        owners.guard.forget(process.popen.pid)
        reader.join(timeout=1.0)
        self._events.put(_Exit(process))

    def _kill(self, process: _Process) -> None:
        process.killed = True
        _signal_group(process.popen.pid)

    def _shut_down(self, grace: float) -> None:
        error = HostClosedError(f"{self._name} was closed")
        self._refuse_all([starter.answer for starter in self._starters], error)
        running = [call for process in self._processes for call in process.running.values()]
        self._refuse_all([call.answer for call in (*running, *self._suspects, *self._waiting)], error)
        for call in running:
            self._take(call)
        while True:  # what was posted just before the end
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                break
            if isinstance(event, _Submit):
                self._refuse_all([event.call.answer], error)
            elif isinstance(event, _Start):
                self._refuse_all([event.answer], error)
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


def _next_deadline(process: _Process) -> float:
    if process.killed:
        return float("inf")
    if not process.ready:
        return process.deadline
    return process.soonest + LATE_SECONDS if process.ping_deadline is None else process.ping_deadline


def _find_soonest(process: _Process) -> None:
    process.soonest = min((call.deadline for call in process.running.values()), default=float("inf"))


def _begin_again(call: _Pending) -> None:
    """Its next life hears again what this one has heard. What this one has not come to is known from the one before."""
    known: dict[_Question, deque[_Exchange]] = {}
    for exchange in (*call.answered, *(left for exchanges in call.known.values() for left in exchanges)):
        known.setdefault(exchange.question, deque()).append(exchange)
    call.known, call.answered = known, []
    call.deadline = float("inf")


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
    with contextlib.suppress(InvalidStateError):  # whoever waited has given up
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


if TYPE_CHECKING:
    _: type[Host] = HostProcess

"""Users' code in a process of its own: a crash, an endless loop or a blocking call there touches nothing here.

`HostProcess` starts the process, sends it calls, answers what they ask, and gives their results to coroutines. When a
call takes too long, or the process dies, the process is replaced and the other calls in it are run again, unnoticed by
those who wait for them; answers that are being worked out for their former lives are cancelled.

Only users' time counts: a call's clock stands still while it waits for an answer. And which call is to blame is found
out, not guessed. When one is late here, the host is asked how long each call has really had (`host_clock.py`); those
that exceed their time by that clock are it. A host that does not even answer is held by one of its calls, as it is when
it died: those that were not waiting for an answer are run again one at a time, and the one that does it alone is it.

Threads of one host, none of which ever waits for another's lock:

    supervisor  owns all state; consumes events (submit, cancel, reply, answer, exit, close) and deadlines
    reader      replies of the process → events
    writer      requests → the process, whose pipe may be full while a call holds its interpreter lock
    waiter      the process's end → an event, after its last reply has been read
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
from typing import IO, Any, NamedTuple, Protocol

from openrlhf.agents.host_answers import Answers, Asked
from openrlhf.agents.host_messages import (
    Answered,
    Ask,
    Call,
    Cancel,
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
    Unask,
)
from openrlhf.utils import owners, waits
from openrlhf.utils.beacon import Address, stacks

logger = logging.getLogger(__name__)

LATE_SECONDS = 0.1
"""How long after a deadline the host is asked about it, so that calls that hang together end together."""

PING_SECONDS = 1.0
"""How long a host whose call is late has to show that its interpreter still runs."""

# Before anything is imported: the protocol's pipes move to private descriptors, so that users' code (and programs it
# starts) can neither print into the replies nor read the requests; stdout becomes stderr. SIGINT gets a handler that
# does nothing instead of SIG_IGN, which programs started from here would inherit. And the process gets a beacon
# (`utils/beacon.py`), in a file that it is given.
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
    asks: dict[int, Asked] = field(default_factory=dict)
    """Not answered yet; while there is one the deadline is infinite."""
    deadline: float = float("inf")
    spared: bool = False
    """Whether a process has died under it and others while it waited for an answer; the next time it is suspect."""
    suspect: bool = False
    """Whether a process has died under it and others; such a call runs alone."""
    deaths: int = 0
    """How often the process died under it while it ran alone."""


@dataclass(slots=True, eq=False)
class _Process:
    """One life of the host."""

    popen: subprocess.Popen[bytes]
    outbox: queue.SimpleQueue[bytes | None]
    deadline: float
    """By when it must be ready."""
    beacon: Address
    ready: bool = False
    killed: bool = False


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
    process: _Process
    call: _Pending
    message: Answered | Refused


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
        self._process: _Process | None = None
        self._starters: list[_Start] = []
        self._waiting: deque[_Pending] = deque()
        self._suspects: deque[_Pending] = deque()
        self._running: dict[int, _Pending] = {}
        self._soonest = float("inf")
        """No deadline of a running call is earlier."""
        self._ping_deadline: float | None = None
        """By when the host must have answered a Ping."""
        self._said: set[str] = set()
        _hosts.add(self)
        waits.neighbours.add(self)

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
        process = self._process
        if process is not None and process.popen.returncode is None:
            self._kill(process)

    def stacks(self) -> dict[str, str]:
        """As `waits.Neighbour` gives them."""
        process = self._process
        if process is None:
            return {}
        asking = sum(bool(call.asks) for call in list(self._running.values()))
        name = f"{self._name}, process {process.popen.pid}: {len(self._running)} calls, {asking} of them wait for us"
        return {name: stacks(process.beacon)}

    def idle_seconds(self) -> float:
        """What users' code does is no sign of life: it has deadlines of its own."""
        return float("inf")

    @property
    def pid(self) -> int | None:
        """Of the present process; another after a restart."""
        process = self._process
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
                    self._waiting.append(call)
                case _Cancel(call):
                    self._on_cancel(call)
                case _Answer(process, call, message) if process is self._process:
                    self._on_answer(process, call, message)
                case _Start():
                    self._starters.append(event)
                case _Reply(process, message) if process is self._process:
                    self._on_reply(process, message)
                case _Exit(process) if process is self._process:
                    self._on_exit(process)
                case _Close(grace):
                    self._shut_down(grace)
                    return
            self._on_deadlines()
            self._dispatch()

    def _seconds_to_deadline(self) -> float | None:
        process = self._process
        if process is None or process.killed:
            return None
        if not process.ready:
            soonest = process.deadline
        else:
            soonest = self._soonest + LATE_SECONDS if self._ping_deadline is None else self._ping_deadline
        return None if soonest == float("inf") else max(0.0, soonest - time.monotonic())

    def _dispatch(self) -> None:
        """Send what may be sent; start a process if there is something to do and none to do it."""
        if self._process is None and (self._starters or self._waiting or self._suspects):
            self._spawn()
        process = self._process
        if process is None or not process.ready or process.killed:
            return
        for starter in self._starters:
            _resolve(starter.answer, None)
        self._starters.clear()
        while self._may_send() and (calls := self._suspects or self._waiting):
            call = calls.popleft()
            if not call.answer.cancelled():
                self._running[call.id] = call
                self._start_clock(call)
                process.outbox.put(call.payload)

    def _may_send(self) -> bool:
        """A suspect runs alone."""
        if self._suspects:
            return not self._running
        if len(self._running) == 1 and next(iter(self._running.values())).suspect:
            return False
        return len(self._running) < self._max_concurrency

    def _start_clock(self, call: _Pending) -> None:
        if call.timeout is not None:
            call.deadline = time.monotonic() + call.timeout
            self._soonest = min(self._soonest, call.deadline)

    def _on_reply(self, process: _Process, message: Any) -> None:
        match message:
            case Ready():
                process.ready = True
            case Failure():
                process.outbox.put(None)  # it ends by itself, but exit handlers of users' code may hang
                self._fail_start(HostStartError(f"{message.kind}: {message.text}", message))
            case Done(call_id) if call_id in self._running:
                _resolve_with(self._finish(call_id).answer, message)
            case Failed(call_id, failure) if call_id in self._running:
                _refuse(self._finish(call_id).answer, RemoteError(failure))
            case Ask(call_id) if call_id in self._running:
                self._on_ask(process, self._running[call_id], message)
            case Unask(call_id, ask_id) if call_id in self._running:
                self._settle(self._running[call_id], ask_id, cancel=True)
            case Pong(spent, doing):
                self._on_pong(process, spent, doing)
            case Said(text) if text not in self._said:
                self._said.add(text)
                logger.warning("%s: %s", self._name, text)
            case Pinned():
                self._hello = replace(self._hello, pinned=True)
                self._run_again(self._take_running())
                self._end(process)

    def _finish(self, call_id: int) -> _Pending:
        call = self._running.pop(call_id)
        _give_up_asks(call)
        return call

    def _on_cancel(self, call: _Pending) -> None:
        """Nobody waits for it. It leaves when the host says so, and has its time to do so."""
        if self._process is None or self._running.get(call.id) is not call:
            return  # `_dispatch` passes it over
        for asked in call.asks.values():
            asked.cancel()
        self._process.outbox.put(pickle.dumps(Cancel(call.id)))

    # ------------------------------------------------------------------------------------ asks

    def _on_ask(self, process: _Process, call: _Pending, ask: Ask) -> None:
        if call.answer.cancelled():
            refusal = Refused(ask.id, Failure("CancelledError", "nobody waits for its call", ""))
            process.outbox.put(pickle.dumps(refusal))
            return

        def send(message: Part | Answered | Refused) -> None:  # on the caller's loop
            if isinstance(message, Part):
                process.outbox.put(pickle.dumps(message))
            else:
                self._events.put(_Answer(process, call, message))

        asked = Asked(ask, self._answers, loop=call.loop, context=call.context.copy(), send=send)
        call.asks[ask.id] = asked
        call.deadline = float("inf")
        asked.start()

    def _on_answer(self, process: _Process, call: _Pending, message: Answered | Refused) -> None:
        if self._settle(call, message.ask, cancel=False):
            process.outbox.put(pickle.dumps(message))

    def _settle(self, call: _Pending, ask_id: int, *, cancel: bool) -> bool:
        """Whether the ask was still open. The clock goes on after the last one."""
        asked = call.asks.pop(ask_id, None)
        if asked is None:
            return False
        if cancel:
            asked.cancel()
        if not call.asks:
            self._start_clock(call)
        return True

    # ------------------------------------------------------------------------------------ time limits and deaths

    def _on_deadlines(self) -> None:
        now = time.monotonic()
        process = self._process
        if process is None or process.killed:
            return
        if not process.ready:
            if now >= process.deadline:
                self._kill(process)
                self._fail_start(HostStartError(f"it was not ready after {self._start_timeout:g} s"))
            return
        if self._ping_deadline is not None:
            if now >= self._ping_deadline:
                self._on_silence(process)
        elif now >= self._soonest + LATE_SECONDS:
            self._find_soonest()
            if now >= self._soonest + LATE_SECONDS:
                self._ping_deadline = now + PING_SECONDS
                process.outbox.put(pickle.dumps(Ping()))

    def _find_soonest(self) -> None:
        self._soonest = min((call.deadline for call in self._running.values()), default=float("inf"))

    def _on_pong(self, process: _Process, spent: dict[int, float], doing: dict[int, str]) -> None:
        """The interpreter runs, so each call that has had more than its time hangs by itself. The others that are late
        were kept waiting and get what they have left."""
        self._ping_deadline = None
        now = time.monotonic()
        hanging = []
        for call in self._running.values():
            if call.timeout is None or now < call.deadline:
                continue
            left = call.timeout - spent.get(call.id, 0.0)
            if left <= 0:
                hanging.append(call)
            else:
                call.deadline = now + left
        self._find_soonest()
        if hanging:
            self._blame(process, hanging, doing)

    def _on_silence(self, process: _Process) -> None:
        """Some call holds the interpreter, and the late ones may just be its victims."""
        if len(self._running) == 1:
            self._blame(process, list(self._running.values()), {})
        else:
            calls = self._take_running()
            self._suspect(calls)
            self._replace(process, again=len(calls))

    def _blame(self, process: _Process, calls: Iterable[_Pending], doing: dict[int, str]) -> None:
        for call in calls:
            function = doing.get(call.id)
            what = "no answer after" if function is None else f"{function}() took longer than"
            _refuse(self._finish(call.id).answer, HostTimeoutError(f"{what} {call.timeout:g} s", function))
        others = self._take_running()
        self._run_again(others)
        self._replace(process, again=len(others))

    def _replace(self, process: _Process, *, again: int) -> None:
        """End a process that hangs; `_dispatch` starts the next."""
        logger.warning("%s: ended because a call took too long; other calls run again: %d", self._name, again)
        self._end(process)

    def _end(self, process: _Process) -> None:
        self._kill(process)
        self._process = None

    def _on_exit(self, process: _Process) -> None:
        """The process died by itself."""
        self._process = None
        how = _how_it_ended(process.popen.returncode)
        if not process.ready:
            self._fail_start(HostStartError(f"the process {how} while it loaded"))
            return
        calls = self._take_running()
        if len(calls) == 1:
            calls[0].deaths += 1
            if calls[0].deaths > self._max_crashes:
                _give_up_asks(calls[0])
                _refuse(calls.pop().answer, HostCrashError(f"the process {how}"))
        logger.warning("%s: the process %s; calls run again: %d", self._name, how, len(calls))
        self._suspect(calls)

    def _take_running(self) -> list[_Pending]:
        """They have no process any more."""
        calls = list(self._running.values())
        self._running.clear()
        self._soonest = float("inf")
        self._ping_deadline = None
        return calls

    def _suspect(self, calls: Sequence[_Pending]) -> None:
        """One of them did it, most likely one that was not waiting for an answer. Who did wait is believed once."""
        everybody_waited = all(call.asks for call in calls)
        believed = []
        for call in calls:
            if call.asks and not call.spared and not everybody_waited:
                call.spared = True
                believed.append(call)
            else:
                call.suspect = True
                _give_up_asks(call)
                self._suspects.append(call)
        self._run_again(believed)

    def _run_again(self, calls: Sequence[_Pending]) -> None:
        """Back to where they waited, from scratch: their next life asks anew."""
        for call in calls:
            _give_up_asks(call)
        self._waiting.extendleft(reversed(calls))

    def _fail_start(self, error: HostStartError) -> None:
        """Nobody waits for a service that cannot be made; a later call tries again."""
        self._process = None
        for starter in self._starters:
            _refuse(starter.answer, error)
        for call in (*self._suspects, *self._waiting):
            _refuse(call.answer, error)
        self._starters.clear()
        self._suspects.clear()
        self._waiting.clear()

    # ------------------------------------------------------------------------------------ the process

    def _spawn(self) -> None:
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
            self._fail_start(HostStartError(f"no process could be started: {error}"))
            return
        owners.guard.watch(popen.pid)
        outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        process = _Process(popen, outbox, time.monotonic() + self._start_timeout, Address(popen.pid, beacon))
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
        self._process = process

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
        calls = (*self._running.values(), *self._suspects, *self._waiting)
        self._refuse_all([call.answer for call in calls], error)
        for call in calls:
            _give_up_asks(call)
        while True:  # what was posted just before the end
            try:
                event = self._events.get_nowait()
            except queue.Empty:
                break
            if isinstance(event, _Submit):
                self._refuse_all([event.call.answer], error)
            elif isinstance(event, _Start):
                self._refuse_all([event.answer], error)
        process = self._process
        if process is None:
            return
        process.outbox.put(None)
        try:
            process.popen.wait(timeout=grace)
        except subprocess.TimeoutExpired:
            self._kill(process)
            process.popen.wait()
        self._process = None

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


def _give_up_asks(call: _Pending) -> None:
    for asked in call.asks.values():
        asked.cancel()
    call.asks.clear()


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

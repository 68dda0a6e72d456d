"""Users' code in a process of its own: a crash, an endless loop or a blocking call there touches nothing here.

`HostProcess` starts the process, sends it calls and gives their answers to coroutines. When a call passes its
deadline, or the process dies, the process is replaced and the other calls in it are run again, unnoticed by those
who wait for them. Which call is to blame is found out, not guessed: if several could be, they are run again one
at a time, and the one under which the process dies alone is it.

Threads of one host, none of which ever waits for another's lock:

    supervisor  owns all state; consumes events (submit, reply, exit, close) and deadlines
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
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import IO, Any

from openrlhf.agents.host_worker import Call, Done, Failed, Failure, Hello, Ping, Pong, Ready

logger = logging.getLogger(__name__)

PING_SECONDS = 0.5
"""How long a host whose call is late has to show that its interpreter still runs."""

# Before anything is imported: the protocol's pipes move to private descriptors, so that users' code (and programs it
# starts) can neither print into the replies nor read the requests; stdout becomes stderr. SIGINT gets a handler that
# does nothing instead of SIG_IGN, which programs started from here would inherit.
BOOTSTRAP = """
import os, pickle, signal, sys
signal.signal(signal.SIGINT, lambda *_: None)
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
    """The call passed its deadline; the process was ended."""


class HostCrashError(HostError):
    """The process died while it ran this call and nothing else."""


class HostClosedError(HostError):
    """The host was closed before the call was answered."""


class RemoteError(HostError):
    """The method raised."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(f"{failure.kind}: {failure.text}")
        self.failure = failure


@dataclass(slots=True, eq=False)
class _Pending:
    """A call that has not been answered yet."""

    id: int
    payload: bytes
    timeout: float | None
    answer: Future[Any]
    deadline: float = float("inf")
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
    ready: bool = False
    killed: bool = False


@dataclass(slots=True)
class _Submit:
    call: _Pending


@dataclass(slots=True)
class _Start:
    answer: Future[None]


@dataclass(slots=True)
class _Reply:
    process: _Process
    message: Any


@dataclass(slots=True)
class _Exit:
    process: _Process


@dataclass(slots=True)
class _Close:
    grace: float


_Event = _Submit | _Start | _Reply | _Exit | _Close


@dataclass(slots=True)
class _Probe:
    """A late call, and by when the host must have shown that it is only this call that hangs."""

    call: _Pending
    deadline: float = field(default_factory=lambda: time.monotonic() + PING_SECONDS)


class HostProcess:
    """A service in a process of its own.

    `target` is `module:callable`; the process imports it and calls it with `args`, and `call` names methods of what
    it returns. Sync methods run in threads, coroutines on one event loop, at most `max_concurrency` calls at once;
    a call waits for its turn here, and its time counts from when it is sent. Arguments and results are pickled.

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
    ) -> None:
        """`name` is for messages. A call under which the process dies `max_crashes` + 1 times is given up."""
        if max_concurrency < 1:
            raise ValueError(f"max_concurrency must be >= 1, got {max_concurrency}")
        self._hello = pickle.dumps(list(sys.path)) + pickle.dumps(Hello(target, args))
        self._name = name
        self._start_timeout = start_timeout
        self._max_concurrency = max_concurrency
        self._max_crashes = max_crashes
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
        self._probe: _Probe | None = None
        _hosts.add(self)

    # ------------------------------------------------------------------------------------ for callers

    async def start(self) -> None:
        """Make the service. Raises HostStartError."""
        answer: Future[None] = Future()
        self._post(_Start(answer))
        await asyncio.wrap_future(answer)

    async def call(self, method: str, *args: Any, timeout: float | None = None) -> Any:
        """What `method` returns. Raises RemoteError, HostTimeoutError, HostCrashError or HostStartError."""
        call_id = next(self._ids)
        call = _Pending(call_id, pickle.dumps(Call(call_id, method, pickle.dumps(args))), timeout, Future())
        self._post(_Submit(call))
        return await asyncio.wrap_future(call.answer)

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
        deadlines = [call.deadline for call in self._running.values()]
        if self._process is not None and not self._process.ready:
            deadlines.append(self._process.deadline)
        if self._probe is not None:
            # The late call's own deadline has passed; what counts now is the probe's.
            deadlines = [self._probe.deadline]
        soonest = min(deadlines, default=float("inf"))
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
        alone = self._suspects or any(call.suspect for call in self._running.values())
        limit = 1 if alone else self._max_concurrency
        while len(self._running) < limit and (calls := self._suspects or self._waiting):
            call = calls.popleft()
            if not call.answer.cancelled():
                self._send(process, call)

    def _send(self, process: _Process, call: _Pending) -> None:
        if call.timeout is not None:
            call.deadline = time.monotonic() + call.timeout
        self._running[call.id] = call
        process.outbox.put(call.payload)

    def _on_reply(self, process: _Process, message: Any) -> None:
        match message:
            case Ready():
                process.ready = True
            case Failure():
                process.outbox.put(None)  # it ends by itself, but exit handlers of users' code may hang
                self._fail_start(HostStartError(f"{message.kind}: {message.text}", message))
            case Done(call_id, value) if call_id in self._running:
                self._answer(self._finish(call_id), value)
            case Failed(call_id, failure) if call_id in self._running:
                _refuse(self._finish(call_id).answer, RemoteError(failure))
            case Pong(call_id) if self._probe is not None and self._probe.call.id == call_id:
                self._blame_late()

    @staticmethod
    def _answer(call: _Pending, value: bytes) -> None:
        try:
            _resolve(call.answer, pickle.loads(value))
        except Exception as error:  # a class that exists over there only
            _refuse(call.answer, HostError(f"its result cannot be read here: {error!r}"))

    def _finish(self, call_id: int) -> _Pending:
        if self._probe is not None and self._probe.call.id == call_id:
            self._probe = None
        return self._running.pop(call_id)

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
        if self._probe is not None:
            if now >= self._probe.deadline:
                # Some call holds the interpreter, and the late one may just be its victim.
                self._suspect(self._running.values())
                self._replace(process)
            return
        late = next((call for call in self._running.values() if now >= call.deadline), None)
        if late is None:
            return
        if len(self._running) == 1:
            self._blame_late()
        else:
            self._probe = _Probe(late)
            process.outbox.put(pickle.dumps(Ping(late.id)))

    def _blame_late(self) -> None:
        """The interpreter runs, so each late call hangs by itself. The others go back to where they waited."""
        now = time.monotonic()
        late = [call for call in self._running.values() if now >= call.deadline]
        for call in late:
            del self._running[call.id]
            _refuse(call.answer, HostTimeoutError(f"no answer after {call.timeout:g} s"))
        self._waiting.extendleft(reversed(self._running.values()))
        assert self._process is not None
        self._replace(self._process)

    def _replace(self, process: _Process) -> None:
        """End a process that hangs; `_dispatch` starts the next."""
        logger.warning(
            "%s: ended because a call took too long; other calls run again: %d", self._name, len(self._running)
        )
        self._probe = None
        self._running.clear()
        self._kill(process)
        self._process = None

    def _on_exit(self, process: _Process) -> None:
        """The process died by itself."""
        self._process = None
        self._probe = None
        how = _how_it_ended(process.popen.returncode)
        if not process.ready:
            self._fail_start(HostStartError(f"the process {how} while it loaded"))
            return
        calls = list(self._running.values())
        self._running.clear()
        if len(calls) == 1:
            calls[0].deaths += 1
            if calls[0].deaths > self._max_crashes:
                _refuse(calls.pop().answer, HostCrashError(f"the process {how}"))
        logger.warning("%s: the process %s; calls run again: %d", self._name, how, len(calls))
        self._suspect(calls)

    def _suspect(self, calls: Iterable[_Pending]) -> None:
        for call in calls:
            call.suspect = True
            self._suspects.append(call)

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
            popen = subprocess.Popen(
                [sys.executable, "-c", BOOTSTRAP],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                # Its own session: Ctrl-C goes to us alone, and ending the group ends what users' code has started.
                start_new_session=True,
            )
        except OSError as error:
            self._fail_start(HostStartError(f"no process could be started: {error}"))
            return
        outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        process = _Process(popen, outbox, time.monotonic() + self._start_timeout)
        assert popen.stdin is not None
        assert popen.stdout is not None
        outbox.put(self._hello)
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

"""World processes, from outside: one runs a world's package in its own Python (`server.py`) and is asked over pipes.

A call has a name and a deadline, which begins when the process gets it. A process that misses one is killed. A process
that dies fails the calls that it has not answered, and the next call finds another one in its place.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import itertools
import json
import logging
import os
import queue
import secrets
import signal
import subprocess
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from openrlhf.utils import parent_death
from openrlhf.worlds.base import (
    AnyStart,
    GameStart,
    GameTurn,
    Outcome,
    Turn,
    WorldError,
    WorldSettings,
    shown,
    start_of_json,
)
from openrlhf.worlds.environments import WorldPython, install_command, world_name
from openrlhf.worlds.games import GamePlan
from openrlhf.worlds.server import MARK, end_marked

logger = logging.getLogger(__name__)

START_SECONDS = 180.0
"""How long a world process may take to import its package and make its world."""
LEAST_WAIT = 0.05
LINES_KEPT = 20
"""Of what a world process has written to its standard error: a message about its death ends with the last ones."""

_FOLDER = Path(__file__).resolve().parents[1]
_keys = itertools.count(1)
_alive: weakref.WeakSet[WorldProcess] = weakref.WeakSet()
_under_way: set[asyncio.Task[Any]] = set()
"""An event loop does not keep its tasks alive by itself."""
T = TypeVar("T")


class WorldFailure(Exception):
    """A call of a world failed. The text names the world, and is all that people need."""

    retry = True
    """Whether another attempt may succeed."""


class WorldRefusal(WorldFailure):
    """The world says that what it was asked cannot be done: a `WorldError` inside."""

    retry = False


class WorldDeath(WorldFailure):
    """The process ended, or was ended, before it answered."""

    def __init__(self, text: str, *, others: bool = False) -> None:
        super().__init__(text)
        self.others = others
        """Whether it was a call of others under which it ended."""


class WorldTimeout(WorldFailure):
    """The call took longer than its deadline, and the process was killed."""

    retry = False


class WorldPlan(NamedTuple):
    """All that a world's processes are started with."""

    target: str
    """`openrlhf.worlds.NAME`, or the path of a file with a class `World`."""
    settings: WorldSettings
    python: WorldPython
    timeout: float
    """Seconds that each call may take."""
    processes: int = 1
    """How many share the episodes of a host."""
    games: GamePlan = GamePlan()

    def process(self, index: int = 0) -> WorldProcess:
        """One of them, which is not started yet."""
        return WorldProcess(self.target, self.settings, python=self.python, timeout=self.timeout, index=index)


class _Call(NamedTuple):
    id: int
    line: bytes
    sent: Future[None]
    answered: Future[Any]


class WorldProcess:
    """A world in a process of its own, which is started when it is first asked, and again after its death.

    It may be asked from any thread and event loop.
    """

    def __init__(
        self,
        target: str,
        settings: WorldSettings,
        *,
        python: WorldPython,
        timeout: float,
        start_timeout: float = START_SECONDS,
        index: int = 0,
    ) -> None:
        """
        Args:
            target: `openrlhf.worlds.NAME`, or the path of a file with a class `World`.
            timeout: seconds that each call may take.
            index: of the process among those of the same world, for messages.
        """
        self.target = target
        self.name = f"world {world_name(target)}" + (f" (process {index + 1})" if index else "")
        self.playing = 0
        """Episodes under way."""
        self._settings = settings
        self._python = python
        self._timeout = timeout
        self._start_timeout = start_timeout
        self._counting = threading.Lock()
        self._lock = threading.RLock()
        """Held while a process starts: not to be waited for on an event loop."""
        self._life: _Life | None = None

    async def begin(self, label: Any, *, seed: int) -> WorldEpisode:
        """An episode of the record with this label. Raises WorldFailure.

        One whose caller is cancelled meanwhile is begun all the same, and then closed.
        """
        self.count(1)  # before anything is awaited: of episodes that begin at once, each sees the others
        beginning = _kept(self._begin(label, seed))
        try:
            await asyncio.wait([beginning])
        except asyncio.CancelledError:
            beginning.add_done_callback(_close_unwanted)
            raise
        return beginning.result()

    async def _begin(self, label: Any, seed: int) -> WorldEpisode:
        try:
            life = await self._alive()
            key = next(_keys)
            request = {"do": "begin", "episode": key, "label": label, "seed": seed}
            start = self.read(start_of_json, "begin", await life.ask(request, "begin", self._timeout))
        except BaseException:
            self.count(-1)
            raise
        return WorldEpisode(self, life, key, start, self._timeout)

    def count(self, change: int) -> None:
        """An episode begins, or is over. This waits for nothing, not for a process that is being started either."""
        with self._counting:
            self.playing += change

    def read(self, kind: Callable[[Any], T], method: str, told: Any) -> T:
        """What the world has answered. Raises WorldFailure where it is something else."""
        try:
            return kind(told)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise WorldRefusal(f"{self.name}: {method} has returned {shown(told)}: {error}") from error

    async def call(self, method: str, *args: Any, **named: Any) -> Any:
        """A method of the world itself, by name. Raises WorldFailure."""
        life = await self._alive()
        return await life.ask({"do": "call", "method": method, "args": args, "named": named}, method, self._timeout)

    def records(self, *, count: int, seed: int) -> Iterator[dict[str, Any]]:
        """The prompts of a run, in order; a plain generator, which waits. Raises WorldFailure."""
        life = self._started()
        asked = {"do": "records", "key": next(_keys), "count": count, "seed": seed}
        more = True
        while more:
            part = life.ask_now(asked, "records", self._timeout)
            yield from part["records"]
            more = part["more"]

    async def start(self) -> dict[str, Any]:
        """What the world says of itself. Raises WorldFailure when it cannot be made."""
        return (await self._alive()).about

    def start_now(self) -> dict[str, Any]:
        """The same for a caller without an event loop."""
        return self._started().about

    def close(self) -> None:
        """End the process, with all that it has started."""
        with self._lock:
            life, self._life = self._life, None
        if life is not None:
            life.end()

    async def _alive(self) -> _Life:
        return await asyncio.to_thread(self._started) if self._life is None or self._life.ended else self._life

    def _started(self) -> _Life:
        with self._lock:  # who comes second waits until the first has started it
            if self._life is None or self._life.ended:
                try:
                    life = _Life(self)
                except OSError as error:
                    raise WorldRefusal(f"{self.name}: {self._python.path} cannot be started: {error}") from error
                self._life = life
                try:
                    life.about = life.ask_now(
                        {"do": "open", "settings": self._settings.as_json()}, "start", self._start_timeout
                    )
                except WorldFailure:
                    life.end()
                    raise
                life.threads = life.about["threads"]
                logger.info("%s runs in Python %s (%s)", self.name, life.about["python"], self._python.path)
            return self._life


class WorldEpisode:
    """One episode under way in a world process."""

    def __init__(self, process: WorldProcess, life: _Life, key: int, start: AnyStart, timeout: float) -> None:
        self.start = start
        self._process = process
        self._life = life
        self._key = key
        self._timeout = timeout

    async def step(self, message: Mapping[str, Any]) -> Turn:
        """The world's answer to what the policy said. Raises WorldFailure."""
        return self._process.read(Turn.of_json, "step", await self.call("step", message))

    async def move(self, agent: str, message: Mapping[str, Any]) -> GameTurn:
        """The same in a game of several agents. Raises WorldFailure."""
        turn = self._process.read(GameTurn.of_json, "step", await self.call("step", agent, message))
        assert isinstance(self.start, GameStart)
        if strangers := {turn.agent, *turn.rewards, *turn.scores, *turn.logs} - {"", *self.start.agents}:
            there = ", ".join(self.start.agents)
            raise WorldRefusal(f"{self._process.name}: step speaks of agent {min(strangers)!r}; the game has {there}")
        return turn

    async def run(self, base_url: str, api_key: str, model: str, *, waited: Callable[[], float]) -> Outcome:
        """Have an episode that drives itself do so. Its deadline is for its own time: not for what it has `waited` for
        the policy. Raises WorldFailure."""
        request = {"do": "call", "episode": self._key, "method": "run", "args": [base_url, api_key, model]}
        return self._process.read(Outcome.of_json, "run", await self._life.ask(request, "run", self._timeout, waited))

    async def call(self, method: str, *args: Any, **named: Any) -> Any:
        """A method of the episode, by name. Raises WorldFailure."""
        request = {"do": "call", "episode": self._key, "method": method, "args": args, "named": named}
        return await self._life.ask(request, method, self._timeout)

    async def close(self) -> None:
        """The episode is over. A failure to say so harms nobody."""
        self._process.count(-1)
        with contextlib.suppress(WorldFailure):
            await self._life.ask({"do": "end", "episode": self._key}, "close", self._timeout)


class _Life:
    """One process, from its start to its end."""

    def __init__(self, world: WorldProcess) -> None:
        self.about: dict[str, Any] = {}
        self.threads = False
        self.ended = False
        self._name = world.name
        self._target = world.target
        self._python = world._python
        self._ids = itertools.count()
        self._lock = threading.Lock()
        self._calls: dict[int, _Call] = {}
        self._queue: deque[_Call] = deque()
        self._due: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._written: deque[str] = deque(maxlen=LINES_KEPT)
        self._ends_with: WorldFailure | None = None
        self._mark = secrets.token_hex(8)
        self._popen = subprocess.Popen(
            [str(world._python.path), str(_FOLDER / "worlds" / "server.py"), world.target, str(_FOLDER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=world._python.environment() | {MARK: self._mark},
            start_new_session=True,  # with its children it is one group, and Ctrl-C is for us
        )
        parent_death.guard.watch(self._popen.pid)
        _alive.add(world)
        self._reads_errors = threading.Thread(target=self._read_errors, name=f"{world.name} stderr", daemon=True)
        self._reads_errors.start()
        threading.Thread(target=self._read_answers, name=world.name, daemon=True).start()
        threading.Thread(target=self._write, name=f"{world.name} stdin", daemon=True).start()

    async def ask(
        self, request: dict[str, Any], what: str, timeout: float, waited: Callable[[], float] = lambda: 0.0
    ) -> Any:
        """`waited`: seconds in which the process has waited for us, which are not its own.

        The deadline holds for a call whose caller is cancelled too: others wait until the process has answered it.
        """
        asking = _kept(self._answer(self._submit(request), what, timeout, waited))
        await asyncio.wait([asking])
        return asking.result()

    async def _answer(self, call: _Call, what: str, timeout: float, waited: Callable[[], float]) -> Any:
        await asyncio.wait([asyncio.wrap_future(call.sent)])
        answered = asyncio.wrap_future(call.answered)
        began = time.monotonic()
        while (left := timeout + waited() - (time.monotonic() - began)) > 0:
            await asyncio.wait([answered], timeout=max(left, LEAST_WAIT))
            if answered.done():
                return answered.result()
        answered.add_done_callback(_look_at)
        raise self._timed_out(what, timeout)

    def ask_now(self, request: dict[str, Any], what: str, timeout: float) -> Any:
        call = self._submit(request)
        try:
            call.sent.result()
            return call.answered.result(timeout)
        except TimeoutError:
            raise self._timed_out(what, timeout) from None

    def end(self, why: WorldFailure | None = None) -> None:
        """Kill the process and what it has started. `why`: what calls that are under way fail with."""
        with self._lock:
            self.ended = True
            self._ends_with = self._ends_with or why
        self._kill()

    def _kill(self) -> None:
        """Children that outlived it, too."""
        if self._popen.returncode is None:  # else its number may be another's
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._popen.pid, signal.SIGKILL)
        end_marked(self._mark)

    def _timed_out(self, what: str, timeout: float) -> WorldTimeout:
        why = f"{self._name} was killed, as another episode's {what} took longer than {timeout:g} s"
        self.end(WorldDeath(why, others=True))
        return WorldTimeout(f"{self._name}: {what} took longer than {timeout:g} s; its process was killed")

    def _submit(self, request: dict[str, Any]) -> _Call:
        call = _Call(number := next(self._ids), self._line({**request, "id": number}), Future(), Future())
        with self._lock:
            why = self._ends_with
            if why is None:
                self._calls[call.id] = call
                self._queue.append(call)
                if not self.ended:  # else it is answered when it is known how the process has ended
                    self._send_due()
                return call
        raise why

    def _line(self, request: dict[str, Any]) -> bytes:
        try:
            return json.dumps(request).encode() + b"\n"
        except (TypeError, ValueError) as error:
            what = f"the label {shown(request['label'])}" if "label" in request else shown(request)
            raise WorldRefusal(f"{self._name}: {what} is no JSON, which is all that worlds read: {error}") from error

    def _send_due(self) -> None:
        """Under the lock. A world without threads gets the next call when it has answered the last one."""
        while self._queue and (self.threads or len(self._calls) == len(self._queue)):
            call = self._queue.popleft()
            self._due.put(call.line)
            call.sent.set_result(None)

    def _write(self) -> None:
        """In a thread of its own: a process that does not read must not stop those who ask."""
        stdin = self._popen.stdin
        assert stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has died: who reads its answers finds out
            while (line := self._due.get()) is not None:
                stdin.write(line)
                stdin.flush()
        with contextlib.suppress(OSError):
            stdin.close()

    def _read_answers(self) -> None:
        assert self._popen.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._popen.stdout:
                answer = json.loads(line)
                with self._lock:
                    call = self._calls.pop(answer["id"])
                    self._send_due()
                if "error" in answer:
                    call.answered.set_exception(self._failure(answer["error"]))
                else:
                    call.answered.set_result(answer["result"])
        self._bury()

    def _bury(self) -> None:
        with self._lock:
            self.ended = True
        self._kill()
        status = self._popen.wait()
        self._due.put(None)
        parent_death.guard.forget(self._popen.pid)
        self._reads_errors.join(timeout=1.0)
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        said = f"; its last words: {' | '.join(list(self._written)[-3:])}" if self._written else ""
        with self._lock:
            # Who is in the middle of a call may be the reason; of many nobody knows which one.
            met = self._ends_with or WorldDeath(f"{self._name} {how}{said}")
            self._ends_with = self._ends_with or WorldDeath(f"{self._name} {how}{said}", others=True)
            calls = list(self._calls.values())
            self._calls.clear()
            self._queue.clear()
        for call in calls:
            began = call.sent.done()
            if not began:
                call.sent.set_result(None)
            call.answered.set_exception(met if began else self._ends_with)

    def _read_errors(self) -> None:
        assert self._popen.stderr is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._popen.stderr:
                text = line.decode(errors="replace").rstrip()
                if text:
                    self._written.append(text)
                    logger.debug("%s: %s", self._name, text)

    def _failure(self, error: Mapping[str, str]) -> WorldFailure:
        text = f"{self._name}: {error['text']}"
        if error["kind"] == "ModuleNotFoundError":
            command = install_command(self._target)
            return WorldRefusal(f"{text} in {self._python.path}" + (f". Run: {command}" if command else ""))
        logger.debug("%s\n%s", text, error["traceback"])
        return WorldRefusal(text) if error["kind"] == WorldError.__name__ else WorldFailure(text)


def _kept(work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """A task that goes on where its caller is cancelled."""
    task = asyncio.ensure_future(work)
    _under_way.add(task)
    task.add_done_callback(_under_way.discard)
    task.add_done_callback(_look_at)
    return task


def _look_at(answered: asyncio.Future[Any]) -> None:
    """What nobody waits for any more is no exception that was never retrieved."""
    if not answered.cancelled():
        answered.exception()


def _close_unwanted(beginning: asyncio.Task[WorldEpisode]) -> None:
    if not beginning.cancelled() and beginning.exception() is None:
        _kept(beginning.result().close())


@atexit.register
def _close_all() -> None:
    for world in list(_alive):
        world.close()

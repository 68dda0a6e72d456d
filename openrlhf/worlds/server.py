"""The inside of a world process: it makes one `World` and serves its episodes. Imports the standard library only.

    python server.py openrlhf.worlds.reasoning_gym FOLDER_OF_OPENRLHF

Requests come as lines of JSON on the standard input, and answers go out on what was the standard output: whatever the
package prints goes to the standard error instead. When the requests end, the parent is gone or done: then the process
ends at once, with every process that it has started.

    {"id": 1, "do": "open", "settings": {…}}                        {"id": 1, "result": {"threads": false, …}}
    {"id": 2, "do": "begin", "episode": 7, "label": …, "seed": 5}   {"id": 2, "result": {"messages": […], …}}
    {"id": 3, "do": "call", "episode": 7, "method": "step", "args": [{…}]}
    {"id": 4, "do": "end", "episode": 7}                            {"id": 4, "error": {"kind": …, "text": …}}

`call` without an episode calls a method of the world. What a method returns is JSON, or has `as_json()`.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    del sys.path[0]  # the folder of this file, where gymnasium.py is not Gymnasium

import contextlib
import importlib
import importlib.util
import itertools
import json
import os
import platform
import queue
import random
import signal
import threading
import time
import traceback
import types
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

PREFIX = "openrlhf.worlds."
MOST_THREADS = 1024
"""Calls at once of a world that allows threads."""
RECORD_SECONDS = 0.5
"""Records are sent in parts that take about this long to make: no part waits for a whole data set."""


MARK = "OPENRLHF_WORLD_PROCESS"
"""The environment variable by which a world's process knows what it has started, also in sessions of their own."""
SWEEPS = 3


def end_marked(mark: str) -> None:
    """Kill every other process that has this mark, where the system shows them (/proc)."""
    sought = f"{MARK}={mark}".encode()
    for _ in range(SWEEPS):  # one that was missed has been started meanwhile
        found = False
        for pid in _processes():
            try:
                with open(f"/proc/{pid}/environ", "rb") as variables:
                    if sought in variables.read().split(b"\0"):
                        os.kill(pid, signal.SIGKILL)
                        found = True
            except OSError:  # it has ended, or is another user's
                continue
        if not found:
            return


def _processes() -> list[int]:
    try:
        names = os.listdir("/proc")
    except OSError:
        return []
    return [int(name) for name in names if name.isdigit() and int(name) != os.getpid()]


def load_world(target: str, folder: str) -> Any:
    """The class `World` of a module of `openrlhf.worlds`, or of a file. `folder` is that of the package `openrlhf`,
    whose own `__init__` is not run: what it imports is not installed here."""
    if "openrlhf" not in sys.modules:
        package = types.ModuleType("openrlhf")
        package.__path__ = [folder]
        sys.modules["openrlhf"] = package
    if target.startswith(PREFIX):
        return importlib.import_module(target).World
    file = os.path.abspath(target)
    name = "user_world_" + os.path.splitext(os.path.basename(file))[0]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, os.path.dirname(file))
    spec.loader.exec_module(module)
    return module.World


class Server:
    """Answers requests. Those of a world without threads run in the thread that calls `run`."""

    def __init__(self, target: str, folder: str, answers: BinaryIO) -> None:
        self._target = target
        self._folder = folder
        self._answers = answers
        self._writing = threading.Lock()
        self._waiting: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._pool: ThreadPoolExecutor | None = None
        self._world: Any = None
        self._episodes: dict[int, Any] = {}
        self._records: dict[int, Any] = {}

    def put(self, request: dict[str, Any]) -> None:
        """From the thread that reads requests."""
        if self._pool is not None:
            self._pool.submit(self._serve, request)
        else:
            self._waiting.put(request)

    def run(self) -> None:
        """Packages may want the main thread: signals and some windows are only there."""
        while True:
            self._serve(self._waiting.get())

    def _serve(self, request: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"id": request["id"]}
        try:
            result = getattr(self, "_do_" + request["do"])(request)
            told = result.as_json() if hasattr(result, "as_json") else result
            try:
                line = json.dumps({**answer, "result": told})
            except (TypeError, ValueError) as error:
                what = request.get("method", request["do"])
                raise self._refusal(f"{what} has returned something that is no JSON: {error}") from error
        except BaseException as error:  # SystemExit too: a package that ends the process fails this call alone
            if request["do"] == "begin":
                self._forget(request)
            line = json.dumps({**answer, "error": self._failure(error)})
        with self._writing:
            self._answers.write(line.encode() + b"\n")
            self._answers.flush()

    def _do_open(self, request: dict[str, Any]) -> dict[str, Any]:
        cls = load_world(self._target, self._folder)
        from openrlhf.worlds.base import WorldSettings

        settings = WorldSettings.of_json(request["settings"])
        random.seed(settings.seed)  # of packages that draw from the shared generator
        self._world = cls(settings)
        lacking = [name for name in ("records", "begin") if not callable(getattr(self._world, name, None))]
        if lacking:
            raise self._refusal(f"World has no method {lacking[0]}")
        if threads := bool(getattr(cls, "THREADS", False)):
            self._pool = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="world")
        return {
            "threads": threads,
            "python": platform.python_version(),
            "methods": sorted(_public(cls)),
            "agents": int(getattr(self._world, "agents", 1)),
            "opponents": list(getattr(self._world, "opponents", ())),
        }

    def _do_records(self, request: dict[str, Any]) -> dict[str, Any]:
        """A part of the records; `key` goes on with those of an earlier request."""
        key = request["key"]
        if key not in self._records:
            records = self._world.records(count=request["count"], seed=request["seed"])
            self._records[key] = itertools.islice(records, request["count"])  # one that goes on for ever may
        part, ends = [], time.monotonic() + RECORD_SECONDS
        for record in self._records[key]:
            part.append(record)
            if time.monotonic() > ends:
                return {"records": part, "more": True}
        del self._records[key]
        return {"records": part, "more": False}

    def _do_begin(self, request: dict[str, Any]) -> Any:
        episode = self._world.begin(request["label"], seed=request["seed"])
        self._episodes[request["episode"]] = episode
        start = getattr(episode, "start", None)
        if not hasattr(start, "as_json"):
            raise self._refusal(f"begin has returned an episode whose start is no Start: {start!r:.120}")
        return start

    def _do_call(self, request: dict[str, Any]) -> Any:
        key = request.get("episode")
        on = self._world if key is None else self._episodes[key]
        return getattr(on, request["method"])(*request.get("args", ()), **request.get("named", {}))

    def _do_end(self, request: dict[str, Any]) -> None:
        episode = self._episodes.pop(request["episode"], None)
        if episode is not None and hasattr(episode, "close"):
            episode.close()

    def _forget(self, request: dict[str, Any]) -> None:
        """Nobody will play, or end, an episode that could not begin."""
        with contextlib.suppress(Exception):
            self._do_end(request)

    def _refusal(self, text: str) -> Exception:
        from openrlhf.worlds.base import WorldError

        return WorldError(text)

    def _failure(self, error: BaseException) -> dict[str, str]:
        """`kind` is WorldError where another attempt gives the same. `text` names the innermost line of the adapter's
        own file, or the place where the package failed."""
        kind = type(error).__name__
        text = " ".join(str(error).split())
        if kind in ("WorldError", "ModuleNotFoundError"):
            missing = str(getattr(error, "name", "") or "")
            return {"kind": kind, "text": text, "missing": missing, "traceback": traceback.format_exc()}
        own = self._file()
        trace = list(traceback.extract_tb(error.__traceback__))
        frames = [frame for frame in trace if frame.filename == own] or trace
        place = f"{frames[-1].filename}:{frames[-1].lineno} (in {frames[-1].name}): " if frames else ""
        return {"kind": kind, "text": f"{place}{kind}: {text[:500]}", "traceback": traceback.format_exc()}

    def _file(self) -> str:
        if self._target.startswith(PREFIX):
            return os.path.join(self._folder, "worlds", self._target[len(PREFIX) :].replace(".", os.sep) + ".py")
        return os.path.abspath(self._target)


def _public(cls: Any) -> list[str]:
    return [name for name in dir(cls) if not name.startswith("_") and callable(getattr(cls, name))]


def main() -> None:
    """Serve the world that the command line names, until the requests end."""
    target, folder = sys.argv[1:]
    requests = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)  # what the package prints is no answer
    server = Server(target, folder, answers)

    def read() -> None:
        try:
            for line in requests:
                server.put(json.loads(line))
        finally:
            if mark := os.environ.get(MARK):
                end_marked(mark)
            if os.getpgrp() == os.getpid():
                os.killpg(os.getpid(), signal.SIGKILL)  # with all that the world has started
            os._exit(0)

    threading.Thread(target=read, name="requests", daemon=True).start()
    server.run()


if __name__ == "__main__":
    main()

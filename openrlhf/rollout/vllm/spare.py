"""A process that has imported vLLM before an engine asks for one.

vLLM's scheduler lives in a process of its own, which imports everything anew: ten seconds and more in which a run would
wait. A spare process does that from the start of a run, while the run's own process imports and loads. When an engine
starts, the spare becomes its scheduler's process. Whatever keeps it from that (it died, or would have imported other
things in the engine's environment), vLLM starts a process as ever.

    prepare      start a spare; this takes milliseconds
    take         the spare that `prepare` has started, for the one engine that may have it
    discard      end the one that nobody has taken

Imports neither torch nor vLLM: its work begins before they are imported here.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from typing import Any, NamedTuple

from openrlhf.config.commands import RLConfig
from openrlhf.rollout.vllm.settings import SOCKETS, environment, import_variables
from openrlhf.utils.foreign_lines import filter_unhandled
from openrlhf.utils.parent_death import exit_with_parent

IMPORTED = (
    "vllm.v1.engine.core",
    "openrlhf.rollout.vllm.compat",
    "openrlhf.rollout.vllm.scheduling",
    "openrlhf.rollout.vllm.worker",
)
"""What the scheduler's process needs; further ones for the worker in it."""
IMPORTED_ON = {True: "vllm.v1.worker.gpu_worker", False: "vllm.v1.worker.cpu_worker"}
"""By whether there is a GPU."""
SCHEDULER = "EngineCore"
"""The name that vLLM gives the process."""
END_SECONDS = 5.0


class Task(NamedTuple):
    """What the spare is to do, and where."""

    target: Callable[..., Any]
    arguments: dict[str, Any]
    variables: dict[str, str]
    """The whole environment."""
    folder: str


class SpareProcess:
    """A process that imports vLLM, and waits for its task."""

    def __init__(self, *, gpu: bool) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        wanted = import_variables(gpu=gpu)
        self._fixed = {name: os.environ.get(name, value) for name, value in wanted.items()}
        self._fixed["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        modules = (*IMPORTED, IMPORTED_ON[gpu])
        self.process: SpawnProcess = context.Process(
            target=_import_and_wait, args=(theirs, os.getpid(), modules), name=SCHEDULER
        )
        with environment(wanted):
            self.process.start()
        theirs.close()

    def give(self, target: Callable[..., Any], arguments: dict[str, Any]) -> bool:
        """Let it do this, in the environment and the folder that this process has now. False: it cannot."""
        if any(os.environ.get(name, "") != value for name, value in self._fixed.items()):
            return False
        task = Task(target, arguments, dict(os.environ), os.getcwd())
        try:
            self._ours.send(task)
        except (OSError, RuntimeError, TypeError, AttributeError, pickle.PicklingError):
            return False  # it has ended, or there is something in it that only a process that starts can inherit
        self._ours.close()
        return self.process.is_alive()

    def end(self) -> None:
        """Closing twice is fine."""
        self._ours.close()
        if self.process.is_alive():
            self.process.kill()  # it holds nothing but memory
        self.process.join(END_SECONDS)


def _import_and_wait(tasks: Connection, owner: int, modules: tuple[str, ...]) -> None:
    # Ctrl-C is for the run, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exit_with_parent(owner, leaving_nothing_in=lambda: os.environ.get(SOCKETS))
    filter_unhandled()  # vLLM says some things before it has set up its log
    for module in modules:
        # What is wrong with it is said where the scheduler needs it.
        with contextlib.suppress(Exception):
            importlib.import_module(module)
    try:
        task: Task = tasks.recv()
    except EOFError:
        return
    tasks.close()
    _set_environment(task.variables)
    os.chdir(task.folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    task.target(**task.arguments)


def _set_environment(variables: Mapping[str, str]) -> None:
    threads = variables.get("OMP_NUM_THREADS")
    if threads is not None and threads != os.environ.get("OMP_NUM_THREADS"):
        import torch  # which has read it when it was imported

        torch.set_num_threads(int(threads))
    for name in os.environ.keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)


class SpareContext:
    """multiprocessing's way to start processes, the first of which is the spare."""

    def __init__(self, context: SpawnContext, spare: SpareProcess) -> None:
        self._context = context
        self._spare: SpareProcess | None = spare

    def Process(self, *, target: Callable[..., Any], name: str, kwargs: dict[str, Any]) -> Any:
        plain = self._context.Process(target=target, name=name, kwargs=kwargs)
        spare, self._spare = self._spare, None
        return plain if spare is None else _StartedOrSpare(spare, plain, target, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


class _StartedOrSpare:
    """A process as multiprocessing has them; `start` decides which one it is."""

    def __init__(
        self, spare: SpareProcess, plain: SpawnProcess, target: Callable[..., Any], arguments: dict[str, Any]
    ) -> None:
        self._spare, self._process = spare, plain
        self._target, self._arguments = target, arguments

    def start(self) -> None:
        if self._spare.give(self._target, self._arguments):
            self._process = self._spare.process
        else:
            self._spare.end()
            self._process.start()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._process, name)


_prepared: SpareProcess | None = None


def prepare(*, gpu: bool | None = None) -> None:
    """Start a spare, unless there is one. `gpu` None: as this machine looks."""
    global _prepared
    if _prepared is None and importlib.util.find_spec("vllm") is not None:
        atexit.register(discard)  # multiprocessing waits for processes that are left, after this
        _prepared = SpareProcess(gpu=looks_like_gpu(os.environ) if gpu is None else gpu)


def take() -> SpareProcess | None:
    """The one that is prepared. Who takes it ends it, if it was of no use."""
    global _prepared
    spare, _prepared = _prepared, None
    return spare


def discard() -> None:
    """Nobody will need the one that is prepared."""
    if (spare := take()) is not None:
        spare.end()


@contextlib.contextmanager
def prepared(wanted: bool) -> Iterator[None]:
    """While open there is a spare, if one is wanted, for the first engine that starts."""
    if wanted:
        prepare()
    try:
        yield
    finally:
        discard()


def wants_spare(config: RLConfig, variables: Mapping[str, str]) -> bool:
    """Whether a run will start an engine in its first process, as far as flags and environment tell."""
    if config.train.launcher == "ray" or (config.train.launcher == "auto" and variables.get("RAY_ADDRESS")):
        return False
    engines = config.vllm.num_engines
    return engines == 1 or (engines is None and looks_like_gpu(variables))


def looks_like_gpu(variables: Mapping[str, str]) -> bool:
    """Whether torch will find a GPU of NVIDIA's here: a guess, without torch. A wrong one costs what a spare saves."""
    hidden = variables.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return not hidden and os.path.exists("/dev/nvidiactl")

"""Users' files: how they are loaded, and how their classes and functions are called with the arguments they take.

Every error becomes one line that names the user's file and line. Imports the standard library only: hosts start here.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from openrlhf.agents.host_worker import run_user

MOST_CHARACTERS = 500
"""The most characters of an exception's text in a message: some hold a whole page that a server has answered."""


_NOT_USERS = (
    str(Path(__file__).resolve().parents[1]),
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    "<frozen",
)
"""What the names of files begin with that no user has written."""


class UserFileError(Exception):
    """Users' code failed. The text says where in their file."""


def load_module(path: str | os.PathLike[str]) -> ModuleType:
    """Run the file as a module whose neighbours can be imported. Raises UserFileError naming file and line."""
    file = Path(path).expanduser().resolve()
    # Not its plain name: a file called json.py must not become the module json.
    name = f"user_file_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserFileError(f"{file} is not a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        place = f"{error.filename or file}:{error.lineno}"
        raise UserFileError(f"{place}: {type(error).__name__}: {error.msg}") from error
    except BaseException as error:  # SystemExit too: a script that ends the process has not loaded
        raise UserFileError(f"{describe_error(error, file=file)} (while the file was loaded)") from error
    return module


def describe_error(error: BaseException, *, file: Path) -> str:
    """`reward.py:12 (in grade): ZeroDivisionError: division by zero`, with the innermost line that is in `file`.

    Of a function that the file has from elsewhere, such as a notebook's cell, it is the innermost line there.
    """
    try:
        text = " ".join(str(error).split())
    except Exception:  # an exception whose own __str__ fails
        text = "(its text cannot be shown)"
    if len(text) > MOST_CHARACTERS:
        text = text[: MOST_CHARACTERS - 1] + "…"
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    trace = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in trace if frame.filename == str(file)]
    if not frames:
        elsewhere = next((frame.filename for frame in trace if not frame.filename.startswith(_NOT_USERS)), None)
        if elsewhere is None:
            return f"{file}: {what}"
        file, frames = Path(elsewhere), [frame for frame in trace if frame.filename == elsewhere]
    functions = [frame.name for frame in frames if not frame.name.startswith("<")]  # <module>, <listcomp>, <lambda>
    inside = f" (in {functions[-1]})" if functions else ""
    return f"{file}:{frames[-1].lineno}{inside}: {what}"


def public_functions(module: ModuleType) -> list[str]:
    """Names of the functions and classes the file itself defines, for messages."""
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", None) == module.__name__
    ]


class LoadedFile:
    """A file as a service of a host, which tells the names that the file defines."""

    def __init__(self, path: str) -> None:
        self._module = load_module(path)

    def names(self) -> list[str]:
        """The names at the file's top level, imports included."""
        return [name for name in vars(self._module) if not name.startswith("__")]


class AgentError(UserFileError):
    """Users' code failed in an episode. One line: file, line and what happened. Another attempt may succeed."""


class AgentResultError(AgentError):
    """Users' code returned something that cannot be used. Another attempt will give the same."""


@contextlib.contextmanager
def users_code(file: Path) -> Iterator[None]:
    """Exceptions inside become an AgentError that names the line in `file`."""
    try:
        yield
    except AgentError:
        raise
    except UserFileError as error:  # says where already
        raise AgentResultError(str(error)) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        # Theirs, when they await something they have cancelled themselves; ours, when this episode is given up.
        if task is None or task.cancelling():
            raise
        raise AgentError(describe_error(error, file=file)) from error
    except (Exception, SystemExit) as error:  # sys.exit() in a step fails the episode, not the process
        raise AgentError(describe_error(error, file=file)) from error


async def make_instance(cls: Any) -> Any:
    """`cls()`, also when its `__init__` is a coroutine."""
    if not inspect.iscoroutinefunction(cls.__init__):
        # Where its coroutines will run: what it makes may belong to their event loop.
        return await run_user(cls, thread=not inspect.iscoroutinefunction(getattr(cls, "step", None)))
    instance = cls.__new__(cls)
    await run_user(instance.__init__)
    return instance


def check_instance_class(cls: Any) -> None:
    """Raises UserFileError unless `make_instance(cls)` gives something with a `step` of one argument."""
    if not inspect.isclass(cls):
        remedy = ": leave @ray.remote out, agents have processes of their own" if hasattr(cls, "remote") else ""
        raise TypeError(f"the agent instance must be a class, got {type(cls).__name__}{remedy}")
    place = place_of(cls)
    if not callable(getattr(cls, "step", None)):
        raise UserFileError(f"{place}: {cls.__name__} does not define step(self, states, **kwargs)")
    missing = sorted(getattr(cls, "__abstractmethods__", ()))
    if missing:
        raise UserFileError(f"{place}: {cls.__name__} does not define {', '.join(missing)}")
    if not accepts(cls):
        raise UserFileError(f"{place}: {cls.__name__} is made without arguments, but takes {inspect.signature(cls)}")
    for name in ("reset", "step"):
        method = getattr(cls, name, None)
        if method is not None and not accepts(method, None, None):
            raise UserFileError(
                f"{place_of(method)}: {name} is called with one argument, states, but takes {inspect.signature(method)}"
            )


@dataclass(frozen=True, slots=True)
class CallPlan:
    """Which of the values on offer a callable takes, and how."""

    by_position: tuple[str, ...] = ()
    by_name: tuple[str, ...] = ()

    def takes(self, name: str) -> bool:
        return name in self.by_position or name in self.by_name

    def call(self, function: Any, values: Mapping[str, Any]) -> Any:
        return self.bind(function, values)()

    def bind(self, function: Any, values: Mapping[str, Any]) -> Callable[[], Any]:
        """`function` with its arguments, still known by its name."""
        bound = functools.partial(
            function,
            *(values[name] for name in self.by_position),
            **{name: values[name] for name in self.by_name},
        )
        return functools.update_wrapper(bound, function)


def plan_call(function: Any, names: Sequence[str], *, fewest: int, bound: bool = True) -> CallPlan | None:
    """How to call `function` with some of `names`: those it has as parameters by name, else the first few by position.

    `fewest` is how many may be passed by position at least; `bound` is False for a method taken from its class, whose
    `self` is passed first. None: it cannot be called with these.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # builtins: nothing is known of them
        return CallPlan(by_position=tuple(names))
    parameters = list(signature.parameters.values())
    this = () if bound else (None,)
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = tuple(p.name for p in parameters if p.name in names and p.kind in by_name)
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        named = tuple(names)
    if named and accepts(function, *this, **dict.fromkeys(named)):
        return CallPlan(by_name=named)
    for count in range(len(names), fewest - 1, -1):
        if accepts(function, *this, *names[:count]):
            return CallPlan(by_position=tuple(names[:count]))
    return None


def accepts(function: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether it can be called so, judging by its signature."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # builtins: nothing is known of them
        return True
    return True


UNKNOWN_FILE = Path("<unknown file>")


def place_of(thing: Any, *, unknown: Path = UNKNOWN_FILE) -> str:
    """`agent.py:12`: where a function or class begins; its file if the line is unknown; else `unknown`."""
    thing = inspect.unwrap(thing)
    code = getattr(thing, "__code__", None)
    if code is not None:
        return f"{code.co_filename}:{code.co_firstlineno}"
    file = file_of(thing, unknown=unknown)
    try:
        return f"{file}:{max(1, inspect.getsourcelines(thing)[1])}"
    except (OSError, TypeError):
        return str(file)


def file_of(thing: Any, *, unknown: Path = UNKNOWN_FILE) -> Path:
    """The file that a class or function was read from."""
    try:
        return Path(inspect.getfile(thing))
    except (OSError, TypeError):  # made in an interactive session
        return unknown

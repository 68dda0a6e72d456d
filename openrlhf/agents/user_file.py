"""Loading of users' Python files. Imports the standard library only: hosts start with it."""

from __future__ import annotations

import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType

MOST_CHARACTERS = 500
"""The most characters of an exception's text in a message: some hold a whole page that a server has answered."""


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
    """`reward.py:12 (in grade): ZeroDivisionError: division by zero`, with the innermost line that is in `file`."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # an exception whose own __str__ fails
        text = "(its text cannot be shown)"
    if len(text) > MOST_CHARACTERS:
        text = text[: MOST_CHARACTERS - 1] + "…"
    what = f"{type(error).__name__}: {text}" if text else type(error).__name__
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(file)]
    if not frames:
        return f"{file}: {what}"
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

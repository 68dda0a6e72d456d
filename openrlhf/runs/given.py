"""Functions, classes and records that a program gives a run directly, as files in the run's folder.

Users' code runs in processes of its own, which load it from a file, and data is read from files. So what a notebook's
cell has defined becomes a file too: there is one way for all of them, the folder of the run holds what it was trained
with, and `openrlhf rl --config <run>/config.yaml` repeats it.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from openrlhf.config.fields import ConfigError

FOLDER = "inputs"
"""The folder of these files in that of a run."""

_LOADER = '''"""{what} that a program gave to the run: {name}, kept in {pickle} beside this file."""

from pathlib import Path

import cloudpickle

{target} = cloudpickle.loads(Path(__file__).with_name("{pickle}").read_bytes())
'''


def write_code(thing: Callable[..., Any], folder: Path, *, target: str, given: str, taken: Iterable[str] = ()) -> Path:
    """The file whose `target` is `thing`, a function or a class. It is named after it, unless the name is `taken`.

    Code of a module that another process can import is imported there; other code, such as that of a notebook's cell
    or of the program itself, is copied with the variables that it uses, as they are now. `given`: the argument that
    error messages name. Raises ConfigError for what cannot be copied.
    """
    import cloudpickle

    name = getattr(thing, "__name__", type(thing).__name__)
    stem = _free(re.sub(r"\W", "", name.replace("<lambda>", "function")) or "function", set(taken))
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    copied = module is not None and not _importable(module)
    if copied:
        cloudpickle.register_pickle_by_value(module)
    try:
        pickled = cloudpickle.dumps(thing)
    except Exception as error:  # whatever an object of the user's says of being pickled
        raise ConfigError(
            f"{given}: {name} cannot be sent to the process that runs it: {' '.join(str(error).split())}. Make what it "
            "uses inside it, or write it to a Python file and give that file's path"
        ) from error
    finally:
        if copied:
            cloudpickle.unregister_pickle_by_value(module)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{stem}.py"
    path.with_suffix(".pkl").write_bytes(pickled)
    what = "The class" if inspect.isclass(thing) else "The function"
    text = _LOADER.format(what=what, name=name, pickle=f"{stem}.pkl", target=target)
    path.write_text(text + _source_of(thing), encoding="utf-8")
    return path


def write_records(records: Iterable[Any], folder: Path, *, name: str, given: str) -> Path:
    """The file with these records, one JSON object a line. Raises ConfigError for what is none."""
    lines = []
    for number, record in enumerate(records):
        if not isinstance(record, Mapping):
            raise ConfigError(f"{given}[{number}] must be a dict, got {type(record).__name__}")
        try:
            lines.append(json.dumps(dict(record), ensure_ascii=False))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{given}[{number}] must hold what JSON can: {error}") from error
    if not lines:
        raise ConfigError(f"{given} has no records")
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _importable(module: ModuleType) -> bool:
    """Whether another process that has this one's `sys.path` gets the same module by its name."""
    if module.__name__ == "__main__":
        return False
    try:
        spec = importlib.util.find_spec(module.__name__)
    except (ImportError, ValueError):
        return False
    file = getattr(module, "__file__", None)
    if spec is None or file is None or spec.origin is None:
        return spec is not None and spec.origin in ("built-in", "frozen")
    # A module in `sys.modules` has a spec whether or not a finder would find it.
    root = Path(file).resolve().parents[module.__name__.count(".") + (Path(file).name == "__init__.py")]
    return any(Path(entry or ".").resolve() == root for entry in sys.path)


def _source_of(thing: Any) -> str:
    """The source as a comment, for readers; nothing where it is unknown."""
    try:
        lines = inspect.getsource(thing).splitlines()
    except (OSError, TypeError):
        return ""
    return "\n" + "".join(f"# {line}".rstrip() + "\n" for line in lines)


def _free(name: str, taken: set[str]) -> str:
    number = 2
    stem = name
    while stem in taken:
        stem, number = f"{name}_{number}", number + 1
    return stem

"""Environments for worlds: which packages each needs, in which versions, and the Python that has them.

A world's package is never installed beside this one: `openrlhf worlds install NAME` makes a virtual environment for it,
in `$OPENRLHF_WORLDS`, else in `openrlhf/worlds` of the cache folder (`$XDG_CACHE_HOME`, `~/.cache`).
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

PREFIX = "openrlhf.worlds."
DONE = "installed.json"
"""Written last: an environment without it is not whole, and is made again."""
PROBE_SECONDS = 60.0
INSTALL_SECONDS = 1800.0


class Requirements(NamedTuple):
    """What a world needs beside Python."""

    about: str
    """In a few words, for lists."""
    packages: tuple[str, ...]
    """As pip reads them, pinned."""
    module: str
    """The one that is there when they are."""
    alone: tuple[str, ...] = ()
    """Pinned packages that are installed without what they depend on: all that is used of it is in `packages`."""

    @property
    def all(self) -> tuple[str, ...]:
        return (*self.alone, *self.packages)


WORLDS: dict[str, Requirements] = {
    "reasoning_gym": Requirements(
        "procedural tasks with verifiers, one answer each", ("reasoning-gym==0.1.25",), "reasoning_gym"
    ),
    "gymnasium": Requirements(
        "environments of Gymnasium, shown and acted on as text", ("gymnasium==1.4.0",), "gymnasium"
    ),
    "bfcl": Requirements(
        "multi-turn tool worlds of the Berkeley Function Calling Leaderboard",
        ("mpmath==1.3.0",),
        "bfcl_eval",
        # The whole has 33 dependencies, torch and the clients of seven model providers among them; its multi-turn
        # tools and checks import one.
        alone=("bfcl-eval==2026.3.23",),
    ),
    "mcp": Requirements("tools of any MCP server, over stdio or HTTP", ("mcp==2.3.0",), "mcp"),
    "textarena": Requirements(
        "games for one player and for several, self-play among them", ("textarena==0.7.4", "numpy==2.4.6"), "textarena"
    ),
    "verifiers": Requirements(
        "environments of verifiers: their loop, their rewards", ("verifiers==0.4.0",), "verifiers"
    ),
    "openenv": Requirements(
        # openenv-core is the same project under its older name, in older versions.
        "environments of OpenEnv, served anywhere or by a command",
        ("openenv==0.10.0",),
        "openenv",
    ),
    "nemo_gym": Requirements("resources servers of NeMo Gym, over HTTP", (), "json"),
}
"""Name -> what it needs. The adapter of NAME is `openrlhf/worlds/NAME.py`."""


class WorldMissingError(Exception):
    """No Python has a world's package. The text ends with the command that installs it."""


class InstallError(Exception):
    """An environment could not be made. The text says why."""


@dataclass(frozen=True)
class WorldPython:
    """The interpreter of a world's processes."""

    path: Path
    own: bool = False
    """Whether its environment was made for this world, so that nothing of ours may leak into it."""

    def environment(self) -> dict[str, str]:
        """The environment variables of a world process."""
        variables = dict(os.environ)
        if self.own:
            for name in ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"):
                variables.pop(name, None)
            variables["PYTHONNOUSERSITE"] = "1"
            variables["PATH"] = os.pathsep.join([str(self.path.parent), variables.get("PATH", os.defpath)])
        # Sets of texts have the same order in every process, so that what a package draws from one is the same.
        return {"PYTHONHASHSEED": "0"} | variables


# ------------------------------------------------------------------------------------ names


def is_world(target: str | os.PathLike[str]) -> bool:
    """Whether an agent's path names a world: `openrlhf.worlds.NAME`, or a file with a class `World` and no
    `AgentExecutor`. The file is read, not run."""
    text = os.fspath(target)
    return text.startswith(PREFIX) or (
        text.endswith(".py") and "World" in (names := _names(Path(text).expanduser())) and "AgentExecutor" not in names
    )


def world_name(target: str) -> str:
    """`reasoning_gym`, or the name of the file."""
    return target.removeprefix(PREFIX) if target.startswith(PREFIX) else Path(target).name


def requirements_of(target: str) -> Requirements | None:
    """Those of a world's name, of `openrlhf.worlds.NAME`, or of a file that says `REQUIREMENTS = ["name==1.2"]`; None:
    of a file that says nothing. Raises WorldMissingError for a name that no world has."""
    name = target.removeprefix(PREFIX)
    if name in WORLDS:
        return WORLDS[name]
    if not target.endswith(".py"):
        raise WorldMissingError(
            f"there is no world {name!r}: there are {', '.join(WORLDS)}, and files with class World"
        )
    file = Path(target).expanduser().resolve()
    if not file.is_file():
        raise WorldMissingError(f"there is no file {file}")
    said = _constants(file)
    packages = said.get("REQUIREMENTS")
    if not packages:
        return None
    if not isinstance(packages, (list, tuple)) or not all(isinstance(one, str) for one in packages):
        raise WorldMissingError(f'{file}: REQUIREMENTS must be a list, as ["name==version"], not {packages!r}')
    module = str(said.get("MODULE") or _module_of(packages[0]))
    return Requirements(f"the world of {file.name}", tuple(packages), module)


def install_command(target: str) -> str:
    """What installs the world's packages; empty where it names none."""
    if requirements_of(target) is None:
        return ""
    return f"openrlhf worlds install {target.removeprefix(PREFIX)}"


def _module_of(requirement: str) -> str:
    name = requirement
    for character in "[=<>!~; @":
        name = name.split(character)[0]
    return name.strip().replace("-", "_")


def _names(file: Path) -> set[str]:
    """What the top level of a file defines or imports; nothing where it cannot be read."""
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return set()
    names = {node.name for node in body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    for node in body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return names


def _constants(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    try:
        body = ast.parse(file.read_text(encoding="utf-8")).body
    except (OSError, SyntaxError, ValueError):
        return found
    for node in body:
        named = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(named, ast.Name) and node.value is not None:
            with suppress(ValueError, TypeError):
                found[named.id] = ast.literal_eval(node.value)
    return found


# ------------------------------------------------------------------------------------ which Python


def find_python(target: str, *, wanted: str | None = None) -> WorldPython:
    """The interpreter for a world: `wanted` (`--world.python`), else the installed environment, else our own where the
    package is there already. Raises WorldMissingError, whose text ends with the command that installs it."""
    needs = requirements_of(target)
    if wanted is not None:
        path = shutil.which(os.path.expanduser(wanted))
        if path is None:
            raise WorldMissingError(f"--world.python {wanted}: there is no such program")
        python = WorldPython(Path(path))
        if needs is not None and not _has(python, needs.module):
            raise WorldMissingError(
                f"--world.python {wanted} has no package {needs.module}: install {' '.join(needs.all)} there, or "
                f"leave the flag out and run: {install_command(target)}"
            )
        return python
    ours = WorldPython(Path(sys.executable))
    if needs is None or not needs.all:
        return ours
    folder = environment_folder(target)
    if _is_whole(folder):
        return WorldPython(folder / "bin" / "python", own=True)
    if _has(ours, needs.module):
        return ours
    raise WorldMissingError(
        f"world {world_name(target)} needs {', '.join(needs.all)} in an environment of its own, which is not in "
        f"{folder.parent} on this machine. Run: {install_command(target)}"
    )


def _has(python: WorldPython, module: str) -> bool:
    """Whether that interpreter finds the module, which is not imported for it."""
    code = "import importlib.util, sys; sys.path = [p for p in sys.path if p]; " + (
        "sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
    )
    try:
        done = subprocess.run(
            [str(python.path), "-c", code, module.split(".")[0]],
            env=python.environment(),
            capture_output=True,
            timeout=PROBE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


# ------------------------------------------------------------------------------------ environments


def worlds_folder() -> Path:
    """Where environments are."""
    if given := os.environ.get("OPENRLHF_WORLDS"):
        return Path(given).expanduser().resolve()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser().resolve() / "openrlhf" / "worlds"


def environment_folder(target: str) -> Path:
    """The environment of a world with these requirements and this version of Python, whether it is there or not."""
    needs = requirements_of(target)
    assert needs is not None, target
    name = world_name(target).removesuffix(".py")
    digest = hashlib.blake2b("\n".join(needs.all).encode(), digest_size=4).hexdigest()
    return worlds_folder() / f"{name}-{digest}-py{sys.version_info.major}.{sys.version_info.minor}"


def installed(target: str) -> bool:
    """Whether the environment of this world is there."""
    return _is_whole(environment_folder(target))


def _is_whole(folder: Path) -> bool:
    """Its Python is a link to the one that it was made with, which may be gone since."""
    return (folder / DONE).is_file() and (folder / "bin" / "python").exists()


def install(target: str, *, again: bool = False, say: Callable[[str], None] = lambda text: None) -> Path:
    """Make the environment of a world, where there is none yet; its folder. Raises InstallError, WorldMissingError.

    Several processes may do so at once: one makes it, the others wait. What was begun and not finished is made anew.
    """
    needs = requirements_of(target)
    if needs is None:
        raise InstallError(f'{target} names no packages: write REQUIREMENTS = ["name==version"] at its top level')
    if not needs.all:
        raise InstallError(f"{world_name(target)} needs no package: it runs as it is")
    folder = environment_folder(target)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InstallError(
            f"{folder.parent} cannot be made ({error.strerror}): name another folder in the variable OPENRLHF_WORLDS"
        ) from error
    with _locked(folder.parent / f".{folder.name}.lock"):
        if _is_whole(folder) and not again:
            say(f"{world_name(target)} is installed already: {folder}")
            return folder
        if folder.exists():
            shutil.rmtree(folder)
        say(f"{world_name(target)}: {', '.join(needs.all)} into {folder}")
        try:
            _make(folder, needs)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        told = {"world": world_name(target), "packages": list(needs.all), "python": sys.version.split()[0]}
        (folder / DONE).write_text(json.dumps(told) + "\n", encoding="utf-8")
    return folder


def _make(folder: Path, needs: Requirements) -> None:
    python = folder / "bin" / "python"
    own_pip = importlib.util.find_spec("pip") is not None
    without = ["--without-pip"] if own_pip else []
    _run([sys.executable, "-m", "venv", *without, str(folder)], "the virtual environment could not be made")
    pip = [sys.executable, "-m", "pip", "--python", str(python)] if own_pip else [str(python), "-m", "pip"]
    for packages, how in ((needs.alone, ["--no-deps"]), (needs.packages, [])):
        if packages:
            _run(
                [*pip, "install", "--disable-pip-version-check", "--no-input", *how, *packages],
                f"pip could not install {', '.join(packages)}",
            )
    if not _has(WorldPython(python, own=True), needs.module):
        raise InstallError(f"{', '.join(needs.all)} have no module {needs.module}")


def _run(command: list[str], what: str) -> None:
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    try:
        done = subprocess.run(
            command, env=variables, capture_output=True, text=True, timeout=INSTALL_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InstallError(f"{what}: {error}") from error
    if done.returncode != 0:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise InstallError(f"{what}: " + " | ".join(lines[-5:]))


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

"""Which kinds of file a user's file is: one with rewards, one with an agent, or both."""

from __future__ import annotations

import symtable
from enum import StrEnum
from pathlib import Path

from openrlhf.agents.host import HostProcess, HostStartError
from openrlhf.agents.user_calls import UserFileError


class Kind(StrEnum):
    """The kind of a user's file, by the name that training looks for in it."""

    REWARD = "reward_func"
    AGENT = "AgentExecutor"


EXPECTED = "a reward file defines reward_func(queries, prompts, labels), an agent file class AgentExecutor"


async def kinds_of(file: Path, *, start_timeout: float, load: bool = False) -> list[Kind]:
    """At least one. Raises UserFileError, in one line, when the file cannot be loaded or defines neither.

    `load` runs the file, in a process of its own: an import that fails is then found before anything else is loaded.
    Otherwise it is run only when neither name is assigned in its text, so that it is broken, has the name from an
    `import *`, or is not what it was taken for.
    """
    if not file.is_file():
        raise UserFileError(f"there is no file {file}")
    names = assigned_names(file)
    if load or not names & set(Kind):
        names = await _loaded_names(file, start_timeout=start_timeout)
    kinds = [kind for kind in Kind if kind in names]
    if not kinds:
        there = ", ".join(sorted(name for name in names if not name.startswith("_"))) or "nothing"
        raise UserFileError(
            f"{file} defines neither reward_func nor AgentExecutor; it has {there}. Expected: {EXPECTED}"
        )
    return kinds


def assigned_names(file: Path) -> set[str]:
    """The names that the file defines, imports or assigns at the top level; none if it cannot be read."""
    try:
        table = symtable.symtable(file.read_text(encoding="utf-8"), str(file), "exec")
    except (SyntaxError, ValueError):
        return set()
    return {symbol.get_name() for symbol in table.get_symbols() if symbol.is_assigned() or symbol.is_imported()}


async def _loaded_names(file: Path, *, start_timeout: float) -> set[str]:
    host = HostProcess(
        "openrlhf.agents.user_calls:LoadedFile", str(file), name=f"file {file}", start_timeout=start_timeout
    )
    try:
        await host.start()
        return set(await host.call("names"))
    except HostStartError as error:
        if error.failure is not None and error.failure.kind == "UserFileError":
            raise UserFileError(error.failure.text) from error
        raise UserFileError(f"{file} could not be loaded: {error}") from error
    finally:
        await host.close()

"""The first steps of `openrlhf check`, without torch: its options, the kind of the file, and what the file prints."""

from __future__ import annotations

import contextlib
import os
import symtable
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from openrlhf.agents.host import HostProcess, HostStartError
from openrlhf.agents.user_calls import UserFileError
from openrlhf.config.commands import RLConfig
from openrlhf.config.rl import WorldSection
from openrlhf.config.training import RLTrainSection
from openrlhf.worlds.environments import is_world

LOAD_SECONDS = 60.0
"""The least time allowed for loading a file: importing libraries may take long, however short its calls are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOptions:
    """The command line of `openrlhf check`."""

    file: Path
    pretrain: str | None
    prompt_data: str | None
    input_key: str
    label_key: str | None
    apply_chat_template: bool
    image_key: str
    max_images_per_prompt: int
    """0: images are not read."""
    allow_image_urls: bool
    n: int
    """Samples per prompt."""
    timeout: float
    max_len: int
    max_new_tokens: int
    max_steps: int
    agent_hosts: int
    tasks: str | None = None
    """Of a world; so are the next two."""
    world_options: str | None = None
    python: str | None = None

    @property
    def world(self) -> RLConfig | None:
        """A run that plays the world that the file is; None: it is none."""
        target = str(self.file)
        if not is_world(target):
            return None
        world = WorldSection(
            tasks=self.tasks, options=self.world_options, python=self.python, timeout=self.timeout, samples=4
        )
        return RLConfig(train=RLTrainSection(agent_func_path=target), world=world)

    @property
    def start_timeout(self) -> float:
        return max(self.timeout, LOAD_SECONDS)


MOST_PRINTED = 40
"""Lines that a file printed, of which the last ones are shown."""


@contextlib.contextmanager
def captured_stderr() -> Iterator[list[str]]:
    """The lines that processes of users' code write to stderr meanwhile; the list is filled when this ends."""
    lines: list[str] = []
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        before = os.dup(2)
        os.dup2(file.fileno(), 2)
        try:
            yield lines
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
            file.seek(0)
            lines += file.read().decode(errors="replace").splitlines()


def replay(lines: list[str]) -> None:
    """Show the last of them on stderr."""
    if len(lines) > MOST_PRINTED:
        print(f"… {len(lines) - MOST_PRINTED} lines before", file=sys.stderr)
    for line in lines[-MOST_PRINTED:]:
        print(line, file=sys.stderr)


class Kind(StrEnum):
    """The kind of a user's file, by the name that training looks for in it."""

    REWARD = "reward_func"
    AGENT = "AgentExecutor"
    WORLD = "World"


EXPECTED = "a reward file defines reward_func(queries, prompts, labels), an agent file class AgentExecutor"


async def kinds_of(file: Path, *, start_timeout: float, load: bool = False) -> list[Kind]:
    """The kinds of a file, at least one. Raises UserFileError when the file cannot be loaded or defines neither.

    `load` runs the file, in a process of its own: an import that fails is then found before anything else is loaded.
    Otherwise it is run only when neither name is assigned in its text, so that it is broken, has the name from an
    `import *`, or is not what it was taken for.
    """
    if is_world(file):
        return [Kind.WORLD]
    if not file.is_file():
        raise UserFileError(f"there is no file {file}")
    names = assigned_names(file)
    if load or not names & set(Kind):
        names = await _loaded_names(file, start_timeout=start_timeout)
    kinds = [kind for kind in (Kind.REWARD, Kind.AGENT) if kind in names]
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

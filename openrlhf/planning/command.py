"""A training command as a user types it: what starts it, which command it is, and its flags, which can be changed.

openrlhf rl …
python -m openrlhf.cli.train_ppo_ray …
torchrun --nproc_per_node 8 -m openrlhf.cli.train_sft …
deepspeed --num_gpus 8 --module openrlhf.cli.train_dpo …
"""

from __future__ import annotations

import contextlib
import io
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from openrlhf.config.aliases import Given, vocabulary
from openrlhf.config.commands import SHORT_NAMES, TrainerConfig
from openrlhf.config.fields import ConfigError
from openrlhf.config.parser import parse
from openrlhf.config.rules import require_runnable

TRAINERS = {word: module for module, word in SHORT_NAMES.items() if module.startswith("train_")}
"""`rl` → `train_ppo_ray`."""
PROCESSES = ("--nproc_per_node", "--nproc-per-node", "--num_gpus")
NODES = ("--nnodes", "--num_nodes")


@dataclass(frozen=True, slots=True)
class Command:
    front: tuple[str, ...]
    """The words before the flags; the last one names the command."""
    name: str
    """A key of `ROOTS`."""
    flags: tuple[str, ...]

    @property
    def ranks(self) -> int:
        """Processes that the words in front of a supervised command start."""
        return _number_after(self.front, PROCESSES) * _number_after(self.front, NODES)

    def __str__(self) -> str:
        return shlex.join([*self.front, *self.flags])

    def lines(self) -> str:
        """The same over several lines, as it can be pasted into a shell."""
        rows = [shlex.join(self.front), *(shlex.join(group) for group in grouped(self.flags))]
        return " \\\n   ".join(rows)

    def config(self) -> TrainerConfig:
        """Raises ConfigError. Notes of the parser are not printed."""
        with contextlib.redirect_stderr(io.StringIO()):
            found = parse(self.name, self.flags)
            require_runnable(found)
        if not isinstance(found, TrainerConfig):
            raise ConfigError(f"{self.name} trains nothing")
        return found

    def changed(self, changes: Mapping[str, Any]) -> Command:
        """With other values of flags, by dotted name; None leaves a flag out. Whatever spelling they had is removed."""
        words = vocabulary(self.name)
        kept: list[str] = []
        for group in grouped(self.flags):
            name, _, value = group[0].removeprefix("--").partition("=")
            plain = name.removeprefix("no-")
            sets = words.sets(Given(name=plain, raw="", where=""))
            if not set(sets) & changes.keys():
                kept += group
                continue
            rest = [value] if value else list(group[1:])
            for other in sets:
                if other not in changes:
                    kept += [f"--{other}", *rest]
        for path, new in changes.items():
            if new is not None:
                kept += [f"--{path}", "true" if new is True else "false" if new is False else str(new)]
        return replace(self, flags=tuple(kept))

    def on_ranks(self, ranks: int, *, per_node: int) -> Command:
        """A supervised command, started on so many devices."""
        nodes = max(1, ranks // per_node)
        machines = [f"--nnodes={nodes}"] if nodes > 1 else []
        front = ("torchrun", *machines, f"--nproc_per_node={min(ranks, per_node)}", "-m", f"openrlhf.cli.{self.name}")
        return replace(self, front=front)


def read_command(words: Sequence[str]) -> Command:
    """The first word that names a command of training ends what is in front. Raises ConfigError."""
    for place, word in enumerate(words):
        name = _named(word)
        if name is not None:
            front = tuple(words[: place + 1])
            if place == 0 and not word.startswith("openrlhf."):
                front = ("openrlhf", SHORT_NAMES[name])
            elif place == 0:
                front = ("python", "-m", word)
            return Command(front, name, tuple(words[place + 1 :]))
    said = f" in {shlex.join(words)!r}" if words else ""
    raise ConfigError(
        f"there is no command of training{said}: write one after `openrlhf doctor`, such as `openrlhf doctor rl "
        f"--actor.model_name_or_path …` (there are {', '.join(TRAINERS)})"
    )


def _named(word: str) -> str | None:
    if word in TRAINERS:
        return TRAINERS[word]
    module = word.removesuffix(".py").replace("/", ".").rpartition(".")[2]
    return module if module in TRAINERS.values() else None


def grouped(flags: Sequence[str]) -> list[list[str]]:
    """Each flag with its values."""
    found: list[list[str]] = []
    for word in flags:
        if word.startswith("--") or not found:
            found.append([word])
        else:
            found[-1].append(word)
    return found


def _number_after(words: Sequence[str], names: Sequence[str]) -> int:
    for place, word in enumerate(words):
        name, _, value = word.partition("=")
        if name in names:
            text = value or next(iter(words[place + 1 :]), "")
            return int(text) if text.isdecimal() and int(text) else 1
    return 1

"""The flags of a configuration class, read off its dataclasses; and a configuration made from their values."""

import dataclasses
import functools
import math
import re
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from openrlhf.config.commands import ROOTS, Config
from openrlhf.config.fields import Flag, Shape, shape_of

REDACTED = "<redacted>"
"""Stands for a secret wherever a configuration is shown."""

MODEL_GROUPS = ("actor", "critic", "ref", "reward")


@dataclass(frozen=True, slots=True)
class FlagSpec:
    """One flag of one command."""

    path: str
    """Dotted name, `actor.adam.lr`."""
    shape: Shape
    flag: Flag
    default: Any
    only_with: tuple[str, ...] = ()
    """Conditions without which it has no effect (`Flag.only_with`), its sections' among them, with full names."""

    @property
    def section(self) -> str:
        """First part of the name, or "" at the top level."""
        return self.path.rpartition(".")[0].partition(".")[0]

    @property
    def flat_names(self) -> tuple[str, ...]:
        """Older names, without the dotted one."""
        owner = f"{self.section}_" if self.section in MODEL_GROUPS else ""
        return tuple(name for name in self.flag.flat.format(owner=owner).split() if name != self.path)

    @property
    def shown_default(self) -> str:
        """The default as help and documentation write it."""
        if self.flag.shown_default is not None:
            return self.flag.shown_default
        if self.default is None:
            return "unset"
        if isinstance(self.default, tuple):
            return " ".join(str(value) for value in self.default)
        if isinstance(self.default, str):
            return repr(self.default) if self.default == "" or "\n" in self.default else self.default
        return str(self.default).lower() if isinstance(self.default, bool) else str(self.default)


@functools.cache
def flags_of(command: str) -> dict[str, FlagSpec]:
    """Every flag of a command by its dotted name, top-level ones first, sections in their order."""
    specs = list(_walk(ROOTS[command](), prefix="", only_with=()))
    return {spec.path: spec for spec in sorted(specs, key=lambda spec: "." in spec.path)}


def _walk(section: Any, *, prefix: str, only_with: tuple[str, ...]) -> Iterator[FlagSpec]:
    hints = typing.get_type_hints(type(section), include_extras=True)
    for field in dataclasses.fields(section):
        value, path = getattr(section, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            inherited = (*only_with, *_conditions(field.metadata.get("only_with", ""), prefix=prefix))
            yield from _walk(value, prefix=f"{path}.", only_with=inherited)
        else:
            flag = next(extra for extra in typing.get_args(hints[field.name]) if isinstance(extra, Flag))
            conditions = (*only_with, *_conditions(flag.only_with, prefix=prefix))
            yield FlagSpec(path, shape_of(hints[field.name]), flag, default=value, only_with=conditions)


def _conditions(text: str, *, prefix: str) -> tuple[str, ...]:
    """Each with full names: `.optim=muon` in the section `actor` is `actor.optim=muon`."""
    return tuple(re.sub(r"(?<![\w.])\.", prefix, condition) for condition in text.split())


def command_of(config: Config) -> str:
    """The command whose configuration this is."""
    return next(command for command, root in ROOTS.items() if type(config) is root)


def value_at(config: Any, path: str) -> Any:
    """`value_at(config, "actor.adam.lr")` is `config.actor.adam.lr`."""
    return functools.reduce(getattr, path.split("."), config)


def build(command: str, values: Mapping[str, Any]) -> Config:
    """The command's defaults with `values` (dotted name -> value) in their place."""
    tree: dict[str, Any] = {}
    for path, value in values.items():
        *sections, name = path.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
        node[name] = value
    return _replace(ROOTS[command](), tree)


def _replace(section: Any, changes: Mapping[str, Any]) -> Any:
    new = {
        name: _replace(getattr(section, name), change) if isinstance(change, dict) else change
        for name, change in changes.items()
    }
    return dataclasses.replace(section, **new)


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain values, ready for YAML or a logger. Tuples become lists; secrets become `<redacted>`."""
    hints = typing.get_type_hints(type(config), include_extras=True)
    result: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            result[field.name] = to_dict(value)
        elif value is not None and any(getattr(e, "secret", False) for e in typing.get_args(hints[field.name])):
            result[field.name] = REDACTED
        else:
            result[field.name] = list(value) if isinstance(value, tuple) else value
    return result


def to_yaml(config: Config, given: Mapping[str, str] | None = None) -> str:
    """The resolved configuration; feeding it to `--config` gives the same configuration, secrets apart.

    `given`: where the user set a flag, which becomes a comment beside it.
    """
    return "".join(_lines(to_dict(config), given or {}, prefix=""))


def _lines(tree: Mapping[str, Any], given: Mapping[str, str], *, prefix: str) -> Iterator[str]:
    import yaml  # only where a file is written or read: it costs a tenth of --help

    indent = "  " * prefix.count(".")
    for name, value in tree.items():
        path = prefix + name
        if isinstance(value, dict):
            yield f"{indent}{name}:\n"
            yield from _lines(value, given, prefix=f"{path}.")
            continue
        first, *rest = yaml.safe_dump({name: value}, allow_unicode=True, width=math.inf).splitlines(keepends=True)
        # A comment after a text of several lines would be a part of it.
        mark = f"  # set: {given[path]}" if path in given else ""
        if rest and not isinstance(value, list):
            yield f"{indent}{mark.strip()}\n" if mark else ""
            mark = ""
        yield f"{indent}{first.rstrip(chr(10))}{mark}\n"
        yield from (f"{indent}{line}" if line.strip() else line for line in rest)

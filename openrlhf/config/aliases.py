"""Every name a user may give a setting, and what it sets.

A plain name — dotted or flat — sets one field, or several where actor and critic share it. What is not as plain is in
`oddities`.
"""

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.config.fields import ConfigError, Flag, Shape, convert
from openrlhf.config.legacy_flags import (
    CLIP_HALVES,
    FOREIGN,
    HINTS,
    INERT,
    LENGTH_HALVES,
    NO_PTX,
    NUMBER,
    OLD_MAX_LEN,
    SWITCH,
    VALUE_SWITCHES,
    Half,
    ValueSwitch,
)
from openrlhf.config.schema import REDACTED, FlagSpec, flags_of


@dataclass(frozen=True, slots=True)
class Given:
    """One setting as the user wrote it."""

    name: str
    """Without dashes."""
    raw: Any
    """Words of the command line, or a YAML value."""
    where: str
    """How messages name it: `--no-x`, or `FILE: key`."""


@dataclass(frozen=True, slots=True)
class Assigned:
    value: Any
    where: str


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """All names one command understands."""

    command: str
    fields: Mapping[str, tuple[FlagSpec, ...]]
    """Dotted and flat names -> the fields they set."""
    value_switches: Mapping[str, ValueSwitch]
    halves: Mapping[str, Half]

    def names(self) -> set[str]:
        """Everything that parses, gone names left out."""
        ptx = {"ptx_coef"} if self.command == "train_ppo_ray" else set()
        return {*self.fields, *self.value_switches, *self.halves, *INERT, *ptx}

    def sets(self, item: Given) -> tuple[str, ...]:
        """The flags that a setting sets on its own account; none for halves, of which it takes two."""
        if item.name in self.value_switches:
            return (self.value_switches[item.name].path,)
        return tuple(spec.path for spec in self.fields.get(item.name, ()))

    def hint(self, name: str) -> str | None:
        """What to use for another tool's name; None where this command has nothing of the kind."""
        hint = HINTS.get(name)
        return hint if hint and {flag.rstrip(".") for flag in re.findall(r"--([\w.]+)", hint)} <= self.names() else None

    def shape(self, name: str) -> Shape:
        """What values `name` takes on the command line."""
        if name in self.fields:
            return self.fields[name][0].shape
        if name in self.halves:
            return self.halves[name].shape
        return NUMBER if name == "ptx_coef" else SWITCH


@functools.cache
def vocabulary(command: str) -> Vocabulary:
    specs = flags_of(command)
    names: dict[str, list[FlagSpec]] = {path: [spec] for path, spec in specs.items()}
    for spec in specs.values():
        for flat in spec.flat_names:
            names.setdefault(flat, []).append(spec)
        for synonym in _section_synonyms(spec, command=command):
            names.setdefault(synonym, []).append(spec)
    halves = (LENGTH_HALVES if "data.max_len" in specs and command != "serve_rm" else {}) | (
        CLIP_HALVES if "actor.eps_clip" in specs else {}
    )
    for foreign, paths in FOREIGN.items():
        ours = next((path for path in paths.split() if path in specs), None)
        if ours is not None and foreign not in names:
            names[foreign] = [specs[ours]]
    return Vocabulary(
        command=command,
        fields={name: tuple(targets) for name, targets in names.items()},
        value_switches={name: switch for name, switch in VALUE_SWITCHES.items() if switch.path in specs},
        halves=halves,
    )


def _section_synonyms(spec: FlagSpec, *, command: str) -> list[str]:
    """Documents mix `--actor.*` and `--model.*`: SFT, RM and DPO know their model and optimizer by both."""
    if command == "train_ppo_ray":
        return ["model.trust_remote_code"] if spec.path == "actor.trust_remote_code" else []
    if command not in ("train_sft", "train_rm", "train_dpo"):
        return []
    if spec.section == "model":
        return ["actor." + spec.path.removeprefix("model.")]
    optimizer = spec.section in ("adam", "muon") or spec.path in (
        "optim",
        "lr_scheduler",
        "lr_warmup_ratio",
        "min_lr_ratio",
        "max_norm",
    )
    return [f"actor.{spec.path}"] if optimizer else []


def resolve(
    given: Sequence[Given],
    *,
    words: Vocabulary,
    below: Mapping[str, Any],
    note: Callable[[str], None],
) -> dict[str, Assigned]:
    """Settings of one layer (a file, or a command line) -> values by dotted name, and where each was given.

    `below` holds the values of the layer underneath: the other half of a pair may come from there. Raises
    `ConfigError` when two settings give one field different values.
    """
    assigned: dict[str, Assigned] = {}
    halves: dict[str, Assigned] = {}
    implied: dict[str, Assigned] = {}

    def assign(path: str, value: Any, where: str) -> None:
        secret = path in specs and specs[path].flag.secret
        other = assigned.setdefault(path, Assigned(value, where))
        if other.value != value:
            values = "different values" if secret else f"{_show(other.value)} and {_show(value)}"
            if other.where == where:
                raise ConfigError(f"{where} is given twice, as {values}: give it once")
            raise ConfigError(f"{other.where} and {where} both set {path}, to {values}: give one of them")

    specs = flags_of(words.command)
    for item in given:
        if item.name in words.fields:
            for spec in words.fields[item.name]:
                if spec.flag.secret and item.raw == REDACTED:
                    note(f"{item.where} is {REDACTED}: taken as unset; give --{spec.path} to set it")
                    continue
                value = convert(item.raw, shape=spec.shape, flag=spec.flag, where=item.where)
                assign(spec.path, value, item.where)
        elif item.name in words.value_switches:
            switch = words.value_switches[item.name]
            value = switch.on if _switch(item) else switch.off
            if value is not None:
                assign(switch.path, value, item.where)
            if value == switch.on and switch.enables is not None:
                implied[switch.enables] = Assigned(True, item.where)
        elif item.name in words.halves:
            half = Flag("", unlimited=item.name in CLIP_HALVES)
            value = convert(item.raw, shape=words.halves[item.name].shape, flag=half, where=item.where)
            if halves.setdefault(item.name, Assigned(value, item.where)).value != value:
                raise ConfigError(f"{item.where} is given twice with different values: give it once")
        else:
            _accept_without_effect(item, note=note)
    _join_clip(halves, assigned=assigned, below=below, assign=assign)
    _join_lengths(halves, assigned=assigned, known=specs, assign=assign)
    return implied | assigned


def _show(value: Any) -> str:
    return " ".join(str(part) for part in value) if isinstance(value, tuple) else str(value)


def _switch(item: Given) -> bool:
    return bool(convert(item.raw, shape=SWITCH, flag=Flag(""), where=item.where))


def _accept_without_effect(item: Given, *, note: Callable[[str], None]) -> None:
    if item.name == "ptx_coef":
        if convert(item.raw, shape=NUMBER, flag=Flag(""), where=item.where) != 0:
            raise ConfigError(f"{item.where}: {NO_PTX}")
        note(f"{item.where} 0 does nothing: {NO_PTX}")
    elif _switch(item):
        note(f"{item.where} does nothing: {INERT[item.name]}")


def _join_clip(
    halves: Mapping[str, Assigned],
    *,
    assigned: Mapping[str, Assigned],
    below: Mapping[str, Any],
    assign: Callable[[str, Any, str], None],
) -> None:
    """--clip_eps_low and --clip_eps_high: a missing half is the one in force underneath, else eps_clip."""
    low, high = halves.get("clip_eps_low"), halves.get("clip_eps_high")
    given = low or high
    if given is None:
        return
    eps = assigned["actor.eps_clip"].value if "actor.eps_clip" in assigned else below["actor.eps_clip"]
    pair = below["actor.eps_clip_low_high"] or (eps, eps)
    value = (low.value if low else pair[0], high.value if high else pair[1])
    where = " and ".join(half.where for half in (low, high) if half)
    assign("actor.eps_clip_low_high", value, where)


def _join_lengths(
    halves: Mapping[str, Assigned],
    *,
    assigned: Mapping[str, Assigned],
    known: Mapping[str, FlagSpec],
    assign: Callable[[str, Any, str], None],
) -> None:
    """max_len = prompt_max_len + generate_max_len, max_new_tokens = generate_max_len.

    One of them alone leaves the other at its old default, 1024; --generate_max_len alone leaves a given --max_len as
    it is.
    """
    prompt, response = halves.get("prompt_max_len"), halves.get("generate_max_len")
    given = prompt or response
    if given is None:
        return
    prompt_len = prompt.value if prompt else OLD_MAX_LEN
    response_len = response.value if response else OLD_MAX_LEN
    where = " and ".join(half.where for half in (prompt, response) if half)
    if prompt or "data.max_len" not in assigned:
        assign("data.max_len", prompt_len + response_len, where)
    if "rollout.max_new_tokens" in known:
        assign("rollout.max_new_tokens", response_len, where)

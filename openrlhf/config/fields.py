"""What one flag is: its documentation and bounds (`Flag`), its type (`Shape`), and the conversion of a value to it.

A section declares a flag as an annotated dataclass field:

    lr: Annotated[float, Flag("AdamW learning rate", flat="{owner}learning_rate")] = 1e-6

The type, the choices (`Literal`), the arity (`tuple`) and the default stand where Python keeps them; `Flag` adds
what Python has no place for.
"""

import dataclasses
import math
import types
import typing
from dataclasses import dataclass
from typing import Any, Literal


class ConfigError(ValueError):
    """What the user wrote cannot be run. The message names the flag (or the file and key) and what to do."""


TRUE_WORDS = frozenset({"true", "1", "yes", "on"})
FALSE_WORDS = frozenset({"false", "0", "no", "off"})
NONE_WORDS = frozenset({"none", "null"})


@dataclass(frozen=True, slots=True)
class Flag:
    """Documentation of one flag."""

    help: str
    """One line for `--help` and docs/flags.md."""
    flat: str = ""
    """Older names without a section, separated by spaces. `{owner}` becomes `actor_`, `critic_`, … or nothing."""
    secret: bool = False
    """The value is never printed, logged or stored."""
    one_value: Literal["mirror", "upper"] | None = None
    """Meaning of a single value X for a pair: mirror = (−X, X), upper = (0, X). None: two values are needed."""
    shown_default: str | None = None
    """Text for a default that depends on the moment (a time stamp)."""
    choices: tuple[str, ...] | None = None
    """Choices that a registry knows; a fixed set is a `Literal` instead."""
    synonyms: tuple[tuple[str, str], ...] = ()
    """Other tools' words for some of the choices, each with ours."""
    unlimited: bool = False
    """Infinity is a value: it means that there is no limit."""
    only_with: str = ""
    """What this flag needs to have an effect: conditions separated by spaces, all of which must hold.

    `algo.kl.target` holds where that flag is on (given, true, more than 0), `!algo.kl.target` where it is off,
    `optim=muon` and `actor.policy_loss_type!=sapo,gspo` compare, `a|b` holds where one of them does. `.optim` is a
    flag of the same section. A property of the configuration (`uses_critic`) counts like a flag. A condition on a flag
    that a command does not have holds there. A section says it of all its flags, with `metadata={"only_with": …}`.
    """
    no_effect: str = ""
    """Why it changes nothing, of a flag that is accepted for the sake of commands written elsewhere."""
    above: float | None = None
    """The value must be more than this. This bound and the next three are checked by `rules.values_are_within_bounds`;
    an unset flag has no bounds, and each value of a pair is held to them."""
    at_least: float | None = None
    """The value must not be less than this."""
    below: float | None = None
    """The value must be less than this."""
    within: tuple[float, float] | None = None
    """The value must lie between these two, which are allowed themselves."""

    def is_within_bounds(self, value: float) -> bool:
        low, high = self.within or (-math.inf, math.inf)
        low = low if self.at_least is None else self.at_least
        return (
            low <= value <= high
            and (self.above is None or value > self.above)
            and (self.below is None or value < self.below)
        )

    @property
    def bounds(self) -> str:
        """The bounds in words, for the error message: "more than 0", "from 0 to 1"."""
        if self.within is not None and self.above is None:
            return f"from {self.within[0]} to {self.within[1]}"
        most = None if self.within is None else self.within[1]
        words = {"more than": self.above, "at least": self.at_least, "less than": self.below, "at most": most}
        return " and ".join(f"{word} {bound}" for word, bound in words.items() if bound is not None)


@dataclass(frozen=True, slots=True)
class Shape:
    """What values a flag takes: `count` values of `kind`, or None where `optional`."""

    kind: type
    """bool, int, float or str."""
    count: int | Literal["*"] = 1
    """1, 2, or "*" for one or more."""
    optional: bool = False
    choices: tuple[str, ...] | None = None

    @property
    def is_switch(self) -> bool:
        return self.kind is bool

    def __str__(self) -> str:
        """As help and documentation write it: `int`, `float x2`, `str ppo/gspo`, `switch`."""
        name = "switch" if self.is_switch else self.kind.__name__
        if self.choices:
            name += " " + "/".join(self.choices)
        return name if self.count == 1 else f"{name} x{self.count}"


def shape_of(annotation: Any) -> Shape:
    """`int | None` -> optional int; `tuple[float, float]` -> two floats; `Literal[...]` -> str with choices."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        shape = shape_of(args[0])
        registered = next((arg.choices for arg in args[1:] if isinstance(arg, Flag)), None)
        return dataclasses.replace(shape, choices=registered) if registered else shape
    if origin in (types.UnionType, typing.Union):
        (inner,) = [arg for arg in args if arg is not type(None)]
        shape = shape_of(inner)
        return Shape(kind=shape.kind, count=shape.count, optional=True, choices=shape.choices)
    if origin is tuple:
        return Shape(kind=args[0], count="*" if args[1] is Ellipsis else len(args))
    if origin is Literal:
        return Shape(kind=str, choices=tuple(args))
    if annotation in (bool, int, float, str):
        return Shape(kind=annotation)
    raise TypeError(f"a flag cannot have the type {annotation!r}")


def convert(raw: Any, *, shape: Shape, flag: Flag, where: str) -> Any:
    """Turn words of a command line, or a value of a YAML file, into the value of a field.

    `raw` is a list of words, or a YAML scalar or list. `where` opens the error message: the flag as the user spelled
    it, or `FILE: key`. A secret never appears in a message.
    """
    items = list(raw) if isinstance(raw, list | tuple) else [raw]
    if len(items) == 1 and items[0] is None and not shape.optional:
        raise ConfigError(f"{where}: needs a value ({shape}), not nothing")
    if len(items) == 1 and shape.optional and _is_none(items[0], auto=shape.is_switch or flag.shown_default == "auto"):
        return None
    values = [_convert_one(item, shape=shape, flag=flag, where=where) for item in items]
    if shape.count == 1:
        if len(values) != 1:
            raise ConfigError(f"{where}: takes one value ({shape}), got {len(values)}")
        return values[0]
    if shape.count == 2 and len(values) == 1 and flag.one_value:
        return (-values[0], values[0]) if flag.one_value == "mirror" else (0.0, values[0])
    if shape.count != "*" and len(values) != shape.count:
        raise ConfigError(f"{where}: takes {shape.count} values ({shape}), got {len(values)}")
    if not values:
        raise ConfigError(f"{where}: takes at least one value ({shape})")
    return tuple(values)


def _is_none(item: Any, *, auto: bool = False) -> bool:
    """Of a switch that may be unset, and where the documents call it so, `auto` is the word for it."""
    words = NONE_WORDS | {"auto"} if auto else NONE_WORDS
    return item is None or (isinstance(item, str) and item.lower() in words)


def _convert_one(item: Any, *, shape: Shape, flag: Flag, where: str) -> Any:
    shown = "this value" if flag.secret else repr(item)
    if shape.is_switch:
        word = str(item).lower()
        if word in TRUE_WORDS | FALSE_WORDS:
            return word in TRUE_WORDS
        raise ConfigError(f"{where}: is a switch; give nothing, true or false, not {shown}")
    # YAML reads `lr: true` as a bool, which Python would take for the number 1.
    if shape.kind is not str and (isinstance(item, bool) or not isinstance(item, int | float | str)):
        raise ConfigError(f"{where}: expected {shape}, got {shown}")
    if shape.kind is int and isinstance(item, float):
        raise ConfigError(f"{where}: expected a whole number, got {shown}")
    try:
        value = shape.kind(item)
    except ValueError:
        expected = "a whole number" if shape.kind is int else "a number"
        raise ConfigError(f"{where}: expected {expected}, got {shown}") from None
    if shape.kind is float and (math.isnan(value) or (math.isinf(value) and not flag.unlimited)):
        raise ConfigError(f"{where}: {shown} is not a value; give a finite number")
    value = dict(flag.synonyms).get(value, value)
    if shape.choices and value not in shape.choices:
        raise ConfigError(f"{where}: {shown} is not one of {', '.join(shape.choices)}")
    return value

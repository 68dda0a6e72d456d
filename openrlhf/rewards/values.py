"""What reward functions and servers may return, as plain float32 numbers. Imports no tensor library."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any


class RewardValueError(ValueError):
    """What was returned cannot be used. The text says what came and what was expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardValues:
    """Numbers for n samples, each representable in float32."""

    rewards: list[float]
    """[n]"""
    scores: list[float] | None = None
    """[n]; None when not given."""
    extra_logs: dict[str, list[float]] = field(default_factory=dict)
    """[n] each."""
    repeated: bool = False
    """Whether one number was returned for n > 1 samples."""


def parse_rewards(returned: Any, *, count: int) -> RewardValues:
    """Numbers for `count` samples, from {"rewards": …, "scores": …, "extra_logs": {name: …}} or from rewards alone.

    Where numbers are expected they may be Python numbers, bools, arrays or tensors of any shape, or nested lists of
    these, `count` of them in all; or a single number (not in a list), which then applies to every sample.

    >>> parse_rewards({"rewards": [1, 0.5], "scores": True}, count=2)
    RewardValues(rewards=[1.0, 0.5], scores=[1.0, 1.0], extra_logs={}, repeated=False)

    Raises RewardValueError.
    """
    if returned is None:
        raise RewardValueError(f"it returned None: is a `return` missing? {_expected(count)}")
    if not isinstance(returned, Mapping):
        returned = {"rewards": returned}
    elif "rewards" not in returned:
        keys = ", ".join(repr(key) for key in returned) or "no keys"
        raise RewardValueError(f"it returned a dict without 'rewards' (with {keys}). {_expected(count)}")
    rewards, scores, logs = _plain(returned["rewards"]), returned.get("scores"), returned.get("extra_logs")
    if logs is None:
        logs = {}
    if not isinstance(logs, Mapping):
        raise RewardValueError(f"its 'extra_logs' must be a dict of numbers, got {_shown(logs)}")
    return RewardValues(
        rewards=_numbers(rewards, count=count, what="rewards"),
        scores=None if scores is None else _numbers(scores, count=count, what="scores"),
        extra_logs={
            str(name): _numbers(value, count=count, what=f"extra_logs[{str(name)!r}]") for name, value in logs.items()
        },
        repeated=count > 1 and not isinstance(rewards, list),
    )


def _numbers(value: Any, *, count: int, what: str) -> list[float]:
    """float32 [count]"""
    value = _plain(value)
    if not isinstance(value, list):
        return [_number(value, what=f"its {what}", count=count)] * count
    items = list(_flatten(value))
    if len(items) != count:
        raise RewardValueError(
            f"its {what} has {len(items)} values for {count} sample{'' if count == 1 else 's'}: {_shown(value)}. "
            f"{_expected(count)}"
        )
    return [_number(item, what=f"its {what}[{index}]", count=count) for index, item in enumerate(items)]


def _plain(value: Any) -> Any:
    """Arrays and tensors (known by `tolist`, so that neither library is imported) and ordered iterables as lists."""
    if hasattr(value, "tolist") and not isinstance(value, type):
        return (value.detach() if hasattr(value, "detach") else value).tolist()
    if isinstance(value, Iterable) and not isinstance(value, (list, str, bytes, Mapping, Set)):
        return list(value)
    return value


def _flatten(value: Any) -> Iterator[Any]:
    value = _plain(value)
    if isinstance(value, list):
        for item in value:
            yield from _flatten(item)
    else:
        yield value


def _number(value: Any, *, what: str, count: int) -> float:
    if isinstance(value, (str, bytes, complex)) or not hasattr(type(value), "__float__"):
        raise RewardValueError(f"{what} must be a number, got {_shown(value)}. {_expected(count)}")
    try:
        number = struct.unpack("<f", struct.pack("<f", float(value)))[0]  # "<" refuses what overflows
    except OverflowError:
        raise RewardValueError(f"{what} is {_shown(value)}, which is too large for a float32") from None
    if not math.isfinite(number):
        raise RewardValueError(f"{what} is {number}, which must be finite")
    return number


def _shown(value: Any) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a user's object whose own __repr__ fails
        text = "…"
    return f"{text if len(text) <= 120 else text[:119] + '…'} ({type(value).__name__})"


def _expected(count: int) -> str:
    numbers = "one number" if count == 1 else f"{count} numbers, one per sample"
    return f'Expected {{"rewards": {numbers}}}, with "scores" and "extra_logs" if wanted'

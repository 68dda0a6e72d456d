"""The answers of reward functions and reward servers as plain float32 numbers. Imports no tensor library."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from openrlhf.agents.values import BadValueError, as_number, plain, shown


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardValues:
    """Numbers for n samples, each representable in float32."""

    rewards: list[float]
    """[n]"""
    scores: list[float] | None = None
    """[n]; None when not given."""
    extra_logs: dict[str, list[float]] = field(default_factory=dict)
    """[n] each."""
    parts: dict[str, list[float]] = field(default_factory=dict)
    """[n] each, where rewards were given by name: `rewards` is their weighted sum."""
    weights: dict[str, float] = field(default_factory=dict)
    """Of parts; one that is not named has 1."""
    repeated: bool = False
    """Whether one number was returned for n > 1 samples."""


def parse_rewards(returned: Any, *, count: int) -> RewardValues:
    """Numbers for `count` samples, from {"rewards": …, "scores": …, "extra_logs": {name: …}} or from rewards alone.

    Where numbers are expected they may be Python numbers, bools, arrays or tensors of any shape, or nested lists of
    these, `count` of them in all; or a single number (not in a list), which then applies to every sample. "rewards" may
    be several by name, {"right": …, "format": …}: the reward is their sum, weighted by {"weights": {name: number}}.

    >>> parse_rewards({"rewards": [1, 0.5], "scores": True}, count=2)
    RewardValues(rewards=[1.0, 0.5], scores=[1.0, 1.0], extra_logs={}, parts={}, weights={}, repeated=False)

    Raises BadValueError.
    """
    if returned is None:
        raise BadValueError(f"it returned None: is a `return` missing? {_expected(count)}")
    if not isinstance(returned, Mapping):
        returned = {"rewards": returned}
    elif "rewards" not in returned:
        keys = ", ".join(repr(key) for key in returned) or "no keys"
        raise BadValueError(f"it returned a dict without 'rewards' (with {keys}). {_expected(count)}")
    rewards, scores, logs = returned["rewards"], returned.get("scores"), returned.get("extra_logs")
    if logs is None:
        logs = {}
    if not isinstance(logs, Mapping):
        raise BadValueError(f"its 'extra_logs' must be a dict of numbers, got {shown(logs)}")
    parts: dict[str, list[float]] = {}
    weights: dict[str, float] = {}
    if isinstance(rewards, Mapping):
        parts = {str(name): _numbers(v, count=count, what=f"rewards[{str(name)!r}]") for name, v in rewards.items()}
        weights = _weights(returned.get("weights"), parts, count)
        if not parts:
            raise BadValueError(f"its 'rewards' is an empty dict. {_expected(count)}")
        rewards = [
            as_number(
                sum(weights.get(name, 1.0) * part[i] for name, part in parts.items()), what="the sum of its rewards"
            )
            for i in range(count)
        ]
    rewards = plain(rewards)
    return RewardValues(
        parts=parts,
        weights=weights,
        rewards=_numbers(rewards, count=count, what="rewards"),
        scores=None if scores is None else _numbers(scores, count=count, what="scores"),
        extra_logs={
            str(name): _numbers(value, count=count, what=f"extra_logs[{str(name)!r}]") for name, value in logs.items()
        },
        repeated=count > 1 and not isinstance(rewards, list),
    )


def _weights(given: Any, parts: Mapping[str, list[float]], count: int) -> dict[str, float]:
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not {str(name) for name in given} <= parts.keys():
        raise BadValueError(
            f"its 'weights' must be numbers by the names in 'rewards' ({', '.join(parts)}), got {shown(given)}"
        )
    return {str(name): _number(value, what=f"weights[{str(name)!r}]", count=count) for name, value in given.items()}


def _numbers(value: Any, *, count: int, what: str) -> list[float]:
    """float32 [count]"""
    value = plain(value)
    if not isinstance(value, list):
        return [_number(value, what=f"its {what}", count=count)] * count
    items = list(_flatten(value))
    if len(items) != count:
        raise BadValueError(
            f"its {what} has {len(items)} values for {count} sample{'' if count == 1 else 's'}: {shown(value)}. "
            f"{_expected(count)}"
        )
    return [_number(item, what=f"its {what}[{index}]", count=count) for index, item in enumerate(items)]


def _flatten(value: Any) -> Iterator[Any]:
    value = plain(value)
    if isinstance(value, list):
        for item in value:
            yield from _flatten(item)
    else:
        yield value


def _number(value: Any, *, what: str, count: int) -> float:
    try:
        return as_number(value, what=what)
    except BadValueError as error:
        raise BadValueError(f"{error}. {_expected(count)}") from None


def _expected(count: int) -> str:
    numbers = "one number" if count == 1 else f"{count} numbers, one per sample"
    return f'Expected {{"rewards": {numbers}}}, with "scores" and "extra_logs" if wanted'

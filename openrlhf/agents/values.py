"""Values that users' code returns, in any of the forms it may use, as plain numbers, token ids and parameters.

Agents, reward files and reward servers share it. It imports no tensor library: hosts of reward files start with it.
"""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openrlhf.types import SamplingParams

MOST_CHARACTERS = 120
"""The length at which a value is cut in a message."""


class BadValueError(ValueError):
    """Users' code gave something that cannot be used. The text says what came and what was expected."""


def shown(value: Any) -> str:
    """`[1.0, 2.0] (list of 2)`: a value for messages, on one line, cut when long."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # a user's object whose own __repr__ fails
        text = "…"
    if len(text) > MOST_CHARACTERS:
        text = text[: MOST_CHARACTERS - 1] + "…"
    if value is None:
        return text
    kind = type(value).__name__
    shape = getattr(value, "shape", None)
    if shape is not None:
        kind = f"{kind} of shape {tuple(shape)}"
    elif isinstance(value, (list, tuple)):
        kind = f"{kind} of {len(value)}"
    return f"{text} ({kind})"


def as_number(value: Any, *, what: str) -> float:
    """A finite float32 from a number, bool, or array, tensor or list with a single element."""
    try:
        number: float = struct.unpack("<f", struct.pack("<f", _float(value, what)))[0]  # "<" refuses what overflows
    except OverflowError:
        raise BadValueError(f"{what} is too large for a float32: {shown(value)}") from None
    return number


def as_flag(value: Any, *, what: str) -> bool:
    """True or False from a bool, or anything that is one number."""
    try:
        return as_number(value, what=what) != 0
    except BadValueError:
        raise BadValueError(f"{what} must be True or False, got {shown(value)}") from None


def as_numbers(value: Any, *, what: str) -> list[float]:
    """float32 numbers from a list, array or tensor of them, or a list of one-element tensors."""
    items = as_list(value, what=what, of="numbers")
    return [as_number(item, what=f"{what}[{index}]") for index, item in enumerate(items)]


def as_token_ids(value: Any, *, what: str) -> list[int]:
    """Token ids from a list, array or tensor of shape [T] or [1, T]."""
    if isinstance(value, str):
        raise BadValueError(f"{what} must be token ids, got text: {shown(value)}")
    items = as_list(value, what=what, of="token ids")
    if len(items) == 1 and isinstance(items[0], (list, tuple)):
        items = list(items[0])
    ids = []
    for index, item in enumerate(items):
        if isinstance(item, bool) or not hasattr(type(item), "__index__"):
            raise BadValueError(f"{what}[{index}] must be a token id, got {shown(item)}")
        try:
            ids.append(operator.index(item))
        except (TypeError, ValueError, RuntimeError):  # a float tensor has __index__ and refuses
            raise BadValueError(f"{what}[{index}] must be a token id, got {shown(item)}") from None
        if ids[-1] < 0:
            raise BadValueError(f"{what}[{index}] must be a token id, got {ids[-1]}")
    return ids


def as_list(value: Any, *, what: str, of: str) -> list[Any]:
    items = plain(value)
    if not isinstance(items, list):
        raise BadValueError(f"{what} must be a list of {of}, got {shown(value)}")
    return items


def as_logs(value: Any, *, what: str) -> dict[str, float]:
    """{name: number}; None is none."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadValueError(f"{what} must be a dict of numbers, got {shown(value)}")
    return {str(name): as_number(item, what=f"{what}[{str(name)!r}]") for name, item in value.items()}


def as_images(value: Any, *, what: str) -> tuple[Any, ...]:
    """Pictures are kept as they are; None is none."""
    if value is None:
        return ()
    if not isinstance(value, (list, tuple)):
        raise BadValueError(f"{what} must be a list of pictures, got {shown(value)}")
    return tuple(value)


def as_sampling_params(value: Any, *, what: str) -> SamplingParams:
    """A copy of ours, or the same from an object with vLLM's attributes."""
    if not hasattr(value, "temperature"):
        raise BadValueError(
            f"{what} must be sampling parameters (those that were given, or a changed copy), got {shown(value)}"
        )
    from openrlhf.types import SamplingParams  # imports torch

    given = {field.name: getattr(value, field.name) for field in fields(SamplingParams) if hasattr(value, field.name)}
    try:
        for name in given.keys() & _CONVERTERS.keys():
            given[name] = _CONVERTERS[name](given[name], f"{what}.{name}")
        return SamplingParams(**given)
    except BadValueError:
        raise
    except (TypeError, ValueError) as error:
        raise BadValueError(f"{what} cannot be used: {error}") from None


def plain(value: Any) -> Any:
    """Arrays and tensors as numbers and lists (they are known by `tolist`, so that neither library is imported), and
    other ordered iterables as lists."""
    if hasattr(value, "tolist") and not isinstance(value, type):
        return (value.detach() if hasattr(value, "detach") else value).tolist()
    if isinstance(value, Iterable) and not isinstance(value, (list, str, bytes, Mapping, Set)):
        return list(value)
    return value


def _float(value: Any, what: str) -> float:
    item = plain(value)
    while isinstance(item, list) and len(item) == 1:
        item = plain(item[0])
    if isinstance(item, (str, bytes, complex)) or not hasattr(type(item), "__float__"):
        raise BadValueError(f"{what} must be one number, got {shown(value)}")
    number = float(item)
    if not math.isfinite(number):
        raise BadValueError(f"{what} must be finite, got {shown(value)}")
    return number


def _whole(value: Any, what: str) -> int:
    try:
        return operator.index(plain(value))
    except TypeError:
        raise BadValueError(f"{what} must be a whole number, got {shown(value)}") from None


def _whole_or_none(value: Any, what: str) -> int | None:
    return None if value is None else _whole(value, what)


def _texts(value: Any, what: str) -> list[str]:
    texts = [value] if isinstance(value, str) else list(value or ())
    for text in texts:
        if not isinstance(text, str):
            raise BadValueError(f"{what} must be text or a list of texts, got {shown(value)}")
    return texts


_CONVERTERS: dict[str, Callable[[Any, str], Any]] = {
    "temperature": _float,
    "top_p": _float,
    "top_k": lambda value, what: _whole(value, what) or -1,  # vLLM writes "no limit" as 0 or -1
    "max_tokens": _whole_or_none,
    "min_tokens": _whole,
    "min_p": _float,
    "repetition_penalty": _float,
    "presence_penalty": _float,
    "frequency_penalty": _float,
    "stop": _texts,
    "seed": _whole_or_none,
    "logprobs": lambda value, _: value is not None and value is not False,  # vLLM's 0 asks for the sampled token's
}


def listed(names: Sequence[Any]) -> str:
    """`'a', 'b'`, or `nothing`."""
    return ", ".join(repr(name) for name in names) or "nothing"

"""What a host process and its parent say to each other. Imports the standard library only: hosts start with it.

    parent → host   Hello, then Call | Cancel | Ping | Part | Answered | Refused …
    host → parent   Ready | Failure, then Done | Failed | Pong | Ask | CancelAsk | Said | Pinned …

Each message is a pickle. Values of users' types are pickles inside it, so that one that cannot be read fails its call
alone.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from typing import Any, NamedTuple


class Slowest(NamedTuple):
    """The longest single run of users' code in a call."""

    function: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception, as text: its type may not be importable, or not picklable, on the other side."""

    kind: str
    """Name of its type."""
    text: str
    traceback: str


def describe(error: BaseException) -> Failure:
    try:
        text = str(error)
    except Exception:  # a user's exception whose own __str__ fails
        text = "(its text cannot be shown)"
    return Failure(type(error).__name__, text, "".join(traceback.format_exception(error)))


# ------------------------------------------------------------------------------------ parent → host


@dataclass(frozen=True, slots=True)
class Hello:
    """Which service to make: `target` is `module:callable`, called with `args`."""

    target: str
    args: tuple[Any, ...]
    pinned: bool = False
    """Whether users' coroutines must stay on the shared loop (`host_calls.py`)."""
    own: bool = False
    """Whether each call begins with a loop of its own: a coroutine has blocked the shared one in another process."""


@dataclass(frozen=True, slots=True)
class Call:
    id: int
    method: str
    args: bytes


@dataclass(frozen=True, slots=True)
class Cancel:
    """Nobody waits for this call any more. It still ends with Done or Failed."""

    id: int


@dataclass(frozen=True, slots=True)
class Ping:
    """Answered by the reading thread at once, unless some call holds the interpreter lock."""


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a streamed answer; the last is followed by Answered."""

    ask: int
    value: bytes


@dataclass(frozen=True, slots=True)
class Answered:
    ask: int
    value: bytes


@dataclass(frozen=True, slots=True)
class Refused:
    ask: int
    failure: Failure


# ------------------------------------------------------------------------------------ host → parent


@dataclass(frozen=True, slots=True)
class Ready:
    """The service is there."""


@dataclass(frozen=True, slots=True)
class Done:
    id: int
    value: bytes
    users_seconds: float
    """Time in users' code, as far as it ran through `run_user`."""
    slowest: Slowest | None


@dataclass(frozen=True, slots=True)
class Failed:
    id: int
    failure: Failure


@dataclass(frozen=True, slots=True)
class Pong:
    spent: dict[int, float]
    """For each call: how long it has had since it began or was last answered (`host_clock.CallClock`)."""
    doing: dict[int, str]
    """The users' function it is in, where that is known."""
    holder: int | None
    """The call on whose behalf the shared loop runs something right now."""


@dataclass(frozen=True, slots=True)
class Ask:
    call: int
    id: int
    name: str
    args: bytes
    stream: bool


@dataclass(frozen=True, slots=True)
class CancelAsk:
    """The answer is not wanted any more."""

    call: int
    id: int


@dataclass(frozen=True, slots=True)
class Said:
    """A line for the parent's log."""

    text: str


@dataclass(frozen=True, slots=True)
class Pinned:
    """Users' coroutines must stay on the shared loop, but some of what they share belongs to another by now: this
    process is of no use any more."""

"""Messages between a host process and its parent. Imports the standard library only: hosts start with it.

    parent → host   Hello, then Call | Cancel | Part | Answered | Refused …
    host → parent   Ready | Failure, then Done | Failed | Cancelling | Ask | CancelAsk | LogLine | NeedsSharedLoop …

Each message is a pickle. Values of users' types are pickles inside it, so that a value that cannot be read fails its
own call alone.
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
    """An exception as text, because its type may not be importable, or not picklable, on the other side."""

    kind: str
    """Name of its type."""
    text: str
    traceback: str


def describe(error: BaseException) -> Failure:
    """The exception as text."""
    try:
        text = str(error)
    except Exception:  # a user's exception whose own __str__ fails
        text = "(its text cannot be shown)"
    return Failure(type(error).__name__, text, "".join(traceback.format_exception(error)))


# ------------------------------------------------------------------------------------ parent → host


@dataclass(frozen=True, slots=True)
class Hello:
    """Which service the host makes: `target` is `module:callable`, called with `args`."""

    target: str
    args: tuple[Any, ...]
    shared_loop: bool = False
    """Whether calls share one event loop although the service did not ask for it (`NeedsSharedLoop`)."""


@dataclass(frozen=True, slots=True)
class Call:
    id: int
    method: str
    args: bytes


@dataclass(frozen=True, slots=True)
class Cancel:
    """The call is not wanted any more, or is late. The host answers with Cancelling, then with Done or Failed."""

    id: int


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a streamed answer; the last part is followed by Answered."""

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
class Cancelling:
    """The host's event loop runs, and has told the call to end."""

    id: int
    function: str | None
    """The users' function that the call is in, where that is known."""


@dataclass(frozen=True, slots=True)
class Ask:
    call: int
    id: int
    name: str
    args: bytes
    stream: bool
    keep: bool = True
    """Whether the call hears the same answer when it runs again. What is long and only tells something is not kept."""


@dataclass(frozen=True, slots=True)
class CancelAsk:
    """The answer is not wanted any more."""

    call: int
    id: int


@dataclass(frozen=True, slots=True)
class LogLine:
    """A line for the parent's log."""

    text: str


@dataclass(frozen=True, slots=True)
class NeedsSharedLoop:
    """Calls share something that works on one event loop only. All must run again in a process where they share one."""

    text: str
    """Why, for the log."""

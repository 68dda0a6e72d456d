"""Tool calls in what the policy writes, in the form of Hermes and Qwen, and what can be shown of it while it grows.

I add them.
<tool_call>
{"name": "add", "arguments": {"a": 1, "b": 2}}
</tool_call>
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

OPENING, CLOSING = "<tool_call>", "</tool_call>"
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


class ToolCall(NamedTuple):
    name: str
    arguments: dict[str, Any]


class Reply(NamedTuple):
    """An answer of the policy, as its client reads it."""

    content: str
    tool_calls: tuple[ToolCall, ...] = ()


def parse_reply(text: str) -> Reply:
    """The calls, and the text around them. One that is malformed makes all of it text: nothing is guessed."""
    # One that is never closed. Looked for first: for each such opening the expression would read on to the end.
    if text.rfind(OPENING) > text.rfind(CLOSING):
        return Reply(text)
    calls = [_parse_call(block) for block in _CALL.findall(text)]
    before, *others = _CALL.split(text)[::2]
    if not calls or None in calls or any(OPENING in piece for piece in (before, *others)):
        return Reply(text)
    pieces = [before.rstrip(), *(piece.strip() for piece in others)]
    return Reply("\n".join(piece for piece in pieces if piece), tuple(call for call in calls if call is not None))


def _parse_call(block: str) -> ToolCall | None:
    try:
        call = json.loads(block, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None
    match call:
        case {"name": str(name), "arguments": dict(arguments)} if name:
            return ToolCall(name, arguments)
    return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


class GrowingReply:
    """A reply while it is written. What `feed` and `finish` give, put together, is the content of `parse_reply`.

    Held back is what may turn out to be, or to stand before, a call.
    """

    def __init__(self, *, tools: bool) -> None:
        self._tools = tools
        self._text = ""
        self._shown = 0

    def feed(self, text: str) -> str:
        """Content that is certain now and was not before."""
        self._text += text
        certain = self._text
        if self._tools:
            certain, called, _ = self._text.partition(OPENING)
            if not called:
                certain = certain[: len(certain) - _begun(certain)]
            certain = certain.rstrip()
        new = certain[self._shown :]
        self._shown += len(new)
        return new

    def finish(self) -> tuple[str, Reply]:
        """The rest of the content, and all of it with its calls."""
        reply = parse_reply(self._text) if self._tools else Reply(self._text)
        return reply.content[self._shown :], reply


def _begun(text: str) -> int:
    """How many of the last characters may begin a call."""
    return next((n for n in range(len(OPENING) - 1, 0, -1) if text.endswith(OPENING[:n])), 0)

"""Tool calls and thoughts in what the policy writes, in the form of Hermes and Qwen, and what can be shown of it while
it grows.

<think>
Which tool?
</think>
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
THINK, THOUGHT = "<think>", "</think>"
"""What stands before thoughts, and after them."""
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
                certain = certain[: len(certain) - _begun(certain, OPENING)]
            certain = certain.rstrip()
        new = certain[self._shown :]
        self._shown += len(new)
        return new

    def finish(self) -> tuple[str, Reply]:
        """The rest of the content, and all of it with its calls."""
        reply = parse_reply(self._text) if self._tools else Reply(self._text)
        return reply.content[self._shown :], reply


def _begun(text: str, mark: str) -> int:
    """How many of the last characters may begin the mark."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)


# ------------------------------------------------------------------------------------ thoughts


class Thoughtful(NamedTuple):
    """The content of an answer, or a new part of it, in two."""

    thoughts: str
    answer: str


def with_thoughts(thoughts: str, answer: str) -> str:
    """An answer with its thoughts before it, as Qwen writes them."""
    return f"{THINK}\n{thoughts}\n{THOUGHT}\n\n{answer}"


def split_thoughts(content: str, *, begun: bool = False) -> Thoughtful | None:
    """The thoughts at the beginning of an answer, and the rest, without the white space between; None: it has none.

    `begun`: `<think>` stood before the answer already, as the templates of some models write it.

    >>> split_thoughts("<think>\\nhm\\n</think>\\n\\nyes")
    Thoughtful(thoughts='hm', answer='yes')
    """
    text = content.lstrip()
    if not begun and not text.startswith(THINK):
        return None
    thoughts, _, answer = text.removeprefix(THINK).partition(THOUGHT)
    return Thoughtful(thoughts.strip(), answer.lstrip())


class GrowingThoughts:
    """An answer in two while it is written. What `feed` and `finish` give, put together, is what `split_thoughts` does,
    or all of the content as the answer."""

    def __init__(self, *, begun: bool) -> None:
        self._begun = begun
        self._text = ""
        self._shown = Thoughtful("", "")

    @property
    def has_thoughts(self) -> bool:
        """Whether the answer has thoughts for certain; they may be empty."""
        return self._begun or self._text.lstrip().startswith(THINK)

    def feed(self, content: str) -> Thoughtful:
        """What is certain now and was not before."""
        self._text += content
        text = self._text.lstrip()
        if THINK.startswith(text):  # perhaps it begins with thoughts
            return Thoughtful("", "")
        split = split_thoughts(self._text, begun=self._begun)
        if split is None or THOUGHT in text:
            return self._show(split or Thoughtful("", self._text))
        thoughts = split.thoughts
        return self._show(Thoughtful(thoughts[: len(thoughts) - _begun(thoughts, THOUGHT)].rstrip(), ""))

    def finish(self) -> Thoughtful:
        """The rest."""
        return self._show(split_thoughts(self._text, begun=self._begun) or Thoughtful("", self._text))

    def _show(self, certain: Thoughtful) -> Thoughtful:
        shown, self._shown = self._shown, certain
        return Thoughtful(certain.thoughts[len(shown.thoughts) :], certain.answer[len(shown.answer) :])

"""From a record to the texts that are learnt from it, or the reason why none are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol

from openrlhf.data.boundaries import MarkedText
from openrlhf.data.json_files import Record
from openrlhf.data.templates import fill_template, render_chat, says_something
from openrlhf.data.turns import is_answer, mark_turns


class SkipReason(StrEnum):
    """Why a record is left out."""

    EMPTY_PROMPT = "have an empty prompt"
    EMPTY_RESPONSE = "have an empty answer"
    NOT_ASSISTANT = "have no message of the assistant to learn"
    LONG_PROMPT = "leave no room for an answer within --data.max_len"
    NOTHING_LEFT = "have no token to learn"
    OTHER_PROMPT = "compare answers to different prompts"
    EQUAL = "compare an answer with itself"
    EQUAL_CUT = "compare answers that differ only beyond --data.max_len"


class Unusable(Exception):
    """There is nothing wrong with this record, and nothing to learn from it."""

    def __init__(self, reason: SkipReason) -> None:
        super().__init__(reason)
        self.reason = reason


class Reading(NamedTuple):
    """The content of a record."""

    texts: tuple[MarkedText, ...]
    """One; of a pair the chosen, then the rejected."""
    value: float = 0.0
    """The number that goes with them: a margin, or a label."""
    undivided: bool = False
    """The record does not say where the answers of a pair begin: the prompt is what both texts begin with."""


class Format(Protocol):
    """Which keys of a record hold what, and how they become text. A frozen dataclass: its `repr` is its identity."""

    def read(self, record: Record, tokenizer: Any) -> Reading:
        """Raises DataError for a record that is wrong, and Unusable for one to leave out."""
        ...


def plain_text(prompt: str, response: str, *, input_template: str | None) -> MarkedText:
    """`prompt`, in its template, and then `response`, which is learnt."""
    if not prompt.strip():
        raise Unusable(SkipReason.EMPTY_PROMPT)
    if not response.strip():
        raise Unusable(SkipReason.EMPTY_RESPONSE)
    if input_template is not None:
        prompt = fill_template(input_template, prompt)
    return MarkedText.of(prompt + response, [(len(prompt), len(prompt) + len(response))])


def chat_text(messages: Sequence[Mapping[str, Any]], tokenizer: Any, *, first: int) -> MarkedText:
    """A conversation of which the assistant's messages from number `first` on are learnt."""
    if first and not any(says_something(message) for message in messages[:first]):
        raise Unusable(SkipReason.EMPTY_PROMPT)
    if not any(says_something(message) for message in messages[first:]):
        raise Unusable(SkipReason.EMPTY_RESPONSE)
    if not any(is_answer(message) for message in messages[first:]):
        raise Unusable(SkipReason.NOT_ASSISTANT)
    return mark_turns(messages, tokenizer, first=first)


def whole_text(text: str) -> MarkedText:
    """A text of which no part stands out, closed by end-of-sequence."""
    text = text.rstrip("\n")
    if not text.strip():
        raise Unusable(SkipReason.EMPTY_RESPONSE)
    return MarkedText(text, None, closed=True)


def whole_chat(messages: Sequence[Mapping[str, Any]], tokenizer: Any) -> MarkedText:
    if not any(says_something(message) for message in messages):
        raise Unusable(SkipReason.EMPTY_RESPONSE)
    return whole_text(render_chat(messages, tokenizer))

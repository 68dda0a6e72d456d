"""Preference data: pairs of answers, or answers that were judged one by one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from openrlhf.data.boundaries import MarkedText
from openrlhf.data.examples import Example, TokenisedSet
from openrlhf.data.files import DataError, Record
from openrlhf.data.reading import (
    Reading,
    SkipReason,
    Unusable,
    chat_text,
    plain_text,
    whole_chat,
    whole_text,
)
from openrlhf.data.templates import read_messages, read_text, read_value

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two answers to the same prompt, of which the first is preferred."""

    chosen: Example
    rejected: Example
    margin: float = 0.0
    """The margin between the answers, where the record gives one."""

    @property
    def where(self) -> str:
        return self.chosen.where

    def __len__(self) -> int:
        return len(self.chosen) + len(self.rejected)


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """One answer, and whether it is wanted."""

    example: Example
    desirable: bool

    @property
    def where(self) -> str:
        return self.example.where

    def __len__(self) -> int:
        return len(self.example)


@dataclass(frozen=True, kw_only=True)
class PairFormat:
    """Which keys of a record hold what, and how they become text.

    With `answers_only` the targets are the answers' tokens, as DPO wants them, and the answers must be to the same
    prompt: under `prompt_key`, or, in chats, all messages before the last, or, in texts, all that both begin with.
    Without it nothing is told apart, as a
    reward model wants it: the targets are all tokens.
    """

    prompt_key: str | None = None
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"
    margin_key: str = "margin"
    input_template: str | None = None
    apply_chat_template: bool = False
    answers_only: bool = True

    def read(self, record: Record, tokenizer: Any) -> Reading:
        read = self._chats if self.apply_chat_template else self._plain
        return Reading(
            read(record, tokenizer),
            value=_margin(record.get(self.margin_key), key=self.margin_key),
            undivided=self.answers_only and not self.apply_chat_template and self.prompt_key is None,
        )

    def _values(self, record: Record) -> tuple[Any, Any]:
        return (
            read_value(record, self.chosen_key, flag="--data.chosen_key"),
            read_value(record, self.rejected_key, flag="--data.rejected_key"),
        )

    def _plain(self, record: Record, tokenizer: Any) -> tuple[MarkedText, MarkedText]:
        chosen, rejected = (
            read_text(value, key=key)
            for value, key in zip(self._values(record), (self.chosen_key, self.rejected_key), strict=True)
        )
        if self.prompt_key is None:
            return whole_text(chosen), whole_text(rejected)
        prompt = read_text(read_value(record, self.prompt_key, flag="--data.prompt_key"), key=self.prompt_key)
        texts = tuple(plain_text(prompt, answer, input_template=self.input_template) for answer in (chosen, rejected))
        return texts[0], texts[1]

    def _chats(self, record: Record, tokenizer: Any) -> tuple[MarkedText, MarkedText]:
        prompt: Messages = []
        if self.prompt_key is not None:
            value = read_value(record, self.prompt_key, flag="--data.prompt_key")
            prompt = read_messages(value, role="user", key=self.prompt_key)
        chosen, rejected = (
            [*prompt, *read_messages(value, role="assistant", key=key)]
            for value, key in zip(self._values(record), (self.chosen_key, self.rejected_key), strict=True)
        )
        if not self.answers_only:
            return whole_chat(chosen, tokenizer), whole_chat(rejected, tokenizer)
        if self.prompt_key is not None:
            first = len(prompt)
        elif not chosen or not rejected:
            raise Unusable(SkipReason.EMPTY_RESPONSE)
        elif chosen[:-1] != rejected[:-1]:
            raise Unusable(SkipReason.OTHER_PROMPT)
        else:
            first = len(chosen) - 1
        if first == 0:
            raise Unusable(SkipReason.EMPTY_PROMPT)
        return chat_text(chosen, tokenizer, first=first), chat_text(rejected, tokenizer, first=first)


@dataclass(frozen=True, kw_only=True)
class JudgedFormat:
    """Which keys of a record hold what, and how they become text."""

    prompt_key: str = "prompt"
    response_key: str = "response"
    label_key: str = "label"
    input_template: str | None = None
    apply_chat_template: bool = False

    def read(self, record: Record, tokenizer: Any) -> Reading:
        prompt = read_value(record, self.prompt_key, flag="--data.prompt_key")
        response = read_value(record, self.response_key, flag="--data.response_key")
        desirable = read_label(record, key=self.label_key)
        if not self.apply_chat_template:
            texts = read_text(prompt, key=self.prompt_key), read_text(response, key=self.response_key)
            text = plain_text(*texts, input_template=self.input_template)
        else:
            messages = read_messages(prompt, role="user", key=self.prompt_key)
            if not messages:
                raise Unusable(SkipReason.EMPTY_PROMPT)
            answer = read_messages(response, role="assistant", key=self.response_key)
            text = chat_text([*messages, *answer], tokenizer, first=len(messages))
        return Reading((text,), value=float(desirable))


class PairSet(TokenisedSet[Pair]):
    """Pairs from records in a `PairFormat`; the chosen and the rejected answer always differ."""

    def _sample(self, index: int) -> Pair:
        return Pair(
            chosen=self._example(index, 0),
            rejected=self._example(index, 1),
            margin=float(self._columns.values[index]),
        )


class JudgedSet(TokenisedSet[Judged]):
    """Judged answers from records in a `JudgedFormat`."""

    def _sample(self, index: int) -> Judged:
        return Judged(example=self._example(index), desirable=bool(self._columns.values[index]))

    @property
    def desirable(self) -> list[bool]:
        """The length of each sample, without building it."""
        return self._columns.values.astype(bool).tolist()


def read_label(record: Mapping[str, Any], *, key: str) -> bool:
    """Whether the answer is wanted: true or 1 against false, 0 or −1. A rating is refused: its middle is not said."""
    value = read_value(record, key, flag="--data.label_key")
    number = {"true": 1, "false": 0}.get(value.strip().lower(), value) if isinstance(value, str) else value
    try:
        number = float(number)
    except (TypeError, ValueError):
        number = math.nan
    if number not in (-1.0, 0.0, 1.0):
        raise DataError(f"its {key!r} must be true or 1 (wanted), or false, 0 or -1 (not wanted), got {value!r:.80}")
    return number > 0


def _margin(value: Any, *, key: str) -> float:
    if value is None:
        return 0.0
    try:
        margin = float(value)
    except (TypeError, ValueError):
        margin = math.nan
    if not math.isfinite(margin):
        raise DataError(f"its {key!r} must be a number, got {value!r:.80}")
    return margin


if TYPE_CHECKING:
    from openrlhf.data.reading import Format

    _: list[type[Format]] = [PairFormat, JudgedFormat]

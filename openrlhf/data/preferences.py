"""Preference data: pairs of answers, or answers that were judged one by one."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf.data.boundaries import MarkedText
from openrlhf.data.examples import Example, TokenisedSet
from openrlhf.data.files import DataError, Record
from openrlhf.data.image_places import ImagePlaces, is_image, place_in_messages, place_in_text
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
Illustrated = tuple[MarkedText, tuple[bytes | str, ...]]
"""A text and its images."""


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
    places: ImagePlaces | None = None

    def read(self, record: Record, tokenizer: Any, folder: Path | None = None) -> Reading:
        read = self._chats if self.apply_chat_template else self._plain
        (chosen, chosen_images), (rejected, rejected_images) = read(record, tokenizer, folder)
        return Reading(
            (chosen, rejected),
            images=(chosen_images, rejected_images),
            value=_margin(record.get(self.margin_key), key=self.margin_key),
            undivided=self.answers_only and not self.apply_chat_template and self.prompt_key is None,
        )

    def _values(self, record: Record) -> tuple[Any, Any]:
        return (
            read_value(record, self.chosen_key, flag="--data.chosen_key"),
            read_value(record, self.rejected_key, flag="--data.rejected_key"),
        )

    def _plain(self, record: Record, tokenizer: Any, folder: Path | None) -> tuple[Illustrated, Illustrated]:
        chosen, rejected = (
            read_text(value, key=key)
            for value, key in zip(self._values(record), (self.chosen_key, self.rejected_key), strict=True)
        )
        if self.prompt_key is None:
            placed = [place_in_text(text, record, self.places, folder) for text in (chosen, rejected)]
            first, second = ((whole_text(text), images) for text, images in placed)
            return first, second
        prompt = read_text(read_value(record, self.prompt_key, flag="--data.prompt_key"), key=self.prompt_key)
        if not prompt.strip():
            raise Unusable(SkipReason.EMPTY_PROMPT)
        prompt, images = place_in_text(prompt, record, self.places, folder)
        first, second = (
            (plain_text(prompt, answer, input_template=self.input_template, places=self.places), images)
            for answer in (chosen, rejected)
        )
        return first, second

    def _chats(self, record: Record, tokenizer: Any, folder: Path | None) -> tuple[Illustrated, Illustrated]:
        prompt: Messages = []
        if self.prompt_key is not None:
            value = read_value(record, self.prompt_key, flag="--data.prompt_key")
            prompt = read_messages(value, role="user", key=self.prompt_key)
        chosen, rejected = (
            [*prompt, *read_messages(value, role="assistant", key=key)]
            for value, key in zip(self._values(record), (self.chosen_key, self.rejected_key), strict=True)
        )
        same = chosen[:-1] == rejected[:-1]
        chosen, chosen_images = place_in_messages(chosen, record, self.places, folder)
        rejected, rejected_images = place_in_messages(rejected, record, self.places, folder)
        if not self.answers_only:
            return (whole_chat(chosen, tokenizer), chosen_images), (whole_chat(rejected, tokenizer), rejected_images)
        if self.prompt_key is not None:
            first = len(prompt)
        elif not chosen or not rejected:
            raise Unusable(SkipReason.EMPTY_RESPONSE)
        elif not same:
            raise Unusable(SkipReason.OTHER_PROMPT)
        else:
            first = len(chosen) - 1
        if first == 0:
            raise Unusable(SkipReason.EMPTY_PROMPT)
        return (
            (chat_text(chosen, tokenizer, first=first), chosen_images),
            (chat_text(rejected, tokenizer, first=first), rejected_images),
        )


@dataclass(frozen=True, kw_only=True)
class JudgedFormat:
    """Which keys of a record hold what, and how they become text."""

    prompt_key: str = "prompt"
    response_key: str = "response"
    label_key: str = "label"
    input_template: str | None = None
    apply_chat_template: bool = False
    places: ImagePlaces | None = None

    def read(self, record: Record, tokenizer: Any, folder: Path | None = None) -> Reading:
        prompt = read_value(record, self.prompt_key, flag="--data.prompt_key")
        response = read_value(record, self.response_key, flag="--data.response_key")
        desirable = read_label(record, key=self.label_key)
        if not self.apply_chat_template:
            asked, answer = read_text(prompt, key=self.prompt_key), read_text(response, key=self.response_key)
            if not asked.strip():
                raise Unusable(SkipReason.EMPTY_PROMPT)
            asked, images = place_in_text(asked, record, self.places, folder)
            text = plain_text(asked, answer, input_template=self.input_template, places=self.places)
        else:
            messages = read_messages(prompt, role="user", key=self.prompt_key)
            if not messages:
                raise Unusable(SkipReason.EMPTY_PROMPT)
            first = len(messages)
            messages += read_messages(response, role="assistant", key=self.response_key)
            messages, images = place_in_messages(messages, record, self.places, folder)
            if any(is_image(item) for message in messages[first:] for item in message["content"] or ()):
                raise DataError(
                    f"its {self.response_key!r} has an image: answers are read after other prompts too, and an image "
                    "belongs to the prompt"
                )
            text = chat_text(messages, tokenizer, first=first)
        return Reading((text,), value=float(desirable), images=(images,))


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

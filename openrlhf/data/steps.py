"""Answers whose steps were judged one by one: what a process reward model learns from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from openrlhf.data.examples import Example, TokenisedSet
from openrlhf.data.files import DataError, Record
from openrlhf.data.image_places import ImagePlaces, place_in_messages, place_in_text
from openrlhf.data.preferences import read_label
from openrlhf.data.reading import Format, Reading, SkipReason, Unusable, chat_text, plain_text
from openrlhf.data.sources import Records
from openrlhf.data.templates import read_messages, read_text, read_value
from openrlhf.rewards.steps import decoded, step_ends


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedSteps:
    """An answer, the tokens with which its steps end, and which steps are good."""

    example: Example
    ends: tuple[int, ...]
    good: tuple[bool, ...]

    @property
    def where(self) -> str:
        return self.example.where

    def __len__(self) -> int:
        return len(self.example)


@dataclass(frozen=True, kw_only=True)
class StepFormat:
    """Which keys of a record hold what. The answer is the steps, joined by the separator."""

    prompt_key: str = "input"
    steps_key: str = "steps"
    labels_key: str = "labels"
    separator: str = "\n\n"
    input_template: str | None = None
    apply_chat_template: bool = False
    places: ImagePlaces | None = None

    def read(self, record: Record, tokenizer: Any, folder: Path | None = None) -> Reading:
        prompt = read_value(record, self.prompt_key, flag="--data.prompt_key")
        good = self.good(record)
        answer = self.separator.join(self.steps(record))
        if self.apply_chat_template:
            messages = read_messages(prompt, role="user", key=self.prompt_key)
            first = len(messages)
            messages += [{"role": "assistant", "content": answer}]
            messages, images = place_in_messages(messages, record, self.places, folder)
            text = chat_text(messages, tokenizer, first=first)
        else:
            asked = read_text(prompt, key=self.prompt_key)
            if not asked.strip():
                raise Unusable(SkipReason.EMPTY_PROMPT)
            asked, images = place_in_text(asked, record, self.places, folder)
            text = plain_text(asked, answer, input_template=self.input_template, places=self.places)
        # The number stands for the labels where two data sets are compared.
        labels = float(sum(is_good << (step % 48) for step, is_good in enumerate(good)))
        return Reading((text,), value=labels, images=(images,))

    def steps(self, record: Record) -> list[str]:
        """Without the space around them. Raises DataError."""
        given = read_value(record, self.steps_key, flag="--data.steps_key")
        if not isinstance(given, list | tuple) or not given or not all(isinstance(step, str) for step in given):
            raise DataError(f"its {self.steps_key!r} must be a list of texts, the steps of the answer")
        steps = [step.strip() for step in given]
        for number, step in enumerate(steps, start=1):
            if not step:
                raise DataError(f"step {number} under {self.steps_key!r} is empty")
            if self.separator in step:
                raise DataError(
                    f"step {number} under {self.steps_key!r} has {self.separator!r} in it, which ends a step: divide "
                    "it, or choose another --data.step_separator"
                )
        return steps

    def good(self, record: Record) -> tuple[bool, ...]:
        """Which steps are good. Raises DataError."""
        steps = self.steps(record)
        given = read_value(record, self.labels_key, flag="--data.labels_key")
        if not isinstance(given, list | tuple) or len(given) != len(steps):
            raise DataError(f"its {self.labels_key!r} must be a list of {len(steps)} labels, one for each step")
        return tuple(read_label({self.labels_key: label}, key=self.labels_key) for label in given)


class StepSet(TokenisedSet[JudgedSteps]):
    """Answers with judged steps, from records in a `StepFormat`.

    Every answer is decoded once, here: one whose tokens have more or fewer steps than labels raises DataError.
    """

    def __init__(self, records: Records, format: Format, **options: Any) -> None:
        """`options`: those of `TokenisedSet`."""
        super().__init__(records, format, **options)
        for index in range(len(self)):
            if self._seems_divided_otherwise(index):
                self._sample(index)

    def _sample(self, index: int) -> JudgedSteps:
        format: Any = self._format
        example, good = self._example(index), format.good(self._records[int(self._columns.rows[index])])
        ends = step_ends(example.token_ids, example.target_mask, self._tokenizer, separator=format.separator)
        if self._is_cut(index):
            ends = ends[:-1]  # there the answer was cut, and no step ends
        elif len(ends) != len(good):
            raise DataError(
                f"{self._flag}, {self.where(index)}: its {len(good)} steps have {len(ends)} ends as tokens: a step has "
                "no text for the tokenizer, or the tokenizer or the chat template changes the answer, for instance its "
                "thinking or its separators (--data.step_separator)"
            )
        return JudgedSteps(example=example, ends=ends, good=good[: len(ends)])

    def _is_cut(self, index: int) -> bool:
        return bool(self._columns.truncated[index].any())

    def _seems_divided_otherwise(self, index: int) -> bool:
        """Whether the text of the answer's tokens has another number of steps than the record. It is decoded once,
        which takes a fifth of the time of finding the tokens where steps end."""
        if self._is_cut(index):
            return False
        format: Any = self._format
        example = self._example(index)
        text = decoded(self._tokenizer, example.token_ids[example.target_mask].tolist(), skip_special_tokens=True)
        found = sum(bool(step.strip()) for step in text.split(format.separator))
        return found != len(format.steps(self._records[int(self._columns.rows[index])]))


def judged_tokens(sample: JudgedSteps) -> Example:
    """The example whose targets are the tokens at which a step is judged."""
    mask = torch.zeros_like(sample.example.target_mask)
    mask[list(sample.ends)] = True
    return Example(
        token_ids=sample.example.token_ids,
        target_mask=mask,
        where=sample.example.where,
        load_images=sample.example.load_images,
        image_keys=sample.example.image_keys,
    )


if TYPE_CHECKING:
    _: type[Format] = StepFormat

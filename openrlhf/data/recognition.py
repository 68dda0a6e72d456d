"""Which keys of the records hold what, where the flags do not say it: keys are found by the names that other tools
use, and lists of messages are rendered in the chat template. What was found is said in one line."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

from openrlhf.data.examples import ExampleFormat
from openrlhf.data.preferences import JudgedFormat, PairFormat
from openrlhf.data.sources import Record, Records
from openrlhf.data.steps import StepFormat

logger = logging.getLogger(__name__)

ANSWERS = ("completion", "response")
"""The names that TRL and others use for an answer."""


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """The keys of a prompt's record."""

    input_key: str = "input"
    label_key: str | None = None
    image_key: str = "images"
    apply_chat_template: bool = False


AnyFormat = TypeVar("AnyFormat", bound=ExampleFormat | PairFormat | JudgedFormat | StepFormat | PromptFormat)


def recognise(records: Records, format: AnyFormat, *, flag: str) -> AnyFormat:
    """The format of these records: `format`, with other keys where theirs are missing. Judged by the first record."""
    record = records[0] if len(records) else {}
    match format:
        case ExampleFormat():
            found: Any = _example(record, format)
        case PairFormat():
            found = _pair(record, format)
        case JudgedFormat():
            found = _judged(record, format)
        case StepFormat():
            chat = format.apply_chat_template or is_chat(record.get(format.prompt_key))
            found = replace(format, apply_chat_template=chat)
        case _:
            found = _prompt(record, format)
    if not isinstance(found, PromptFormat) and found.places is not None:
        found = replace(found, places=replace(found.places, key=_image_key(record, found.places.key)))
    if found != format:
        changed = [(field.name, getattr(found, field.name)) for field in fields(found)]
        changed = [(name, value) for name, value in changed if value != getattr(format, name)]
        changed = [("image_key", value.key) if name == "places" else (name, value) for name, value in changed]
        flags = [f"--data.{name}" if value is True else f"--data.{name} {value}" for name, value in changed]
        logger.info("%s: its records have the keys %s; read as with %s", flag, ", ".join(record), " ".join(flags))
    return found


def _example(record: Record, format: ExampleFormat) -> ExampleFormat:
    if format.input_key == ExampleFormat().input_key and format.input_key not in record:
        if "messages" in record and format.output_key is None:
            format = replace(format, input_key="messages")
        elif format.pretrain and "text" in record:
            format = replace(format, input_key="text")
        elif "prompt" in record:
            answer = next((key for key in ANSWERS if key in record), None)
            format = replace(format, input_key="prompt", output_key=format.output_key or answer)
    values = (record.get(format.input_key), record.get(format.output_key or ""))
    return replace(format, apply_chat_template=format.apply_chat_template or any(map(is_chat, values)))


def _pair(record: Record, format: PairFormat) -> PairFormat:
    chosen, rejected, prompt = record.get(format.chosen_key), record.get(format.rejected_key), record.get("prompt")
    if format.prompt_key is None and prompt is not None and not _begins_with_prompt(prompt, chosen):
        format = replace(format, prompt_key="prompt")
    values = (chosen, rejected, record.get(format.prompt_key or ""))
    return replace(format, apply_chat_template=format.apply_chat_template or any(map(is_chat, values)))


def _begins_with_prompt(prompt: Any, answer: Any) -> bool:
    """Whether the answer is the whole conversation: then a prompt beside it says nothing new."""
    if is_chat(answer):
        return len(answer) > 0 and answer[0].get("role") != "assistant"
    return isinstance(answer, str) and isinstance(prompt, str) and answer.startswith(prompt)


def _judged(record: Record, format: JudgedFormat) -> JudgedFormat:
    if format.response_key == JudgedFormat().response_key and format.response_key not in record:
        format = replace(format, response_key=next((key for key in ANSWERS if key in record), format.response_key))
    values = (record.get(format.prompt_key), record.get(format.response_key))
    return replace(format, apply_chat_template=format.apply_chat_template or any(map(is_chat, values)))


def _prompt(record: Record, format: PromptFormat) -> PromptFormat:
    if format.input_key == PromptFormat().input_key and format.input_key not in record:
        usual = (key for key in ("prompt", "messages") if key in record)
        format = replace(format, input_key=next(usual, format.input_key))
    format = replace(format, image_key=_image_key(record, format.image_key))
    return replace(format, apply_chat_template=format.apply_chat_template or is_chat(record.get(format.input_key)))


def _image_key(record: Record, key: str) -> str:
    return "image" if key == PromptFormat().image_key and key not in record and "image" in record else key


def is_chat(value: Any) -> bool:
    """Whether it is a list of messages, and not a text."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str)
        and len(value) > 0
        and all(isinstance(message, Mapping) and "role" in message for message in value)
    )

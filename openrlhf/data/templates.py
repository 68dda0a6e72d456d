"""From a record to the text the policy reads."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any

from openrlhf.data.errors import DataError
from openrlhf.data.json_files import Record


def render_prompt(
    record: Record,
    *,
    input_key: str = "input",
    apply_chat_template: bool = False,
    input_template: str | None = None,
    tokenizer: Any = None,
) -> str:
    """The prompt of one record, its template applied.

    With `apply_chat_template` a string becomes one user message and a list is taken as messages; the tokenizer's
    template ends with what opens the assistant's turn. Otherwise `input_template.format(value)`, or the value itself.
    Returns "" when there is nothing to ask: blank text, or a null, which is what an empty cell of a table is.
    Raises DataError.
    """
    if input_key not in record:
        raise DataError(f"it has no {input_key!r}: set --data.input_key to one of {known_keys(record)}")
    value = record[input_key]
    if value is None:
        return ""
    if isinstance(value, str):
        if not value.strip():
            return ""
        messages: list[dict[str, Any]] = [{"role": "user", "content": value}]
    elif isinstance(value, Sequence):
        messages = [_message(item, number, input_key) for number, item in enumerate(value, start=1)]
        if not any(message["content"] for message in messages):
            return ""
    else:
        raise DataError(f"its {input_key!r} must be a string or a list of messages, got {type(value).__name__}")
    if apply_chat_template:
        return _apply_chat_template(messages, tokenizer)
    if not isinstance(value, str):
        raise DataError(f"its {input_key!r} is a list of messages, which needs --data.apply_chat_template")
    return value if input_template is None else fill_template(input_template, value)


def has_placeholder(input_template: str) -> bool:
    """Whether the prompt has a place in it. Raises DataError when it is not a format string."""
    try:
        return any(field is not None for _, field, _, _ in string.Formatter().parse(input_template))
    except ValueError as error:
        raise _bad_template(input_template, error) from None


def fill_template(input_template: str, prompt: str) -> str:
    """`input_template.format(prompt)`."""
    try:
        return input_template.format(prompt)
    except (IndexError, KeyError, ValueError, AttributeError) as error:
        raise _bad_template(input_template, error) from None


def known_keys(record: Record) -> str:
    """The keys that have a value, for messages."""
    return ", ".join(str(key) for key, value in record.items() if value is not None) or "(it has no keys)"


def _bad_template(input_template: str, error: Exception) -> DataError:
    return DataError(
        f"--data.input_template {input_template!r} must have exactly one {{}} for the prompt; "
        f"write other braces twice, {{{{ and }}}} ({type(error).__name__}: {error})"
    )


def _message(item: Any, number: int, input_key: str) -> dict[str, Any]:
    if not isinstance(item, Mapping) or "role" not in item or "content" not in item:
        raise DataError(
            f"message {number} of its {input_key!r} must be an object with 'role' and 'content', got {item!r:.80}"
        )
    # Columnar files fill the keys a message lacks with None; templates that ask `is defined` must not see those.
    return {key: value for key, value in item.items() if value is not None or key in ("role", "content")}


def _apply_chat_template(messages: list[dict[str, Any]], tokenizer: Any) -> str:
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or "this model"
        raise DataError(
            f"the tokenizer of {name} has no chat template: leave --data.apply_chat_template out "
            f"(and use --data.input_template), or take a model whose tokenizer has one"
        )
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates are programs: whatever one raises is about this record
        raise DataError(f"the chat template refused its messages: {error}") from error

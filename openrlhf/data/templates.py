"""Turns a record into the text that the policy reads."""

from __future__ import annotations

import logging
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf.data.files import DataError, Record
from openrlhf.data.image_places import ImagePlaces, PlacedText, place_in_messages, place_in_text

if TYPE_CHECKING:
    from openrlhf.models.image_processor import ImageProcessor

logger = logging.getLogger(__name__)

PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""What messages look like to a model that has no chat template of its own."""

_BEFORE, _AFTER = "\ue000", "\ue001"
"""Private-use characters: no chat template writes them."""


def render_prompt(
    record: Record,
    *,
    input_key: str = "input",
    apply_chat_template: bool = False,
    input_template: str | None = None,
    tokenizer: Any = None,
    places: ImagePlaces | None = None,
    folder: Path | None = None,
) -> PlacedText:
    """The prompt of one record, its template applied, and its images; without `places` there are none.

    With `apply_chat_template` a string becomes one user message and a list is taken as messages; the tokenizer's
    template ends with what opens the assistant's turn. Otherwise `input_template.format(value)`, or the value itself.
    The text is "" when there is nothing to ask: blank text, or a null, which is what an empty cell of a table is.
    `folder`: that of the data file, for images by relative paths. Raises DataError.
    """
    value = read_value(record, input_key, flag="--data.input_key")
    messages = read_messages(value, role="user", key=input_key)
    if not any(says_something(message) for message in messages):
        return PlacedText("")
    if apply_chat_template:
        messages, images = place_in_messages(messages, record, places, folder)
        text = render_chat(messages, tokenizer, add_generation_prompt=True)
    else:
        text, images = place_in_text(read_text(value, key=input_key), record, places, folder)
        text = text if input_template is None else fill_template(input_template, text)
    if places is not None:
        places.require_tokens(text, images)
    return PlacedText(text, images)


def image_places(
    processor: ImageProcessor, tokenizer: Any, *, key: str, most: int, allow_urls: bool = False
) -> ImagePlaces:
    """How images stand in the records and in the texts of a model: its chat template is asked."""
    items = [{"type": "text", "text": _BEFORE}, {"type": "image"}, {"type": "text", "text": _AFTER}]
    between = re.search(f"{_BEFORE}(.*){_AFTER}", _rendered(items, tokenizer) or "", re.DOTALL)
    as_string = _rendered(_BEFORE, tokenizer)
    return ImagePlaces(
        key=key,
        most=most,
        allow_urls=allow_urls,
        token=processor.image_token,
        written=between[1] if between and between[1].count(processor.image_token) == 1 else processor.image_token,
        reserved=processor.reserved_tokens,
        items_only=as_string is not None and _BEFORE not in as_string,
    )


def _rendered(content: Any, tokenizer: Any) -> str | None:
    """How the chat template writes a message of this content; None where there is no template, or it refuses."""
    try:
        return render_chat([{"role": "user", "content": content}], tokenizer)
    except DataError:
        return None


def read_value(record: Record, key: str, *, flag: str) -> Any:
    """The record's `key`, which `flag` names. Raises DataError when it has none."""
    if key not in record:
        raise DataError(f"it has no {key!r}: set {flag} to one of {known_keys(record)}")
    return record[key]


def read_text(value: Any, *, key: str) -> str:
    """A string; a null, which is what an empty cell of a table is, reads as "". Raises DataError for a chat."""
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, Sequence):
        raise _neither_text_nor_chat(value, key)
    raise DataError(f"its {key!r} is a list of messages, which needs --data.apply_chat_template")


def read_messages(value: Any, *, role: str, key: str) -> list[dict[str, Any]]:
    """The messages of a chat; a string is one message of `role`, a null none at all. Raises DataError."""
    if value is None:
        return []
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if isinstance(value, Sequence):
        return [_message(item, number, key) for number, item in enumerate(value, start=1)]
    raise _neither_text_nor_chat(value, key)


def says_something(message: Mapping[str, Any]) -> bool:
    """Whether the message has words, or calls a tool."""
    content = message["content"]
    words = content.strip() if isinstance(content, str) else content
    return bool(words or message.get("tool_calls") or message.get("function_call"))


def usable_template(input_template: str | None, *, apply_chat_template: bool) -> str | None:
    """`input_template` where it is one: it has a place for the prompt, and no chat template replaces it."""
    if input_template is None or apply_chat_template:
        return None
    if not has_placeholder(input_template):
        logger.warning("--data.input_template %r has no {} for the prompt: it is not used", input_template)
        return None
    return input_template


def has_placeholder(input_template: str) -> bool:
    """Whether the prompt has a place in it. Raises DataError when it is not a format string."""
    try:
        return any(field is not None for _, field, _, _ in string.Formatter().parse(input_template))
    except ValueError as error:
        raise _bad_template(input_template, error) from None


def fill_template(input_template: str, prompt: str) -> str:
    """`input_template.format(prompt)`. Raises DataError when that has no place for the prompt."""
    if not has_placeholder(input_template):
        raise _bad_template(input_template, ValueError("it has none"))
    try:
        return input_template.format(prompt)
    except (IndexError, KeyError, ValueError, AttributeError) as error:
        raise _bad_template(input_template, error) from None


def known_keys(record: Record) -> str:
    """The keys that have a value, for messages."""
    return ", ".join(str(key) for key, value in record.items() if value is not None) or "(it has no keys)"


def _neither_text_nor_chat(value: Any, key: str) -> DataError:
    return DataError(f"its {key!r} must be a string or a list of messages, got {type(value).__name__}")


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


def set_chat_template(
    tokenizer: Any, template: str | None, arguments: Mapping[str, Any], *, needed: bool = False
) -> Any:
    """The tokenizer, with another template (Jinja text, or a file with it) and with variables for it, if any are given.

    `needed`: one that has none gets `PLAIN_TEMPLATE`. Raises DataError for a name of a file that is not there.
    """
    if template:
        tokenizer.chat_template = _template_text(template)
    elif needed and not getattr(tokenizer, "chat_template", None):
        tokenizer.chat_template = PLAIN_TEMPLATE
    if arguments:
        tokenizer.template_arguments = dict(arguments)
    return tokenizer


def template_arguments(tokenizer: Any) -> dict[str, Any]:
    """Variables that every rendering of its chat template gets (`--data.chat_template_kwargs`)."""
    return getattr(tokenizer, "template_arguments", {})


def _template_text(template: str) -> str:
    if "{" in template or "\n" in template:
        return template
    path = Path(template).expanduser()
    if path.is_file():
        return path.read_text(encoding="utf-8")
    raise DataError(
        f"--data.tokenizer_chat_template {template}: this is neither Jinja text, which has braces, nor a file (looked "
        f"in {Path.cwd()})"
    )


def render_chat(messages: Sequence[Mapping[str, Any]], tokenizer: Any, *, add_generation_prompt: bool = False) -> str:
    """The messages in the tokenizer's chat template. Raises DataError."""
    if tokenizer is None or not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or "this model"
        raise DataError(
            f"the tokenizer of {name} has no chat template: leave --data.apply_chat_template out "
            "(and use --data.input_template), give one with --data.tokenizer_chat_template, or take a model whose "
            "tokenizer has one"
        )
    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **template_arguments(tokenizer)
        )
    except Exception as error:  # templates are programs: whatever one raises is about this record
        raise DataError(f"the chat template refused its messages: {error}") from error

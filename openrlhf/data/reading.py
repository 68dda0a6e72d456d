"""The texts that are learnt from a record, or the reason why none are; and where answers stand in a rendered chat.

A chat template is a program: it may rewrite the history, for instance leave out the thinking of earlier turns. So a
message is looked for in the text of the whole conversation, in this order, and a place that cannot be found for sure is
an error, never a guess:

1. The template says it, with `{% generation %}` blocks.
2. The conversation up to the message, and up to its end, both render to beginnings of the whole text.
3. The message is replaced by a mark: the whole text has to begin and end as the one with the mark does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from openrlhf.data.boundaries import MarkedText, Span
from openrlhf.data.files import DataError, Record
from openrlhf.data.image_places import ImagePlaces
from openrlhf.data.templates import fill_template, render_chat, says_something, template_arguments


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
    LONG_IMAGE = "have an image that --data.max_len would cut"


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
    images: tuple[tuple[bytes | str, ...], ...] = ()
    """The images of each text, as `images.portable` returns them; empty where no text has any."""


class Format(Protocol):
    """Which keys of a record hold what, and how they become text. A frozen dataclass: its `repr` is its identity."""

    @property
    def places(self) -> ImagePlaces | None:
        """Where the records have images; None: they have none."""
        ...

    def read(self, record: Record, tokenizer: Any, folder: Path | None = None) -> Reading:
        """`folder`: that of the data file, for images by relative paths. Raises DataError for a record that is wrong,
        and Unusable for one to leave out."""
        ...


def plain_text(
    prompt: str, response: str, *, input_template: str | None, places: ImagePlaces | None = None
) -> MarkedText:
    """`prompt`, in its template, and then `response`, which is learnt and has no images."""
    if places is not None:
        places.require_plain(response)
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


Messages = Sequence[Mapping[str, Any]]

_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
_MARK = "\ue000"
"""A private-use character: no conversation has it."""


def mark_turns(messages: Messages, tokenizer: Any, *, first: int = 0) -> MarkedText:
    """The rendered conversation, with the assistant's messages from number `first` on as what is learnt.

    A turn is what follows the generation prompt: with the template's end of turn, without newlines after that. An
    assistant's message that says nothing is not learnt. Raises DataError.
    """
    text = render_chat(messages, tokenizer)
    turns = [i for i in range(first, len(messages)) if is_answer(messages[i])]
    if _GENERATION.search(_template(tokenizer)):
        spans = _generation_blocks(messages, tokenizer)
        before = _generation_blocks(messages[:first], tokenizer) if first else []
        spans = spans[len(before) :]
    else:
        spans = [_span(text, messages, i, tokenizer) for i in turns]
    if any(end > start for (_, end), (start, _) in pairwise(spans)):
        raise _cannot_tell("each message")
    said = "".join(text[start:end] for start, end in spans)
    return MarkedText.of(text, spans, altered=any(_words(messages[i]) not in said for i in turns))


def is_answer(message: Mapping[str, Any]) -> bool:
    """Whether the message is an answer from which something can be learnt."""
    return message["role"] == "assistant" and says_something(message)


def _words(message: Mapping[str, Any]) -> str:
    content = message["content"]
    if isinstance(content, list) and len(content) == 1:
        content = content[0].get("text")
    return content.strip() if isinstance(content, str) else ""


def _template(tokenizer: Any) -> str:
    return tokenizer.get_chat_template()


def _generation_blocks(messages: Messages, tokenizer: Any) -> list[Span]:
    from transformers.utils.chat_template_utils import render_jinja_template

    rendered: Any = render_jinja_template(
        [[dict(message) for message in messages]],
        chat_template=_template(tokenizer),
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
        **template_arguments(tokenizer),
    )
    _, spans = rendered  # its annotation says that these are texts
    return [(start, end) for start, end in spans[0]]


def _span(text: str, messages: Messages, index: int, tokenizer: Any) -> Span:
    before = _render(messages[:index], tokenizer, add_generation_prompt=True) if index else None
    after = _render(messages[: index + 1], tokenizer)
    appended = before is not None and text.startswith(before)
    if appended and after is not None and text.startswith(after):
        return len(before or ""), max(len(before or ""), len(after.rstrip("\n")))

    marked = [*messages]
    as_items = isinstance(messages[index]["content"], list)
    marked[index] = {**messages[index], "content": [{"type": "text", "text": _MARK}] if as_items else _MARK}
    whole, part = _render(marked, tokenizer), _render(marked[: index + 1], tokenizer)
    what = f"message {index + 1} of the conversation"
    if whole is None or part is None or not whole.count(_MARK) == part.count(_MARK) == 1:
        raise _cannot_tell(what)
    head, _, rest = whole.partition(_MARK)
    ending = _turn_end(part.partition(_MARK)[2], rest, tokenizer)
    if ending is None:
        raise _cannot_tell(what)
    # Without the generation prompt as a guide, the message begins where its words do.
    start = before if appended else head
    tail = rest[len(ending) :]
    end = len(text) - len(tail)
    if start is None or not text.startswith(start) or not text.endswith(tail) or end < len(start):
        raise _cannot_tell(what)
    return len(start), end


def _turn_end(ending: str, rest: str, tokenizer: Any) -> str | None:
    """The text with which a turn ends in the middle of a conversation.

    `ending` is how it ends the conversation, `rest` what follows it in the middle. The template may end the whole
    with more than it ends a turn with: `<|end|>\\n<|endoftext|>`, but `<|end|>\\n<|user|>`. Then the turn ends with the
    last special token that both have. None when letters in common may as well be the next turn's beginning.
    """
    if rest.startswith(ending):
        return ending.rstrip("\n")
    shared = next((i for i, (a, b) in enumerate(zip(ending, rest, strict=False)) if a != b), len(rest))
    kept = 0
    names = sorted({*tokenizer.all_special_tokens, *tokenizer.get_added_vocab()}, key=len, reverse=True)
    for special in re.finditer("|".join(map(re.escape, names)), ending) if names else ():
        if special.end() <= shared:
            kept = special.end()
        else:
            shared = min(shared, special.start())
    return ending[:kept] if not ending[kept:shared].strip() else None


def _render(messages: Messages, tokenizer: Any, *, add_generation_prompt: bool = False) -> str | None:
    """The rendered text; None where the template refuses half a conversation."""
    try:
        return render_chat(messages, tokenizer, add_generation_prompt=add_generation_prompt)
    except DataError:
        return None


def _cannot_tell(what: str) -> DataError:
    return DataError(
        f"the chat template rewrites the conversation, and where {what} stands in the result cannot be told for sure: "
        "put {% generation %} … {% endgeneration %} around what the assistant says, in a template of your own "
        "(--data.tokenizer_chat_template)"
    )

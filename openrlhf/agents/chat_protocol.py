"""What the protocols of the agent endpoint have in common: requests, refusals, and JSON that is read with care.

`openai_protocol.py` and `anthropic_protocol.py` parse the JSON of their clients into a `ChatRequest`, and write answers
with a class that is an `AnswerWriter`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from openrlhf.agents.chat_history import Conversation
from openrlhf.agents.tool_calls import Reply
from openrlhf.agents.values import shown
from openrlhf.types import Generation

MODEL = "policy"
"""The model that `/v1/models` lists. Requests may name any model: there is only one."""

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
"""Fields that change the distribution which answers are sampled from."""

NO_OPTIONS = frozenset(
    (
        *("self", "conversation", "messages", "tools", "chat_template", "add_generation_prompt", "tokenize"),
        *("continue_final_message", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        *("return_assistant_tokens_mask", "tokenizer_kwargs"),
    )
)
"""The arguments of `apply_chat_template` that are not variables of a template. Clients may not set them: templates are
programs, and none comes from outside."""


class ApiError(Exception):
    """A request that is refused. Each protocol says it in the form that its clients expect."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        """`code`, `param` and `kind` are in OpenAI's words."""
        super().__init__(message)
        self.status = status
        self.code = code
        self.param = param
        self.kind = kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One request, checked, whatever protocol it came in."""

    conversation: Conversation
    model: str
    sampling: dict[str, Any]
    """The entries of `SAMPLING` that the request gives."""
    max_tokens: int | None
    stop: list[str]
    seed: int | None
    calls_tools: bool
    """Whether calls are looked for in the answer."""
    stream: bool
    include_usage: bool = False
    logprobs: bool = False


class Delta(NamedTuple):
    """The new part of an answer that is being written; or all of one that was written in one piece."""

    content: str
    part: Generation
    reply: Reply | None
    """All of it, with the last part."""


class AnswerWriter(Protocol):
    """Writes one answer in the JSON of a protocol: whole, or as server-sent events."""

    def whole(self, answer: Delta, written: Sequence[int]) -> dict[str, Any]:
        """`written` are all tokens of the answer."""
        ...

    def opening(self) -> list[str]:
        """The events before the first part."""
        ...

    def part(self, part: Delta, written: Sequence[int]) -> list[str]:
        """The events of a part; of the last one, those of the end as well."""
        ...

    def error(self, error: ApiError) -> list[str]:
        """The events of an answer that has failed."""
        ...


class Dialect(NamedTuple):
    """A protocol, as the server uses it."""

    parse: Callable[[Any], ChatRequest]
    """From the JSON of a request. Raises ApiError."""
    writer: Callable[..., AnswerWriter]
    """Made with `request`, `id`, `prompt` (the `ChatPrompt`) and `tokenizer`."""
    error: Callable[[ApiError], dict[str, Any]]
    """A refusal as JSON."""


def event(data: str, name: str | None = None) -> str:
    """A server-sent event."""
    return f"data: {data}\n\n" if name is None else f"event: {name}\ndata: {data}\n\n"


def parse_body(content: bytes) -> dict[str, Any]:
    """The JSON object in a request. Raises ApiError.

    What JSON does not have, or UTF-8 cannot express, is refused here, so that nothing behind meets it: NaN, numbers
    that overflow, halves of surrogate pairs.
    """
    try:
        body = json.loads(content.decode(), parse_constant=_not_json, parse_float=_finite)
        if b"\\ud" in content.lower():  # perhaps half a pair
            json.dumps(body, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ApiError(f"the request is not JSON: {reason}") from error
    if not isinstance(body, dict):
        raise ApiError("the request must be a JSON object")
    return body


def _not_json(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(f"{text} is too large")
    return number


def template_options(body: Mapping[str, Any]) -> dict[str, Any]:
    """The variables for the chat template that a request gives."""
    options = body.get("chat_template_kwargs")
    options = {} if options is None else as_object(options, "chat_template_kwargs")
    for name in options:
        if name in NO_OPTIONS:
            raise ApiError(
                f"chat_template_kwargs.{name} is not for requests: messages are rendered with the model's own template",
                param="chat_template_kwargs",
            )
    return options


def common_fields(body: Mapping[str, Any], *, max_tokens: Sequence[str], stop: str) -> dict[str, Any]:
    """The fields of `ChatRequest` that requests of both protocols have, under the names that are given here."""
    limits = [given(body, name, int, "a whole number") for name in max_tokens]
    return {
        "model": given(body, "model", str, "text") or MODEL,
        "sampling": {name: body[name] for name in SAMPLING if body.get(name) is not None},
        "max_tokens": next((limit for limit in limits if limit is not None), None),
        "stop": _stop(body.get(stop), stop),
        "seed": given(body, "seed", int, "a whole number"),
        "stream": bool(given(body, "stream", bool, "true or false")),
    }


Impossible = Mapping[str, tuple[str, Callable[[Any], bool]]]
"""Field → why most of its values are refused, and those that are not."""


def refuse_impossible(body: Mapping[str, Any], impossible: Impossible) -> None:
    """Refuse what would change the answer and is not possible here. Whatever else is unknown is ignored."""
    for name, (why, possible) in impossible.items():
        if body.get(name) is not None and not possible(body[name]):
            raise ApiError(f"{name} {shown(body[name])}: {why}", param=name)


def join_parts(parts: Sequence[dict[str, Any]], between: str = "") -> str | list[dict[str, Any]]:
    """The content of a message from its parts, each a text or the place of an image: text where there is no image,
    because most templates of models that read text alone know no lists."""
    if any(part["type"] == "image" for part in parts):
        return list(parts)
    return between.join(part["text"] for part in parts)


def _stop(value: Any, what: str) -> list[str]:
    if value is None:
        return []
    return [as_text(text, what) for text in ([value] if isinstance(value, str) else as_list(value, what))]


def given(body: Mapping[str, Any], name: str, kind: type, wanted: str) -> Any:
    value = body.get(name)
    if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise ApiError(f"{name} must be {wanted}, got {shown(value)}", param=name)
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ApiError(f"{name} must fit in 64 bits, got {shown(value)}", param=name)
    return value


def as_object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ApiError(f"{what} must be an object, got {shown(value)}", param=what)
    return value


def as_list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ApiError(f"{what} must be a list, got {shown(value)}", param=what)
    return value


def as_text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise ApiError(f"{what} must be text, got {shown(value)}", param=what)
    return value

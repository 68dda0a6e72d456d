"""OpenAI's chat completions as JSON: requests checked and read, replies, chunks and errors written."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.agents.chat_history import Conversation
from openrlhf.agents.tool_calls import ToolCall
from openrlhf.agents.values import shown

MODEL = "policy"
"""The model that `/v1/models` lists. Requests may name any model: there is only one."""

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""The role of a message → the role that templates know."""

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
    """A request that is refused, as clients expect to be told."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        code: str | None = None,
        param: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """One request, checked."""

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
    include_usage: bool
    logprobs: bool


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


def parse_chat_request(body: Any) -> ChatRequest:
    """From the JSON of `/v1/chat/completions`. Raises ApiError.

    What would change the answer and is not possible here is refused, whatever else is unknown is ignored.
    """
    body = _object(body, "the request")
    _refuse_impossible(body)
    tools = None if body.get("tools") is None else _list(body["tools"], "tools")
    for index, tool in enumerate(tools or ()):
        function = _object(_object(tool, f"tools[{index}]").get("function"), f"tools[{index}].function")
        _text(function.get("name"), f"tools[{index}].function.name")
    if _choice(body) == "none":
        tools = None
    options = body.get("chat_template_kwargs")
    options = {} if options is None else _object(options, "chat_template_kwargs")
    for name in options:
        if name in NO_OPTIONS:
            raise ApiError(
                f"chat_template_kwargs.{name} is not for requests: messages are rendered with the model's own template",
                param="chat_template_kwargs",
            )
    images: list[Any] = []
    messages = read_messages(body.get("messages"), images)
    limits = [_given(body, name, int, "a whole number") for name in ("max_completion_tokens", "max_tokens")]
    return ChatRequest(
        conversation=Conversation(messages, tools, options, images),
        model=_given(body, "model", str, "text") or MODEL,
        sampling={name: body[name] for name in SAMPLING if body.get(name) is not None},
        max_tokens=next((limit for limit in limits if limit is not None), None),
        stop=_stop(body.get("stop")),
        seed=_given(body, "seed", int, "a whole number"),
        calls_tools=bool(tools),
        stream=bool(_given(body, "stream", bool, "true or false")),
        include_usage=bool(_object(body.get("stream_options") or {}, "stream_options").get("include_usage")),
        logprobs=bool(_given(body, "logprobs", bool, "true or false")),
    )


def read_messages(value: Any, images: list[Any]) -> list[dict[str, Any]]:
    """Messages as templates read them: content is text, or a list of texts and places of images, which are added to
    `images`; arguments of calls are dicts. Raises ApiError."""
    messages = _list(value, "messages")
    if not messages:
        raise ApiError("messages is empty", param="messages")
    return [_message(message, f"messages[{index}]", images) for index, message in enumerate(messages)]


def _message(value: Any, what: str, images: list[Any]) -> dict[str, Any]:
    given = _object(value, what)
    role = given.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ApiError(f"{what}.role must be one of {', '.join(ROLES)}, got {shown(role)}", param=what)
    before = len(images)
    message: dict[str, Any] = {
        "role": ROLES[role],
        "content": _content(given.get("content"), f"{what}.content", images),
    }
    if len(images) > before and message["role"] not in ("user", "tool"):
        raise ApiError(f"{what} of the {role} has an image: those of user and tool may", param=what)
    for name in ("name", "tool_call_id"):
        if given.get(name) is not None:
            message[name] = _text(given[name], f"{what}.{name}")
    if given.get("tool_calls"):
        calls = _list(given["tool_calls"], f"{what}.tool_calls")
        message["tool_calls"] = [_call(call, f"{what}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return message


def _content(value: Any, what: str, images: list[Any]) -> str | list[dict[str, Any]]:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    items: list[dict[str, Any]] = []
    for index, part in enumerate(_list(value, what)):
        part = _object(part, f"{what}[{index}]")
        kind = part.get("type")
        if kind == "image_url":
            images.append(_image_url(part.get("image_url"), f"{what}[{index}].image_url"))
            items.append({"type": "image"})
        elif kind == "text":
            items.append({"type": "text", "text": _given(part, "text", str, "text") or ""})
        else:
            raise ApiError(f"{what}[{index}].type must be text or image_url, got {shown(kind)}", param=what)
    # Most templates of models that read text alone know no lists.
    return items if any(item["type"] == "image" for item in items) else "".join(item["text"] for item in items)


def _image_url(value: Any, what: str) -> str:
    """A data URI, or a URL. Names of files are not for requests."""
    url = _text(value.get("url") if isinstance(value, dict) else value, f"{what}.url")
    if not url.lower().startswith(("data:", "http://", "https://")):
        raise ApiError(f"{what}.url must be a data URI or an http(s) URL, got {shown(url)}", param=what)
    return url


def _call(value: Any, what: str) -> dict[str, Any]:
    call = _object(value, what)
    function = _object(call.get("function"), f"{what}.function")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise ApiError(f"{what}.function.arguments is not JSON: {shown(arguments)}", param=what) from None
    return {
        "id": call.get("id"),
        "type": "function",
        "function": {
            "name": _text(function.get("name"), f"{what}.function.name"),
            "arguments": _object(arguments, f"{what}.function.arguments"),
        },
    }


_IMPOSSIBLE: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "n": ("ask n times instead", lambda n: n == 1),
    "top_logprobs": ("only the sampled token's log-prob is known", lambda n: n in (0, 1)),
    "logit_bias": ("not available here", lambda bias: bias == {}),
    "response_format": (
        "nothing here forces a format",
        lambda wanted: isinstance(wanted, Mapping) and wanted.get("type") == "text",
    ),
    "chat_template": ("messages are rendered with the model's own template", lambda _: False),
    "functions": ("use tools", lambda _: False),
    "function_call": ("use tool_choice", lambda _: False),
    "modalities": ("there is text only", lambda wanted: wanted == ["text"]),
}
"""Field → why most of its values are refused, and those that are not."""


def _refuse_impossible(body: Mapping[str, Any]) -> None:
    for name, (why, possible) in _IMPOSSIBLE.items():
        if body.get(name) is not None and not possible(body[name]):
            raise ApiError(f"{name} {shown(body[name])}: {why}", param=name)


def _choice(body: Mapping[str, Any]) -> str:
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise ApiError(f"tool_choice must be auto or none, got {shown(choice)}: nothing here forces a call")
    return choice or "auto"


def _stop(value: Any) -> list[str]:
    if value is None:
        return []
    return [_text(text, "stop") for text in ([value] if isinstance(value, str) else _list(value, "stop"))]


def _given(body: Mapping[str, Any], name: str, kind: type, wanted: str) -> Any:
    value = body.get(name)
    if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise ApiError(f"{name} must be {wanted}, got {shown(value)}", param=name)
    if isinstance(value, int) and not -(1 << 63) <= value < 1 << 63:
        raise ApiError(f"{name} must fit in 64 bits, got {shown(value)}", param=name)
    return value


def _object(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ApiError(f"{what} must be an object, got {shown(value)}", param=what)
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise ApiError(f"{what} must be a list, got {shown(value)}", param=what)
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise ApiError(f"{what} must be text, got {shown(value)}", param=what)
    return value


# ------------------------------------------------------------------------------------ replies


def chat_completion(
    *,
    id: str,
    model: str,
    content: str,
    tool_calls: Sequence[ToolCall],
    finish_reason: str,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    logprobs: dict[str, Any] | None,
) -> dict[str, Any]:
    """The whole answer as one object."""
    message = {
        "role": "assistant",
        "content": content if content or not tool_calls else None,
        "refusal": None,
        **({"tool_calls": write_calls(tool_calls, id=id)} if tool_calls else {}),
    }
    choice = {"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": logprobs}
    return {
        **_head(id, "chat.completion", model),
        "choices": [choice],
        "usage": usage(prompt_ids, completion_ids),
        "token_ids": token_ids(prompt_ids, completion_ids),
    }


def chunk(
    *,
    id: str,
    model: str,
    delta: dict[str, Any] | None,
    finish_reason: str | None = None,
    logprobs: dict[str, Any] | None = None,
    **others: Any,
) -> dict[str, Any]:
    """A piece of a streamed answer; without `delta`, one that says nothing of it."""
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
    return {**_head(id, "chat.completion.chunk", model), "choices": [] if delta is None else [choice], **others}


def write_calls(calls: Sequence[ToolCall], *, id: str) -> list[dict[str, Any]]:
    return [
        {
            "id": f"call_{id.rpartition('-')[2]}_{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for index, call in enumerate(calls)
    ]


def write_logprobs(tokenizer: Any, ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    """The log-probs of the sampled tokens. The text and bytes of a token that is part of a character are not known."""
    content = []
    for token_id, logprob in zip(ids, logprobs, strict=True):
        token = tokenizer.decode([token_id], skip_special_tokens=False)
        content.append(
            {
                "token": token,
                "logprob": logprob,
                "bytes": None if "\ufffd" in token else list(token.encode()),
                "top_logprobs": [],
            }
        )
    return {"content": content, "refusal": None}


def token_ids(prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> dict[str, list[int]]:
    """The tokens that the engine read and wrote."""
    return {"prompt_token_ids": list(prompt_ids), "completion_token_ids": list(completion_ids)}


def usage(prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> dict[str, int]:
    return {
        "prompt_tokens": len(prompt_ids),
        "completion_tokens": len(completion_ids),
        "total_tokens": len(prompt_ids) + len(completion_ids),
    }


def _head(id: str, kind: str, model: str) -> dict[str, Any]:
    return {"id": id, "object": kind, "created": int(time.time()), "model": model}

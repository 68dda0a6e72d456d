"""OpenAI's chat completions as JSON: requests checked and read, replies, chunks and errors written."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from openrlhf.agents.chat_history import ChatPrompt, Conversation
from openrlhf.agents.chat_protocol import (
    ApiError,
    ChatRequest,
    Delta,
    Dialect,
    Impossible,
    as_list,
    as_object,
    as_text,
    common_fields,
    event,
    given,
    join_parts,
    refuse_impossible,
    template_options,
)
from openrlhf.agents.tool_calls import THOUGHT, ToolCall, with_thoughts
from openrlhf.agents.values import shown
from openrlhf.types import FinishReason

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""The role of a message → the role that templates know."""

THOUGHTS = ("reasoning_content", "reasoning")
"""Where clients keep the thoughts of an answer, if not in its content."""


def parse_chat_request(body: Any) -> ChatRequest:
    """From the JSON of `/v1/chat/completions`. Raises ApiError.

    What would change the answer and is not possible here is refused, whatever else is unknown is ignored.
    """
    body = as_object(body, "the request")
    refuse_impossible(body, _IMPOSSIBLE)
    tools = None if body.get("tools") is None else as_list(body["tools"], "tools")
    for index, tool in enumerate(tools or ()):
        function = as_object(as_object(tool, f"tools[{index}]").get("function"), f"tools[{index}].function")
        as_text(function.get("name"), f"tools[{index}].function.name")
    if _choice(body) == "none":
        tools = None
    images: list[Any] = []
    messages = read_messages(body.get("messages"), images)
    return ChatRequest(
        **common_fields(body, max_tokens=("max_completion_tokens", "max_tokens"), stop="stop"),
        conversation=Conversation(messages, tools, template_options(body), images),
        calls_tools=bool(tools),
        include_usage=bool(as_object(body.get("stream_options") or {}, "stream_options").get("include_usage")),
        logprobs=bool(given(body, "logprobs", bool, "true or false")),
    )


def read_messages(value: Any, images: list[Any]) -> list[dict[str, Any]]:
    """Messages as templates read them: content is text, or a list of texts and places of images, which are added to
    `images`; arguments of calls are dicts. Raises ApiError."""
    messages = as_list(value, "messages")
    if not messages:
        raise ApiError("messages is empty", param="messages")
    return [_message(message, f"messages[{index}]", images) for index, message in enumerate(messages)]


def _message(value: Any, what: str, images: list[Any]) -> dict[str, Any]:
    given = as_object(value, what)
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
    if message["role"] == "assistant" and THOUGHT not in message["content"]:
        for name in THOUGHTS:
            if given.get(name):
                thoughts = as_text(given[name], f"{what}.{name}").strip()
                message["content"] = with_thoughts(thoughts, message["content"])
                break
    for name in ("name", "tool_call_id"):
        if given.get(name) is not None:
            message[name] = as_text(given[name], f"{what}.{name}")
    if given.get("tool_calls"):
        calls = as_list(given["tool_calls"], f"{what}.tool_calls")
        message["tool_calls"] = [_call(call, f"{what}.tool_calls[{index}]") for index, call in enumerate(calls)]
    return message


def _content(value: Any, what: str, images: list[Any]) -> str | list[dict[str, Any]]:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    items: list[dict[str, Any]] = []
    for index, part in enumerate(as_list(value, what)):
        part = as_object(part, f"{what}[{index}]")
        kind = part.get("type")
        if kind == "image_url":
            images.append(_image_url(part.get("image_url"), f"{what}[{index}].image_url"))
            items.append({"type": "image"})
        elif kind == "text":
            items.append({"type": "text", "text": given(part, "text", str, "text") or ""})
        else:
            raise ApiError(f"{what}[{index}].type must be text or image_url, got {shown(kind)}", param=what)
    return join_parts(items)


def _image_url(value: Any, what: str) -> str:
    """A data URI, or a URL. Names of files are not for requests."""
    url = as_text(value.get("url") if isinstance(value, dict) else value, f"{what}.url")
    if not url.lower().startswith(("data:", "http://", "https://")):
        raise ApiError(f"{what}.url must be a data URI or an http(s) URL, got {shown(url)}", param=what)
    return url


def _call(value: Any, what: str) -> dict[str, Any]:
    call = as_object(value, what)
    function = as_object(call.get("function"), f"{what}.function")
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
            "name": as_text(function.get("name"), f"{what}.function.name"),
            "arguments": as_object(arguments, f"{what}.function.arguments"),
        },
    }


_IMPOSSIBLE: Impossible = {
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


def _choice(body: Mapping[str, Any]) -> str:
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none"):
        raise ApiError(f"tool_choice must be auto or none, got {shown(choice)}: nothing here forces a call")
    return choice or "auto"


# ------------------------------------------------------------------------------------ replies


class OpenAIWriter:
    """One answer as a chat completion, or as its chunks."""

    def __init__(self, *, request: ChatRequest, id: str, prompt: ChatPrompt, tokenizer: Any) -> None:
        self._request = request
        self._id = f"chatcmpl-{id}"
        self._prompt_ids = prompt.token_ids
        self._tokenizer = tokenizer

    def whole(self, answer: Delta, written: Sequence[int]) -> dict[str, Any]:
        assert answer.reply is not None
        content, calls = answer.reply
        message = {
            "role": "assistant",
            "content": content if content or not calls else None,
            "refusal": None,
            **({"tool_calls": write_calls(calls, id=self._id)} if calls else {}),
        }
        choice = {"index": 0, "message": message, "finish_reason": _finish_reason(answer)}
        return {
            **self._head("chat.completion"),
            "choices": [choice | {"logprobs": self._logprobs(answer)}],
            "usage": self._usage(written),
            "token_ids": token_ids(self._prompt_ids, written),
        }

    def opening(self) -> list[str]:
        return [self._chunk({"role": "assistant", "content": ""})]

    def part(self, part: Delta, written: Sequence[int]) -> list[str]:
        events = []
        logprobs = self._logprobs(part)
        if part.content or (logprobs and part.reply is None):
            events.append(self._chunk({"content": part.content}, logprobs=logprobs))
            logprobs = None
        if part.reply is None:
            return events
        for index, call in enumerate(write_calls(part.reply.tool_calls, id=self._id)):
            events.append(self._chunk({"tool_calls": [{"index": index, **call}]}))
        ids = token_ids(self._prompt_ids, written)
        events.append(self._chunk({}, finish_reason=_finish_reason(part), logprobs=logprobs, token_ids=ids))
        if self._request.include_usage:
            events.append(self._chunk(None, usage=self._usage(written)))
        return [*events, event("[DONE]")]

    def error(self, error: ApiError) -> list[str]:
        return [event(json.dumps(error_body(error)))]

    def _chunk(
        self,
        delta: dict[str, Any] | None,
        *,
        finish_reason: str | None = None,
        logprobs: dict[str, Any] | None = None,
        **others: Any,
    ) -> str:
        """A piece of a streamed answer; without `delta`, one that says nothing of it."""
        choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": logprobs}
        choices = [] if delta is None else [choice]
        return event(json.dumps({**self._head("chat.completion.chunk"), "choices": choices, **others}))

    def _logprobs(self, part: Delta) -> dict[str, Any] | None:
        if not self._request.logprobs or part.part.logprobs is None:
            return None
        return write_logprobs(self._tokenizer, part.part.token_ids, part.part.logprobs)

    def _usage(self, written: Sequence[int]) -> dict[str, int]:
        read, wrote = len(self._prompt_ids), len(written)
        return {"prompt_tokens": read, "completion_tokens": wrote, "total_tokens": read + wrote}

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self._id, "object": kind, "created": int(time.time()), "model": self._request.model}


def _finish_reason(answer: Delta) -> str:
    if answer.part.finish_reason is not FinishReason.STOP:
        return "length"
    return "tool_calls" if answer.reply and answer.reply.tool_calls else "stop"


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


def error_body(error: ApiError) -> dict[str, Any]:
    return {"error": {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}}


OPENAI = Dialect(parse_chat_request, OpenAIWriter, error_body)

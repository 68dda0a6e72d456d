"""Anthropic's messages as JSON: requests checked and read, replies, events and errors written.

A message of Anthropic's is a list of blocks; what the engine reads has the form that chat templates know:

    system                                              a message of the system, the first one
    user        text, image                             a message of the user
                tool_result                             a message of the tool, each
    assistant   thinking, text                          its content: <think>…</think>, then the text
                tool_use                                its tool calls
"""

from __future__ import annotations

import json
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
from openrlhf.agents.openai_protocol import token_ids
from openrlhf.agents.tool_calls import THINK, GrowingThoughts, Thoughtful, ToolCall, with_thoughts
from openrlhf.agents.values import shown
from openrlhf.types import FinishReason

SIGNATURE = "policy"
"""Stands where Anthropic proves that thoughts are its own. Clients want some text there; it is not looked at."""

ERRORS = {
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
}
"""The status of a refusal → its type. Others are `invalid_request_error`, or `api_error` from 500 on."""


def parse_messages_request(body: Any) -> ChatRequest:
    """From the JSON of `/v1/messages`. Raises ApiError.

    What would change the answer and is not possible here is refused, whatever else is unknown is ignored.
    """
    body = as_object(body, "the request")
    refuse_impossible(body, _IMPOSSIBLE)
    tools = None if body.get("tools") is None else as_list(body["tools"], "tools")
    tools = tools and [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    if _choice(body) == "none":
        tools = None
    images: list[Any] = []
    return ChatRequest(
        **common_fields(body, max_tokens=("max_tokens",), stop="stop_sequences"),
        conversation=Conversation(_messages(body, images), tools, _options(body), images),
        calls_tools=bool(tools),
    )


def _messages(body: Mapping[str, Any], images: list[Any]) -> list[dict[str, Any]]:
    """As templates read them; the sources of images are added to `images`."""
    value = as_list(body.get("messages"), "messages")
    if not value:
        raise ApiError("messages is empty", param="messages")
    messages: list[dict[str, Any]] = []
    if body.get("system"):
        messages.append({"role": "system", "content": _joined(body["system"], "system", images, allowed=("text",))})
    for index, message in enumerate(value):
        what = f"messages[{index}]"
        message = as_object(message, what)
        role, content = message.get("role"), message.get("content")
        if role == "user":
            messages += _of_user(content, f"{what}.content", images)
        elif role == "assistant":
            messages.append(_of_assistant(content, f"{what}.content"))
        elif role == "system":
            text = _joined(content, f"{what}.content", images, allowed=("text",))
            messages.append({"role": "system", "content": text})
        else:
            raise ApiError(f"{what}.role must be user, assistant or system, got {shown(role)}", param=what)
    if messages[-1]["role"] == "assistant":
        raise ApiError(
            f"messages[{len(value) - 1}] is the assistant's: a beginning of the answer cannot be given, the policy "
            "writes all of it",
            param="messages",
        )
    return messages


def _of_user(content: Any, what: str, images: list[Any]) -> list[dict[str, Any]]:
    """Answers of tools are messages of their own; what stands between them is one of the user."""
    messages: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []

    def end() -> None:
        if parts:
            messages.append({"role": "user", "content": join_parts(parts, "\n")})
            parts.clear()

    for index, block in enumerate(_blocks(content, what)):
        place = f"{what}[{index}]"
        if block.get("type") != "tool_result":
            parts.append(_part(block, place, images, allowed=("text", "image", "tool_result")))
            continue
        end()
        answer = {
            "role": "tool",
            "tool_call_id": as_text(block.get("tool_use_id"), f"{place}.tool_use_id"),
            "content": _joined(block.get("content") or "", f"{place}.content", images, allowed=("text", "image")),
        }
        # For templates that show it.
        messages.append(answer | ({"is_error": True} if given(block, "is_error", bool, "true or false") else {}))
    end()
    if not messages:
        raise ApiError(f"{what} is empty", param=what)
    return messages


def _of_assistant(content: Any, what: str) -> dict[str, Any]:
    thoughts: list[str] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for index, block in enumerate(_blocks(content, what)):
        place, kind = f"{what}[{index}]", block.get("type")
        if kind == "thinking":
            thoughts.append(given(block, "thinking", str, "text") or "")
        elif kind == "text":
            texts.append(given(block, "text", str, "text") or "")
        elif kind == "tool_use":
            function = {
                "name": as_text(block.get("name"), f"{place}.name"),
                "arguments": as_object(block.get("input"), f"{place}.input"),
            }
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        else:
            raise ApiError(f"{place}.type must be text, thinking or tool_use, got {shown(kind)}", param=what)
    text = "\n".join(texts)
    if thoughts:
        text = with_thoughts("\n".join(thoughts), text)
    return {"role": "assistant", "content": text} | ({"tool_calls": calls} if calls else {})


def _blocks(content: Any, what: str) -> list[dict[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return [as_object(block, f"{what}[{index}]") for index, block in enumerate(as_list(content, what))]


def _joined(content: Any, what: str, images: list[Any], *, allowed: Sequence[str]) -> str | list[dict[str, Any]]:
    blocks = enumerate(_blocks(content, what))
    return join_parts([_part(block, f"{what}[{index}]", images, allowed=allowed) for index, block in blocks], "\n")


def _part(block: Mapping[str, Any], what: str, images: list[Any], *, allowed: Sequence[str]) -> dict[str, Any]:
    kind = block.get("type")
    if kind == "text":
        return {"type": "text", "text": given(block, "text", str, "text") or ""}
    if kind == "image" and kind in allowed:
        images.append(_image(as_object(block.get("source"), f"{what}.source"), f"{what}.source"))
        return {"type": "image"}
    *others, last = allowed
    names = f"{', '.join(others)} or {last}" if others else last
    raise ApiError(f"{what}.type must be {names}, got {shown(kind)}", param=what)


def _image(source: Mapping[str, Any], what: str) -> str:
    """A data URI, or a URL."""
    if source.get("type") == "base64":
        kind = as_text(source.get("media_type"), f"{what}.media_type")
        return f"data:{kind};base64,{as_text(source.get('data'), f'{what}.data')}"
    if source.get("type") == "url":
        url = as_text(source.get("url"), f"{what}.url")
        if url.lower().startswith(("http://", "https://")):
            return url
        raise ApiError(f"{what}.url must be an http(s) URL, got {shown(url)}", param=what)
    raise ApiError(f"{what}.type must be base64 or url, got {shown(source.get('type'))}", param=what)


def _tool(value: Any, what: str) -> dict[str, Any]:
    """As templates read it, which is OpenAI's form."""
    tool = as_object(value, what)
    if tool.get("type") not in (None, "custom"):
        raise ApiError(f"{what}.type is {shown(tool['type'])}: nothing here runs such a tool", param=what)
    function = {"name": as_text(tool.get("name"), f"{what}.name")}
    if tool.get("description") is not None:
        function["description"] = given(tool, "description", str, "text")
    return {
        "type": "function",
        "function": function | {"parameters": as_object(tool.get("input_schema"), f"{what}.input_schema")},
    }


def _choice(body: Mapping[str, Any]) -> str:
    choice = as_object(body.get("tool_choice") or {"type": "auto"}, "tool_choice")
    if choice.get("type") not in ("auto", "none"):
        raise ApiError(
            f"tool_choice.type must be auto or none, got {shown(choice.get('type'))}: nothing here forces a call",
            param="tool_choice",
        )
    if given(choice, "disable_parallel_tool_use", bool, "true or false"):
        raise ApiError("tool_choice.disable_parallel_tool_use: the policy makes as many calls as it likes")
    kind: str = choice["type"]
    return kind


def _options(body: Mapping[str, Any]) -> dict[str, Any]:
    """Variables for the template. Thoughts can be turned off, where it knows how; how long they are is the policy's."""
    thinking = as_object(body.get("thinking") or {}, "thinking")
    off = {"enable_thinking": False} if thinking.get("type") == "disabled" else {}
    return off | template_options(body)


def _keeps_all(wanted: Any) -> bool:
    edits = wanted.get("edits") if isinstance(wanted, Mapping) else None
    return isinstance(edits, list) and all(isinstance(e, Mapping) and e.get("keep") == "all" for e in edits)


_IMPOSSIBLE: Impossible = {
    "container": ("nothing here runs code", lambda _: False),
    "mcp_servers": ("nothing here calls tools", lambda servers: servers == []),
    "context_management": ("the program itself shortens its history", _keeps_all),
    "output_config": (
        "nothing here forces a format",
        lambda wanted: isinstance(wanted, Mapping) and wanted.get("format") is None,
    ),
    "output_format": ("nothing here forces a format", lambda _: False),
    "chat_template": ("messages are rendered with the model's own template", lambda _: False),
}


# ------------------------------------------------------------------------------------ replies


class AnthropicWriter:
    """One answer as a message, or as the events of a streamed one."""

    def __init__(self, *, request: ChatRequest, id: str, prompt: ChatPrompt, tokenizer: Any) -> None:
        self._request = request
        self._id = f"msg_{id}"
        self._prompt_ids = prompt.token_ids
        self._growing = GrowingThoughts(begun=prompt.text.rstrip().endswith(THINK))
        self._blocks = 0
        self._open = ""
        """The kind of the block that is being written."""

    def whole(self, answer: Delta, written: Sequence[int]) -> dict[str, Any]:
        assert answer.reply is not None
        parts = [self._growing.feed(answer.reply.content), self._growing.finish()]
        thoughts, text = ("".join(pieces) for pieces in zip(*parts, strict=True))
        content: list[dict[str, Any]] = []
        if self._growing.has_thoughts:
            content.append({"type": "thinking", "thinking": thoughts, "signature": SIGNATURE})
        if text or not (content or answer.reply.tool_calls):
            content.append(_text(text))
        content += self._calls(answer.reply.tool_calls)
        return self._message(content, **self._end(answer), output=len(written)) | {
            "token_ids": token_ids(self._prompt_ids, written)
        }

    def opening(self) -> list[str]:
        message = self._message([], stop_reason=None, stop_sequence=None, output=0)
        return [_event("message_start", message=message), _event("ping")]

    def part(self, part: Delta, written: Sequence[int]) -> list[str]:
        events = self._said(self._growing.feed(part.content))
        if part.reply is None:
            return events
        events += self._said(self._growing.finish())
        if not (self._blocks or part.reply.tool_calls):
            events += self._begin(_text(""))
        events += self._finish()
        for call in self._calls(part.reply.tool_calls):
            events += self._begin(call | {"input": {}})
            events += self._delta(type="input_json_delta", partial_json=json.dumps(call["input"], ensure_ascii=False))
            events += self._finish()
        usage = self._usage(len(written))
        ids = token_ids(self._prompt_ids, written)
        return [
            *events,
            _event("message_delta", delta=self._end(part), usage=usage, token_ids=ids),
            _event("message_stop"),
        ]

    def error(self, error: ApiError) -> list[str]:
        return [event(json.dumps(error_body(error)), "error")]

    def _said(self, new: Thoughtful) -> list[str]:
        events: list[str] = []
        if self._growing.has_thoughts and not self._blocks:
            events += self._begin({"type": "thinking", "thinking": "", "signature": ""})
        if new.thoughts:
            events += self._delta(type="thinking_delta", thinking=new.thoughts)
        if new.answer:
            if self._open != "text":
                events += self._finish()
                events += self._begin(_text(""))
            events += self._delta(type="text_delta", text=new.answer)
        return events

    def _begin(self, block: dict[str, Any]) -> list[str]:
        self._open = block["type"]
        self._blocks += 1
        return [_event("content_block_start", index=self._blocks - 1, content_block=block)]

    def _delta(self, **delta: Any) -> list[str]:
        return [_event("content_block_delta", index=self._blocks - 1, delta=delta)]

    def _finish(self) -> list[str]:
        if not self._open:
            return []
        events = self._delta(type="signature_delta", signature=SIGNATURE) if self._open == "thinking" else []
        self._open = ""
        return [*events, _event("content_block_stop", index=self._blocks - 1)]

    def _calls(self, calls: Sequence[ToolCall]) -> list[dict[str, Any]]:
        number = self._id.rpartition("-")[2]
        return [
            {"type": "tool_use", "id": f"toolu_{number}_{index}", "name": call.name, "input": call.arguments}
            for index, call in enumerate(calls)
        ]

    def _end(self, answer: Delta) -> dict[str, Any]:
        """Why it ended. The policy's answers are never refused: what it wrote is what the program reads."""
        ended_by = answer.part.stop_reason
        if answer.part.finish_reason is not FinishReason.STOP:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if answer.reply and answer.reply.tool_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if ended_by in self._request.stop:
            return {"stop_reason": "stop_sequence", "stop_sequence": ended_by}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    def _message(self, content: list[dict[str, Any]], *, output: int, **end: Any) -> dict[str, Any]:
        head = {"id": self._id, "type": "message", "role": "assistant", "model": self._request.model}
        return head | {"content": content, **end, "usage": self._usage(output)}

    def _usage(self, output: int) -> dict[str, int]:
        return {
            "input_tokens": len(self._prompt_ids),
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": output,
        }


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _event(name: str, **content: Any) -> str:
    return event(json.dumps({"type": name, **content}), name)


def error_body(error: ApiError) -> dict[str, Any]:
    kind = "api_error" if error.status >= 500 else ERRORS.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}, "request_id": None}


ANTHROPIC = Dialect(parse_messages_request, AnthropicWriter, error_body)

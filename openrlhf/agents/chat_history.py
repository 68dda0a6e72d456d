"""From a client's messages to token ids. What the policy wrote is never tokenised again.

A client sends its whole conversation with every request, as text. When it goes on from an earlier answer of the same
episode, the tokens that the engine read and wrote then are kept, and only what the chat template puts after that answer
is tokenised:

    first request    <|im_start|>user⏎2+3?<|im_end|>⏎<|im_start|>assistant⏎            text → tokens
    its answer                                                             5<|im_end|>  tokens, as sampled
    second request   ⏎<|im_start|>user⏎Sure?<|im_end|>⏎<|im_start|>assistant⏎           text → tokens
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from openrlhf.agents.tool_calls import Reply, ToolCall, parse_reply

Message = Mapping[str, Any]
"""As chat templates read it: `role`, `content` (text), perhaps `tool_calls` whose arguments are dicts."""

MARK = "@@what-the-policy-said@@"
"""Stands for an answer in a rendered conversation. Without spaces, which templates trim."""


class TemplateError(ValueError):
    """The chat template cannot render a conversation. The text says why."""


class Conversation(NamedTuple):
    """What a request shows the policy."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    template_options: Mapping[str, Any] = {}


class ChatPrompt(NamedTuple):
    """A conversation as the engine reads it."""

    num_messages: int
    text: str
    """As the template renders it."""
    token_ids: list[int]
    continues: bool
    """Whether it begins with the tokens of an earlier exchange."""


class _Exchange(NamedTuple):
    """A prompt that was answered."""

    prompt: ChatPrompt
    written: list[int]
    reply: Reply


class ChatHistory:
    """The exchanges of one episode."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._exchanges: list[_Exchange] = []

    def prompt(self, conversation: Conversation) -> ChatPrompt:
        """What the engine reads next. Raises TemplateError."""
        text = self._render(conversation)
        count = len(conversation.messages)
        candidates = [e for e in self._exchanges if e.prompt.num_messages < count and text.startswith(e.prompt.text)]
        # The longest; of the same question asked again, the latest.
        for exchange in sorted(candidates, key=lambda e: len(e.prompt.text))[::-1]:
            tail = self._after_reply(exchange, conversation, text)
            if tail is not None:
                return ChatPrompt(count, text, _read(exchange) + self._ids_after(exchange, tail), continues=True)
        return ChatPrompt(count, text, self._tokenise(text), continues=False)

    def remember(self, prompt: ChatPrompt, written: Sequence[int], reply: Reply) -> None:
        """`written` are the sampled tokens, `reply` is what the client was told they say."""
        self._exchanges.append(_Exchange(prompt, list(written), reply))

    def _after_reply(self, exchange: _Exchange, conversation: Conversation, text: str) -> str | None:
        """What the template puts after the reply of `exchange`; None when the conversation does not go on from it.

        It goes on when the client shows the reply unchanged, and the template renders both what stood before it and the
        reply itself as the policy has them in its context, up to white space. Templates that leave out the thoughts of
        earlier turns, say, do not.
        """
        at = exchange.prompt.num_messages
        said = conversation.messages[at]
        if said["role"] != "assistant" or not _same(_reply_in(said), exchange.reply):
            return None
        marked = [*conversation.messages[:at], {"role": "assistant", "content": MARK}, *conversation.messages[at + 1 :]]
        try:
            _, mark, tail = self._render(conversation._replace(messages=marked)).partition(MARK)
        except TemplateError:  # of a tool's answer without a call, perhaps
            return None
        if not mark or MARK in tail or not text.endswith(tail) or len(exchange.prompt.text) + len(tail) > len(text):
            return None
        rendered = text[len(exchange.prompt.text) : len(text) - len(tail)]
        shown = parse_reply(rendered) if exchange.reply.tool_calls else Reply(rendered)
        return tail if _same(shown, exchange.reply, spaces=False) else None

    def _ids_after(self, exchange: _Exchange, tail: str) -> list[int]:
        """The tail begins with what closes the assistant's turn: usually the policy has written that itself."""
        ids = self._tokenise(tail)
        return ids[1:] if ids[:1] == exchange.written[-1:] else ids

    def _render(self, conversation: Conversation) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                list(conversation.messages),
                tools=list(conversation.tools) if conversation.tools else None,
                tokenize=False,
                add_generation_prompt=True,
                **conversation.template_options,
            )
        except Exception as error:  # templates are programs: whatever one raises is about these messages
            raise TemplateError(f"the chat template refused these messages: {error}") from error
        return text

    def _tokenise(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def _read(exchange: _Exchange) -> list[int]:
    return exchange.prompt.token_ids + exchange.written


def _reply_in(message: Message) -> Reply:
    calls = (call["function"] for call in message.get("tool_calls") or ())
    return Reply(message["content"], tuple(ToolCall(call["name"], call["arguments"]) for call in calls))


def _same(one: Reply, other: Reply, *, spaces: bool = True) -> bool:
    """Up to white space around the content; without `spaces`, to any in it."""
    contents = [reply.content.strip() if spaces else "".join(reply.content.split()) for reply in (one, other)]
    return contents[0] == contents[1] and one.tool_calls == other.tool_calls

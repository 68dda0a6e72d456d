"""From a client's messages to token ids. What the policy wrote is never tokenised again.

A client sends its whole conversation with every request, as text. When it goes on from an earlier answer of the same
episode, the tokens that the engine read and wrote then are kept, and only what the chat template puts after that answer
is tokenised:

    first request    <|im_start|>user⏎2+3?<|im_end|>⏎<|im_start|>assistant⏎            text → tokens
    its answer                                                             5<|im_end|>  tokens, as sampled
    second request   ⏎<|im_start|>user⏎Sure?<|im_end|>⏎<|im_start|>assistant⏎           text → tokens
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from openrlhf.agents.images import check_readable, images_of
from openrlhf.agents.tool_calls import THOUGHT, Reply, ToolCall, parse_reply, split_thoughts
from openrlhf.data.templates import template_arguments
from openrlhf.models.image_processor import ExpandedText
from openrlhf.types import ImageInput, PlacedImage

Message = Mapping[str, Any]
"""As chat templates read it: `role`, `content` (text, or a list of texts and places of images), perhaps `tool_calls`
whose arguments are dicts."""

MARK = "@@what-the-policy-said@@"
"""Stands for an answer in a rendered conversation. Without spaces, which templates trim."""

TOOLS = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""
"""The text about tools in a system message, where the template has none. These are the words of Hermes and Qwen, which
models that have seen any tools are most likely to know, and the form of calls that `tool_calls.py` reads."""


class TemplateError(ValueError):
    """The chat template cannot render a conversation. The text says why."""


class Conversation(NamedTuple):
    """The messages, tools and options that a request shows the policy."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    template_options: Mapping[str, Any] = {}
    images: Sequence[Any] = ()
    """The sources of the images in the messages, in order."""


class ChatPrompt(NamedTuple):
    """A conversation as the engine reads it."""

    num_messages: int
    text: str
    """As the template renders it."""
    token_ids: list[int]
    continues: bool
    """Whether it begins with the tokens of an earlier exchange."""
    images: tuple[PlacedImage, ...] = ()
    """Those among the tokens."""


class _Exchange(NamedTuple):
    """A prompt that was answered."""

    prompt: ChatPrompt
    written: list[int]
    reply: Reply


class ChatHistory:
    """The exchanges of one episode."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._reader = images_of(tokenizer)
        self._exchanges: list[_Exchange] = []
        self.spells_tools: bool | None = None
        """Whether tools are described in a message of ours, as the template leaves them out; None: none were given."""

    def prompt(self, conversation: Conversation) -> ChatPrompt:
        """The tokens that the engine reads next. New images are prepared here, which may take long. Raises
        TemplateError, and BadImageError."""
        check_readable(self._tokenizer, conversation.images)
        images = [self._reader.prepare_one(source) for source in conversation.images] if self._reader else []
        text = self._render(conversation)
        self._check_images(text, images)
        count = len(conversation.messages)
        candidates = [
            e
            for e in self._exchanges
            if e.prompt.num_messages < count and text.startswith(e.prompt.text) and _has_seen(e, images)
        ]
        # The longest; of the same question asked again, the latest.
        for exchange in sorted(candidates, key=lambda e: len(e.prompt.text))[::-1]:
            tail = self._after_reply(exchange, conversation, text)
            if tail is not None:
                read = _read(exchange)
                new = self._after(exchange, tail, images[len(exchange.prompt.images) :])
                placed = (PlacedImage(len(read) + start, image) for start, image in new.images)
                return ChatPrompt(
                    count, text, read + new.token_ids, continues=True, images=(*exchange.prompt.images, *placed)
                )
        whole = self._tokenise(text, images)
        return ChatPrompt(count, text, whole.token_ids, continues=False, images=whole.images)

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

    def _after(self, exchange: _Exchange, tail: str, images: Sequence[ImageInput]) -> ExpandedText:
        """The tail begins with what closes the assistant's turn: usually the policy has written that itself."""
        read = self._tokenise(tail, images)
        if read.token_ids[:1] != exchange.written[-1:]:
            return read
        return ExpandedText(read.token_ids[1:], tuple(PlacedImage(at - 1, image) for at, image in read.images))

    def _check_images(self, text: str, images: Sequence[ImageInput]) -> None:
        """Templates of models without images, or for other roles, leave images out without a word."""
        if images and self._reader is not None:
            token = self._reader.processor.image_token
            if text.count(token) != len(images):
                raise TemplateError(
                    f"the messages have {len(images)} images, and the chat template shows {text.count(token)} "
                    f"({token}): it leaves some out, or a message spells the token"
                )

    def _render(self, conversation: Conversation) -> str:
        if conversation.tools:
            if self.spells_tools is None:
                self.spells_tools = not renders_tools(self._tokenizer, conversation)
            if self.spells_tools:
                conversation = spell_tools(conversation)
                try:
                    return render(self._tokenizer, conversation)
                except TemplateError:  # of models that know no system messages
                    conversation = _without_system(conversation)
        return render(self._tokenizer, conversation)

    def _tokenise(self, text: str, images: Sequence[ImageInput]) -> ExpandedText:
        if self._reader is not None:
            return self._reader.expand(text, images)
        return ExpandedText(self._tokenizer(text, add_special_tokens=False)["input_ids"], ())


def _read(exchange: _Exchange) -> list[int]:
    return exchange.prompt.token_ids + exchange.written


def _has_seen(exchange: _Exchange, images: Sequence[ImageInput]) -> bool:
    """Whether the images begin with those of the exchange."""
    seen = [placed.image.digest for placed in exchange.prompt.images]
    return seen == [image.digest for image in images[: len(seen)]]


def _reply_in(message: Message) -> Reply:
    calls = (call["function"] for call in message.get("tool_calls") or ())
    return Reply(message["content"], tuple(ToolCall(call["name"], call["arguments"]) for call in calls))


def _same(one: Reply, other: Reply, *, spaces: bool = True) -> bool:
    """Up to white space around the content and around its thoughts; without `spaces`, to any in it."""
    contents = [_pieces(reply.content) if spaces else "".join(reply.content.split()) for reply in (one, other)]
    return contents[0] == contents[1] and one.tool_calls == other.tool_calls


def _pieces(content: str) -> tuple[str, str]:
    """Its thoughts and what it says, wherever the thoughts were begun."""
    thoughts, answer = split_thoughts(content, begun=THOUGHT in content) or ("", content)
    return thoughts, answer.strip()


# ------------------------------------------------------------------------------------ templates


def render(tokenizer: Any, conversation: Conversation) -> str:
    """The text that the policy goes on from. Raises TemplateError."""
    try:
        text: str = tokenizer.apply_chat_template(
            list(conversation.messages),
            tools=list(conversation.tools) if conversation.tools else None,
            tokenize=False,
            add_generation_prompt=True,
            **{**template_arguments(tokenizer), **conversation.template_options},
        )
    except Exception as error:  # templates are programs: whatever one raises is about these messages
        raise TemplateError(f"the chat template refused these messages: {error}") from error
    return text


def renders_tools(tokenizer: Any, conversation: Conversation) -> bool:
    """Whether the template says anything of the conversation's tools."""
    asked = conversation._replace(messages=[{"role": "user", "content": "hi"}])
    return render(tokenizer, asked) != render(tokenizer, asked._replace(tools=None))


def spell_tools(conversation: Conversation) -> Conversation:
    """The same without tools, calls and tools' answers: a system message, the assistant and the user spell them out."""
    tools = "\n".join(_json(tool) for tool in conversation.tools or ())
    messages: list[Message] = []
    for message in conversation.messages:
        if message["role"] == "tool":
            answer = _joined("<tool_response>\n", message["content"], "\n</tool_response>")
            if messages and messages[-1].get("answers"):
                messages[-1] = {**messages[-1], "content": _joined(messages[-1]["content"], "\n", answer)}
            else:
                messages.append({"role": "user", "content": answer, "answers": True})
        elif message.get("tool_calls"):
            calls = (call["function"] for call in message["tool_calls"])
            spelled = [
                f'<tool_call>\n{{"name": {_json(call["name"])}, "arguments": {_json(call["arguments"])}}}\n</tool_call>'
                for call in calls
            ]
            content = "\n".join([*([message["content"]] if message["content"] else []), *spelled])
            messages.append({"role": "assistant", "content": content})
        else:
            messages.append(message)
    said = TOOLS.format(tools=tools)
    if messages and messages[0]["role"] == "system":
        first, *messages = messages
        said = f"{first['content']}\n\n{said}" if first["content"] else said
    return conversation._replace(messages=[{"role": "system", "content": said}, *messages], tools=None)


def _without_system(conversation: Conversation) -> Conversation:
    """The messages with the text of the system message at the beginning of the user's first message."""
    system, first, *others = conversation.messages
    if first["role"] != "user":
        return conversation
    joined = {**first, "content": _joined(system["content"], "\n\n", first["content"])}
    return conversation._replace(messages=[joined, *others])


def _joined(*contents: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Contents of messages as one: text, or a list where one of them is a list."""
    if all(isinstance(content, str) for content in contents):
        return "".join(str(content) for content in contents)
    lists = [[{"type": "text", "text": part}] if isinstance(part, str) else part for part in contents]
    return [item for part in lists for item in part]


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# ------------------------------------------------------------------------------------ for users' agents


def next_user_turn(tokenizer: Any, text: str | list[dict[str, Any]], *, after: str, **template_options: Any) -> str:
    """What the model's own chat template puts between an answer and the next: feedback as a message of the user.

    `text` has `<image>` where an image belongs, or is a list of content items, `{"type": "image"}` among them.
    `after` is the answer, as `states["action_text"]` has it: special tokens that it has ended with are not there twice.
    `template_options` are variables of the template, `enable_thinking` for instance. Raises ValueError.

    >>> next_user_turn(tokenizer, "Try again.", after="5<|im_end|>")
    '\\n<|im_start|>user\\nTry again.<|im_end|>\\n<|im_start|>assistant\\n'
    """
    if not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or "this model"
        raise TemplateError(f"the tokenizer of {name} has no chat template, so it has no turns")
    messages: list[Message] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": MARK},
        {"role": "user", "content": text},
    ]
    _, mark, turn = render(tokenizer, Conversation(messages, None, template_options)).partition(MARK)
    if not mark:
        raise TemplateError("the chat template does not show what the assistant has said")
    closing = turn.lstrip()
    for token in _special_tokens(tokenizer):
        if after.endswith(token) and closing.startswith(token):
            return closing[len(token) :]
    return turn


def action_text(tokenizer: Any, action: str | Sequence[int]) -> str:
    """What the policy said, without special tokens; of `states["action_text"]`, or of token ids.

    >>> action_text(tokenizer, "5<|im_end|>")
    '5'
    """
    if not isinstance(action, str):
        text: str = tokenizer.decode(action, skip_special_tokens=True)
        return text
    tokens = _special_tokens(tokenizer)
    return re.sub("|".join(map(re.escape, tokens)), "", action) if tokens else action


def _special_tokens(tokenizer: Any) -> list[str]:
    """The longest first."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).values()
    tokens = {*getattr(tokenizer, "all_special_tokens", ()), *(str(token) for token in added if token.special)}
    return sorted((token for token in tokens if token), key=len, reverse=True)

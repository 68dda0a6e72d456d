"""`openrlhf chat`: a conversation with a model in the terminal, or in a pipe, streamed token by token."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from openrlhf.config.commands import RLConfig
from openrlhf.config.schema import build
from openrlhf.data.sources import DataError
from openrlhf.data.templates import render_chat, set_chat_template
from openrlhf.models.loading import load_config, load_tokenizer
from openrlhf.rollout.base import Engine
from openrlhf.runs.inference import opened_engine, whole_model, with_engine
from openrlhf.runs.preflight import reading_model
from openrlhf.runs.process import prepare_process, process_device, user_errors_end_the_run
from openrlhf.types import FinishReason, Generation, SamplingParams
from openrlhf.utils.foreign_lines import start_logging
from openrlhf.utils.randomness import derive_seed

MOST_LEN = 8192
"""The context of a chat that asks for none, where the model was made for more."""
MOST_TOKENS = 400
"""Tokens that /tokens shows, of a longer answer the last ones."""

HELP = """\
/system TEXT      what the model is told before everything else; without TEXT nothing
/reset            forget the conversation, but for the system message
/undo             take the last question and its answer back
/save FILE        write the conversation as JSON: a list of messages
/temperature X    0 is greedy; /top_p X and /max_tokens N likewise
/tokens           ids and log-probs of the last answer's tokens
/help, /quit      Ctrl-D quits too; Ctrl-C stops an answer, twice it quits

A line that ends with \\ goes on in the next one. Three quotes (\"\"\") begin and end a text of several lines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """The command line of `openrlhf chat`."""

    model: str
    system: str | None
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int | None
    max_len: int | None
    seed: int
    engine: str
    chat_template: str | None
    trust_remote_code: bool


def chat(options: ChatOptions) -> int:
    """Talk until /quit or the end of the input; the exit status."""
    start_logging()
    with (
        user_errors_end_the_run() as ending,
        whole_model(options.model, trust_remote_code=options.trust_remote_code) as folder,
    ):
        config, tokenizer = _prepared(options, folder)
        with asyncio.Runner() as loop, opened_engine(config, tokenizer, process_device()) as engine:
            Terminal(Conversation(engine, tokenizer, options), loop).talk()
    return ending.status


def _prepared(options: ChatOptions, folder: str) -> tuple[RLConfig, Any]:
    with reading_model(folder, flag="MODEL"):
        tokenizer = load_tokenizer(folder, trust_remote_code=options.trust_remote_code, flag="MODEL")
        model = load_config(folder, trust_remote_code=options.trust_remote_code, flag="MODEL")
    set_chat_template(tokenizer, options.chat_template, {})
    known = getattr(model.get_text_config(), "max_position_embeddings", None) or MOST_LEN
    values = {
        "actor.model_name_or_path": folder,
        "actor.trust_remote_code": options.trust_remote_code,
        "data.max_len": options.max_len or min(known, MOST_LEN),
        "train.seed": options.seed,
        "rollout.batch_size": 1,
        "rollout.n_samples_per_prompt": 1,
        "vllm.enable_prefix_caching": True,
    }
    config = build("train_ppo_ray", values)
    assert isinstance(config, RLConfig)
    prepare_process(config.train)
    return with_engine(config, options.engine, process_device()), tokenizer


class Answer(NamedTuple):
    """An answer as it was sampled."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    finish_reason: FinishReason | None
    """None: it was stopped."""


@dataclass(slots=True)
class Conversation:
    """Messages, and the model that answers the last of them.

    A model without a chat template continues what was written as it is.
    """

    engine: Engine
    tokenizer: Any
    options: ChatOptions
    messages: list[dict[str, str]] = field(default_factory=list)
    last: Answer | None = None
    sampling: SamplingParams = field(init=False)
    _asked: int = 0

    def __post_init__(self) -> None:
        self.sampling = SamplingParams(
            temperature=self.options.temperature,
            top_p=self.options.top_p,
            top_k=self.options.top_k,
            max_tokens=self.options.max_new_tokens,
        )
        self.set_system(self.options.system or "")

    @property
    def has_template(self) -> bool:
        return bool(getattr(self.tokenizer, "chat_template", None))

    def set_system(self, text: str) -> None:
        others = [message for message in self.messages if message["role"] != "system"]
        self.messages = [{"role": "system", "content": text}, *others] if text else others

    def reset(self) -> None:
        self.messages = [message for message in self.messages if message["role"] == "system"]
        self.last = None

    def undo(self) -> bool:
        """Whether there was something to take back."""
        asked = [place for place, message in enumerate(self.messages) if message["role"] == "user"]
        if not asked:
            return False
        del self.messages[asked[-1] :]
        self.last = None
        return True

    def prompt_ids(self) -> list[int]:
        """The conversation so far, up to where the model goes on. Raises DataError."""
        if self.has_template:
            text = render_chat(self.messages, self.tokenizer, add_generation_prompt=True)
        else:
            text = "".join(message["content"] for message in self.messages)
        return list(self.tokenizer(text, add_special_tokens=not self.has_template)["input_ids"])

    async def ask(self, text: str, show: Callable[[str], None]) -> Answer:
        """Ask, and keep question and answer. Cancelled, it keeps what is there of the answer. `show` gets its text part
        by part. Raises DataError, and ValueError for a conversation that leaves no room; both keep nothing."""
        self.messages.append({"role": "user", "content": text})
        parts: list[Generation] = []
        try:
            sampling = self.sampling.copy(seed=derive_seed(self.options.seed, "chat", self._asked))
            self._asked += 1
            prompt = self.prompt_ids()
            async with contextlib.aclosing(self.engine.stream(prompt, sampling)) as stream:
                async for part in stream:
                    parts.append(part)
                    show(part.text)
        except (DataError, ValueError):
            self.messages.pop()
            raise
        except asyncio.CancelledError:
            self._keep(parts)
            raise
        return self._keep(parts)

    def _keep(self, parts: Sequence[Generation]) -> Answer:
        self.last = Answer(
            text="".join(part.text for part in parts),
            token_ids=[token for part in parts for token in part.token_ids],
            logprobs=[value for part in parts for value in part.logprobs or ()],
            finish_reason=parts[-1].finish_reason if parts else None,
        )
        self.messages.append({"role": "assistant", "content": self.last.text})
        return self.last


class Terminal:
    """Reads messages and commands from stdin and shows answers on stdout; what else is said goes to stderr.

    In a pipe there are no prompts, and each line, or text between quotes, is a message.
    """

    def __init__(
        self,
        conversation: Conversation,
        loop: asyncio.Runner,
        *,
        source: TextIO | None = None,
        out: TextIO | None = None,
    ) -> None:
        self._conversation = conversation
        self._loop = loop
        self._source = source or sys.stdin
        self._out = out or sys.stdout
        self._live = self._source.isatty()
        self._interrupts = 0

    def talk(self) -> None:
        if self._live:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401, from here on `input` knows the arrow keys and what was said before
            self._say("/help shows the commands, /quit or Ctrl-D leaves")
        if not self._conversation.has_template:
            self._say("this model has no chat template: it continues what you write, as it is")
        for text in self._messages():
            if text.startswith("/") and not text.startswith("//"):
                if not self._command(*text[1:].partition(" ")[::2]):
                    return
            elif text.strip():
                self._ask(text.removeprefix("/") if text.startswith("//") else text)

    def _messages(self) -> Iterator[str]:
        while True:
            try:
                text = self._message()
                self._interrupts = 0
            except EOFError:
                if self._live:
                    print(file=self._out)
                return
            except KeyboardInterrupt:
                if not self._live or self._interrupts:
                    raise
                self._interrupts = 1
                self._say("\n(Ctrl-C once more, or /quit, leaves)")
                continue
            yield text

    def _message(self) -> str:
        line = self._line("> ")
        if line.strip().startswith('"""'):
            first = line.strip().removeprefix('"""')
            if first.endswith('"""'):
                return first.removesuffix('"""')
            lines = [first] if first else []
            while not (line := self._line("… ")).rstrip().endswith('"""'):
                lines.append(line)
            rest = line.rstrip().removesuffix('"""')
            return "\n".join([*lines, rest] if rest else lines)
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1].removesuffix("\\")
            lines.append(self._line("… "))
        return "\n".join(lines)

    def _line(self, prompt: str) -> str:
        if self._live:
            return input(prompt)
        line = self._source.readline()
        if not line:
            raise EOFError
        return line.rstrip("\n")

    def _ask(self, text: str) -> None:
        def show(part: str) -> None:
            print(part, end="", file=self._out, flush=True)

        try:
            answer = self._loop.run(self._conversation.ask(text, show))
        except (DataError, ValueError) as error:
            self._say(f"error: {error}; /undo or /reset makes room" if "no room" in str(error) else f"error: {error}")
            return
        except KeyboardInterrupt:
            if not self._live:
                raise
            print(file=self._out, flush=True)
            self._interrupts = 1
            self._say("(stopped; Ctrl-C once more leaves)")
            return
        print(file=self._out, flush=True)
        if answer.finish_reason is FinishReason.LENGTH:
            self._say("(the limit of tokens is reached)")

    def _command(self, name: str, argument: str) -> bool:
        """Whether the conversation goes on."""
        argument = argument.strip()
        match name:
            case "quit" | "exit":
                return False
            case "help":
                self._say(HELP)
            case "system":
                self._conversation.set_system(argument)
                self._say("the system message is set" if argument else "there is no system message")
            case "reset":
                self._conversation.reset()
                self._say("the conversation is empty")
            case "undo":
                found = self._conversation.undo()
                self._say(
                    "the last question and its answer are taken back" if found else "there is nothing to take back"
                )
            case "save":
                self._save(argument)
            case "temperature" | "top_p" | "max_tokens":
                self._set(name, argument)
            case "tokens":
                self._show_tokens()
            case _:
                self._say(f"there is no /{name}; /help shows the commands (a message that begins with / needs //)")
        return True

    def _save(self, name: str) -> None:
        if not name:
            self._say("error: /save needs the name of a file")
            return
        text = json.dumps(self._conversation.messages, ensure_ascii=False, indent=1)
        try:
            Path(name).expanduser().write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            self._say(f"error: {name}: {error.strerror}")
        else:
            self._say(f"{len(self._conversation.messages)} messages are in {name}")

    def _set(self, name: str, argument: str) -> None:
        try:
            value = (int if name == "max_tokens" else float)(argument)
            self._conversation.sampling = self._conversation.sampling.copy(**{name: value})
        except ValueError as error:
            why = str(error) if name in str(error) else f"/{name} needs a number, got {argument!r}"
            self._say(f"error: {why}")
        else:
            self._say(f"{name} {value:g}")

    def _show_tokens(self) -> None:
        answer = self._conversation.last
        if answer is None or not answer.token_ids:
            self._say("there is no answer yet")
            return
        pieces = list(zip(answer.token_ids, answer.logprobs, strict=True))
        if len(pieces) > MOST_TOKENS:
            self._say(f"the last {MOST_TOKENS} of {len(pieces)} tokens")
        print(f"{'id':>8}  {'log-prob':>8}  {'prob':>6}  token", file=self._out)
        for token, logprob in pieces[-MOST_TOKENS:]:
            text = self._conversation.tokenizer.decode([token])
            print(f"{token:>8}  {logprob:>8.3f}  {math.exp(logprob):>6.1%}  {text!r}", file=self._out)
        print(f"{len(pieces)} tokens, log-prob {math.fsum(answer.logprobs):.3f}", file=self._out, flush=True)

    def _say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

"""One episode's conversations with the policy: requests in, answers out, every token accounted for."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncGenerator, Iterator
from typing import Any

from openrlhf.agents.chat_history import ChatHistory, ChatPrompt, TemplateError
from openrlhf.agents.chat_protocol import ApiError, ChatRequest, Delta
from openrlhf.agents.images import BadImageError, images_of
from openrlhf.agents.recording_engine import RecordingEngine
from openrlhf.agents.tool_calls import GrowingReply
from openrlhf.types import FinishReason, Generation, SamplingParams
from openrlhf.utils.randomness import derive_seed

BYTES_PER_TOKEN = 64
"""Bytes of JSON per token: tokens have about 4 characters, some have 16, and JSON may write each in 6 bytes."""
LEAST_LIMIT = 1 << 20
"""Bytes of a request that are for everything else: tools, ids, and messages that are found to be too long."""
LEAST_IMAGES = 64 << 20
"""Bytes of a request that are for images, where the policy reads some: files in base64, all that the conversation has
shown so far."""


class ChatTurn:
    """One request that can be answered."""

    def __init__(
        self, session: ChatSession, request: ChatRequest, prompt: ChatPrompt, params: SamplingParams, ticket: object
    ) -> None:
        self._session = session
        self._request = request
        self._params = params
        self._ticket = ticket
        self.prompt = prompt
        self.written: list[int] = []
        """Tokens so far."""

    async def whole(self) -> Delta:
        """The answer in one piece."""
        with _refusals():
            generation = await self._session.engine.generate(
                self.prompt.token_ids, self._params, images=self.prompt.images
            )
        growing = GrowingReply(tools=self._request.calls_tools)
        return self._end(generation, growing, before=growing.feed(generation.text))

    async def parts(self) -> AsyncGenerator[Delta]:
        """The answer as it is written. Closing the iterator gives it up."""
        growing = GrowingReply(tools=self._request.calls_tools)
        with _refusals():
            stream = self._session.engine.stream(self.prompt.token_ids, self._params, images=self.prompt.images)
            async with contextlib.aclosing(stream) as parts:
                async for part in parts:
                    content = growing.feed(part.text)
                    if part.finish_reason is not None:
                        yield self._end(part, growing, before=content)
                    else:
                        self.written += part.token_ids
                        yield Delta(content, part, None)

    def _end(self, last: Generation, growing: GrowingReply, *, before: str) -> Delta:
        self.written += last.token_ids
        self._session.answered(self._ticket)
        rest, reply = growing.finish()
        self._session.history.remember(self.prompt, self.written, reply)
        return Delta(before + rest, last, reply)


@contextlib.contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except ValueError as error:  # the engine does not answer such questions
        raise ApiError(str(error)) from error


class ChatSession:
    """The state of one episode on the server."""

    def __init__(
        self,
        engine: RecordingEngine,
        tokenizer: Any,
        *,
        sampling_params: SamplingParams,
        max_length: int,
        max_turns: int | None = None,
        client_sampling: bool = True,
    ) -> None:
        """
        Args:
            engine: the episode's own, which remembers the calls.
            sampling_params: the run's. Requests may ask for fewer tokens, never for more.
            max_length: most tokens of a prompt and its answer.
            max_turns: most answers.
            client_sampling: whether requests may choose how answers are sampled.
        """
        self.id = secrets.token_urlsafe(12)
        self.engine = engine
        self.tokenizer = tokenizer
        self.max_length = max_length
        self.history = ChatHistory(tokenizer)
        self.tasks: set[asyncio.Task[Any]] = set()
        """Requests under way, on the server's loop."""
        self.foreign_sampling: dict[str, Any] = {}
        """The sampling parameters that requests have asked for and that differ from the run's."""
        self.refused_for_length = False
        """Whether the last request met a limit before it was answered."""
        self._params = sampling_params
        self._max_turns = max_turns
        self._client_sampling = client_sampling
        self._under_way: set[object] = set()
        self._busy_since = self._busy = 0.0
        self._requests = 0

    @property
    def truncated(self) -> bool:
        """Whether a limit cut an answer short, or refused the last request."""
        reasons = (call.generation.finish_reason for call in self.engine.calls)
        return self.refused_for_length or any(reason is FinishReason.LENGTH for reason in reasons)

    @property
    def most_bytes(self) -> int:
        """The most bytes of a request. One with more text cannot fit into the context, whatever is in it."""
        images = LEAST_IMAGES if images_of(self.tokenizer) is not None else 0
        return LEAST_LIMIT + images + BYTES_PER_TOKEN * self.max_length

    def next_id(self) -> str:
        self._requests += 1
        return f"{self.id}-{self._requests}"

    @contextlib.contextmanager
    def answering(self) -> Iterator[object]:
        """Around all that is done for one request, which counts as a turn. Raises ApiError when there were enough.

        Gives what stands for the request until its answer is recorded.
        """
        self.refused_for_length = False
        if self._max_turns is not None and len(self.engine.calls) + len(self._under_way) >= self._max_turns:
            self.refused_for_length = True
            raise ApiError(f"the limit of {self._max_turns} turns is met (--max_steps)", code="turn_limit_exceeded")
        ticket = object()
        if not self._under_way:
            self._busy_since = time.monotonic()
        self._under_way.add(ticket)
        try:
            yield ticket
        finally:
            self.answered(ticket)

    def answered(self, ticket: object) -> None:
        """The engine's record has it now."""
        if ticket in self._under_way:
            self._under_way.discard(ticket)
            if not self._under_way:
                self._busy += time.monotonic() - self._busy_since

    @property
    def busy_seconds(self) -> float:
        """How long the program has waited for answers. From any thread, to within a request."""
        return self._busy + (time.monotonic() - self._busy_since if self._under_way else 0.0)

    def begin(self, request: ChatRequest, ticket: object) -> ChatTurn:
        """Whatever can be wrong with a request is found here. May take long; in any thread. Raises ApiError."""
        prompt = self.prompt(request)
        if len(prompt.token_ids) >= self.max_length:
            self.refused_for_length = True
            raise ApiError(
                # OpenAI's words, then Anthropic's: programs look for them before they shorten their history.
                f"This model's maximum context length is {self.max_length} tokens. However, your messages resulted in "
                f"{len(prompt.token_ids)} tokens. Please reduce the length of the messages (prompt is too long: "
                f"{len(prompt.token_ids)} tokens > {self.max_length} maximum).",
                code="context_length_exceeded",
                param="messages",
            )
        return ChatTurn(self, request, prompt, self._sampling(request), ticket)

    def prompt(self, request: ChatRequest) -> ChatPrompt:
        """The prompt that the engine would read. Raises ApiError."""
        try:
            return self.history.prompt(request.conversation)
        except (TemplateError, BadImageError) as error:
            raise ApiError(str(error), param="messages") from error

    def _sampling(self, request: ChatRequest) -> SamplingParams:
        run = self._params
        foreign = {name: value for name, value in request.sampling.items() if value != getattr(run, name)}
        self.foreign_sampling |= foreign
        changes: dict[str, Any] = dict(foreign) if self._client_sampling else {}
        if request.max_tokens is not None:
            changes["max_tokens"] = min(request.max_tokens, run.max_tokens or request.max_tokens)
        if request.stop:
            changes["stop"] = request.stop
        if request.seed is not None and self._client_sampling:
            # The samples of a prompt must differ, whatever seed the program has written into it.
            changes["seed"] = request.seed if run.seed is None else derive_seed(run.seed, "client", request.seed)
        try:
            return run.copy(
                **changes,
                # Calls may be spelled with special tokens.
                skip_special_tokens=not request.calls_tools,
                include_stop_str_in_output=False,
                detokenize=True,
                logprobs=request.logprobs or run.logprobs,
            )
        except ValueError as error:
            raise ApiError(str(error)) from error

"""The inside of an agent host: the user's file, loaded once, and episodes of its `AgentExecutor`."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any, NamedTuple

from openrlhf.agents.base import Episode
from openrlhf.agents.host_worker import ask, ask_stream
from openrlhf.agents.user_agent import load_agent
from openrlhf.rollout.requests import PackedRequest, read_generation
from openrlhf.types import Generation, PlacedImage, SamplingParams


class EpisodeSettings(NamedTuple):
    """The settings that all episodes of a host have in common."""

    agent_file: str
    tokenizer: str
    """The folder that the tokenizer is loaded from: it is too large to be sent with every prompt."""
    use_fast: bool
    trust_remote_code: bool
    max_length: int
    max_steps: int | None
    max_model_len: int
    chat_template: str | None = None
    """Replaces the tokenizer's, as Jinja text or a file with it."""
    template_arguments: tuple[tuple[str, Any], ...] = ()
    """Variables for it."""


class EpisodeService:
    """Plays episodes of one user's file, many at once."""

    def __init__(self, settings: EpisodeSettings) -> None:
        self._settings = settings
        self._player = load_agent(settings.agent_file)
        self.shared_loop = self._player.shared_loop
        # Seconds of imports, which who wrote a file that cannot be used need not wait for.
        from openrlhf.data.templates import set_chat_template
        from openrlhf.models.loading import load_tokenizer

        tokenizer = load_tokenizer(
            settings.tokenizer, use_fast=settings.use_fast, trust_remote_code=settings.trust_remote_code
        )
        self._tokenizer = set_chat_template(tokenizer, settings.chat_template, dict(settings.template_arguments))
        self._engine = AskingEngine(settings.max_model_len)

    async def play(
        self, prompt: str, label: Any, sampling_params: SamplingParams, images: Sequence[Any] | None, version: int
    ) -> Episode:
        """One episode. `version` is that of the weights as it begins."""
        self._engine.version = max(self._engine.version, version)
        return await self._player.play(
            prompt,
            label,
            sampling_params,
            self._settings.max_length,
            self._tokenizer,
            self._engine,
            images,
            max_steps=self._settings.max_steps,
        )


class AskingEngine:
    """The engine as a host sees it: every request is packed here, and asked of the process that has the engine.

    It may be asked from any thread and event loop, in the context of the episode.
    """

    def __init__(self, max_model_len: int) -> None:
        self.max_model_len = max_model_len
        self.version = 0
        """The latest that an answer has shown."""

    async def generate(
        self, token_ids: Sequence[int], sampling_params: SamplingParams, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        generation = read_generation(await ask("generate", PackedRequest.of(token_ids, sampling_params, images)))
        self._note(generation)
        return generation

    async def stream(
        self, token_ids: Sequence[int], sampling_params: SamplingParams, images: Sequence[PlacedImage] = ()
    ) -> AsyncGenerator[Generation]:
        request = PackedRequest.of(token_ids, sampling_params, images)
        async with contextlib.aclosing(ask_stream("stream", request)) as parts:
            async for packed in parts:
                part = read_generation(packed)
                self._note(part)
                yield part

    def _note(self, generation: Generation) -> None:
        self.version = max(self.version, *generation.versions, 0)

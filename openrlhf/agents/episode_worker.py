"""The inside of an agent host: the user's file, loaded once, and episodes of its `AgentExecutor`; or a world."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

from openrlhf.agents.base import Episode, FailedEpisode
from openrlhf.agents.host_worker import ask, ask_stream
from openrlhf.agents.images import image_tokenizer
from openrlhf.agents.user_agent import load_agent
from openrlhf.rollout.requests import PackedRequest, by_digest, read_generation
from openrlhf.types import Generation, ImageInput, PlacedImage, SamplingParams
from openrlhf.worlds.executor import WorldPlayer
from openrlhf.worlds.process import WorldPlan

_known_there: ContextVar[set[str]] = ContextVar("images of this episode that the parent has")


class EpisodeSettings(NamedTuple):
    """The settings that all episodes of a host have in common."""

    agent_file: str
    """Or the name of a world."""
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
    images: bool = False
    """Whether the policy reads images. The processor is in the tokenizer's folder."""
    allow_image_urls: bool = False
    world: WorldPlan | None = None
    """The world that is played, instead of the file's agent."""


class SentEpisode(NamedTuple):
    """An episode on its way to the parent, which has its images already."""

    episode: Episode
    """Without images."""
    places: tuple[tuple[tuple[int, str], ...], ...]
    """For each segment, where its images begin, and their digests."""

    @staticmethod
    def of(episode: Episode) -> SentEpisode:
        segments = tuple(dataclasses.replace(segment, images=()) for segment in episode.segments)
        places = tuple(tuple((at, image.digest) for at, image in segment.images) for segment in episode.segments)
        return SentEpisode(dataclasses.replace(episode, segments=segments, images=()), places)

    def read(self, images: Mapping[str, ImageInput]) -> Episode:
        segments = (
            dataclasses.replace(segment, images=tuple(PlacedImage(at, images[digest]) for at, digest in placed))
            for segment, placed in zip(self.episode.segments, self.places, strict=True)
        )
        return dataclasses.replace(self.episode, segments=tuple(segments))


class EpisodeService:
    """Plays episodes of one user's file or of a world, many at once."""

    def __init__(self, settings: EpisodeSettings) -> None:
        self._settings = settings
        self._player: Any = WorldPlayer(settings.world) if settings.world else load_agent(settings.agent_file)
        self.shared_loop = self._player.shared_loop
        # Seconds of imports, which who wrote a file that cannot be used need not wait for.
        from openrlhf.data.templates import set_chat_template
        from openrlhf.models.loading import load_tokenizer

        tokenizer = load_tokenizer(
            settings.tokenizer, use_fast=settings.use_fast, trust_remote_code=settings.trust_remote_code
        )
        self._tokenizer = set_chat_template(
            tokenizer,
            settings.chat_template,
            dict(settings.template_arguments),
            needed=settings.world is not None,
        )
        if settings.images:
            self._tokenizer = image_tokenizer(
                self._tokenizer,
                settings.tokenizer,
                allow_urls=settings.allow_image_urls,
                trust_remote_code=settings.trust_remote_code,
            )
        self._engine = AskingEngine(settings.max_model_len)

    async def play(
        self, prompt: str, label: Any, sampling_params: SamplingParams, images: Sequence[Any] | None, version: int
    ) -> SentEpisode:
        """One episode. `version` is that of the weights as it begins."""
        self._begin(version)
        episode = await self._player.play(
            prompt,
            label,
            sampling_params,
            self._settings.max_length,
            self._tokenizer,
            self._engine,
            images,
            max_steps=self._settings.max_steps,
        )
        await tell_of_images(placed for segment in episode.segments for placed in segment.images)
        return SentEpisode.of(episode)

    def group_play(self) -> str:
        """How all samples of a prompt are played together (`play_group`), for people; "": they are not."""
        return str(getattr(self._player, "group_play", ""))

    async def play_group(
        self,
        prompt: str,
        label: Any,
        sampling_params: Sequence[SamplingParams],
        images: Sequence[Any] | None,
        version: int,
    ) -> list[SentEpisode | FailedEpisode]:
        """The episodes of a prompt."""
        self._begin(version)
        episodes = await self._player.play_group(
            prompt,
            label,
            sampling_params,
            self._settings.max_length,
            self._tokenizer,
            self._engine,
            images,
            max_steps=self._settings.max_steps,
        )
        played = [episode for episode in episodes if isinstance(episode, Episode)]
        await tell_of_images(placed for one in played for segment in one.segments for placed in segment.images)
        return [SentEpisode.of(one) if isinstance(one, Episode) else one for one in episodes]

    def _begin(self, version: int) -> None:
        self._engine.version = max(self._engine.version, version)
        _known_there.set(set())


async def tell_of_images(images: Iterable[PlacedImage]) -> None:
    """From here on the parent has these images, until the episode ends: it is sent those that it has from no other
    episode or host either."""
    known = _known_there.get()
    new = {digest: image for digest, image in by_digest(images).items() if digest not in known}
    if new:
        while lacking := await ask("lacking_images", list(new), keep=False):
            await ask("take_images", [new[digest] for digest in lacking], keep=False)
        known.update(new)


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
        await tell_of_images(images)
        generation = read_generation(await ask("generate", PackedRequest.of(token_ids, sampling_params, images)))
        self._note(generation)
        return generation

    async def stream(
        self, token_ids: Sequence[int], sampling_params: SamplingParams, images: Sequence[PlacedImage] = ()
    ) -> AsyncGenerator[Generation]:
        await tell_of_images(images)
        request = PackedRequest.of(token_ids, sampling_params, images)
        async with contextlib.aclosing(ask_stream("stream", request)) as parts:
            async for packed in parts:
                part = read_generation(packed)
                self._note(part)
                yield part

    def _note(self, generation: Generation) -> None:
        self.version = max(self.version, *generation.versions, 0)

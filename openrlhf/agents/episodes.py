"""Players of episodes: in this process (our own single turn), or in host processes (users' agents)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from openrlhf.agents.base import Episode, FailedEpisode, Player
from openrlhf.agents.episode_worker import EpisodeSettings, SentEpisode
from openrlhf.agents.host import (
    Host,
    HostCrashError,
    HostError,
    HostProcess,
    HostStartError,
    HostTimeoutError,
    LocalHost,
    RemoteError,
    Reply,
)
from openrlhf.agents.images import BadImageError
from openrlhf.rollout.base import Engine, EngineError
from openrlhf.rollout.requests import EngineRequests, ImageStore, PackedRequest, RequestHandler
from openrlhf.types import ImageInput, Prompt, SamplingParams
from openrlhf.utils import waits
from openrlhf.worlds.process import START_SECONDS

logger = logging.getLogger(__name__)

EPISODES_PER_HOST = 128
"""Above this many at once, another host process takes its share."""
SLOW_SECONDS = 5.0
"""A call of users' code that takes longer is named in the log, each time the record is broken."""


_images: ContextVar[dict[str, ImageInput]] = ContextVar("images of this episode")
"""By digest, those that its host has told of: they are needed until the episode has ended, and are here until then."""


class EpisodeError(Exception):
    """An episode failed. The text names the user's file and line, and is all that people need."""

    def __init__(self, message: str, *, retry: bool) -> None:
        super().__init__(message)
        self.retry = retry
        """Whether another attempt may succeed."""


class AgentFileError(Exception):
    """The agent's file cannot be used at all."""


class Episodes(Protocol):
    """Plays episodes, many at once."""

    @property
    def plays_groups(self) -> bool:
        """Whether the samples of a prompt are played together, by `play_group`. Known after `start`."""
        ...

    async def start(self) -> None:
        """Load what is needed. Raises AgentFileError when it cannot ever work."""
        ...

    async def play(self, prompt: Prompt, sampling_params: SamplingParams) -> Episode:
        """One episode of the prompt. Raises EpisodeError; what else it raises is not the episode's fault."""
        ...

    async def play_group(
        self, prompt: Prompt, sampling_params: Sequence[SamplingParams]
    ) -> Sequence[Episode | FailedEpisode]:
        """All episodes of the prompt, one for each of `sampling_params`. Raises as `play` when all have failed."""
        ...

    async def close(self) -> None: ...


class OwnEpisodes:
    """Our own executor, which runs no users' code, right here."""

    plays_groups = False

    def __init__(self, player: Player, *, engine: Engine, tokenizer: Any, max_length: int) -> None:
        self._player = player
        self._engine = engine
        self._tokenizer = tokenizer
        self._max_length = max_length

    async def start(self) -> None:
        pass

    async def play(self, prompt: Prompt, sampling_params: SamplingParams) -> Episode:
        try:
            with waits.doing("at the engine"):
                return await self._player.play(
                    prompt.text,
                    prompt.label,
                    sampling_params,
                    self._max_length,
                    self._tokenizer,
                    self._engine,
                    prompt.images or None,
                )
        except BadImageError as error:
            raise EpisodeError(str(error), retry=False) from error

    async def play_group(
        self, prompt: Prompt, sampling_params: Sequence[SamplingParams]
    ) -> Sequence[Episode | FailedEpisode]:
        raise NotImplementedError("its samples have nothing in common")

    async def close(self) -> None:
        pass


class ArrivingImages:
    """The images of episodes on their way from the hosts. Each is sent once for all who need it at the time, and is
    kept for those who come later. From any event loop."""

    def __init__(self, kept: ImageStore) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._coming: dict[str, tuple[dict[str, ImageInput], Future[ImageInput | None]]] = {}
        """The images that an episode, known by its own `images`, is to send. None: it has ended without."""

    async def lacking(self, digests: Sequence[str], images: dict[str, ImageInput]) -> list[str]:
        """Which of these the episode is to send now, before it asks again; none: `images` has them all.

        What another episode is to send is waited for, but not by who has to send something himself: two might wait for
        each other.
        """
        while True:
            with self._lock:
                images |= self._kept.find(digests)
                missing = [digest for digest in digests if digest not in images]
                new = [digest for digest in missing if digest not in self._coming]
                self._coming |= {digest: (images, Future()) for digest in new}
                # A process may have died with what its episode was to send.
                own = [digest for digest in missing if self._coming[digest][0] is images]
                if own or not missing:
                    return own
                _, coming = self._coming[missing[0]]
            if (image := await asyncio.shield(asyncio.wrap_future(coming))) is not None:
                images[image.digest] = image

    def take(self, arrived: Sequence[ImageInput], images: dict[str, ImageInput]) -> None:
        for image in arrived:
            images[image.digest] = image
            with self._lock:
                self._kept.keep(image)
                _, coming = self._coming.pop(image.digest, (images, None))
            if coming is not None:
                coming.set_result(image)

    def give_up(self, images: dict[str, ImageInput]) -> None:
        """The episode has ended: what it has not sent comes from those who wait for it."""
        with self._lock:
            unsent = [digest for digest, (sender, _) in self._coming.items() if sender is images]
            futures = [self._coming.pop(digest)[1] for digest in unsent]
        for coming in futures:
            coming.set_result(None)


class AgentEpisodes:
    """A user's agent, in host processes that load its file once each; or a world. A host asks the engine that is here.

    An episode in which `reset`, `step` or `execute` takes longer than `step_timeout` seconds of its own time, or ends
    its process, has failed; the others of the host go on, or begin again. `hosts` 0 plays in this process, for a
    debugger.
    """

    def __init__(
        self,
        settings: EpisodeSettings,
        *,
        engine: Engine,
        requests: RequestHandler | None = None,
        hosts: int,
        step_timeout: float,
        start_timeout: float = 180.0,
        slow_seconds: float = SLOW_SECONDS,
    ) -> None:
        """`requests` passes the hosts' requests on to the engine's process; None: the engine is in this process."""
        self._world = settings.world
        self._file = settings.agent_file if self._world else str(Path(settings.agent_file).expanduser().resolve())
        self._name = Path(self._file).name
        self._engine = engine
        self._requests = requests or EngineRequests(engine)
        self._arriving = ArrivingImages(ImageStore())
        self._engine_failure: EngineError | None = None
        # Each call of a world has a deadline of its own, which begins when its process gets it.
        self._step_timeout = None if self._world else step_timeout
        self._slowest = slow_seconds
        service = "openrlhf.agents.episode_worker:EpisodeService"
        asked: dict[str, Any] = {"answer": self._answer, "answer_stream": self._answer_stream}
        self._hosts: list[Host] = (
            [
                HostProcess(
                    service,
                    settings,
                    name=f"agent {self._name} (host {index + 1} of {hosts})",
                    start_timeout=start_timeout + (START_SECONDS if self._world else 0.0),
                    max_concurrency=1024,
                    **asked,
                )
                for index in range(hosts)
            ]
            if hosts
            else [LocalHost(service, settings, name=f"agent {self._name}", **asked)]
        )
        self._playing = [0] * len(self._hosts)
        self.group_play = ""
        """How the samples of a prompt are played together, for people; "": they are not. Known after `start`."""

    @property
    def plays_groups(self) -> bool:
        return bool(self.group_play)

    async def start(self) -> None:
        if self._world is None and not Path(self._file).is_file():
            raise AgentFileError(f"--train.agent_func_path: there is no file {self._file}")
        try:
            await asyncio.gather(*(host.start() for host in self._hosts))
            self.group_play = (await self._hosts[0].call_timed("group_play")).value
        except HostStartError as error:
            raise self._not_loaded(error) from error

    async def play(self, prompt: Prompt, sampling_params: SamplingParams) -> Episode:
        images: dict[str, ImageInput] = {}
        sent: SentEpisode = await self._call("play", prompt, sampling_params, images, episodes=1)
        return sent.read(images)

    async def play_group(
        self, prompt: Prompt, sampling_params: Sequence[SamplingParams]
    ) -> Sequence[Episode | FailedEpisode]:
        images: dict[str, ImageInput] = {}
        sent: list[SentEpisode | FailedEpisode] = await self._call(
            "play_group", prompt, list(sampling_params), images, episodes=len(sampling_params)
        )
        return [one.read(images) if isinstance(one, SentEpisode) else one for one in sent]

    async def _call(
        self, method: str, prompt: Prompt, sampling_params: Any, images: dict[str, ImageInput], *, episodes: int
    ) -> Any:
        """What the host with the fewest episodes answers; `images` gets those of the episodes."""
        index = min(range(len(self._hosts)), key=self._playing.__getitem__)
        self._playing[index] += episodes
        before = _images.set(images)
        try:
            with waits.doing(f"in the {'world' if self._world else 'user'}'s code ({self._name})"):
                reply = await self._hosts[index].call_timed(
                    method,
                    prompt.text,
                    prompt.label,
                    sampling_params,
                    list(prompt.images) or None,
                    self._engine.version,
                    timeout=self._step_timeout,
                )
        except HostStartError as error:
            raise self._not_loaded(error) from error
        except HostError as error:
            # Whatever the agent's code made of it: without an engine nobody can play.
            raise self._engine_failure or self._failed(error) from error
        finally:
            self._playing[index] -= episodes
            _images.reset(before)
            self._arriving.give_up(images)
        self._note_slow(reply, prompt)
        return reply.value

    async def close(self) -> None:
        await asyncio.gather(*(host.close() for host in self._hosts))

    async def _answer(self, name: str, about: Any) -> Any:
        """What a host asks, in the context of the episode that asks it (`_images`)."""
        match name:
            case "generate":
                with self._asking_the_engine():
                    return await self._requests.answer(about, _images.get())
            case "lacking_images":
                return await self._arriving.lacking(about, _images.get())
            case "take_images":
                return self._arriving.take(about, _images.get())
        raise LookupError(name)

    async def _answer_stream(self, name: str, request: PackedRequest) -> AsyncGenerator[bytes, None]:
        assert name == "stream", name
        with self._asking_the_engine():
            async with contextlib.aclosing(self._requests.answer_parts(request, _images.get())) as parts:
                async for part in parts:
                    yield part

    @contextlib.contextmanager
    def _asking_the_engine(self) -> Iterator[None]:
        try:
            with waits.doing("at the engine", turn=True):
                yield
            waits.mark_progress()
        except EngineError as error:
            self._engine_failure = error
            raise

    def _failed(self, error: HostError) -> Exception:
        match error:
            case RemoteError(failure=failure) if failure.kind == "AgentError":
                return EpisodeError(failure.text, retry=True)
            case RemoteError(failure=failure) if failure.kind in ("AgentResultError", "UserFileError", "BadImageError"):
                return EpisodeError(failure.text, retry=False)
            case RemoteError(failure=failure) if failure.kind == "AskError":
                # What the engine refuses because of what it was asked is the agent's doing; anything else is not.
                if failure.text.startswith(("ValueError", "TypeError")):
                    return EpisodeError(f"{self._file}: the engine was asked wrongly: {failure.text}", retry=False)
                if failure.text.startswith("LostRequestError"):
                    return EpisodeError(f"{self._file}: {failure.text}", retry=True)
                return RuntimeError(f"the engine failed: {failure.text}")
            case RemoteError(failure=failure):
                return RuntimeError(f"an agent host failed: {failure.kind}: {failure.text}\n{failure.traceback}")
            case HostTimeoutError():
                return EpisodeError(
                    f"{self._file}: {error} (--rollout.step_timeout {self._step_timeout or 0:g})", retry=False
                )
            case HostCrashError():
                return EpisodeError(f"{self._file}: {error} while it played this episode", retry=False)
        return EpisodeError(f"{self._file}: {error}", retry=False)

    def _not_loaded(self, error: HostStartError) -> AgentFileError:
        if error.failure is not None and error.failure.kind == "UserFileError":
            return AgentFileError(f"--train.agent_func_path: {error.failure.text}")
        return AgentFileError(f"--train.agent_func_path: {self._file} could not be loaded: {error}")

    def _note_slow(self, reply: Reply, prompt: Prompt) -> None:
        if reply.slowest is not None and reply.slowest.seconds > self._slowest:
            self._slowest = reply.slowest.seconds
            logger.warning(
                "%s: %s took %.1f s for %s, the longest so far",
                self._file,
                reply.slowest.function,
                reply.slowest.seconds,
                prompt.where or f"prompt {prompt.ordinal}",
            )


def hosts_for(episodes: int, *, wanted: int | None) -> int:
    """How many host processes play so many episodes at once: as wanted, else one per 128, no more than cores."""
    if wanted is not None:
        return wanted
    return max(1, min(-(-episodes // EPISODES_PER_HOST), os.cpu_count() or 1))


if TYPE_CHECKING:
    _: list[type[Episodes]] = [OwnEpisodes, AgentEpisodes]

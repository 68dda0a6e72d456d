"""The engine as one episode of users' code sees it: it answers, and remembers what it was asked and answered."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping, Sequence
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from openrlhf.agents.host_worker import AskError
from openrlhf.agents.images import NO_IMAGES, EpisodeImages
from openrlhf.agents.recorder import TokenRecorder
from openrlhf.agents.values import BadValueError, as_sampling_params, as_token_ids, shown
from openrlhf.types import FinishReason, Generation, PlacedImage, SamplingParams, Segment, Supports
from openrlhf.utils.randomness import derive_seed

if TYPE_CHECKING:
    from openrlhf.rollout.base import Engine

T = TypeVar("T")


class EngineCall(NamedTuple):
    """One question and its answer."""

    prompt_ids: list[int]
    generation: Generation
    images: tuple[PlacedImage, ...] = ()
    """Those among the tokens of the prompt."""

    @property
    def token_ids(self) -> list[int]:
        """The tokens that the engine read, then those that it wrote."""
        return self.prompt_ids + self.generation.token_ids

    def copy(self) -> EngineCall:
        """With lists of its own; images are not written to."""
        said = self.generation
        logprobs = None if said.logprobs is None else list(said.logprobs)
        own = dataclasses.replace(said, token_ids=list(said.token_ids), logprobs=logprobs, versions=list(said.versions))
        return EngineCall(list(self.prompt_ids), own, self.images)


class RecordingEngine:
    """Given to users' executors as `llm_engine`. One per episode, so that its calls are the episode's.

    It may be asked wherever its engine may be. That of a host (`AskingEngine`) may be asked from any thread and event
    loop, such as that of a user's own server; what it is asked there is asked in the context of the episode.
    """

    def __init__(
        self, engine: Engine, *, sampling_params: SamplingParams, max_length: int, images: EpisodeImages | None = None
    ) -> None:
        """`images` prepares those that it is asked with; None: the policy reads none."""
        self._engine = engine
        self._prepares = images
        self._episode = sampling_params
        self._max_length = max_length
        self._asked = 0
        self._context = copy_context()
        self._by_length: dict[int, list[EngineCall]] = defaultdict(list)
        """Those of the whole group, where there is one: what a sample has in common with another was sampled there."""
        self.calls: list[EngineCall] = []
        """The calls in the order in which they were answered."""
        self.failure: Exception | None = None
        """The exception of the engine itself, which is not the fault of the code that asked it."""

    def of_sample(self, sampling_params: SamplingParams) -> RecordingEngine:
        """The engine of another sample of its group."""
        other = RecordingEngine(
            self._engine, sampling_params=sampling_params, max_length=self._max_length, images=self._prepares
        )
        other._by_length = self._by_length
        return other

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    async def generate(
        self,
        prompt_token_ids: Any,
        sampling_params: Any,
        multi_modal_data: Any = None,
        *,
        images: Sequence[PlacedImage] = (),
    ) -> Generation:
        """Continue `prompt_token_ids` (list, array or tensor) until a stop, or `max_length` tokens in all.

        `multi_modal_data={"image": …}` has the images of the prompt, one or a list, in any form. The token ids have one
        image token for each, or all that the image processor makes of it. `images` are those that are prepared and
        placed already; our own executors have no others.

        Each call of an episode has randomness of its own: a `seed` that is None or the episode's is made one for this
        call, so that asking the same thing twice gives two samples. Log-probs and supports come whenever the run wants
        them.
        """
        prompt_ids, placed = await self._prompt(prompt_token_ids, multi_modal_data, images)
        params = self._params(prompt_ids, sampling_params)
        with self._noting_failure():
            generation = await self._on_behalf(self._engine.generate(prompt_ids, params, placed))
        self.record(EngineCall(prompt_ids, generation, placed))
        return generation

    async def stream(
        self,
        prompt_token_ids: Any,
        sampling_params: Any,
        multi_modal_data: Any = None,
        *,
        images: Sequence[PlacedImage] = (),
    ) -> AsyncGenerator[Generation]:
        """`generate` in parts. An answer that is given up before its end is no part of the episode."""
        prompt_ids, placed = await self._prompt(prompt_token_ids, multi_modal_data, images)
        params = self._params(prompt_ids, sampling_params)
        parts: list[Generation] = []
        asked = self._engine.stream(prompt_ids, params, placed)
        try:
            while True:
                with self._noting_failure():
                    part = await self._on_behalf(_next(asked))
                if part is None:
                    break
                parts.append(part)
                if part.finish_reason is not None:  # before it is handed out: nobody need ask for more
                    self.record(EngineCall(prompt_ids, joined(parts), placed))
                yield part
        finally:
            await self._on_behalf(_close(asked))

    async def _prompt(
        self, prompt_token_ids: Any, multi_modal_data: Any, images: Sequence[PlacedImage]
    ) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """What the policy reads: token ids with all the tokens of their images. Raises BadValueError."""
        prompt_ids = as_token_ids(prompt_token_ids, what="prompt_token_ids")
        sources = _sources(multi_modal_data)
        if self._prepares is None:
            if sources:
                raise ValueError(f"multi_modal_data has {len(sources)} images, but {NO_IMAGES}")
        elif not images:
            found = self._prepares.place(prompt_ids, await self._prepares.prepare(sources))
            return found.token_ids, found.images
        return prompt_ids, tuple(images)

    def _params(self, prompt_ids: list[int], sampling_params: Any) -> SamplingParams:
        params = as_sampling_params(sampling_params, what="sampling_params")
        if not prompt_ids:
            raise ValueError("prompt_token_ids is empty")
        room = self._max_length - len(prompt_ids)
        if room < 1:
            raise ValueError(
                f"{len(prompt_ids)} prompt tokens leave no room for an answer in {self._max_length} tokens"
            )
        if self._episode.seed is not None and params.seed in (None, self._episode.seed):
            params.seed = derive_seed(self._episode.seed, "turn", self._asked)
        self._asked += 1
        params.max_tokens = min(params.max_tokens or room, room)
        params.logprobs = params.logprobs or self._episode.logprobs
        params.supports = self._episode.supports
        return params

    async def _on_behalf(self, asking: Coroutine[Any, Any, T]) -> T:
        """Its result, run in the episode's context."""
        return await asyncio.get_running_loop().create_task(asking, context=self._context.copy())

    @contextlib.contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except AskError as error:
            if error.failure.kind in ("ValueError", "TypeError"):  # what was asked is at fault, not the engine
                raise ValueError(error.failure.text) from None
            self.failure = error
            raise
        except Exception as error:
            self.failure = error
            raise

    def record(self, call: EngineCall) -> None:
        """Remember a call as it is now: users' code may go on writing to the lists it was given."""
        call = call.copy()
        self.calls.append(call)
        self._by_length[len(call.prompt_ids)].append(call)

    def match_to_calls(
        self, token_ids: list[int], start: int, end: int, images: Sequence[PlacedImage] = ()
    ) -> Generation | None:
        """The generation of `token_ids[start:end]`, put together from recorded calls; None if some token is of none.

        A token was sampled by a call if the call's prompt, its `images` included, and its answer up to the token are
        equal to what `token_ids` has there. Where an answer ends, the answer of another call may go on.
        """
        logprobs: list[float] | None = []
        versions: list[int] = []
        reason: FinishReason | None = FinishReason.STOP
        routes = None
        supports: list[tuple[Supports | None, int]] = []
        at = start
        while at < end:
            here = token_ids[at:end]
            # Calls are looked up by the length of their prompts, because an answer begins where its prompt ends. The
            # tokens before are compared as well: a log-prob is right only for the very tokens that the engine has read.
            matches = [
                answer
                for prompt_ids, answer, seen in self._by_length.get(at, ())
                if answer.token_ids
                and prompt_ids == token_ids[:at]
                and _places(seen) == _places(images, before=at)
                and answer.token_ids[: len(here)] == here[: len(answer.token_ids)]
            ]
            if not matches:
                return None
            # Several calls may have sampled the same beginning. The best match covers the most tokens; among those, the
            # shortest answer, because the user's code has more likely used a whole answer than cut a longer one.
            best = max(matches, key=lambda answer: (min(len(answer.token_ids), len(here)), -len(answer.token_ids)))
            n = min(len(best.token_ids), len(here))
            logprobs = None if logprobs is None or best.logprobs is None else logprobs + best.logprobs[:n]
            versions += best.versions[:n]
            supports.append((None if best.supports is None else best.supports[:n], n))
            # If the user's code has cut the answer, the engine's finish reason (its length limit) does not apply.
            reason = best.finish_reason if n == len(best.token_ids) else FinishReason.STOP
            at += n
            routes = None if best.routes is None else best.routes[: at - 1]  # of all before its last token
        return Generation(
            token_ids=token_ids[start:end],
            logprobs=logprobs,
            versions=versions,
            finish_reason=reason,
            routes=routes,
            supports=Supports.joined(supports),
        )


def joined(parts: Sequence[Generation]) -> Generation:
    """The generation that was streamed in these parts."""
    logprobs: list[float] | None = []
    for part in parts:
        if part.token_ids:
            logprobs = None if logprobs is None or part.logprobs is None else logprobs + part.logprobs
    return Generation(
        token_ids=[token for part in parts for token in part.token_ids],
        logprobs=logprobs,
        versions=[version for part in parts for version in part.versions],
        finish_reason=parts[-1].finish_reason,
        stop_reason=parts[-1].stop_reason,
        text="".join(part.text for part in parts),
        routes=parts[-1].routes,
        supports=Supports.joined([(part.supports, len(part.token_ids)) for part in parts]),
    )


def segments_from_calls(calls: Sequence[EngineCall], *, reward: float | None = None) -> tuple[Segment, ...]:
    """The token histories behind an episode's calls, each where its last call was; the reward stands once, on the very
    last action token.

    A call whose prompt begins with all that a segment has so far goes on with it (the longest such): what is new in the
    prompt is an observation. Any other call begins a segment: the client has rewritten its history, or keeps several.

        a b → C,  a b C d → E,  a d → F    gives    a b C d E    and    a d F    (sampled tokens in capitals)
        a → B,    x → Y,    a B c → D      gives    x Y          and    a B c D
    """
    recorders: list[TokenRecorder] = []
    for call in calls:
        if not call.generation.token_ids:
            continue
        open_ = [
            r
            for r in recorders
            if call.prompt_ids[: len(r)] == r.token_ids and _places(call.images, before=len(r)) == _places(r.images)
        ]
        recorder = max(open_, key=len, default=None)
        if recorder is None:
            recorder = TokenRecorder(call.prompt_ids, call.images)
        else:
            recorders.remove(recorder)
            had = len(recorder)
            new = [PlacedImage(start - had, image) for start, image in call.images if start >= had]
            recorder.append_observation(call.prompt_ids[had:], new)
        recorder.append_action(call.generation)
        recorders.append(recorder)
    if recorders and reward is not None:
        recorders[-1].reward_turn(reward)
    return tuple(recorder.segment() for recorder in recorders)


def _places(images: Sequence[PlacedImage], *, before: int | None = None) -> list[tuple[int, str]]:
    """Which image is where: those of the same size have the same tokens."""
    return [(start, image.digest) for start, image in images if before is None or start < before]


def _sources(multi_modal_data: Any) -> list[Any]:
    """From vLLM's {"image": one or a list}. Raises BadValueError."""
    if multi_modal_data is None:
        return []
    if not isinstance(multi_modal_data, Mapping) or multi_modal_data.keys() - {"image"}:
        raise BadValueError(f'multi_modal_data must be {{"image": images}}, got {shown(multi_modal_data)}')
    images = multi_modal_data.get("image")
    if images is None:
        return []
    return list(images) if isinstance(images, (list, tuple)) else [images]


async def _next(parts: AsyncGenerator[T]) -> T | None:
    return await anext(parts, None)


async def _close(parts: AsyncGenerator[Any]) -> None:
    await parts.aclose()

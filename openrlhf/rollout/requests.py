"""Requests to engines on their way between processes: packed once where they are made, read once by the engine."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import AsyncGenerator, Sequence
from typing import NamedTuple, Protocol

from openrlhf.rollout.base import Engine
from openrlhf.rollout.router import beginning_of
from openrlhf.types import Generation, PlacedImage, SamplingParams


class PackedRequest(NamedTuple):
    """A request that processes can pass on without reading it."""

    beginning: int
    """What the router is told of it (`router.beginning_of`)."""
    payload: bytes
    """A pickle of the token ids, the sampling parameters and the images."""

    @staticmethod
    def of(
        token_ids: Sequence[int], sampling_params: SamplingParams, images: Sequence[PlacedImage] = ()
    ) -> PackedRequest:
        payload = pickle.dumps((token_ids, sampling_params, images), protocol=pickle.HIGHEST_PROTOCOL)
        return PackedRequest(beginning_of(token_ids), payload)

    def read(self) -> tuple[Sequence[int], SamplingParams, Sequence[PlacedImage]]:
        token_ids, sampling_params, images = pickle.loads(self.payload)
        return token_ids, sampling_params, images


def read_generation(answer: bytes) -> Generation:
    """A whole answer, or one part of it, as the engine made it."""
    generation: Generation = pickle.loads(answer)
    return generation


class RequestHandler(Protocol):
    """Answers packed requests. The answer is a packed `Generation`. Raises what `Engine.generate` raises."""

    async def answer(self, request: PackedRequest) -> bytes: ...

    def answer_parts(self, request: PackedRequest) -> AsyncGenerator[bytes]: ...


class EngineRequests:
    """The handler of an engine that is in this process: here requests are read, and answers are packed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def answer(self, request: PackedRequest) -> bytes:
        return _packed(await self._engine.generate(*request.read()))

    async def answer_parts(self, request: PackedRequest) -> AsyncGenerator[bytes]:
        async with contextlib.aclosing(self._engine.stream(*request.read())) as parts:
            async for part in parts:
                yield _packed(part)


def _packed(generation: Generation) -> bytes:
    return pickle.dumps(generation, protocol=pickle.HIGHEST_PROTOCOL)

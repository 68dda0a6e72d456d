"""Requests to engines on their way between processes: packed once where they are made, read once by the engine.

A request names its images by their digests. The tensors travel by themselves, once to each process that needs them: a
process keeps the images it has got (`ImageStore`), and asks for those that it does not have, or has forgotten. So a
later turn of an episode, and a prompt's other samples, send no pixels again.
"""

from __future__ import annotations

import contextlib
import io
import pickle
from collections import OrderedDict
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from threading import Lock
from typing import NamedTuple, Protocol

from openrlhf.rollout.base import Engine
from openrlhf.rollout.router import beginning_of
from openrlhf.types import Generation, ImageInput, PlacedImage, SamplingParams

KEPT_BYTES = 1 << 30
"""The most bytes of images that a process keeps for requests to come. A 448² image of Qwen2.5-VL has 5 MB."""


class PackedRequest(NamedTuple):
    """A request that processes can pass on without reading it."""

    beginning: int
    """What the router is told of it (`router.beginning_of`)."""
    payload: bytes
    """Two pickles: the digests of the images; the token ids, the sampling parameters and where each image begins."""

    @staticmethod
    def of(
        token_ids: Sequence[int], sampling_params: SamplingParams, images: Sequence[PlacedImage] = ()
    ) -> PackedRequest:
        digests = tuple(placed.image.digest for placed in images)
        question = token_ids, sampling_params, tuple(placed.start for placed in images)
        payload = b"".join(pickle.dumps(part, protocol=pickle.HIGHEST_PROTOCOL) for part in (digests, question))
        return PackedRequest(beginning_of(token_ids, images), payload)

    @property
    def digests(self) -> tuple[str, ...]:
        """Those of its images, in order."""
        found: tuple[str, ...] = pickle.loads(self.payload)  # what stands behind the first pickle is not read
        return found

    def read(
        self, images: Mapping[str, ImageInput] | None = None
    ) -> tuple[Sequence[int], SamplingParams, tuple[PlacedImage, ...]]:
        """`images` has all of `digests`."""
        stream = io.BytesIO(self.payload)
        digests = pickle.load(stream)
        token_ids, sampling_params, starts = pickle.load(stream)
        placed = (PlacedImage(start, (images or {})[digest]) for start, digest in zip(starts, digests, strict=True))
        return token_ids, sampling_params, tuple(placed)


def by_digest(images: Iterable[PlacedImage]) -> dict[str, ImageInput]:
    return {placed.image.digest: placed.image for placed in images}


class ImageStore:
    """The images that this process has got from others, the latest used, within `most_bytes`. From any thread.

    A user of an image holds it himself: what is forgotten here is only sent again to who comes later.
    """

    def __init__(self, most_bytes: int = KEPT_BYTES) -> None:
        self._most_bytes = most_bytes
        self._images: OrderedDict[str, ImageInput] = OrderedDict()
        self._bytes = 0
        self._lock = Lock()

    def find(self, digests: Iterable[str]) -> dict[str, ImageInput]:
        """Those of the images that are here."""
        found = {}
        with self._lock:
            for digest in digests:
                if digest in self._images:
                    self._images.move_to_end(digest)
                    found[digest] = self._images[digest]
        return found

    def keep(self, image: ImageInput) -> None:
        """An image that is larger than all that may be kept is not kept."""
        with self._lock:
            if image.digest not in self._images:
                self._images[image.digest] = image
                self._bytes += num_bytes(image)
            self._images.move_to_end(image.digest)
            while self._bytes > self._most_bytes:
                _, forgotten = self._images.popitem(last=False)
                self._bytes -= num_bytes(forgotten)


def num_bytes(image: ImageInput) -> int:
    """What the image takes in memory, about."""
    return sum(tensor.nbytes for tensor in image.tensors.values()) + len(image.thumbnail) + 8 * len(image.token_ids)


def read_generation(answer: bytes) -> Generation:
    """A whole answer, or one part of it, as the engine made it."""
    generation: Generation = pickle.loads(answer)
    return generation


class RequestHandler(Protocol):
    """Answers packed requests. The answer is a packed `Generation`. Raises what `Engine.generate` raises.

    `images` has those of the request's digests; None: it has no images.
    """

    async def answer(self, request: PackedRequest, images: Mapping[str, ImageInput] | None = None) -> bytes: ...

    def answer_parts(
        self, request: PackedRequest, images: Mapping[str, ImageInput] | None = None
    ) -> AsyncGenerator[bytes]: ...


class EngineRequests:
    """The handler of an engine that is in this process: here requests are read, and answers are packed."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def answer(self, request: PackedRequest, images: Mapping[str, ImageInput] | None = None) -> bytes:
        return _packed(await self._engine.generate(*request.read(images)))

    async def answer_parts(
        self, request: PackedRequest, images: Mapping[str, ImageInput] | None = None
    ) -> AsyncGenerator[bytes]:
        async with contextlib.aclosing(self._engine.stream(*request.read(images))) as parts:
            async for part in parts:
                yield _packed(part)


def _packed(generation: Generation) -> bytes:
    return pickle.dumps(generation, protocol=pickle.HIGHEST_PROTOCOL)

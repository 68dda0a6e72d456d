"""`VllmProcesses`: several vLLM processes on the same device, as one engine.

A step of vLLM is planned and read by Python in one process, for each sequence. With hundreds of sequences of a small
model that takes longer than the GPU computes, which then waits (bench/RESULTS.md, "The scheduler of vLLM"). Processes
that share the requests out do it at the same time. Each has weights, keys and values of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from openrlhf.rollout.base import ControlledEngine, DraftCounts
from openrlhf.rollout.router import Router, beginning_of
from openrlhf.rollout.vllm.engine import VllmEngine
from openrlhf.types import Generation, PlacedImage, SamplingParams
from openrlhf.weight_sync.blocks import AdapterSpec, WeightBlock, WeightSyncError
from openrlhf.weight_sync.probe import max_gap, mean_gap, tolerance
from openrlhf.weight_sync.transports import HandlesOfReaders

_T = TypeVar("_T")


class VllmProcesses:
    """Requests with the same beginning go to the same process, unless it has many more than the others (`Router`).

    What changes the engine is done by all of them, and fails where one fails.
    """

    def __init__(self, engines: Sequence[VllmEngine]) -> None:
        self.engines = tuple(engines)
        self._router = Router(len(self.engines))
        self._lock = threading.Lock()
        """Of the router: calls come from several event loops."""

    @classmethod
    def started(cls, start: Callable[[], VllmEngine], *, count: int) -> VllmProcesses:
        """One after the other: vLLM measures what is free on a device while it starts, and sets the environment of its
        processes in this one."""
        with contextlib.ExitStack() as begun:
            engines = [begun.enter_context(contextlib.closing(start())) for _ in range(count)]
            begun.pop_all()
            return cls(engines)

    @property
    def start_seconds(self) -> dict[str, float]:
        """By part, of all together."""
        parts: dict[str, float] = {}
        for engine in self.engines:
            for part, seconds in engine.start_seconds.items():
                parts[part] = parts.get(part, 0.0) + seconds
        return parts

    # --------------------------------------------------------------------------------------------- requests

    @property
    def version(self) -> int:
        return self.engines[0].version

    @property
    def max_model_len(self) -> int:
        return self.engines[0].max_model_len

    @property
    def num_running(self) -> int:
        return sum(engine.num_running for engine in self.engines)

    async def generate(
        self, token_ids: Sequence[int], sampling_params: SamplingParams, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        with self._chosen(token_ids, images) as engine:
            return await engine.generate(token_ids, sampling_params, images)

    async def stream(
        self, token_ids: Sequence[int], sampling_params: SamplingParams, images: Sequence[PlacedImage] = ()
    ) -> AsyncGenerator[Generation]:
        with self._chosen(token_ids, images) as engine:
            async with contextlib.aclosing(engine.stream(token_ids, sampling_params, images)) as parts:
                async for part in parts:
                    yield part

    @contextlib.contextmanager
    def _chosen(self, token_ids: Sequence[int], images: Sequence[PlacedImage]) -> Iterator[VllmEngine]:
        choice = self._router.chosen(beginning_of(token_ids, images))
        with self._lock:
            number = choice.__enter__()
        try:
            yield self.engines[number]
        finally:
            with self._lock:
                choice.__exit__(None, None, None)

    def abort(self) -> None:
        for engine in self.engines:
            engine.abort()

    # ------------------------------------------------------------------------------------------ control of all

    @property
    def shares_weights(self) -> bool:
        return False

    @property
    def needs_base(self) -> bool:
        return any(engine.needs_base for engine in self.engines)

    async def pause(self) -> None:
        await self._all(lambda engine: engine.pause())

    async def resume(self, version: int) -> None:
        await self._all(lambda engine: engine.resume(version))

    async def sleep(self) -> None:
        """One after the other: vLLM compares what is free on the device before and after."""
        await self._all(lambda engine: engine.pause())
        for engine in self.engines:
            await engine.sleep()

    async def wake(self) -> None:
        for engine in self.engines:
            await engine.wake()

    async def load_weights(self, blocks: Sequence[WeightBlock], *, adapter: AdapterSpec | None = None) -> None:
        await self._all(lambda engine: engine.load_weights(self._own(blocks, engine), adapter=adapter))

    def _own(self, blocks: Sequence[WeightBlock], engine: VllmEngine) -> list[WeightBlock]:
        """Memory of a device is read with a handle of one's own."""
        number = self.engines.index(engine)
        return [
            replace(block, payload=block.payload.readers[number])
            if isinstance(block.payload, HandlesOfReaders)
            else block
            for block in blocks
        ]

    async def logprobs(self, token_ids: Sequence[int], images: Sequence[PlacedImage] = ()) -> list[float]:
        """Those of the first. Raises WeightSyncError where another process's are further away than rounding explains,
        because it has other weights."""
        first, *others = await self._all(lambda engine: engine.logprobs(token_ids, images))
        settings = self.engines[0].settings
        # Rounding may send a token to other experts.
        gap_of = mean_gap if settings.has_experts else max_gap
        limit = tolerance(getattr(torch, settings.dtype))
        for number, found in enumerate(others, start=2):
            if not (gap := gap_of(first, found)) <= limit:
                raise WeightSyncError(
                    f"process {number} of an engine gives other log-probs than its first: {gap:.2g} apart, {limit:.2g} "
                    "is allowed"
                )
        return first

    async def take_draft_counts(self) -> DraftCounts | None:
        return DraftCounts.of_all(await self._all(lambda engine: engine.take_draft_counts()))

    async def check_health(self) -> None:
        await self._all(lambda engine: engine.check_health())

    async def _all(self, work: Callable[[VllmEngine], Coroutine[Any, Any, _T]]) -> list[_T]:
        """The answers, once all are done with it. Raises what the first one that failed has raised."""
        answers = await asyncio.gather(*map(work, self.engines), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    def close(self) -> None:
        with contextlib.ExitStack() as closing:
            for engine in self.engines:
                closing.callback(engine.close)


if TYPE_CHECKING:
    _: type[ControlledEngine] = VllmProcesses

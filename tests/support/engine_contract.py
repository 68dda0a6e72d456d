"""Every promise of `openrlhf.rollout.base`, as tests that run against any engine.

class TestMyEngine(EngineContract):
    @pytest.fixture
    def subject(self): return Subject(engine, weights, prompt)
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from patience import patience

from openrlhf.rollout.base import ControlledEngine, NoWeightsError
from openrlhf.types import Generation, SamplingParams
from openrlhf.weight_sync.blocks import WeightBlock, checksum_of, pack
from openrlhf.weight_sync.probe import max_gap

SAME, OTHER = 1e-4, 1e-2
"""The log-probs of equal weights are at most so far apart, and those of different ones at least so far."""
ATTEMPTS = 50
"""To stop an engine while it answers. A stop that has no effect fails all of them."""


@dataclass
class Subject:
    """An engine that samples, and what is needed to try it. A test leaves it sampling, with the weights it had."""

    engine: ControlledEngine
    weights: Sequence[tuple[str, torch.Tensor]]
    """The weights that it has, by the names that a push uses, in memory that the engine does not write to."""
    prompt: Sequence[int]
    max_tokens: int = 40
    """Of an answer. It has to take longer than a pause."""
    quiet: float = 0.01
    """Seconds in which an engine that samples gives a token."""

    @property
    def params(self) -> SamplingParams:
        """The answer is the same every time. An engine need not follow seeds, and the fake one is never greedy."""
        return SamplingParams(temperature=0.0, seed=5, max_tokens=self.max_tokens, ignore_eos=True)

    @property
    def other_weights(self) -> list[tuple[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(1)
        return [(name, w + 0.1 * torch.randn(w.shape, generator=generator).to(w)) for name, w in self.weights]

    def blocks(self, weights: Sequence[tuple[str, torch.Tensor]]) -> list[WeightBlock]:
        """Several of them, where the weights are several."""
        size = sum(w.numel() * w.element_size() for _, w in weights) // 4
        packed = pack(weights, max_bytes=size)
        return [dataclasses.replace(block, checksum=checksum_of(block.payload)) for block in packed]

    async def push(self, weights: Sequence[tuple[str, torch.Tensor]]) -> int:
        """In the order that the contract gives. Returns the new version."""
        version = self.engine.version + 1
        await self.engine.pause()
        await self.engine.wake()
        for block in self.blocks(weights):
            await self.engine.load_weights([block])
        await self.engine.resume(version)
        return version

    async def generate(self, *, temperature: float = 0.0) -> Generation:
        async with asyncio.timeout(patience(60)):
            return await self.engine.generate(self.prompt, self.params.copy(temperature=temperature))

    async def logprobs(self, answer: Generation) -> list[float]:
        """Of an answer's tokens."""
        found = await self.engine.logprobs([*self.prompt, *answer.token_ids])
        assert len(found) == len(self.prompt) + len(answer.token_ids) - 1
        return found[len(self.prompt) - 1 :]

    @contextlib.asynccontextmanager
    async def under_way(self) -> AsyncGenerator[tuple[list[Generation], AsyncGenerator[Generation]]]:
        """A request that has given its first part, and will give more."""
        async with contextlib.aclosing(self.engine.stream(self.prompt, self.params)) as parts:
            yield [await anext(parts)], parts

    @contextlib.asynccontextmanager
    async def stopped_in_the_middle(self, stop: str) -> AsyncGenerator[tuple[list[Generation], asyncio.Task[None]]]:
        """The parts so far of a request that waits for `resume`, and the task that adds the others to them.

        On a busy machine the answer may be over before the engine has heard of it; then another request is made.
        """

        async def collect() -> None:
            async for part in parts:
                seen.append(part)

        for _ in range(ATTEMPTS):
            async with self.under_way() as (seen, parts):
                await getattr(self.engine, stop)()
                rest = asyncio.create_task(collect())
                await asyncio.sleep(self.quiet)  # for what was sampled before
                if not rest.done():
                    yield seen, rest
                    return
                await rest
                await self.push(self.weights)
        pytest.fail(f"{ATTEMPTS} requests in a row were answered to their end in spite of `{stop}`")


def on_a_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Each test has an event loop of its own."""

    @functools.wraps(test)
    def run(*arguments: Any, **options: Any) -> None:
        asyncio.run(test(*arguments, **options))

    return run


class EngineContract:
    """The tests. `subject` is a fixture of the class that inherits them."""

    @on_a_loop
    async def test_contract_parts_of_a_stream_are_the_answer(self, subject: Subject):
        whole = await subject.generate()
        parts = [part async for part in subject.engine.stream(subject.prompt, subject.params)]
        assert len(parts) > 1
        assert [token for part in parts for token in part.token_ids] == whole.token_ids
        assert [version for part in parts for version in part.versions] == whole.versions
        assert max_gap([x for part in parts for x in part.logprobs or ()], whole.logprobs or ()) < SAME
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [whole.finish_reason]
        assert whole.finish_reason is not None
        assert set(whole.versions) == {subject.engine.version}
        sampled = await subject.generate(temperature=1.0)
        assert max_gap(await subject.logprobs(sampled), sampled.logprobs or ()) < SAME

    @pytest.mark.parametrize("stop", ["pause", "sleep"])
    @on_a_loop
    async def test_contract_requests_wait_for_resume_and_go_on_with_its_version(self, subject: Subject, stop: str):
        """So does a request that has begun, and one that comes later."""
        engine = subject.engine
        async with subject.stopped_in_the_middle(stop) as (seen, rest):
            old, count = engine.version, len(seen)
            late = asyncio.create_task(subject.generate())
            await asyncio.sleep(subject.quiet)
            assert len(seen) == count
            assert not rest.done()
            assert not late.done()
            assert engine.version == old
            new = await subject.push(subject.weights)
            async with asyncio.timeout(patience(60)):
                await rest
            versions = [version for part in seen for version in part.versions]
            assert versions == sorted(versions)
            assert set(versions) == {old, new}
            assert set((await late).versions) == {new} == {engine.version}

    @on_a_loop
    async def test_contract_every_control_method_may_be_called_again(self, subject: Subject):
        engine, version = subject.engine, subject.engine.version + 1
        before = await subject.generate()
        for stop in (
            engine.pause,
            engine.pause,
            engine.sleep,
            engine.sleep,
            engine.pause,
            engine.wake,
            engine.wake,
        ):
            await stop()
        await engine.load_weights(subject.blocks(subject.weights))
        for _ in range(2):
            await engine.resume(version)
            await engine.wake()
            await engine.check_health()
        after = await subject.generate()
        assert after.token_ids == before.token_ids
        assert set(after.versions) == {version}

    @on_a_loop
    async def test_contract_loaded_weights_are_those_it_computes_with(self, subject: Subject):
        answer = await subject.generate()
        before = await subject.logprobs(answer)
        await subject.push(subject.other_weights)
        other = await subject.logprobs(answer)
        assert max_gap(before, other) > OTHER
        sampled = await subject.generate(temperature=1.0)
        assert max_gap(await subject.logprobs(sampled), sampled.logprobs or ()) < SAME
        await subject.push(subject.weights)
        assert max_gap(before, await subject.logprobs(answer)) < SAME
        assert (await subject.generate()).token_ids == answer.token_ids

    @on_a_loop
    async def test_contract_a_load_that_breaks_off_is_forgotten_at_the_next_pause(self, subject: Subject):
        """One push ends in the middle, and another with a damaged block."""
        engine, old = subject.engine, subject.engine.version
        answer = await subject.generate()
        before = await subject.logprobs(answer)
        blocks = subject.blocks(subject.other_weights)
        damaged = dataclasses.replace(blocks[-1], checksum=(blocks[-1].checksum or 0) ^ 1)
        await engine.pause()
        await engine.load_weights(blocks[: (len(blocks) + 1) // 2])
        await engine.pause()
        with pytest.raises(Exception, match="arrived damaged"):
            await engine.load_weights([*blocks[:-1], damaged])
        assert engine.version == old
        await subject.push(subject.weights)
        assert max_gap(before, await subject.logprobs(answer)) < SAME

    @on_a_loop
    async def test_contract_an_engine_that_slept_needs_weights_to_resume(self, subject: Subject):
        """One that shares the trained weights has them all the time."""
        engine, version = subject.engine, subject.engine.version + 1
        before = await subject.generate()
        await engine.sleep()
        if not engine.shares_weights:
            with pytest.raises(NoWeightsError):
                await engine.resume(version)
        await engine.wake()
        if engine.shares_weights:
            await engine.resume(version)
        else:
            with pytest.raises(NoWeightsError):
                await engine.resume(version)
            version = await subject.push(subject.weights)
        after = await subject.generate()
        assert after.token_ids == before.token_ids
        assert set(after.versions) == {version}

    @on_a_loop
    async def test_contract_weights_without_an_adapter_are_no_base_of_one(self, subject: Subject):
        """An adapter may be merged into them. An engine that shares the trained weights never needs a base."""
        own = not subject.engine.shares_weights
        await subject.push(subject.weights)
        assert subject.engine.needs_base == own
        await subject.engine.sleep()
        assert subject.engine.needs_base == own
        await subject.push(subject.weights)
        assert subject.engine.needs_base == own

    @on_a_loop
    async def test_contract_a_request_that_is_given_up_leaves_the_others_alone(self, subject: Subject):
        """Be it a call that is cancelled, or a stream that is closed."""
        before = await subject.generate()
        async with subject.under_way():
            call = asyncio.create_task(subject.generate())
            await asyncio.sleep(0)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
        assert (await subject.generate()).token_ids == before.token_ids

    @on_a_loop
    async def test_contract_a_request_may_be_given_up_while_the_engine_is_paused(self, subject: Subject):
        before = await subject.generate()
        async with subject.stopped_in_the_middle("pause") as (_, rest):
            call = asyncio.create_task(subject.generate())
            await asyncio.sleep(subject.quiet)
            for given_up in (call, rest):
                given_up.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await given_up
        await subject.engine.resume(subject.engine.version + 1)
        await asyncio.sleep(subject.quiet)
        assert (await subject.generate()).token_ids == before.token_ids

    @on_a_loop
    async def test_contract_a_prompt_without_room_is_refused(self, subject: Subject):
        too_long = list(subject.prompt[:1]) * subject.engine.max_model_len
        with pytest.raises(ValueError, match="leaves no room"):
            await subject.engine.generate(too_long, subject.params)
        with pytest.raises(ValueError, match="leaves no room"):
            await anext(subject.engine.stream(too_long, subject.params))
        with pytest.raises(ValueError, match="at least one token"):
            await subject.engine.generate([], subject.params)
        assert (await subject.generate()).token_ids

"""Requests on a connection to an engine's process: both ends in this process, on loopback."""

import asyncio
import contextlib

import pytest

from openrlhf.cluster.connections import Address, ConnectionLostError, EngineConnections, serve_requests
from openrlhf.rollout.base import EngineError
from openrlhf.rollout.requests import EngineRequests, PackedRequest, read_generation
from openrlhf.types import FinishReason, Generation, SamplingParams


class Engine:
    """Samples the prompt backwards, a token for each event that it is given; `events` says what it was told."""

    version, max_model_len = 3, 10**9

    def __init__(self):
        self.events = []
        self.go_on = asyncio.Event()
        self.go_on.set()

    async def generate(self, token_ids, sampling_params, images=()):
        self.events.append(f"begins {len(token_ids)}")
        if sampling_params.temperature == 0.25:
            raise ValueError("not at this temperature")
        if sampling_params.temperature == 0.5:
            raise EngineError("the engine has died")
        if sampling_params.temperature == 0.75:
            raise asyncio.CancelledError
        try:
            if sampling_params.max_tokens == 1:
                await self.go_on.wait()
        except asyncio.CancelledError:
            self.events.append(f"given up {len(token_ids)}")
            raise
        return generation(list(reversed(token_ids)), FinishReason.STOP)

    async def stream(self, token_ids, sampling_params, images=()):
        try:
            for token in token_ids:
                yield generation([token], None)
                await self.go_on.wait()
            yield generation([], FinishReason.STOP)
        finally:
            self.events.append("stream closed")


def generation(token_ids, reason) -> Generation:
    return Generation(
        token_ids=token_ids, logprobs=None, versions=[3] * len(token_ids), finish_reason=reason, text="text"
    )


class Remote:
    """A method of an actor, as Ray gives it."""

    def __init__(self, method):
        self.remote = method


class Actor:
    """Where an engine lives: all that the driver asks of Ray is the address."""

    def __init__(self, address: Address):
        self.serve_requests = Remote(self._address)
        self.address = address

    async def _address(self) -> Address:
        return self.address


@contextlib.asynccontextmanager
async def connected(engine: Engine):
    connections = EngineConnections()
    actor = Actor(await serve_requests(EngineRequests(engine), host="127.0.0.1"))
    try:
        yield await connections.to(0, actor)
    finally:
        connections.close()
        await asyncio.sleep(0)


def packed(token_ids, **params) -> bytes:
    return PackedRequest.of(token_ids, SamplingParams(**params)).payload


async def eventually(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


def test_each_request_gets_its_own_answer_in_whatever_order_they_come():
    async def main():
        engine = Engine()
        async with connected(engine) as connection:
            engine.go_on.clear()
            slow = asyncio.create_task(connection.answer(packed([1, 2, 3], max_tokens=1)))
            quick = await asyncio.gather(*(connection.answer(packed(list(range(n)))) for n in range(1, 20)))
            assert not slow.done()
            engine.go_on.set()
            return await slow, quick

    slow, quick = asyncio.run(main())
    assert read_generation(slow) == generation([3, 2, 1], FinishReason.STOP)
    assert [read_generation(answer).token_ids for answer in quick] == [list(range(n))[::-1] for n in range(1, 20)]


def test_requests_longer_than_any_read_of_a_socket_arrive_whole():
    async def main():
        async with connected(Engine()) as connection:
            prompts = [list(range(start, start + 500_000)) for start in (0, 7)]
            return await asyncio.gather(*(connection.answer(packed(prompt)) for prompt in prompts))

    for start, answer in zip((0, 7), asyncio.run(main()), strict=True):
        assert read_generation(answer).token_ids == list(range(start, start + 500_000))[::-1]


def test_a_cancelled_request_is_given_up_in_the_engine():
    async def main():
        engine = Engine()
        engine.go_on.clear()
        async with connected(engine) as connection:
            asked = asyncio.create_task(connection.answer(packed([1, 2], max_tokens=1)))
            await eventually(lambda: engine.events == ["begins 2"])
            asked.cancel()
            await eventually(lambda: engine.events == ["begins 2", "given up 2"])
            return read_generation(await connection.answer(packed([5, 6]))).token_ids

    assert asyncio.run(main()) == [6, 5]


def test_a_stream_comes_in_parts_and_is_given_up_when_it_is_closed():
    async def main():
        engine = Engine()
        async with connected(engine) as connection:
            whole = [read_generation(part).token_ids async for part in connection.parts(packed([4, 5]))]
            assert whole == [[4], [5], []]
            assert engine.events == ["stream closed"]
            engine.go_on.clear()
            async with contextlib.aclosing(connection.parts(packed([8, 9]))) as parts:
                async for part in parts:
                    assert read_generation(part).token_ids == [8]
                    break
            await eventually(lambda: engine.events == ["stream closed"] * 2)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("temperature", "kind", "text"),
    [
        (0.25, ValueError, "not at this temperature"),
        (0.5, EngineError, "the engine has died"),
        (0.75, EngineError, "the engine gave a request up"),
    ],
)
def test_what_the_engine_raises_is_raised_by_the_request(temperature, kind, text):
    async def main():
        async with connected(Engine()) as connection:
            with pytest.raises(kind, match=text):
                await connection.answer(packed([1], temperature=temperature))
            return await connection.answer(packed([1, 2]))

    assert read_generation(asyncio.run(main())).token_ids == [2, 1]


def test_requests_under_way_hear_that_their_connection_has_ended():
    async def main():
        engine = Engine()
        engine.go_on.clear()
        async with connected(engine) as connection:
            asked = [asyncio.create_task(connection.answer(packed([1] * n, max_tokens=1))) for n in (1, 2)]
            parts = connection.parts(packed([8, 9]))
            await anext(parts)
            await eventually(lambda: engine.events == ["begins 1", "begins 2"])
            connection.close()
            for request in (*asked, anext(parts), connection.answer(packed([1]))):
                with pytest.raises(ConnectionLostError, match="its connection has ended"):
                    await request
            await eventually(lambda: sorted(engine.events[2:]) == ["given up 1", "given up 2", "stream closed"])

    asyncio.run(main())


def test_a_lost_connection_is_made_anew_and_one_that_is_there_is_shared():
    async def main():
        connections = EngineConnections()
        actor = Actor(await serve_requests(EngineRequests(Engine()), host="127.0.0.1"))
        first, second = await asyncio.gather(connections.to(0, actor), connections.to(0, actor))
        assert first is second
        first.close()
        await eventually(lambda: first.lost)
        third = await connections.to(0, actor)
        assert third is not first
        answer = read_generation(await third.answer(packed([1, 2])))
        connections.close()
        await eventually(lambda: third.lost)
        return answer.token_ids

    assert asyncio.run(main()) == [2, 1]


def test_a_process_that_does_not_know_the_key_is_not_read():
    """A payload is a pickle: whoever may send one may run anything here."""

    async def main():
        engine = Engine()
        actor = Actor(await serve_requests(EngineRequests(engine), host="127.0.0.1"))
        actor.address = actor.address._replace(key=b"another")
        with pytest.raises(ConnectionLostError):
            await EngineConnections().to(0, actor)
        reader, writer = await asyncio.open_connection(actor.address.host, actor.address.port)
        challenge = await reader.readexactly(32)
        payload = packed([1])
        frame = len(payload).to_bytes(4, "little") + bytes(8) + b"\0" + payload
        # Its own challenge answered with what the engine's process says to the same challenge.
        writer.write(challenge)
        writer.write(await reader.readexactly(32) + frame)
        assert await reader.read() == b""
        writer.close()
        return engine.events

    assert asyncio.run(main()) == []


def test_an_engine_that_cannot_be_reached_is_named_with_its_address():
    async def main():
        address = await serve_requests(EngineRequests(Engine()), host="127.0.0.1")
        with pytest.raises(ConnectionLostError, match=r"no connection to 127\.0\.0\.1:1: "):
            await EngineConnections().to(0, Actor(address._replace(port=1)))

    asyncio.run(main())

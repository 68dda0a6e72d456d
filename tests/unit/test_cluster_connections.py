"""Requests on a connection to an engine's process: both ends in this process, on loopback."""

import asyncio
import contextlib
import pickle

import pytest
import torch

from openrlhf.cluster.connections import IMAGE, Address, ConnectionLostError, EngineConnections, serve_requests
from openrlhf.rollout.base import EngineError
from openrlhf.rollout.requests import (
    EngineRequests,
    ImageStore,
    PackedRequest,
    by_digest,
    num_bytes,
    read_generation,
)
from openrlhf.types import FinishReason, Generation, ImageInput, PlacedImage, SamplingParams


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


# Images -------------------------------------------------------------------------------------------------------------


def picture(number: int, *, floats: int = 4) -> ImageInput:
    """An image of three tokens; no two numbers have the same."""
    tensors = {"pixel_values": torch.full((1, floats), float(number))}
    return ImageInput(tensors=tensors, token_ids=(7, 7, 7), placeholder=7, digest=f"{number:032x}")


class ReadingEngine(Engine):
    """Notes the pixels that it was asked with."""

    def __init__(self):
        super().__init__()
        self.pixels = []

    async def generate(self, token_ids, sampling_params, images=()):
        self.pixels.append([(start, image.tensors["pixel_values"][0, 0].item()) for start, image in images])
        return await super().generate(token_ids, sampling_params)

    async def stream(self, token_ids, sampling_params, images=()):
        self.pixels.append([(start, image.tensors["pixel_values"][0, 0].item()) for start, image in images])
        async for part in super().stream(token_ids, sampling_params):
            yield part


@contextlib.asynccontextmanager
async def counted(engine: Engine, *, most_bytes: int = 1 << 20):
    """A connection, and the images that were sent on it."""
    connections = EngineConnections()
    store = ImageStore(most_bytes)
    actor = Actor(await serve_requests(EngineRequests(engine), host="127.0.0.1", images=store))
    connection = await connections.to(0, actor)
    sent, send = [], connection.send

    def counting(number, kind, payload=b""):
        if kind == IMAGE:
            sent.append(int(pickle.loads(payload).digest, 16))
        send(number, kind, payload)

    connection.send = counting
    try:
        yield connection, sent
    finally:
        connections.close()
        await asyncio.sleep(0)


def asks_with(connection, *images: tuple[int, ImageInput], stream: bool = False, **params):
    """The answer of a request with images at these places."""
    placed = [PlacedImage(start, image) for start, image in images]
    payload = PackedRequest.of([7] * 40, SamplingParams(**params), placed).payload
    ask = connection.parts if stream else connection.answer
    return ask(payload, by_digest(placed))


def test_an_image_travels_once_and_later_turns_send_only_new_ones():
    async def main():
        engine = ReadingEngine()
        async with counted(engine) as (connection, sent):
            first, second, third = (picture(n) for n in (1, 2, 3))
            await asks_with(connection, (0, first))
            assert sent == [1]
            await asks_with(connection, (0, first), (9, second))
            assert sent == [1, 2]
            parts = asks_with(connection, (0, first), (9, second), (20, second), (30, third), stream=True)
            assert len([part async for part in parts]) == 41
            await asks_with(connection)
            assert sent == [1, 2, 3]
        return engine.pixels

    assert asyncio.run(main()) == [[(0, 1)], [(0, 1), (9, 2)], [(0, 1), (9, 2), (20, 2), (30, 3)], []]


def test_requests_that_lack_the_same_image_at_the_same_time_ask_for_it_once():
    async def main():
        engine = ReadingEngine()
        async with counted(engine) as (connection, sent):
            await asyncio.gather(*(asks_with(connection, (0, picture(1)), (4, picture(2))) for _ in range(8)))
            return engine.pixels, sorted(sent)

    assert asyncio.run(main()) == ([[(0, 1), (4, 2)]] * 8, [1, 2])


def test_an_image_whose_request_is_given_up_comes_with_another_request():
    """The driver forgets the images of a request that is given up, and does not answer for it any more."""

    async def main():
        engine = ReadingEngine()
        async with counted(engine) as (connection, sent):
            held, received = [], connection.received
            connection.received = lambda *frame: held.append(frame)
            given_up = asyncio.create_task(asks_with(connection, (0, picture(1))))
            other = asyncio.create_task(asks_with(connection, (0, picture(1))))
            await eventually(lambda: held)
            given_up.cancel()
            await asyncio.wait([given_up])
            connection.received = received
            for frame in held:
                received(*frame)
            async with asyncio.timeout(30):
                await other
            return engine.pixels, sent

    assert asyncio.run(main()) == ([[(0, 1)]], [1])


def test_what_the_engines_process_has_forgotten_is_sent_again():
    """It keeps two of these images; a request with three has them all while it needs them."""

    async def main():
        engine = ReadingEngine()
        images = [picture(n, floats=1000) for n in (1, 2, 3)]
        async with counted(engine, most_bytes=2 * num_bytes(images[0])) as (connection, sent):
            await asks_with(connection, *zip((0, 4, 8), images, strict=True))
            await asks_with(connection, (0, images[2]))
            assert sent == [1, 2, 3]
            await asks_with(connection, (0, images[0]))
            return engine.pixels, sent

    pixels, sent = asyncio.run(main())
    assert pixels == [[(0, 1), (4, 2), (8, 3)], [(0, 3)], [(0, 1)]]
    assert sent == [1, 2, 3, 1]


def test_a_process_that_replaces_another_gets_the_images_it_is_asked_with():
    async def main():
        pixels = []
        for _ in range(2):
            engine = ReadingEngine()
            async with counted(engine) as (connection, sent):
                await asks_with(connection, (5, picture(1)))
                pixels.append((engine.pixels, sent))
        return pixels

    assert asyncio.run(main()) == [([[(5, 1)]], [1])] * 2


def test_images_larger_than_all_that_is_kept_are_read_all_the_same():
    async def main():
        engine = ReadingEngine()
        async with counted(engine, most_bytes=10) as (connection, sent):
            for _ in range(2):
                await asks_with(connection, (0, picture(1)))
            return engine.pixels, sent

    assert asyncio.run(main()) == ([[(0, 1)]] * 2, [1, 1])

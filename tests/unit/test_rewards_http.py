"""Which server is asked next, on a clock that tests turn."""

import asyncio
import contextlib

import pytest
from hand_clock import HandClock

from openrlhf.rewards.http import DOWN_AFTER, FIRST_REST, NoServerError, ServerPool


@pytest.fixture
def clock():
    return HandClock()


def pool_of(count, clock, *, max_concurrency=8):
    return ServerPool([f"http://{name}" for name in "abc"[:count]], max_concurrency=max_concurrency, clock=clock)


async def taken(stack, pool, samples=1, **options):
    """The server of a turn that lasts as long as the stack."""
    turn = await stack.enter_async_context(pool.turn(samples, **{"patience": 0.0, **options}))
    return turn.server.url[-1]


def test_the_least_busy_server_is_next(clock):
    """By samples, not requests: a has 8 of them, so b gets 3 + 3, then c, which had 7, its second."""

    async def main():
        async with contextlib.AsyncExitStack() as stack:
            pool = pool_of(3, clock)
            return [await taken(stack, pool, samples) for samples in (8, 3, 7, 3, 3, 1)]

    assert "".join(asyncio.run(main())) == "abcbbc"


def test_idle_servers_take_turns(clock):
    """Nothing is under way at any time; who was asked for fewer samples so far is next."""

    async def main():
        pool, order = pool_of(2, clock), []
        for _ in range(4):
            async with contextlib.AsyncExitStack() as stack:
                order.append(await taken(stack, pool))
        return order

    assert asyncio.run(main()) == ["a", "b", "a", "b"]


def test_another_server_comes_first_and_some_never(clock):
    async def main():
        async with contextlib.AsyncExitStack() as stack:
            pool = pool_of(2, clock)
            a, b = pool.servers
            return (
                await taken(stack, pool, 9, not_first=[a]),
                await taken(stack, pool, 1, not_first=[a]),
                await taken(stack, pool, 1, not_first=[a], never=[b]),
            )

    assert asyncio.run(main()) == ("b", "b", "a")


def test_a_busy_server_is_waited_for_without_patience(clock):
    async def main():
        pool = pool_of(1, clock, max_concurrency=1)
        async with contextlib.AsyncExitStack() as later:
            async with contextlib.AsyncExitStack() as stack:
                await taken(stack, pool)
                waiting = asyncio.create_task(taken(later, pool))
                await asyncio.sleep(0.01)
                assert not waiting.done()
            return await waiting

    assert asyncio.run(main()) == "a"


def test_a_server_goes_down_rests_and_comes_back(clock, caplog):
    """After three failures in a row b is left alone, for 5 s, then 10; one success makes it a server like any other."""
    caplog.set_level("INFO")

    async def main():
        pool = pool_of(2, clock)
        a, b = pool.servers
        for _ in range(DOWN_AFTER - 1):
            pool.failed(b, "boom")
        pool.worked(b)
        for _ in range(DOWN_AFTER - 1):
            pool.failed(b, "boom")
        assert not b.down
        pool.failed(b, "boom")
        assert b.down
        async with contextlib.AsyncExitStack() as stack:
            assert [await taken(stack, pool) for _ in range(3)] == ["a"] * 3
            clock.now += FIRST_REST
            # Awake again, but on probation: one request at a time.
            assert [await taken(stack, pool) for _ in range(3)] == ["b", "a", "a"]
            pool.failed(b, "boom")
            clock.now += FIRST_REST
            assert not pool.rested(except_for=[a])
            clock.now += FIRST_REST
            pool.worked(b)
            assert [await taken(stack, pool) for _ in range(3)] == ["b"] * 3

    asyncio.run(main())
    assert caplog.text.count("reward server http://b is down (boom)") == 1
    assert caplog.text.count("reward server http://b answers again") == 1


def test_reward_servers_all_down_are_waited_for_until_the_timeout(clock):
    async def main():
        pool = pool_of(2, clock)
        for server in pool.servers:
            pool.failed(server, "boom", times=DOWN_AFTER)
        async with contextlib.AsyncExitStack() as stack:
            with pytest.raises(NoServerError):
                await taken(stack, pool, patience=FIRST_REST - 0.1)

    asyncio.run(main())


def test_waiting_for_servers_that_are_down_is_told():
    """Real time: it rests for 0.1 s, and that is what a turn says it waited."""

    async def main():
        pool = ServerPool(["http://a"], max_concurrency=1)
        pool.rest(pool.servers[0], 0.1, "busy")
        async with pool.turn(1, patience=5.0) as turn:
            return turn.waited

    assert 0.05 < asyncio.run(main()) < 2.0


def test_reward_server_on_probation_holds_no_request_for_ever():
    """One request is tried on a server that is down; the others' patience ends all the same."""

    async def main():
        pool = ServerPool(["http://a"], max_concurrency=8)
        pool.failed(pool.servers[0], "boom", times=DOWN_AFTER)
        pool.servers[0].rests_until = 0.0
        async with pool.turn(1, patience=0.0):
            with pytest.raises(NoServerError):
                async with pool.turn(1, patience=0.1):
                    pass

    asyncio.run(main())


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, 0.5),
        ("", 0.5),
        ("7", 7.0),
        ("0", 0.0),
        ("-3", 0.0),
        ("nan", 0.0),
        ("3600", 30.0),
        ("soon", 0.5),
        ("Wed, 21 Oct 2015 07:28:00 GMT", 0.0),
        ("Wed, 21 Oct 2115 07:28:00 GMT", 30.0),
        ("Wed, 21 Oct 2115 07:28:00", 0.5),
    ],
)
def test_how_long_a_busy_server_is_left_alone(header, seconds):
    """A date in the past is now, one without a zone is none, and nobody waits for hours."""
    from openrlhf.rewards.http import _retry_after

    assert _retry_after(header) == seconds


@pytest.mark.parametrize(
    ("url", "asked"),
    [
        ("http://h", "http://h/get_reward"),
        ("http://h:5000/", "http://h:5000/get_reward"),
        ("https://h/reward", "https://h/reward"),
        ("http://h/a/?x=1", "http://h/a/?x=1"),
        ("http://h?x=1", "http://h/get_reward?x=1"),
    ],
)
def test_a_url_without_a_path_gets_one(url, asked):
    from openrlhf.rewards.http import endpoint

    assert endpoint(url) == asked

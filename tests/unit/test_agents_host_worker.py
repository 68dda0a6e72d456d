"""Threads with an event loop of their own: what their coroutines share is noticed, and does not hang."""

import asyncio
import threading

import pytest

from openrlhf.agents.host_worker import EpisodeThread, EpisodeThreads


@pytest.fixture
def threads():
    foreign = []
    pool = EpisodeThreads(lambda: foreign.append(1))
    taken = [pool.take(), pool.take()]
    yield *taken, foreign
    for thread in taken:
        thread.close()


async def hold(lock: asyncio.Lock, held: threading.Event, let_go: asyncio.Event) -> None:
    async with lock:
        held.set()
        await let_go.wait()


async def take(lock: asyncio.Lock) -> str:
    async with lock:
        return "taken"


def wake(thread: EpisodeThread, event: asyncio.Event) -> None:
    thread.loop.call_soon_threadsafe(event.set)


def test_a_lock_that_two_loops_share_wakes_the_other_and_is_noticed(threads):
    """asyncio alone would leave the second waiting: its loop sleeps and nothing wakes it."""
    first, second, foreign = threads
    lock, held, let_go = asyncio.Lock(), threading.Event(), asyncio.Event()
    holding = first.submit(hold(lock, held, let_go))
    assert held.wait(30)
    taking = second.submit(take(lock))
    while not lock._waiters:
        pass
    assert not foreign
    wake(first, let_go)
    assert taking.result(30) == "taken"
    holding.result(30)
    assert foreign


def test_a_result_from_a_plain_thread_wakes_the_loop_and_is_no_sharing(threads):
    thread, _, foreign = threads
    made: list[asyncio.Future[str]] = []
    there = threading.Event()

    async def wait():
        made.append(asyncio.get_running_loop().create_future())
        there.set()
        return await made[0]

    waiting = thread.submit(wait())
    assert there.wait(30)
    made[0].set_result("woken")
    assert waiting.result(30) == "woken"
    assert not foreign


def test_threads_are_handed_on():
    pool = EpisodeThreads()
    first = pool.take()
    pool.give(first)
    assert pool.take() is first
    assert pool.take() is not first

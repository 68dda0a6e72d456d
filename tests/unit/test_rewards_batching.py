"""Batching of many callers' sequences: budgets, order, failures, and forwards in a thread of their own."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from patience import patience

from openrlhf.rewards.batching import Batcher, _common_prefix
from openrlhf.types import ImageInput, PlacedImage


class Forward:
    """The score of a sequence is the sum of its tokens. Remembers batches and threads; may be held up."""

    def __init__(self):
        self.batches = []
        self.threads = set()
        self.free = threading.Event()
        self.free.set()
        self.fail = False

    def __call__(self, items):
        self.batches.append([item.token_ids.tolist() for item in items])
        self.threads.add(threading.current_thread().name)
        assert self.free.wait(patience(10))
        if self.fail:
            raise RuntimeError("out of memory")
        return [float(item.token_ids.sum()) for item in items]


def ids(*tokens):
    return torch.tensor(tokens)


@pytest.fixture
def forward():
    return Forward()


@pytest.fixture
def thread():
    with ThreadPoolExecutor(1, thread_name_prefix="model") as executor:
        yield executor


async def until(condition):
    async with asyncio.timeout(patience(10)):
        while not condition():
            await asyncio.sleep(0.001)


def test_sequences_of_a_forward_are_limited_by_number_and_by_tokens(forward):
    """Budget 6, at most 2: (1 + 2), then (3 alone, as 3 + 4 > 6), then (4 + 1)."""
    batcher = Batcher(forward, max_tokens=6, max_sequences=2)
    sequences = [ids(1), ids(1, 2), ids(1, 2, 3), ids(1, 2, 3, 4), ids(5)]
    assert asyncio.run(batcher.score(sequences)) == [1.0, 3.0, 6.0, 10.0, 5.0]
    assert [[len(s) for s in batch] for batch in forward.batches] == [[1, 2], [3], [4, 1]]


def test_reward_batching_of_nothing_runs_no_forward(forward):
    assert asyncio.run(Batcher(forward, max_tokens=6).score([])) == []
    assert forward.batches == []


def test_the_loop_goes_on_while_the_thread_computes_and_what_comes_meanwhile_is_batched(forward, thread):
    async def run():
        batcher = Batcher(forward, max_tokens=100, executor=thread)
        forward.free.clear()
        first = asyncio.create_task(batcher.score([ids(1)]))
        await until(lambda: forward.batches)
        others = [asyncio.create_task(batcher.score([ids(n), ids(n, n)])) for n in (2, 3, 4)]
        await asyncio.sleep(0.01)
        forward.free.set()
        return await asyncio.gather(first, *others)

    assert asyncio.run(run()) == [[1.0], [2.0, 4.0], [3.0, 6.0], [4.0, 8.0]]
    assert forward.batches == [[[1]], [[2], [2, 2], [3], [3, 3], [4], [4, 4]]]
    assert forward.threads == {"model_0"}


def test_cancelled_during_its_forward_or_before_it_harms_nobody(forward, thread):
    async def run():
        batcher = Batcher(forward, max_tokens=1, executor=thread)
        forward.free.clear()
        computed, waiting, kept = (asyncio.create_task(batcher.score([ids(n)])) for n in (1, 2, 3))
        await until(lambda: forward.batches)
        computed.cancel()
        waiting.cancel()
        await asyncio.sleep(0)
        forward.free.set()
        return await kept

    assert asyncio.run(run()) == [3.0]
    assert forward.batches == [[[1]], [[3]]]


def test_of_a_request_that_failed_the_rest_is_not_computed(forward):
    forward.fail = True

    async def run():
        batcher = Batcher(forward, max_tokens=1)
        with pytest.raises(RuntimeError, match="out of memory"):
            await batcher.score([ids(1), ids(2), ids(3), ids(4)])
        forward.fail = False
        return await batcher.score([ids(5)])

    assert asyncio.run(run()) == [5.0]
    assert len(forward.batches) < 5


class TestImages:
    """Samples of one prompt share what they have in common, and not the images of others."""

    def prefix(self, *sequences: tuple[list[int], list[PlacedImage]]) -> int:
        return _common_prefix([torch.tensor(ids) for ids, _ in sequences], [tuple(placed) for _, placed in sequences])

    def test_what_is_shared(self):
        a, b = (ImageInput(tensors={}, token_ids=(9, 9), placeholder=9, digest=name, size=(1, 1)) for name in "ab")
        one = ([1, 9, 9, 2, 3], [PlacedImage(1, a)])
        assert self.prefix(one, ([1, 9, 9, 2, 4], [PlacedImage(1, a)])) == 4
        assert self.prefix(one, ([1, 9, 9, 2, 4], [PlacedImage(1, b)])) == 1  # another image of the same size
        assert self.prefix(one, ([1, 9, 9, 5, 4], [PlacedImage(1, a)])) == 3
        later = ([1, 9, 9, 2, 9, 9, 3], [PlacedImage(1, a), PlacedImage(4, b)])
        assert self.prefix(later, ([1, 9, 9, 2, 9, 9, 4], [PlacedImage(1, a), PlacedImage(4, a)])) == 4
        assert self.prefix(([9, 9, 1], [PlacedImage(0, a)]), ([9, 9], [PlacedImage(0, a)])) == 0  # one token is its own

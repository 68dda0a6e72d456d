"""What the pipelines add around the loop's parts: when generation rests, and what is measured beside training."""

import asyncio
import threading

import pytest

from openrlhf.observability.metrics import Metrics
from openrlhf.observability.timing import BusyClock
from openrlhf.rollout.runner import RolloutError
from openrlhf.trainers.evaluation import EvaluationBeside
from openrlhf.trainers.pipelines import DeferredWeightSync, OverlappedWorkers, SettlingWeightSync
from openrlhf.utils.event_loops import BackgroundRunner


@pytest.fixture
def loop():
    with BackgroundRunner() as running:
        yield running


class Slow:
    """An evaluation that ends when it is told to, with what it is told."""

    def __init__(self):
        self.answer = asyncio.Queue()

    async def play(self):
        found = await self.answer.get()
        if isinstance(found, Exception):
            raise found
        return found

    def end(self, loop, found):
        loop.run(self.answer.put(found))


class Weights:
    def __init__(self):
        self.pushed = []

    def push(self, *, version):
        self.pushed.append(version)
        return Metrics()


def test_a_push_waits_for_the_evaluation_of_the_weights_it_replaces(loop):
    slow, weights = Slow(), Weights()
    beside = EvaluationBeside(slow, loop)
    sync = SettlingWeightSync(weights, beside.settle)
    assert sync.push(version=0).values()["timing/evaluation_wait"] < 0.1
    beside.start()
    assert beside.result() is None
    pushing = threading.Thread(target=sync.push, kwargs={"version": 1})
    pushing.start()
    pushing.join(0.1)
    assert weights.pushed == [0]
    slow.end(loop, {"eval_default_pass1": 0.5})
    pushing.join(10)
    assert weights.pushed == [0, 1]
    assert beside.result() == {"eval_default_pass1": 0.5}
    assert beside.result() is None


def test_who_measures_the_weights_of_a_step_does_not_wait_until_they_must_be_pushed(loop):
    weights = Weights()
    sync = DeferredWeightSync(weights, iter([False, True, True, False]).__next__)
    beside = EvaluationBeside(Slow(), loop)
    beside.catch_up = sync.catch_up
    for version in range(3):
        sync.push(version=version)
    assert weights.pushed == [0]
    beside.start()
    assert weights.pushed == [0, 2]
    sync.catch_up()
    sync.push(version=3)
    sync.catch_up()
    assert weights.pushed == [0, 2, 3]


def test_what_is_wrong_with_an_evaluation_is_said_where_its_result_is_taken(loop):
    slow = Slow()
    beside = EvaluationBeside(slow, loop)
    beside.start()
    slow.end(loop, RolloutError("all 3 evaluation groups failed"))
    beside.settle()
    with pytest.raises(RolloutError, match="all 3"):
        beside.result()


def test_busy_seconds_are_those_in_which_anything_was_under_way():
    """One from 1 to 4, another from 2 to 6, a third from 8 on: 5 s until 8, and 7 s at 10."""
    clock = iter([1.0, 6.0, 8.0, 10.0])
    busy = BusyClock(now=lambda: next(clock))
    assert busy.seconds == 0
    busy.begin()
    busy.begin()
    busy.end()
    busy.end()
    assert busy.seconds == 5
    busy.begin()
    assert busy.seconds == 7


class Rounds:
    """Workers that take half a second for an update, and a collector that plays from 1.0 on."""

    def __init__(self, now):
        self.now = now

    @property
    def seconds_in_play(self):
        return max(0.0, self.now[0] - 1.0)

    def place(self, groups):
        return groups

    def update(self, batch):
        self.now[0] += 0.5
        return Metrics()


def test_overlap_is_the_share_of_a_round_in_which_generation_went_on_beside_training(monkeypatch):
    """The second round begins at 0.5 with the end of the first update. It is placed at 0.75, when nothing is in play;
    its update ends at 1.25, and from 1.0 on something is: (1.25 − 1.0) / (1.25 − 0.5) = 1/3."""
    now = [0.0]
    monkeypatch.setattr("openrlhf.trainers.pipelines.time.perf_counter", lambda: now[0])
    rounds = Rounds(now)
    workers = OverlappedWorkers(rounds, rounds)
    assert "perf/overlap" not in workers.update(workers.place([])).values()
    now[0] = 0.75
    assert workers.update(workers.place([])).values()["perf/overlap"] == pytest.approx(1 / 3)

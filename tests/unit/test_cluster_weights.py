"""Pushes to engines of which some are lost on the way, and weights for one that is new."""

import asyncio
from types import SimpleNamespace

import pytest

from openrlhf.cluster.engines import EngineLostError
from openrlhf.cluster.services import Sent
from openrlhf.cluster.weights import RayWeightSync
from openrlhf.cluster.workers import WorkerError
from openrlhf.weight_sync.base import Pushed, WeightSyncError

LOOP = SimpleNamespace(run=asyncio.run)


class Handles:
    """Blocking calls to some engines."""

    def __init__(self, engines, actors):
        self.engines = engines
        self.actors = actors

    def pause(self):
        for actor in self.actors:
            if actor in self.engines.dead:
                raise WorkerError(f"engine {actor} is gone")

    wake = check_health = pause

    def resume(self, version):
        self.engines.versions |= dict.fromkeys(self.actors, version)


class Engines:
    """Processes by engine; sending to a dead one fails."""

    def __init__(self, **actors):
        self.slots = {int(name[1:]): actor for name, actor in actors.items()}
        self.sampling = dict(self.slots)
        self.dead: set[str] = set()
        self.versions: dict[str, int] = {}
        self.paused = False
        self.partly: set[str] = set()
        """Engines that were sent weights since they paused."""
        self.have_base: set[str] = set()
        """Engines that were sent the base of an adapter."""

    @property
    def needs_base(self):
        return not self.have_base.issuperset(self.sampling.values())

    def handles(self, engines):
        return Handles(self, [self.slots[engine] for engine in engines])

    async def pause(self):
        self.paused = True
        self.partly -= set(self.sampling.values())

    async def wake(self):
        assert self.paused

    async def resume(self, version):
        self.versions |= dict.fromkeys(self.sampling.values(), version)
        self.paused = False

    async def take_draft_counts(self):
        return None

    async def check_health(self):
        self.sampling = {engine: actor for engine, actor in self.sampling.items() if actor not in self.dead}

    def admit(self, engine):
        self.sampling[engine] = self.slots[engine]

    def take_replaced(self):
        return 1


class Ranks:
    """Send to the engines that they are given, or are broken themselves."""

    def __init__(self, engines, *, rounds=0):
        self.engines = engines
        self.rounds = rounds
        self.received: list[tuple[str, ...]] = []
        self.with_base: list[bool] = []
        self.broken = False

    def call(self, method, *arguments, deadline):
        assert method == "send_weights"
        actors = tuple(arguments[0].actors)
        if self.broken or self.engines.dead & set(actors):
            raise WorkerError("actor rank 0: sending failed")
        assert not self.engines.partly & set(actors), "an engine with a part of the weights forgets it before"
        self.engines.partly |= set(actors)
        self.received.append(actors)
        if arguments[1]:
            self.engines.have_base |= set(actors)
        self.with_base.append(arguments[1])
        return [Sent(pushed=Pushed(3, 3000), version=self.rounds, probed=[])]


def test_one_that_is_lost_on_the_way_holds_nobody_up():
    engines = Engines(e0="a", e1="b")
    ranks = Ranks(engines)
    sync = RayWeightSync(ranks, engines, LOOP)
    engines.dead.add("a")
    metrics = sync.push(version=7).values()
    assert ranks.received == [("b",)]
    assert engines.versions == {"b": 7}
    assert metrics == {"sync/buckets": 3, "sync/bytes": 3000, "rollout/engines_replaced": 1}


def test_where_nobody_samples_a_push_sends_nothing():
    engines = Engines(e0="a")
    ranks = Ranks(engines)
    sync = RayWeightSync(ranks, engines, LOOP)
    engines.sampling.clear()
    assert sync.push(version=7).values()["sync/buckets"] == 0
    assert ranks.received == []


def test_a_failure_that_is_no_engines_ends_the_push():
    engines = Engines(e0="a")
    ranks = Ranks(engines)
    sync = RayWeightSync(ranks, engines, LOOP)
    ranks.broken = True
    with pytest.raises(WeightSyncError, match="push of version 7 failed: actor rank 0: sending failed"):
        sync.push(version=7)


def test_a_new_engine_gets_the_weights_as_they_are_and_is_in_the_next_push():
    """Ranks have trained round 8, whose push is still to come: what the engine samples is of version 8."""
    engines = Engines(e0="a", e1="b")
    ranks = Ranks(engines, rounds=8)
    sync = RayWeightSync(ranks, engines, LOOP)
    sync.push(version=7)
    del engines.sampling[0]
    engines.slots[0] = "c"
    sync.supply(0)
    assert ranks.received == [("a", "b"), ("c",)]
    assert engines.versions["c"] == 8
    assert engines.sampling == {1: "b", 0: "c"}


def test_while_all_are_paused_a_new_engine_waits_for_the_push_with_them():
    engines = Engines(e0="a", e1="b")
    ranks = Ranks(engines, rounds=8)
    sync = RayWeightSync(ranks, engines, LOOP)
    del engines.sampling[0]
    engines.slots[0] = "c"
    asyncio.run(engines.pause())
    sync.supply(0)
    assert ranks.received == []
    assert engines.versions == {}
    sync.push(version=8)
    assert engines.versions == {"b": 8, "c": 8}


def test_whose_fault_it_is_that_a_new_engine_gets_no_weights():
    engines = Engines(e0="a")
    ranks = Ranks(engines)
    sync = RayWeightSync(ranks, engines, LOOP)
    engines.sampling.clear()
    ranks.broken = True
    with pytest.raises(EngineLostError, match="rank 0: sending failed"):
        sync.supply(0)
    engines.dead.add("a")
    with pytest.raises(WorkerError, match="engine a is gone"):
        sync.supply(0)
    assert engines.sampling == {}


def test_the_base_of_an_adapter_goes_to_engines_once_and_to_one_that_is_new():
    """The one that is supplied alone has it, and the one that waits for the push gets it there, with all others."""
    engines = Engines(e0="a", e1="b")
    ranks = Ranks(engines)
    sync = RayWeightSync(ranks, engines, LOOP)
    sync.push(version=1)
    sync.push(version=2)
    assert ranks.with_base == [True, False]
    engines.slots[0] = "c"
    sync.supply(0)
    sync.push(version=3)
    assert ranks.with_base == [True, False, True, False]
    engines.slots[1] = "d"
    asyncio.run(engines.pause())
    sync.supply(1)
    sync.push(version=4)
    sync.push(version=5)
    assert ranks.with_base == [True, False, True, False, True, False]

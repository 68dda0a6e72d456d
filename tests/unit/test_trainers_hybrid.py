"""Whose turn it is on a shared device."""

import asyncio

import pytest

from openrlhf.observability.usage import Usage
from openrlhf.trainers.hybrid import DeviceTurns, DeviceUsage


class Device:
    """80 GiB, an engine of 60 and a backend of 30: whoever takes more than is left fails, as on a real one."""

    def __init__(self):
        self.free = 80
        self.peak = 0

    def take(self, size):
        assert size <= self.free, "out of memory"
        self.free -= size
        self.peak = max(self.peak, 80 - self.free)

    def looked_at_when_asked(self):
        """What a meter has seen that did not happen to look since the last call."""
        return {"10.0.0.1": Usage(0.5, 80 - self.free)}

    def looked_at_always(self):
        """What a meter has seen that looks all the time: the most since the last call."""
        peak, self.peak = self.peak, 80 - self.free
        return {"10.0.0.1": Usage(0.5, peak)}


class Engine:
    """Asleep at first. A push wakes it."""

    def __init__(self, device):
        self.device, self.awake = device, False

    async def sleep(self):
        assert self.awake
        self.device.free += 60
        self.awake = False

    def push(self):
        if not self.awake:
            self.device.take(60)
        self.awake = True


class Backend:
    """Updates need its state on the device, and leave 20 behind in an allocator."""

    def __init__(self, device):
        self.device, self.awake, self.cached = device, True, 0
        device.take(30)

    def sleep(self):
        assert self.awake
        self.device.free += 30
        self.awake = False

    def wake(self):
        assert not self.awake
        self.device.take(30)
        self.awake = True

    def release(self):
        self.device.free += self.cached
        self.cached = 0

    def update(self):
        assert self.awake
        if not self.cached:
            self.device.take(20)
            self.cached = 20


@pytest.fixture
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def shared(loop):
    device = Device()
    engine, backend = Engine(device), Backend(device)
    return device, engine, backend, DeviceTurns(loop, engine=engine, backends=[backend], release=backend.release)


@pytest.mark.parametrize("meter", [Device.looked_at_when_asked, Device.looked_at_always])
def test_engine_and_training_take_turns_on_a_device_that_cannot_hold_both(shared, meter):
    """60 + 30 are more than 80, and so are 60 + 20 of cached memory + anything. Three rounds, and nothing grows.
    What is measured is the same whenever the meter happens to look."""
    device, engine, backend, turns = shared
    usage = DeviceUsage(lambda: meter(device))
    turns.to_rollout()
    engine.push()
    for _ in range(3):
        assert (engine.awake, backend.awake) == (True, False)
        metrics = usage.of("generation")
        turns.to_training()
        usage.forget()
        assert (engine.awake, backend.awake) == (False, True)
        backend.update()
        metrics.merge(usage.of("training"))
        turns.to_rollout()
        engine.push()
        assert device.free == 20
        busy = {"device/10.0.0.1/generation_busy": 0.5, "device/10.0.0.1/training_busy": 0.5}
        assert metrics.values() == {"memory/peak_generation_gb": 60, "memory/peak_training_gb": 50} | busy


def test_the_first_update_can_be_looked_at_before_anything_is_moved(loop):
    """Once: not at the start, when nothing was trained yet, and not after later updates."""
    device = Device()
    engine, backend, seen = Engine(device), Backend(device), []
    turns = DeviceTurns(
        loop, engine=engine, backends=[backend], release=backend.release, after_first=lambda: seen.append(device.free)
    )
    for _ in range(3):
        turns.to_rollout()
        engine.push()
        turns.to_training()
        backend.update()
    assert seen == [80 - 30 - 20]


def test_a_turn_that_has_begun_is_not_begun_again(shared):
    """A second push in a row, as after a resumed run's first; a second round before the push."""
    _, engine, backend, turns = shared
    for _ in range(2):
        turns.to_rollout()
        engine.push()
    for _ in range(2):
        turns.to_training()
    assert (engine.awake, backend.awake) == (False, True)


def test_an_engine_that_does_not_fall_asleep_leaves_the_turn_as_it_was(shared):
    _, engine, backend, turns = shared
    turns.to_rollout()
    engine.push()
    fall_asleep = engine.sleep

    async def fails():
        raise ZeroDivisionError

    engine.sleep = fails
    with pytest.raises(ZeroDivisionError):
        turns.to_training()
    assert not backend.awake
    engine.sleep = fall_asleep
    turns.to_training()
    assert backend.awake


def test_without_an_engine_that_sleeps_the_allocator_keeps_its_memory(loop):
    """Taking memory anew costs time."""
    turns = DeviceTurns(loop, release=lambda: 1 / 0)
    turns.to_rollout()
    turns.to_training()


def test_devices_that_are_not_measured_have_no_metrics():
    assert DeviceUsage().of("training").values() == {}

"""How busy devices are, and how full: seen now and then, told once a phase."""

import time

import pytest

from openrlhf.cluster.adapters import by_node
from openrlhf.observability.usage import Usage, UsageMeter


def test_a_meter_tells_what_it_saw_since_the_last_time():
    """Looks at 0, 0.5 and 1 of a device, then only at what `take` itself sees."""
    seen = iter([(0.0, 3.0), (0.5, 9.0), (1.0, 4.0), (0.25, 2.0)])
    meter = UsageMeter(lambda: next(seen), period=3600)
    meter._note()
    meter._note()
    assert meter.take() == Usage(busy=0.5, peak_gb=9.0)
    assert meter.take() == Usage(busy=0.25, peak_gb=2.0)
    meter.close()


def test_usage_meter_samples_by_itself():
    looks = []
    meter = UsageMeter(lambda: looks.append(None) or (0.0, 0.0), period=0.01)
    end = time.monotonic() + 5
    while len(looks) < 3 and time.monotonic() < end:
        time.sleep(0.01)
    meter.close()
    assert len(looks) >= 3


def test_usage_meter_works_on_this_machine():
    meter = UsageMeter(period=3600)
    usage = meter.take()
    meter.close()
    assert 0 <= usage.busy <= 1
    assert usage.peak_gb > 0


def test_nodes_are_told_apart():
    answers = [("a", Usage(0.2, 10)), ("b", Usage(0.9, 5)), ("a", Usage(0.4, 30))]
    found = by_node(answers)
    assert found["a"] == pytest.approx((0.3, 30))
    assert found["b"] == Usage(0.9, 5)

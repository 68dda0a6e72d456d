"""A Ray of one's own on a machine that is busy with something else."""

import pytest
import ray

from openrlhf.cluster.beacons import Beacons
from openrlhf.cluster.launch import ClusterError, ray_cluster

LATE = "The current node timed out during startup. This could happen because some of the raylet failed to startup"


@pytest.fixture
def starts(monkeypatch):
    """How Ray answers to each try, one after the other; None: it starts."""
    answers, tries = [], []

    def init(**options):
        tries.append(options)
        if (error := answers.pop(0)) is not None:
            raise error

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": True, "NodeID": "a", "Resources": {"CPU": 2.0}}])
    return answers, tries


def test_a_node_that_is_late_is_tried_again(starts):
    answers, tries = starts
    answers += [Exception(LATE), None]
    with ray_cluster():
        assert len(tries) == 2


@pytest.mark.parametrize(("error", "count"), [(LATE, 3), ("no space left on device", 1)])
def test_one_that_cannot_start_is_an_error_in_one_line(starts, error, count):
    answers, tries = starts
    answers += [Exception(f"{error}\nand a second line")] * count
    with pytest.raises(ClusterError, match=f"^Ray does not start: {error}$"), ray_cluster():
        pass
    assert len(tries) == count


def test_nobody_looks_for_processes_through_a_connection_that_has_ended():
    """Ray would start another one for whoever asks it then, or end his process without a word."""
    assert not ray.is_initialized()
    late = Beacons(["rank 0"], ["a reference from before"])
    assert late.stacks() == {}
    assert late.idle_seconds() == float("inf")

"""Runs on Ray whose driver is killed with SIGKILL: what it has started goes away by itself, and the same command again
trains on every sample once. Two of five: `tests/faults` has them all."""

import functools

import pytest
from killed_ray_runs import RayRl
from killed_runs import Straights, Try, attempt
from preloaded_workers import interpreter


@pytest.fixture(scope="module")
def straights(files, tmp_path_factory):
    """In one process: which samples there are is the same."""
    return Straights(files, tmp_path_factory.mktemp("straight"))


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    with interpreter(tmp_path_factory.mktemp("python")) as preloaded:
        yield preloaded


@pytest.mark.slow
@pytest.mark.parametrize("one", [Try("sync", 5), Try("partial", 3)], ids=str)
def test_killed_and_started_again_nothing_is_lost_or_repeated(straights, python, tmp_path, one):
    attempt(one, straights, tmp_path / "run", made=functools.partial(RayRl, python=python))

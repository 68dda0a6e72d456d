"""Runs on Ray whose driver is killed with SIGKILL: what it has started goes away by itself, and the same command again
trains on every sample once. Two of five: `tests/faults` has them all."""

import functools
import re
import signal
import tempfile
import time
from pathlib import Path

import pytest
from killed_ray_runs import RayRl
from killed_runs import Straights, Try, attempt
from patience import patience
from preloaded_workers import interpreter
from processes import wait_until

from openrlhf.observability.loggers import read_metrics


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


@pytest.mark.slow
def test_a_signal_ends_it_in_order(straights, python, tmp_path):
    """SIGTERM in the second round or later: its step is saved, and then everything ends, without a word from Ray about
    servers that it has lost. It took 3 seconds on an idle machine with two cores."""
    run, asked = RayRl(straights.inputs, tmp_path / "run", python=python), []

    def reached() -> bool:
        trained = any(record["kind"] == "train" for record in read_metrics(run.run_dir / "metrics.jsonl"))
        if trained and not asked:
            asked.append(time.monotonic())
        return trained

    ended = run.kill_when(reached, number=signal.SIGTERM)
    assert ended.status == 128 + signal.SIGTERM, run.said
    assert time.monotonic() - asked[0] < patience(60), "a step, a checkpoint, and the end"
    assert "stopped by SIGTERM and saved; started again with the same command it goes on from" in run.said
    assert not re.search("GCS|gcs_server|raylet|Traceback", run.said)
    assert wait_until(lambda: not run.left, patience(30)), run.left
    assert not list(Path(tempfile.gettempdir()).glob("openrlhf-vllm-*")), "sockets are in Ray's folder, which is gone"

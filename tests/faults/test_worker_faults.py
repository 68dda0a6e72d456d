"""Training ranks that are killed: the run ends with the cause, or goes on by itself from its last checkpoint.

Minutes: `make test-faults`; `tests/integration/test_cluster_faults.py` has one of these.
"""

import os
import re
import threading
import time

import pytest
from faulty_runs import assert_every_prompt_once, kill, logged, ranks_below

from openrlhf.cluster.workers import WorkerError
from openrlhf.runs.rl_assembly import train

pytestmark = pytest.mark.slow


@pytest.fixture
def run(inputs, cluster, tmp_path):
    """Runs two ranks with a checkpoint after every round, and kills one when told to; returns the run directory."""

    def to_the_end(when, **overrides):
        saving = {"ckpt__path": tmp_path / "checkpoints", "ckpt__save_steps": 1, "actor__num_gpus_per_node": 2}
        killing = threading.Thread(target=lambda: (when(), kill(max(ranks_below(os.getpid())))))
        killing.start()
        try:
            train(inputs.config(tmp_path / "run", **saving | overrides), make_launcher=cluster.make_launcher)
        finally:
            killing.join()
        return tmp_path / "run"

    return to_the_end


def wait_for(condition) -> None:
    end = time.monotonic() + 200
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)


@pytest.mark.parametrize("seconds", [0.0, 0.3, 0.7], ids="{:g} s later".format)
def test_a_killed_rank_costs_a_restart(run, results, tmp_path, caplog, seconds):
    """At any moment of the second round."""
    saved = tmp_path / "checkpoints" / "global_step1"
    run_dir = run(lambda: (wait_for(saved.exists), time.sleep(seconds)))
    assert_every_prompt_once(run_dir)
    assert caplog.text.count("(restart 1 of 3)") == 1
    assert re.search(r"actor rank \d on [\d.]+ is gone: ", caplog.text)
    assert "restart 2 of 3" not in caplog.text
    row = {"killed": f"{seconds:g} s after the first checkpoint", "restarts": 1, "outcome": "every sample once"}
    results.add("Ranks of a run on Ray, kill -9", **row)


def test_without_restarts_the_cause_ends_it(run, tmp_path):
    with pytest.raises(WorkerError, match=r"actor rank \d on [\d.]+ is gone: "):
        run(lambda: wait_for(lambda: logged(tmp_path / "run", 1)), train__max_restarts=0)
    assert ranks_below(os.getpid()) == []


def test_before_the_first_checkpoint_it_begins_anew(run, caplog):
    run_dir = run(lambda: wait_for(lambda: len(ranks_below(os.getpid())) == 2))
    assert_every_prompt_once(run_dir)
    assert "begins anew, for there is no checkpoint yet (restart 1 of 3)" in caplog.text

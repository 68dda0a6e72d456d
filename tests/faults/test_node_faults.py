"""Whole runs, each with its own driver, that lose a node or a rank: everything is closed, and built again elsewhere.

Minutes: `make test-faults`.
"""

import contextlib
import re

import psutil
import pytest
from faulty_runs import Command, column, kill, ranks_below
from ray.cluster_utils import Cluster as Raylets

from openrlhf.cluster.launch import WORKER

pytestmark = pytest.mark.slow


@pytest.fixture
def start(inputs, tmp_path):
    """A run of one rank and one engine."""
    runs = []

    def started(**environment: str) -> Command:
        runs.append(Command(inputs, tmp_path, environment, vllm__num_engines=1))
        return runs[-1]

    yield started
    for run in runs:
        run.process.kill()
        run.process.wait()


@pytest.fixture
def nodes():
    """A head without devices, and as many raylets as are added."""
    raylets = Raylets(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0, "resources": {WORKER: 0}})
    yield raylets
    raylets.shutdown()


@pytest.mark.parametrize(
    ("workers", "lost"),
    [((2, 2), "actor"), ((1, 1, 1), "vllm")],
    ids=["with all of the run", "with its engine"],
)
def test_a_killed_raylet_costs_a_restart(start, nodes, results, request, workers, lost):
    """(2, 2): rank and engine are on one node, and move to the other. (1, 1, 1): each has its own, and the engine that
    is lost cannot be replaced on its."""
    raylets = [nodes.add_node(num_cpus=1, num_gpus=0, resources={WORKER: count}) for count in workers]
    run = start(RAY_ADDRESS=nodes.address)
    run.wait_until((run.checkpoints / "global_step1").exists)
    (name,) = re.findall(rf"{lost} on node (\w+)", run.said)
    (raylet,) = [node for node in raylets if node.node_id == name]
    there = psutil.Process(raylet.all_processes["raylet"][0].process.pid).children(recursive=True)
    try:
        nodes.remove_node(raylet, allow_graceful=False)
        run.ends_after_one_restart()
    finally:
        for process in there:  # with a real node they would be gone
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
    row = {"killed": request.node.callspec.id, "restarts": 1, "outcome": "every sample once"}
    results.add("Nodes of a run on Ray, kill -9", **row)


def test_a_ray_of_its_own_is_started_again(start):
    run = start()
    run.wait_until((run.checkpoints / "global_step1").exists)
    kill(*ranks_below(run.process.pid))
    run.ends_after_one_restart()
    assert max(column(run.run_dir, "sync/probe_gap")) < 1e-4

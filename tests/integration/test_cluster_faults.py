"""An engine and a rank that are killed in the middle of a run, one of each: `tests/faults` has the others."""

import os

import pytest
from faulty_runs import PROMPTS, SAMPLES, Inputs, assert_every_prompt_once, column, core_of, kill, ranks_below, strike

from openrlhf.cluster.health import ReplacementBudget
from openrlhf.runs.rl_assembly import train

pytestmark = pytest.mark.slow

ROUND = PROMPTS * SAMPLES


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return Inputs.made(tmp_path_factory.mktemp("small"))


@pytest.fixture
def flags(tmp_path):
    return {
        "train__full_determinism_enable": None,
        "vllm__sync_backend": None,
        "ckpt__path": tmp_path / "checkpoints",
        "ckpt__save_steps": 1,
    }


def test_an_engine_that_is_killed_is_replaced(small, cluster, flags, tmp_path, caplog):
    cluster.engines.budget = ReplacementBudget()
    with strike(cluster.engines, lambda: kill(core_of(cluster.engines, 0)), at=ROUND + 3):
        train(small.config(tmp_path / "run", **flags), make_launcher=cluster.make_launcher)
    assert_every_prompt_once(tmp_path / "run")
    assert sum(column(tmp_path / "run", "rollout/engines_replaced")) + cluster.engines.take_replaced() == 1
    assert "another one starts in its place" in caplog.text
    assert "restart" not in caplog.text


def test_a_rank_that_is_killed_costs_a_restart(small, cluster, flags, tmp_path, caplog):
    with strike(cluster.engines, lambda: kill(max(ranks_below(os.getpid()))), at=ROUND + 3):
        train(small.config(tmp_path / "run", **flags, actor__num_gpus_per_node=2), make_launcher=cluster.make_launcher)
    assert_every_prompt_once(tmp_path / "run")
    assert f"the run goes on from {tmp_path / 'checkpoints' / 'global_step1'} (restart 1 of 3)" in caplog.text
    assert "restart 2 of 3" not in caplog.text

"""An engine that is killed in the middle of a run: `tests/faults` has more."""

import pytest
from faulty_runs import PROMPTS, SAMPLES, Inputs, assert_every_prompt_once, column, core_of, kill, strike

from openrlhf.cluster.replacing import ReplacementBudget
from openrlhf.trainers.assembly import train

pytestmark = pytest.mark.slow

ROUND = PROMPTS * SAMPLES


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    return Inputs.made(tmp_path_factory.mktemp("small"))


@pytest.fixture
def flags():
    return {
        "train__full_determinism_enable": None,
        "vllm__sync_backend": None,
    }


def test_an_engine_that_is_killed_is_replaced(small, cluster, flags, tmp_path, caplog):
    cluster.engines.budget = ReplacementBudget()
    with strike(cluster.engines, lambda: kill(core_of(cluster.engines, 0)), at=ROUND + 3):
        train(small.config(tmp_path / "run", **flags), launched=cluster.launched)
    assert_every_prompt_once(tmp_path / "run")
    assert sum(column(tmp_path / "run", "rollout/engines_replaced")) + cluster.engines.take_replaced() == 1
    assert "another one starts in its place" in caplog.text

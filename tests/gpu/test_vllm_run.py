"""The hybrid engine as a user starts it: trainer and vLLM take turns on one CUDA device."""

import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

pytest.importorskip("vllm")

from openrlhf.config import parse
from openrlhf.demo.model import make_tokenizer
from openrlhf.demo.sorting import make_task
from openrlhf.runs.rl_assembly import train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

REWARD = """
def reward_func(queries, prompts, labels):
    return [float(sum(map(ord, query)) % 5) for query in queries]
"""


def flags(folder: Path, **overrides: object) -> list[str]:
    """Rounds of 4 prompts, 4 samples each; 4 of them are all the prompts. All that can sleep does, in its turn."""
    values = {
        "actor.model_name_or_path": folder / "model",
        "data.prompt_dataset": folder / "train.jsonl",
        "data.label_key": "label",
        "data.max_len": 32,
        "reward.remote_url": folder / "reward.py",
        "algo.advantage.estimator": "reinforce",
        "algo.kl.init_coef": 0,
        "algo.advantage.is_correction_enable": True,
        "rollout.batch_size": 4,
        "rollout.n_samples_per_prompt": 4,
        "rollout.max_new_tokens": 8,
        "train.batch_size": 16,
        "train.launcher": "local",
        "vllm.num_engines": 1,
        "vllm.gpu_memory_utilization": 0.8,
        "vllm.enable_sleep": True,
        "ds.enable_sleep": True,
        "ds.param_dtype": "bf16",
        "actor.adam.lr": 1e-3,
        "actor.lr_scheduler": "constant",
        "ckpt.path": folder / "ckpt",
        "ckpt.save_steps": 2,
        "ckpt.output_dir": folder / "out",
        "logger.run_dir": folder / "run",
    }
    values |= {name.replace("__", "."): value for name, value in overrides.items()}
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("hybrid")
    make_task(seed=0, train=16).write(folder)
    (folder / "reward.py").write_text(REWARD)
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=64,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


def rounds(run_dir: Path) -> list[dict]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "train"]


def test_a_run_takes_turns_and_one_that_continues_begins_with_a_push(folder, monkeypatch):
    """Every round samples with the weights of the round before, so the two sets of log-probs stay near each other;
    while the policy is trained the engine's 0.8 of the device are free."""
    monkeypatch.chdir(folder)
    first = train(parse("train_ppo_ray", flags(folder)))
    words = flags(folder, train__num_episodes=2, ckpt__load_enable=True, logger__run_dir=folder / "continued")
    second = train(parse("train_ppo_ray", words))
    lines = rounds(first.run_dir) + rounds(second.run_dir)
    assert [line["global_step"] for line in lines] == list(range(1, 9))
    total = torch.cuda.mem_get_info()[1] / 2**30
    for line in lines:
        assert line["logprobs_diff"] < 0.1
        assert line["memory/peak_generation_gb"] > 0.7 * total
        assert line["memory/peak_training_gb"] < 0.4 * total

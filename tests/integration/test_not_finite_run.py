"""A number that is none, once in a whole run: the run ends as if that step had been left out, and says so."""

import json
import math
from pathlib import Path

import pytest
import torch
from harmed_runs import Harm
from preloaded import run_ranks
from safetensors.torch import load_file

from openrlhf.backends.torch import TorchBackend
from openrlhf.learners.rank import RankLearners
from openrlhf.observability.loggers import read_metrics, without_times
from openrlhf.observability.signs import read_warnings

REWARD = """
import math

def reward_func(queries, prompts, labels):
    if {broken!r} and prompts[0] == {prompt!r}:
        {harm}
    return [float(sum(map(ord, query)) % 7) for query in queries]
"""
"""Differs between the samples of almost any prompt, so that a random model gets a gradient."""


@pytest.fixture
def train(cli, tmp_path):
    """Four optimizer steps; returns what was said, the saved weights and the numbers logged."""

    def run(name: str, reward: str = REWARD.format(broken=False, prompt="", harm="pass"), **overrides):
        file = tmp_path / f"{name}.py"
        file.write_text(reward)
        run_dir = tmp_path / f"run_{name}"
        ran = cli(
            reward__remote_url=file,
            rollout__batch_size=2,
            train__batch_size=4,
            actor__adam__lr="1e-3",
            ckpt__output_dir=tmp_path / name,
            logger__run_dir=run_dir,
            **overrides,
        )
        metrics = [without_times(record) for record in read_metrics(run_dir / "metrics.jsonl")]
        saved = load_file(tmp_path / name / "model.safetensors") if ran.rc == 0 else {}
        return ran, saved, metrics, read_warnings(run_dir / "warnings.jsonl")

    return run


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_harmed_step_of_rl_is_as_if_it_had_been_left_out(train, dtype):
    with Harm("left out", TorchBackend, here=True):
        _, expected, numbers, _ = train("control", ds__param_dtype=dtype)
    for harm in ("gradient", "weights", "optimizer"):
        with Harm(harm, TorchBackend, here=True):
            ran, saved, metrics, warnings = train(harm, ds__param_dtype=dtype)
        assert ran.rc == 0
        assert same(saved, expected), harm
        assert all(torch.isfinite(tensor).all() for tensor in saved.values())
        assert metrics == numbers
        assert [record.get("actor_skipped_steps") for record in metrics] == [None, None, 1.0, None]
        (warning,) = [w for w in warnings if w["kind"] == "numbers"]
        assert warning["step"] == 3
        assert "an optimizer step of the policy was left out: " in warning["text"]
        assert f"warning: step 3: {warning['text']}" in ran.err


def test_a_weight_that_breaks_after_the_last_step_comes_back_before_it_is_sampled_from(train, monkeypatch):
    _, expected, numbers, _ = train("control")
    rounds, require = [], TorchBackend.require_finite

    @torch.no_grad()
    def broken(self):
        rounds.append(self)
        if len(rounds) == 2:
            next(self.module.parameters()).view(-1)[3] = math.inf
        return require(self)

    monkeypatch.setattr(TorchBackend, "require_finite", broken)
    ran, saved, metrics, warnings = train("harmed")
    assert ran.rc == 0
    assert same(saved, expected)
    assert metrics == numbers
    assert [w["step"] for w in warnings if w["kind"] == "numbers"] == [2]


def test_a_reward_that_is_none_is_the_failure_of_its_group(train, inputs):
    """As one that raises is: the rest of the round is trained on, and the other rounds never know."""
    prompt = inputs.records[2]["input"]
    outcomes = {
        name: train(name, REWARD.format(broken=True, prompt=prompt, harm=harm))
        for name, harm in (("nan", "return [0.5, math.nan]"), ("inf", "return math.inf"), ("raises", "raise KeyError"))
    }
    _, expected, numbers, _ = outcomes["raises"]
    assert sum(record["rollout/failed"] for record in numbers) == 2
    for name in ("nan", "inf"):
        ran, saved, metrics, _ = outcomes[name]
        assert ran.rc == 0
        assert same(saved, expected)
        assert metrics == numbers
        assert f"must be finite, got {name} (float)" in ran.err


def test_steps_that_are_never_finite_end_the_run_and_keep_its_checkpoints(train, tmp_path, monkeypatch):
    """From the second step on all gradients are NaN: the run ends at the third, and the checkpoints hold numbers."""
    assign, rounds = RankLearners.assign_advantages, []

    def harmed(self, batch):
        rounds.append(self)
        metrics = assign(self, batch)
        if len(rounds) > 1:
            batch.advantages_A[:] = math.nan
        return metrics

    monkeypatch.setattr(RankLearners, "assign_advantages", harmed)
    folder = tmp_path / "ckpt"
    ran, *_ = train("ends", train__max_skipped_steps=2, ckpt__path=folder, ckpt__save_steps=1, ckpt__max_num=1)
    assert ran.rc == 1
    (error,) = ran.errors
    assert "error: 2 optimizer steps of the policy in a row were left out (--train.max_skipped_steps)" in error
    assert "not finite: the advantage of prompt " in error
    assert not (tmp_path / "ends").exists()
    (kept,) = folder.glob("global_step*")
    for file in kept.rglob("*.safetensors"):
        assert all(torch.isfinite(tensor).all() for tensor in load_file(file).values() if tensor.is_floating_point())
    assert (kept / "actor" / "model.safetensors").exists()


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_harmed_step_on_one_of_two_ranks(inputs, tmp_path, stage):
    """DeepSpeed, fine-tuning: the weights that are saved are those of a run whose third step was left out."""
    records = [json.dumps({"input": f"{i} {i + 1}", "output": str(i * 7 % 10)}) for i in range(32)]
    (tmp_path / "data.jsonl").write_text("\n".join(records))
    harms = ("left out", "gradient", "weights", "optimizer") if stage < 3 else ("gradient", "weights", "optimizer")
    runs = [[harm, "train_sft", *_words(inputs.model, tmp_path, harm, stage)] for harm in harms]
    (tmp_path / "runs.json").write_text(json.dumps(runs))
    script = str(Path(__file__).parents[1] / "support" / "harmed_runs.py")
    said = tmp_path / "said.txt"
    run_ranks(2, [script, str(tmp_path / "runs.json")], cwd=tmp_path, said=said, environment={})
    saved = {harm: load_file(tmp_path / harm / "model" / "model.safetensors") for harm in harms}
    for harm in harms[1:]:
        assert same(saved[harm], saved[harms[0]]), harm
        (warning,) = read_warnings(tmp_path / harm / "run" / "warnings.jsonl")
        assert warning["step"] == 3
        assert "an optimizer step was left out: " in warning["text"]
        metrics = [r for r in read_metrics(tmp_path / harm / "run" / "metrics.jsonl") if r["kind"] == "train"]
        assert [record.get("skipped_steps") for record in metrics] == [None, None, 1.0, None]


def _words(model: Path, folder: Path, name: str, stage: int) -> list[str]:
    values = {
        "model.model_name_or_path": model,
        "data.dataset": folder / "data.jsonl",
        "data.output_key": "output",
        "data.input_template": "{}",
        "data.max_len": 32,
        "train.batch_size": 8,
        "train.micro_batch_size": 2,
        "train.max_epochs": 1,
        "ds.zero_stage": stage,
        "ds.param_dtype": "fp32",
        "adam.lr": 1e-3,
        "ckpt.output_dir": folder / name / "model",
        "logger.run_dir": folder / name / "run",
    }
    return [word for key, value in values.items() for word in (f"--{key}", str(value))]

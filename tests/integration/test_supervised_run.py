"""The supervised commands as users call them: files in, a model folder out."""

import json
import math
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from openrlhf.observability.loggers import read_metrics


@pytest.fixture
def run(inputs, data, workplace, capfd, caplog):
    """Runs a command in this process from an empty directory: exit status, metrics, what it said."""
    from importlib import import_module

    import openrlhf.runs.supervised_assembly  # noqa: F401, seconds of imports

    def start(command, *words, **overrides):
        values = {
            "model.model_name_or_path": inputs.model,
            "data.max_len": 16,
            "train.batch_size": 16,
            "train.max_epochs": 2,
            "adam.lr": 1e-3,
            "ckpt.output_dir": workplace / "out",
            "logger.run_dir": workplace / "run",
        } | {name.replace("__", "."): value for name, value in overrides.items()}
        argv = [word for name, value in values.items() for word in (f"--{name}", str(value))]
        rc = import_module(f"openrlhf.cli.{command}").main([*argv, *words])
        said = capfd.readouterr()
        return rc, said.err + caplog.text

    return start


def history(tmp_path, kind):
    return [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == kind]


def sft(run, data, *words, **overrides):
    defaults = {"data__dataset": data / "sft.jsonl", "data__output_key": "output", "data__input_template": "{}"}
    return run("train_sft", *words, **defaults | overrides)


def test_sft_from_files_to_a_folder(run, data, tmp_path):
    """64 examples, 16 a step, 2 epochs: 8 steps; evaluated every 3 and at the end of both epochs."""
    rc, err = sft(run, data, "--eval.dataset", str(data / "sft_eval.jsonl"), "--eval.steps", "3")
    assert rc == 0, err
    train, evaluations = history(tmp_path, "train"), history(tmp_path, "eval")
    assert [r["step"] for r in train] == list(range(1, 9))
    assert [r["step"] for r in evaluations] == [3, 4, 6, 8]
    assert {"gpt_loss", "loss_mean", "lr", "grad_norm", "global_step", "perf/tokens_per_second"} <= train[0].keys()
    assert evaluations[-1]["eval gpt_loss"] < evaluations[0]["eval gpt_loss"]

    for folder in (tmp_path / "out", tmp_path / "run" / "model"):
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for line in (data / "sft_eval.jsonl").read_text().splitlines():
        record = json.loads(line)
        ids = torch.tensor(tokenizer(record["input"] + record["output"] + "<eos>")["input_ids"])
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0].log_softmax(-1)
        learnt = torch.arange(4, len(ids))
        total -= float(logprobs[learnt - 1, ids[learnt]].sum())
        count += len(learnt)
    assert evaluations[-1]["eval gpt_loss"] == pytest.approx(total / count, rel=1e-4)
    assert "<strong class" in (tmp_path / "run" / "report.html").read_text()


def test_the_token_budget_changes_nothing(run, data, tmp_path):
    losses = []
    for micro, name in ((1, "a"), (8, "b")):
        rc, err = sft(run, data, train__micro_batch_size=micro, logger__run_dir=tmp_path / name, train__max_epochs=1)
        assert rc == 0, err
        losses.append([r["gpt_loss"] for r in read_metrics(tmp_path / name / "metrics.jsonl")])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("command", ["train_sft", "train_rm", "train_dpo"])
def test_fp16_trains_as_fp32_does(run, data, tmp_path, command):
    """Eight steps. A resolution of 2^-11 shows in the third digit; without loss scaling gradients would be off by more."""
    keys = {"data__output_key": "output", "data__input_template": "{}"} if command == "train_sft" else {}
    file = data / ("sft.jsonl" if command == "train_sft" else "pairs.jsonl")
    loss, histories = ("gpt_loss" if command == "train_sft" else "loss"), []
    for dtype in ("fp32", "fp16"):
        rc, err = run(
            command,
            *("--ds.param_dtype", dtype),
            data__dataset=file,
            **keys or {"data__prompt_key": "prompt"},
            logger__run_dir=tmp_path / dtype,
        )
        assert rc == 0, err
        rows = [r for r in read_metrics(tmp_path / dtype / "metrics.jsonl") if r["kind"] == "train"]
        histories.append([number for row in rows for number in (row[loss], row["grad_norm"], row["lr"])])
    assert len(histories[0]) == 24
    assert histories[1] == pytest.approx(histories[0], rel=2e-2)


@pytest.mark.parametrize("with_eval", [True, False])
def test_a_reward_model_is_written_with_its_statistics(run, data, tmp_path, with_eval):
    """Without evaluation data the first hundredth of the training pairs, here one, stands in."""
    words = ["--eval.dataset", str(data / "pairs_eval.jsonl")] if with_eval else []
    rc, err = run("train_rm", *words, data__dataset=data / "pairs.jsonl", data__prompt_key="prompt")
    assert rc == 0, err
    train, last = history(tmp_path, "train"), history(tmp_path, "eval")[-1]
    assert {"loss", "acc", "chosen_reward", "reject_reward", "loss_mean", "acc_mean", "lr"} <= train[0].keys()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["mean"] == pytest.approx(last["reward_mean"])
    assert config["std"] == pytest.approx(last["reward_std"])
    assert config["value_head_prefix"] == "score"

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out", num_labels=1).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    lines = (data / ("pairs_eval.jsonl" if with_eval else "pairs.jsonl")).read_text().splitlines()
    pairs = [json.loads(line) for line in (lines if with_eval else lines[:1])]
    scores = []
    for pair in pairs:
        for answer in (pair["chosen"], pair["rejected"]):
            ids = tokenizer(pair["prompt"] + answer + "<eos>", return_tensors="pt")["input_ids"]
            with torch.no_grad():
                scores.append(model(ids).logits.item())
    assert last["reward_mean"] == pytest.approx(sum(scores) / len(scores), abs=1e-4)
    right = [c > r for c, r in zip(scores[0::2], scores[1::2], strict=True)]
    assert last["acc_mean"] == pytest.approx(sum(right) / len(right))


@pytest.mark.parametrize("words", [[], ["--model.ipo_enable"], ["--model.nll_loss_coef", "0.1", "--ref.offload"]])
def test_dpo_from_files_to_a_folder(run, data, tmp_path, words):
    rc, err = run(
        "train_dpo", *words, "--eval.dataset", str(data / "pairs_eval.jsonl"),
        data__dataset=data / "pairs.jsonl", data__prompt_key="prompt",
        # The square of ipo has its minimum at a margin of 5, which eight large steps jump over.
        adam__lr=5e-4 if "--model.ipo_enable" in words else 1e-3,
    )  # fmt: skip
    assert rc == 0, err
    train, evaluations = history(tmp_path, "train"), history(tmp_path, "eval")
    if not words:
        assert train[0]["loss"] == pytest.approx(math.log(2.0), rel=1e-4), "the policy starts as its reference"
    assert ("nll_loss" in train[0]) == ("--model.nll_loss_coef" in words)
    assert train[-1]["acc"] > 0.9
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"]
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")


def test_kto_from_files_to_a_folder(run, data, tmp_path):
    rc, err = run("train_dpo", data__dataset=data / "judged.jsonl", model__loss_type="kto")
    assert rc == 0, err
    train = history(tmp_path, "train")
    assert train[0]["loss"] == pytest.approx(0.5, rel=1e-3), "nothing is preferred yet: 1 − σ(0)"
    assert train[-1]["loss"] < train[0]["loss"]
    assert train[-1]["chosen_reward"] > train[-1]["reject_reward"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"train__batch_size": 65}, "--train.batch_size 65 is more than the 64 samples"),
        ({"data__dataset": "nope.jsonl"}, "--data.dataset: there is no file nope.jsonl"),
        ({"model__model_name_or_path": "./nope"}, "--model.model_name_or_path ./nope: no such folder"),
        ({"data__output_key": "answer"}, "answer"),
        ({"ckpt__output_dir": "/dev/null/x"}, "--ckpt.output_dir"),
    ],
)
def test_what_cannot_work_is_one_line(run, data, overrides, message):
    rc, err = sft(run, data, **overrides)
    assert rc in (1, 2)
    assert message in err
    assert "Traceback" not in err


def test_a_missing_logger_is_found_before_anything_is_loaded(run, data, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    rc, err = sft(run, data, "--use_wandb", "SECRET", model__model_name_or_path="./nope")
    assert rc == 2
    assert "pip install -e '.[wandb]' in the repository" in err
    assert "SECRET" not in err
    assert not (tmp_path / "run").exists()

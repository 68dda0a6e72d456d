"""DeepSpeed on two CPU ranks trains what one process with plain torch trains, step by step, whatever is shared out."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, Qwen2Config, Qwen2ForCausalLM

from openrlhf.demo.model import make_tokenizer
from openrlhf.observability.loggers import read_metrics

SUPPORT = Path(__file__).resolve().parents[1] / "support"
REPOSITORY = SUPPORT.parents[1]
STEPS = 20

TRAINERS = {
    "sft": ("train_sft", {"data.dataset": "sft.jsonl", "data.output_key": "output", "data.input_template": "{}", "eval.dataset": "sft_eval.jsonl"}),
    "rm": ("train_rm", {"data.dataset": "pairs.jsonl", "data.prompt_key": "prompt", "eval.dataset": "pairs_eval.jsonl"}),
    "dpo": ("train_dpo", {"data.dataset": "pairs.jsonl", "data.prompt_key": "prompt", "eval.dataset": "pairs_eval.jsonl"}),
    "kto": ("train_dpo", {"data.dataset": "judged.jsonl", "model.loss_type": "kto", "eval.dataset": "judged.jsonl"}),
}  # fmt: skip
TWO_RANKS = {
    "zero 0": {"ds.zero_stage": 0},
    "zero 1": {"ds.zero_stage": 1},
    "zero 2": {"ds.zero_stage": 2},
    "zero 3": {"ds.zero_stage": 3},
    "offload": {"ds.zero_stage": 2, "ds.adam_offload": True},
    "zero 3 offload": {"ds.zero_stage": 3, "ds.adam_offload": True},
    "checkpointing": {"ds.zero_stage": 3, "model.gradient_checkpointing_enable": True},
    "small budget": {"ds.zero_stage": 3, "train.micro_batch_size": 1},
    "lora": {"ds.zero_stage": 3, "ds.lora.rank": 4},
}
CASES = [("sft", way) for way in TWO_RANKS]
CASES += [(trainer, f"zero {stage}") for trainer in ("rm", "dpo", "kto") for stage in (2, 3)]


class Runs:
    """Command lines and what became of them, one folder each."""

    def __init__(self, folder: Path, model: Path, data: Path) -> None:
        self.folder = folder
        self._model = model
        self._data = data

    def words(self, name: str, trainer: str, **flags) -> list[str]:
        command, own = TRAINERS[trainer]
        values = {
            "model.model_name_or_path": self._model,
            "data.max_len": 16,
            "train.batch_size": 16,
            "train.micro_batch_size": 4,
            "train.max_epochs": STEPS // 4,
            "adam.lr": 1e-3,
            "adam.weight_decay": 0.1,
            "ckpt.output_dir": self.folder / name / "model",
            "logger.run_dir": self.folder / name / "run",
        } | {key: self._data / value if key.endswith("dataset") else value for key, value in own.items()}
        values |= flags
        return [command, *(w for key, value in values.items() for w in ([f"--{key}"] if value is True else [f"--{key}", str(value)]))]  # fmt: skip

    def start(self, *command: str) -> subprocess.CompletedProcess:
        env = os.environ | {
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "HF_HOME": str(self.folder / "cache"),
        }
        done = subprocess.run(command, env=env, cwd=self.folder, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-6000:]
        return done

    def history(self, name: str, *metrics: str) -> list[list[float]]:
        rows = [r for r in read_metrics(self.folder / name / "run" / "metrics.jsonl") if r["kind"] == "train"]
        return [[row[metric] for metric in metrics] for row in rows]

    def evaluation(self, name: str) -> dict[str, float]:
        rows = [r for r in read_metrics(self.folder / name / "run" / "metrics.jsonl") if r["kind"] == "eval"]
        return {key: value for key, value in rows[-1].items() if "loss" in key or "acc" in key or "reward" in key}

    def model(self, name: str) -> Path:
        return self.folder / name / "model"


def torchrun(ranks: int, *words: str) -> list[str]:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*run, *words]


def write_model(folder: Path) -> Path:
    """The demo's tokenizer with a much smaller model: four heads and an even vocabulary, so that it can be cut in two."""
    tokenizer = make_tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=-(-len(tokenizer) // 8) * 8,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def runs(tmp_path_factory, data) -> Runs:
    """Every case on two ranks, and each trainer in one process with plain torch."""
    folder = tmp_path_factory.mktemp("runs")
    runs = Runs(folder, write_model(folder / "tiny"), data)
    alone = [runs.words(f"alone {t}", t) for t in TRAINERS] + [runs.words("alone lora", "sft", **{"ds.lora.rank": 4})]
    pairs = [runs.words(f"{way} {trainer}", trainer, **TWO_RANKS[way]) for trainer, way in CASES]
    for name, list_, start in (("alone", alone, [sys.executable]), ("two", pairs, torchrun(2))):
        (runs.folder / f"{name}.json").write_text(json.dumps(list_))
        runs.start(*start, str(SUPPORT / "many_runs.py"), str(runs.folder / f"{name}.json"))
    return runs


@pytest.mark.parametrize(("trainer", "way"), CASES)
def test_losses_and_gradient_norms_are_those_of_one_process(runs, trainer, way):
    loss = "gpt_loss" if trainer == "sft" else "loss"
    expected = runs.history("alone lora" if way == "lora" else f"alone {trainer}", loss, "grad_norm", "lr")
    measured = runs.history(f"{way} {trainer}", loss, "grad_norm", "lr")
    assert len(expected) == STEPS
    for step, (ours, theirs) in enumerate(zip(measured, expected, strict=True)):
        assert ours == pytest.approx(theirs, rel=1e-4), (step, ours, theirs)


@pytest.mark.parametrize(("trainer", "way"), CASES)
def test_evaluation_is_that_of_one_process(runs, trainer, way):
    expected = runs.evaluation("alone lora" if way == "lora" else f"alone {trainer}")
    assert runs.evaluation(f"{way} {trainer}") == pytest.approx(expected, rel=1e-3)
    assert expected


@pytest.mark.parametrize("way", [way for trainer, way in CASES if trainer == "sft" and way != "lora"])
def test_the_model_that_is_left_is_that_of_one_process(runs, way):
    expected = AutoModelForCausalLM.from_pretrained(runs.model("alone sft")).state_dict()
    written = AutoModelForCausalLM.from_pretrained(runs.model(f"{way} sft")).state_dict()
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        assert written[name] == pytest.approx(tensor, rel=1e-3, abs=1e-4), name


def test_a_reward_model_of_stage_3_has_its_head(runs):
    for name in ("alone rm", "zero 3 rm"):
        AutoModelForSequenceClassification.from_pretrained(runs.model(name), num_labels=1)
    expected, written = (
        AutoModelForSequenceClassification.from_pretrained(runs.model(name)).score.weight
        for name in ("alone rm", "zero 3 rm")
    )
    assert written.detach() == pytest.approx(expected.detach(), rel=1e-3, abs=1e-4)

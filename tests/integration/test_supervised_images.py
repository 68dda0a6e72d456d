"""SFT, reward models, DPO and KTO on records whose images alone decide: every question is the same."""

import json
import math

import pytest
from vision_models import image, write_vision_model

from openrlhf.config.parser import parse
from openrlhf.runs.supervised_assembly import train

pytestmark = pytest.mark.slow

LETTERS = "abcdefgh"


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Trains on these records; returns the last evaluation, which is on the same records."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for number in range(len(LETTERS)):
        image(number).save(tmp_path / f"{number}.png")

    def trained(kind, command, records, *flags):
        model = write_vision_model(kind, tmp_path / "model")
        data = tmp_path / "data.jsonl"
        data.write_text("".join(json.dumps(record) + "\n" for record in records))
        words = [
            *("--model.model_name_or_path", str(model), "--ds.param_dtype", "fp32"),
            *("--data.dataset", str(data), "--eval.dataset", str(data), "--data.max_len", "64"),
            *("--data.max_images_per_prompt", "2", "--data.apply_chat_template"),
            *("--train.batch_size", "8", "--train.micro_batch_size", "4", "--adam.lr", "3e-3"),
            *("--ckpt.output_dir", str(tmp_path / "out"), "--logger.run_dir", str(tmp_path / "run")),
        ]
        return train(parse(command, [*words, *flags])).evaluation

    return trained


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "llava"])
def test_sft_reads_the_images(run, kind, tmp_path):
    """A letter for each of eight images. Without the images a letter costs log 8, which is 0.69 per token to learn:
    the letter, the end of the turn and end-of-sequence."""
    records = [{"input": "which?", "output": letter, "images": f"{i}.png"} for i, letter in enumerate(LETTERS)]
    found = run(kind, "train_sft", records, "--data.output_key", "output", "--train.max_epochs", "40")
    assert found["eval gpt_loss"] < 0.1 < math.log(8) / 3
    assert (tmp_path / "out" / "preprocessor_config.json").is_file()


PAIRS = [
    {
        "prompt": [{"role": "user", "content": [{"type": "image", "path": f"{i}.png"}, {"type": "text", "text": "?"}]}],
        "chosen": [{"role": "assistant", "content": "ab"[i % 2]}],
        "rejected": [{"role": "assistant", "content": "ba"[i % 2]}],
    }
    for i in range(8)
]


@pytest.mark.parametrize(("kind", "command"), [("qwen3_vl", "train_rm"), ("qwen2_5_vl", "train_dpo")])
def test_preferences_that_hang_on_the_image(run, kind, command):
    """What is chosen after one image is rejected after the next: half of the pairs are right by chance."""
    found = run(kind, command, PAIRS, "--train.max_epochs", "30")
    assert found["acc_mean"] == 1.0


def test_kto_with_images(run):
    records = [
        {"prompt": "<image>?", "images": [f"{i}.png"], "response": answer, "label": answer == "ab"[i % 2]}
        for i in range(8)
        for answer in "ab"
    ]
    found = run("qwen2_5_vl", "train_dpo", records, "--model.loss_type", "kto", "--train.max_epochs", "20")
    assert found["acc_mean"] == 1.0

"""Checkpoints that DeepSpeed wrote and its own tool made universal: they are read to the bit, and runs begin with them."""

import shutil
from importlib import import_module
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_deepspeed import Runs, write_model
from universal_checkpoints import STAGES, STEPS

from openrlhf.checkpoint.training_state import read_training_state
from openrlhf.checkpoint.universal import find_universal
from openrlhf.observability.loggers import read_metrics

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def written(tmp_path_factory, data) -> Runs:
    folder = tmp_path_factory.mktemp("universal")
    runs = Runs(folder, write_model(folder / "tiny"), data)
    runs.run("two", "universal_checkpoints.py", folder / "tiny", folder)
    return runs


@pytest.mark.parametrize("stage", STAGES)
def test_what_deepspeed_converts_is_what_the_backend_had(written, stage):
    expected = load_file(written.folder / f"zero{stage}.safetensors")
    checkpoint = find_universal(written.folder / f"zero{stage}")
    names = [name.removeprefix("parameters/") for name in expected if name.startswith("parameters/")]
    tensors = checkpoint.tensors(names)
    assert checkpoint.steps == STEPS
    assert set(tensors) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name


@pytest.mark.parametrize("stage", STAGES)
def test_a_run_begins_there_and_goes_on_from_its_own(written, tmp_path, monkeypatch, capfd, caplog, stage):
    """Five steps in all: two after DeepSpeed's three, the first of them written; then the same command again."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    ckpt = tmp_path / "ckpt"
    shutil.copytree(written.folder / f"zero{stage}", ckpt)

    def start(*flags: str) -> tuple[int, str]:
        settings = {"ckpt.path": ckpt, "ckpt.load_enable": True, "ckpt.save_steps": 1, "train.batch_size": 12}
        paths = {"ckpt.output_dir": tmp_path / "model", "logger.run_dir": tmp_path / "run", "train.max_epochs": 1}
        command, *words = written.words("one", "sft", **settings, **paths)
        status = import_module(f"openrlhf.cli.{command}").main([*words, *flags])
        return status, capfd.readouterr().err + caplog.text

    status, said = start()
    assert status == 1
    assert "holds checkpoints in DeepSpeed's format" in said
    assert "--ds.use_universal_ckpt" in said

    status, said = start("--ds.use_universal_ckpt")
    assert status == 0, said
    steps = [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if row["kind"] == "train"]
    assert steps == [4, 5]
    _, tensors = read_training_state(ckpt / "global_step5" / "model" / "training_state")
    assert {float(tensors[name]) for name in tensors if name.startswith("step/")} == {5.0}
    assert Path(ckpt / f"global_step{STEPS}").is_dir()

    status, said = start("--ds.use_universal_ckpt")
    assert status == 0, said
    assert "global_step5" in said

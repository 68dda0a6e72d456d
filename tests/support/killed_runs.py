"""SFT as a process of its own that is killed with SIGKILL and started again with the same command."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors.torch import load_file

from openrlhf.observability.loggers import read_metrics, without_times

REPOSITORY = Path(__file__).resolve().parents[2]
DIGITS = "0123456789"
SAVE_STEPS = 4


def write_records(path: Path, records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def make_inputs(folder: Path, *, count: int = 64) -> None:
    """`model`, and files in which the right answer repeats the prompt's first digit."""
    from openrlhf.demo.model import write_model

    write_model(folder / "model", seed=0)
    rng = random.Random(0)
    prompts = ["".join(rng.choices(DIGITS, k=3)) + ">" for _ in range(count)]
    rows = [(p, p[0] * rng.randint(1, 4), str((int(p[0]) + 5) % 10) * 2) for p in prompts]
    write_records(folder / "sft.jsonl", [{"input": p, "output": right} for p, right, _ in rows])
    pairs = [{"prompt": p, "chosen": right, "rejected": wrong} for p, right, wrong in rows]
    write_records(folder / "pairs.jsonl", pairs)
    judged = [{"prompt": p, "response": a, "label": a == right} for p, right, wrong in rows for a in (right, wrong)]
    write_records(folder / "judged.jsonl", judged)


def flags(inputs: Path, folder: Path, **overrides) -> list[str]:
    """`overrides` are flags, `__` for `.`; True is a bare switch, None leaves a flag out."""
    values = {
        "model.model_name_or_path": inputs / "model",
        "data.max_len": 16,
        "train.batch_size": 8,
        "train.max_epochs": 4,
        "adam.lr": 1e-3,
        "lr_scheduler": "cosine",
        "ckpt.output_dir": folder / "out",
        "ckpt.path": folder / "checkpoints",
        "ckpt.save_steps": SAVE_STEPS,
        "ckpt.max_num": 2,
        "logger.run_dir": folder / "run",
    } | {name.replace("__", "."): value for name, value in overrides.items()}
    words = []
    for name, value in values.items():
        if value is None:
            continue
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


@dataclass(frozen=True)
class Sft:
    """A command in a folder of its own: 64 examples, 8 a step, 4 epochs: 32 steps, evaluated after each epoch."""

    inputs: Path
    folder: Path

    STEPS = 32

    def start(self) -> subprocess.Popen:
        self.folder.mkdir(exist_ok=True)
        words = flags(
            self.inputs, self.folder, data__dataset=self.inputs / "sft.jsonl", data__output_key="output",
            data__input_template="{}", eval__dataset=self.inputs / "sft.jsonl", ckpt__load_enable=True,
        )  # fmt: skip
        with (self.folder / "said.txt").open("ab") as said:
            return subprocess.Popen(
                [sys.executable, "-m", "openrlhf.cli.train_sft", *words],
                stdout=said,
                stderr=said,
                cwd=self.folder,
                env=os.environ
                | {
                    "OMP_NUM_THREADS": "1",
                    "PYTHONPATH": str(REPOSITORY),
                    "HF_DATASETS_CACHE": str(self.inputs / "cache"),
                },
            )

    def run(self) -> None:
        process = self.start()
        assert process.wait(timeout=300) == 0, self.said

    def kill(self, at: Literal["logged", "writing"], step: int) -> None:
        """Start it, and SIGKILL as soon as that step is logged, or its checkpoint is being written."""
        reached = self.logged if at == "logged" else self.writing
        process = self.start()
        deadline = time.monotonic() + 300
        try:
            while process.poll() is None and not reached(step) and time.monotonic() < deadline:
                time.sleep(0.0005)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == -signal.SIGKILL, self.said
        assert reached(step), "a write that was begun was not ended"

    @property
    def metrics(self) -> Path:
        """A run that is killed before its first checkpoint begins anew, and so does its directory."""
        return max(self.folder.glob("run*"), default=self.folder / "run") / "metrics.jsonl"

    def logged(self, step: int) -> bool:
        """Whether that step is in the metrics."""
        path = self.metrics
        return path.exists() and path.read_bytes().count(b'"kind": "train"') >= step

    def writing(self, step: int) -> bool:
        """Whether that step's checkpoint is being written."""
        return (self.folder / "checkpoints" / f".global_step{step}.partial").exists()

    @property
    def said(self) -> str:
        return (self.folder / "said.txt").read_text()

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "out" / "model.safetensors")

    @property
    def history(self) -> list[dict]:
        """Everything that was measured, times aside."""
        return [without_times(record) for record in read_metrics(self.metrics)]


def assert_same_end(resumed: Sft, straight: Sft) -> None:
    """Weights to the bit, and one history of metrics."""
    ours, theirs = resumed.weights, straight.weights
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert resumed.history == straight.history
    left = sorted(p.name for p in (resumed.folder / "checkpoints").iterdir() if p.name != ".lock")
    assert left == [f"global_step{Sft.STEPS - SAVE_STEPS}", f"global_step{Sft.STEPS}", "latest"]

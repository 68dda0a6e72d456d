"""Short real runs on the demos' tasks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import yaml

from openrlhf.cli.demo import prepare, rl_flags
from openrlhf.config import parse
from openrlhf.config.commands import RLConfig
from openrlhf.demo.task import Task
from openrlhf.observability.loggers import read_metrics
from openrlhf.runs.launchers import LauncherFactory, make_launcher
from openrlhf.runs.rl_assembly import train


@dataclass(frozen=True)
class Demo:
    """A task, and the folder with its data and warmed-up model."""

    task: Task
    folder: Path

    @staticmethod
    def prepared(task: Task, folder: Path) -> Demo:
        (folder / "inputs").mkdir()
        prepare(task, folder / "inputs", seed=0)
        return Demo(task, folder)


def configure(demo: Demo, run_dir: Path, *overrides: str, steps: int, without: Collection[str] = ()) -> RLConfig:
    """The demo's RL phase from its warmed-up model, with these words over its flags, and `without` some of them."""
    flags = rl_flags(demo.task, demo.folder, seed=0, steps=steps)
    flags |= {"logger.run_dir": str(run_dir), "ckpt.output_dir": str(run_dir / "model"), "eval.steps": -1}
    flags = {name: value for name, value in flags.items() if name not in without}
    run_dir.mkdir()
    (run_dir / "flags.yaml").write_text(yaml.safe_dump(flags))
    return parse("train_ppo_ray", ["--config", str(run_dir / "flags.yaml"), *overrides])


def run(
    demo: Demo,
    run_dir: Path,
    *overrides: str,
    steps: int,
    without: Collection[str] = (),
    make_launcher: LauncherFactory = make_launcher,
) -> Path:
    """Such a run, to its end; returns the run directory."""
    return train(
        configure(demo, run_dir, *overrides, steps=steps, without=without), make_launcher=make_launcher
    ).run_dir


def scores(run_dir: Path) -> list[float]:
    """On held-out problems, one for each evaluation."""
    evaluations = [r for r in read_metrics(run_dir / "metrics.jsonl") if r["kind"] == "eval"]
    return [next(r[name] for name in r if name.endswith("_pass1")) for r in evaluations]


def column(run_dir: Path, name: str) -> list[float]:
    """A metric, step by step."""
    return [r[name] for r in read_metrics(run_dir / "metrics.jsonl") if r["kind"] == "train" and name in r]

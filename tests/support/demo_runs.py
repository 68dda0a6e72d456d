"""Short real runs on the demo's task."""

from pathlib import Path

import yaml

from openrlhf.cli.demo import rl_flags
from openrlhf.config import parse
from openrlhf.observability.loggers import read_metrics
from openrlhf.trainers.assembly import train


def run(demo: Path, run_dir: Path, *overrides: str, steps: int) -> Path:
    """The demo's RL phase from its warmed-up model, with these words over its flags; returns the run directory."""
    flags = rl_flags(demo, seed=0, steps=steps)
    flags |= {"logger.run_dir": str(run_dir), "ckpt.output_dir": str(run_dir / "model"), "eval.steps": -1}
    run_dir.mkdir()
    (run_dir / "flags.yaml").write_text(yaml.safe_dump(flags))
    return train(parse("train_ppo_ray", ["--config", str(run_dir / "flags.yaml"), *overrides])).run_dir


def scores(run_dir: Path) -> list[float]:
    """On held-out problems, one for each evaluation."""
    return [r["eval_sorting_pass1"] for r in read_metrics(run_dir / "metrics.jsonl") if r["kind"] == "eval"]


def column(run_dir: Path, name: str) -> list[float]:
    """A metric, step by step."""
    return [r[name] for r in read_metrics(run_dir / "metrics.jsonl") if r["kind"] == "train" and name in r]

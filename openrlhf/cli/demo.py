"""`openrlhf demo`: from random weights to a trained model on this machine, in minutes, with nothing to download."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openrlhf.demo.task import Task

PROMPTS = 128
"""The number of prompts of an RL step."""


def main(argv: Sequence[str] | None = None) -> int:
    """Make task and model, then run `train_ppo_ray` on them through the code path of every user's run."""
    parser = _parser()
    options, overrides = parser.parse_known_args(argv)

    import yaml

    from openrlhf.config.fields import ConfigError
    from openrlhf.config.parser import enter
    from openrlhf.demo import digits, hunt, sorting
    from openrlhf.observability.run_directory import free_directory

    kind, name = sorting, "demo"
    if options.agent or options.images:
        kind, name = (hunt, "agent-demo") if options.agent else (digits, "image-demo")
    try:
        task = kind.make_task(seed=options.seed)
    except ConfigError as error:
        parser.error(str(error))
    if options.steps is not None and not 1 <= options.steps <= task.max_steps(PROMPTS):
        parser.error(f"--steps must be 1 to {task.max_steps(PROMPTS)}: after that the problems repeat")
    run_dir = free_directory(Path(options.run_dir or f"runs/{name}-seed{options.seed}"))
    config_file = run_dir / "inputs" / "rl.yaml"
    config_file.parent.mkdir(parents=True, exist_ok=True)
    flags = rl_flags(task, run_dir, seed=options.seed, steps=options.steps or task.steps)
    config_file.write_text(yaml.safe_dump(flags, sort_keys=False))
    command = ["--config", str(config_file), *overrides]
    return enter(
        "train_ppo_ray", command, lambda config: run(config, task, run_dir, seed=options.seed, command=command)
    )


def run(config: Any, task: Task, run_dir: Path, seed: int, command: Sequence[str]) -> int:
    """The demo itself; `command` is what a user would type for its RL phase."""
    from openrlhf.observability.loggers import read_metrics
    from openrlhf.rollout.vllm.spare import prepared, wants_spare
    from openrlhf.runs.rl_assembly import train, user_errors_end_the_run

    with user_errors_end_the_run() as ended, prepared(wants_spare(config, os.environ)):
        started = time.monotonic()
        prepare(task, run_dir / "inputs", seed=seed)
        _say(f"Now RL: python -m openrlhf.cli.train_ppo_ray {' '.join(command)}")
        result = train(config, began=time.time())
        assert result.run_dir is not None  # only further ranks of a run have none
        seconds = time.monotonic() - started
        records = read_metrics(result.run_dir / "metrics.jsonl")
        scores = [record[task.score] for record in records if record["kind"] == "eval"]
        _say(f"Success on problems never trained on: {scores[0]:.1%} before RL, {scores[-1]:.1%} after.")
        _say(f"Curves and samples: {result.run_dir / 'report.html'}")
        summary = {
            "score_before": scores[0],
            "score_after": scores[-1],
            "seconds": round(seconds, 1),
            "run_dir": str(result.run_dir),
        }
        print(json.dumps(summary), flush=True)
    return ended.status


def prepare(task: Task, inputs: Path, *, seed: int) -> None:
    """Write data and a warmed-up model to `inputs`: what a user would bring."""
    from openrlhf.demo.model import warm_up, write_model, write_vision_model
    from openrlhf.models.loading import silence_progress_bars

    silence_progress_bars()
    started = time.monotonic()
    task.write(inputs)
    write = write_vision_model if task.has_images else write_model
    write(inputs / "model", seed=seed, characters=task.characters)
    _say(f"Task: {task.description}.")
    _say(f"{len(task.train):,} problems to train on, {len(task.held_out)} others to measure on.")
    _say("Warm-up: supervised steps on a model with random weights.")

    def on_step(step: int, probability: float) -> None:
        if step % 25 == 0:
            _say(f"  step {step:4d}  as worked with probability {probability:.2f}")

    steps = warm_up(inputs / "model", task.train, seed=seed, until=task.warm_up_until, on_step=on_step)
    _say(f"  enough after {steps} steps, {time.monotonic() - started:.0f} s")


def rl_flags(task: Task, run_dir: Path, *, seed: int, steps: int) -> dict[str, Any]:
    """The RL phase, as flags."""
    samples, updates = 8, 4
    return {
        "actor.model_name_or_path": str(run_dir / "inputs" / "model"),
        "data.prompt_dataset": str(run_dir / "inputs" / "train.jsonl"),
        "data.label_key": "label",
        # Evaluation data has the same limit, and is measured on as a whole however short the run is.
        "data.max_samples": max(PROMPTS * steps, len(task.held_out)),
        **({"train.num_episodes": task.epochs} if task.epochs > 1 else {}),
        **({"train.total_steps": steps} if task.epochs > 1 or PROMPTS * steps < len(task.held_out) else {}),
        **task.flags,
        "algo.advantage.estimator": "reinforce_baseline",
        "algo.kl.init_coef": 0,
        "rollout.batch_size": PROMPTS,
        "rollout.n_samples_per_prompt": samples,
        "train.batch_size": PROMPTS * samples // updates,
        "train.dynamic_batch_enable": True,
        "train.seed": seed,
        "eval.dataset": str(run_dir / "inputs" / "held_out.jsonl"),
        "eval.n_samples_per_prompt": 1,
        "eval.steps": 10,
        "eval.at_start": True,
        "ckpt.output_dir": str(run_dir / "model"),
        "logger.run_dir": str(run_dir),
        "vllm.num_engines": 0,
    }


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openrlhf demo",
        description="Make a small model and task, warm it up, train it with RL, and show the score before and after. "
        "Any flag of `openrlhf rl` may follow; it overrides the demo's. "
        "The last line on standard output is one JSON object.",
        allow_abbrev=False,
    )
    parser.add_argument("--seed", type=int, default=0, help="of the task, the model and the training (default 0)")
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--agent", action="store_true", help="a multi-turn task, played by an agent file")
    kinds.add_argument("--images", action="store_true", help="read handwritten digits (needs the extra demo-images)")
    parser.add_argument("--steps", type=int, help="RL steps (default 50; 120 with --images)")
    parser.add_argument(
        "--run_dir", help="folder of the run (default runs/[agent-|image-]demo-seed<seed>, numbered if taken)"
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

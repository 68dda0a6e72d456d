"""Time to score: seconds of training until a real model reaches a score on problems that it is not trained on.

    python -m bench.score --model M --data train.jsonl --held-out held_out.jsonl           # sync, async and partial
    python -m bench.score --model M --data D --held-out H --case sync --steps 60 --score 0.5
    python -m bench.score --model M --data D --held-out H --keep F      # results in a folder; those there are kept
    python -m bench.score --model M --data D --held-out H --write       # also bench/RESULTS.md and the plot of the docs

sync      rounds and updates take turns
async     a round is played while the last one is trained on (--train.async_enable)
partial   the same, and responses that are under way go on with new weights (--train.partial_rollout_enable)

A case is the real command, which is printed, in a process of its own: GRPO without KL, one vLLM engine beside the
trainer on one device, `examples/python/reward_func.py` as the reward. Lines of the data have `input` (messages),
`label` and `datasource`, of which those of `--task` count. Seconds are those since the first step began, evaluations
included, which are the same for all cases; the start is not in them (`bench.startup` has it).
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.hybrid import vllm_version
from bench.results import write_section

ROOT = Path(__file__).resolve().parents[1]
TASKS = ("chain_sum", "gcd", "letter_counting", "simple_equations")
CASES: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"train.async_enable": "true", "algo.advantage.is_correction_enable": "true"},
    "partial": {
        "train.async_enable": "true",
        "train.partial_rollout_enable": "true",
        "algo.advantage.is_correction_enable": "true",
    },
}
PLOT = ROOT / "docs" / "images" / "time_to_score.svg"


def command(case: str, *, model: Path, folder: Path, steps: int, every: int) -> list[str]:
    """The words of the run. Its prompts are in the folder."""
    flags: dict[str, Any] = {
        "actor.model_name_or_path": model,
        "data.prompt_dataset": folder / "train.jsonl",
        "data.input_key": "input",
        "data.label_key": "label",
        "data.apply_chat_template": "true",
        "data.max_len": 512,
        "reward.remote_url": ROOT / "examples/python/reward_func.py",
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0,
        "rollout.batch_size": 64,
        "rollout.n_samples_per_prompt": 8,
        "rollout.max_new_tokens": 256,
        "train.batch_size": 512,
        "train.dynamic_batch_enable": "true",
        "train.max_tokens_per_gpu": 65_536,
        "train.total_steps": steps,
        "train.num_episodes": 1000,
        "train.launcher": "local",
        "actor.adam.lr": 3e-6,
        "actor.lr_scheduler": "constant",
        "vllm.num_engines": 1,
        "eval.dataset": folder / "held_out.jsonl",
        "eval.steps": every,
        "eval.n_samples_per_prompt": 4,
        "eval.at_start": "true",
        "logger.run_dir": folder / "run",
        "ckpt.output_dir": folder / "model",
        **CASES[case],
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *words]


def curve(records: Sequence[Mapping[str, Any]]) -> list[tuple[float, float, int]]:
    """(seconds since the first step began, score, step) of each evaluation."""
    first = next(record for record in records if record["kind"] == "train")
    began = first["time"] - first["timing/step_total"]
    found = []
    for record in records:
        if record["kind"] == "eval":
            score = next(value for name, value in record.items() if name.endswith("_pass1"))
            found.append((max(0.0, record["time"] - began), score, record["step"]))
    return found


def reached(points: Sequence[tuple[float, float, int]], score: float) -> tuple[float, int] | None:
    """Seconds and steps until the first evaluation with at least this score; None: none had it."""
    return next(((seconds, step) for seconds, found, step in points if found >= score), None)


def chosen(lines: Path, tasks: Sequence[str], to: Path) -> None:
    kept = [line for line in lines.read_text(encoding="utf-8").splitlines() if json.loads(line)["datasource"] in tasks]
    if not kept:
        raise SystemExit(f"{lines} has no line whose datasource is one of {', '.join(tasks)}")
    to.write_text("\n".join(kept) + "\n", encoding="utf-8")


def table(results: Mapping[str, dict[str, Any]], *, score: float, model: Path, tasks: Sequence[str]) -> str:
    from importlib.metadata import version

    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"

    def row(case: str) -> str:
        points = [tuple(point) for point in results[case]["points"]]
        done = reached(points, score)
        seconds = f"{done[0]:.0f} s, {done[1]} steps" if done else "not reached"
        best = max(found for _, found, _ in points)
        return (
            f"| {case} | {seconds} | {points[0][1]:.3f} | {best:.3f} | {points[-1][0]:.0f} s, {points[-1][2]} steps |"
        )

    return "\n".join(
        [
            f"{model.name} on {', '.join(tasks)}; 64 prompts × 8 samples a step; {device}, torch {torch.__version__}, "
            f"vLLM {vllm_version(version)}. Held-out score: the mean of 4 answers at temperature 0.6.",
            "",
            f"| | until {score:g} | at the start | best | whole run |",
            "|---|---:|---:|---:|---:|",
            *map(row, results),
            "",
            "The command of `sync`; the others add the flags of their names:",
            "",
            "```",
            shlex.join(results[next(iter(results))]["command"][1:]),
            "```",
        ]
    )


def plot(results: Mapping[str, dict[str, Any]], *, score: float) -> str:
    from openrlhf.observability.charts import picture

    curves = [{"name": case, "points": [point[:2] for point in found["points"]]} for case, found in results.items()]
    panel = {"title": "Right answers, held-out problems", "x": "seconds", "percent": True, "zero": True}
    return picture(
        {
            "title": "Time to score",
            "panels": [panel | {"mark": {"name": f"{score:g}", "value": score}, "curves": curves}],
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a trained model")
    parser.add_argument("--data", type=Path, required=True, help="prompts to train on")
    parser.add_argument("--held-out", type=Path, required=True, help="prompts to evaluate on")
    parser.add_argument("--task", action="append", help=f"a datasource; unless given: {', '.join(TASKS)}")
    parser.add_argument("--case", choices=CASES, action="append", help="one of them; unless given: all")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--score", type=float, default=0.5, help="the held-out score that is waited for")
    parser.add_argument("--keep", type=Path, help="folder of results; those that are there are not measured again")
    parser.add_argument("--write", action="store_true", help="write the section of bench/RESULTS.md, and the plot")
    options = parser.parse_args()

    from openrlhf.observability.loggers import read_metrics

    tasks, model = options.task or TASKS, options.model.expanduser().resolve()
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        keep = (options.keep or Path(temporary)).resolve()
        for case in options.case or CASES:
            result = keep / f"{case}.json"
            if not result.exists():
                folder = keep / case
                folder.mkdir(parents=True, exist_ok=True)
                chosen(options.data.expanduser(), tasks, folder / "train.jsonl")
                chosen(options.held_out.expanduser(), tasks, folder / "held_out.jsonl")
                words = command(case, model=model, folder=folder, steps=options.steps, every=options.every)
                print(shlex.join(words), file=sys.stderr, flush=True)
                subprocess.run(words, check=True, stdout=sys.stderr)
                points = curve(read_metrics(folder / "run" / "metrics.jsonl"))
                result.write_text(json.dumps({"points": points, "command": words}))
            results[case] = json.loads(result.read_text())
    body = table(results, score=options.score, model=model, tasks=tasks)
    print(body)
    if options.write:
        write_section(Path(__file__).with_name("RESULTS.md"), title="Time to score", body=body)
        PLOT.write_text(plot(results, score=options.score), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Learning in worlds: success over the steps of a run on records that it never draws, for each world of `CASES`.

    openrlhf worlds install reasoning_gym gymnasium
    python -m bench.worlds --model M                       # all cases
    python -m bench.worlds --model M --case sums --steps 60
    python -m bench.worlds --model M --keep F              # results in a folder; those there are kept
    python -m bench.worlds --model M --write               # also bench/RESULTS.md and the plot of docs/worlds.md

sums      reasoning-gym: chain_sum, gcd, letter_counting and simple_equations, small; the last number is the answer
levels    reasoning-gym: chain_sum at four levels of its curriculum, mixed
lake      Gymnasium: a frozen lake of 3 × 3 that is made anew for each record, no slipping

A case is the real command, which is printed, in a process of its own: GRPO without KL and one engine beside the trainer
on one device (`--engines 0`: the embedded one, for a machine without a GPU).
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
from statistics import fmean
from typing import Any

from bench.results import write_section

ROOT = Path(__file__).resolve().parents[1]
CASES: dict[str, dict[str, Any]] = {
    "sums": {
        "train.agent_func_path": "openrlhf.worlds.reasoning_gym",
        "world.tasks": "chain_sum,gcd,letter_counting,simple_equations",
        "world.options": "chain_sum.min_terms=2,chain_sum.max_terms=2,chain_sum.min_digits=1,chain_sum.max_digits=1,"
        "letter_counting.min_words=2,letter_counting.max_words=4,gcd.max_numbers=2,gcd.max_value=20,"
        'simple_equations.max_terms=2,simple_equations.max_value=10,answer=number,ending=" Answer with the number '
        'alone."',
        "rollout.max_new_tokens": 16,
        "data.max_len": 256,
        "actor.adam.lr": 1e-5,
    },
    "levels": {
        "train.agent_func_path": "openrlhf.worlds.reasoning_gym",
        "world.tasks": "chain_sum",
        "world.options": "levels=[0,1,2,3]",
        "rollout.max_new_tokens": 256,
    },
    "lake": {
        "train.agent_func_path": "openrlhf.worlds.gymnasium",
        "world.tasks": "FrozenLake-v1",
        "world.options": "FrozenLake-v1.is_slippery=false,lake=3,steps=10,penalty=-0.05",
        "rollout.max_new_tokens": 48,
        "data.max_len": 2048,
    },
}
PLOT = ROOT / "docs" / "images" / "worlds.svg"


def command(case: str, *, model: Path, folder: Path, steps: int, every: int, engines: int) -> list[str]:
    """The words of the run."""
    flags: dict[str, Any] = {
        "actor.model_name_or_path": model,
        "data.max_len": 768,
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0,
        "rollout.batch_size": 64,
        "rollout.n_samples_per_prompt": 8,
        "train.batch_size": 512,
        "train.dynamic_batch_enable": "true",
        "train.max_tokens_per_gpu": 65_536,
        "train.total_steps": steps,
        "train.launcher": "local",
        "actor.adam.lr": 3e-6,
        "actor.lr_scheduler": "constant",
        "vllm.num_engines": engines,
        "world.samples": 64 * steps,
        "world.eval_samples": 200,
        "world.processes": 4,
        "eval.dataset": CASES[case]["train.agent_func_path"],
        "eval.steps": every,
        "eval.n_samples_per_prompt": 4,
        "eval.at_start": "true",
        "logger.run_dir": folder / "run",
        "ckpt.output_dir": folder / "model",
        **CASES[case],
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "openrlhf.cli.train_ppo_ray", *words]


def curve(records: Sequence[Mapping[str, Any]]) -> list[tuple[int, float]]:
    """(step, share of right answers) of each evaluation, the mean over its data sources."""
    return [
        (record["step"], fmean(value for name, value in record.items() if name.endswith("_pass1")))
        for record in records
        if record["kind"] == "eval"
    ]


def table(results: Mapping[str, dict[str, Any]], *, model: Path) -> str:
    from importlib.metadata import version

    import torch

    from bench.hybrid import vllm_version

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    rows = []
    for case, result in results.items():
        points = result["points"]
        best = max(found for _, found in points)
        rows.append(f"| {case} | {points[0][1]:.3f} | {points[-1][1]:.3f} | {best:.3f} | {points[-1][0]} |")
    return "\n".join(
        [
            f"{model.name}; 64 prompts × 8 samples a step; {device}, torch {torch.__version__}, vLLM "
            f"{vllm_version(version)}. The score: the mean of 4 samples at temperature 0.6 on 200 held-out records.",
            "",
            "| | at the start | at the end | best | steps |",
            "|---|---:|---:|---:|---:|",
            *rows,
            "",
            "The commands:",
            "",
            "```",
            *(shlex.join(result["command"][1:]) for result in results.values()),
            "```",
        ]
    )


def plot(results: Mapping[str, dict[str, Any]], *, model: Path) -> str:
    from openrlhf.observability.charts import picture

    curves = [{"name": case, "points": found["points"]} for case, found in results.items()]
    panel = {"title": "Success, held-out records", "x": "steps", "percent": True, "zero": True, "curves": curves}
    return picture({"title": f"Worlds: {model.name}", "panels": [panel]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a model with a chat template")
    parser.add_argument("--case", choices=CASES, action="append", help="one of them; unless given: all")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--engines", type=int, default=1, help="vLLM engines; 0: the embedded engine")
    parser.add_argument("--keep", type=Path, help="folder of results; those that are there are not measured again")
    parser.add_argument("--write", action="store_true", help="write the section of bench/RESULTS.md, and the plot")
    options = parser.parse_args()

    from openrlhf.observability.loggers import read_metrics

    model = options.model.expanduser().resolve()
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        keep = (options.keep or Path(temporary)).resolve()
        for case in options.case or CASES:
            result = keep / f"{case}.json"
            if not result.exists():
                folder = keep / case
                folder.mkdir(parents=True, exist_ok=True)
                words = command(
                    case,
                    model=model,
                    folder=folder,
                    steps=options.steps,
                    every=options.every,
                    engines=options.engines,
                )
                print(shlex.join(words), file=sys.stderr, flush=True)
                subprocess.run(words, check=True, stdout=sys.stderr)
                points = curve(read_metrics(folder / "run" / "metrics.jsonl"))
                result.write_text(json.dumps({"points": points, "command": words}))
            results[case] = json.loads(result.read_text())
    body = table(results, model=model)
    print(body)
    if options.write:
        write_section(Path(__file__).with_name("RESULTS.md"), title="Learning in worlds", body=body)
        PLOT.write_text(plot(results, model=model), encoding="utf-8")


if __name__ == "__main__":
    main()

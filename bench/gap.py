"""The gap between the log-probs of engine and trainer, by precision: runs of a real model, and what they cost.

    python -m bench.gap --model M --data train.jsonl             # on a GPU 100 steps a case, on a CPU 3 small ones
    python -m bench.gap --model M --data train.jsonl --write     # also rewrite this bench's section of bench/RESULTS.md
    python -m bench.gap --model M --data D --case bf16 --case logits --steps 20
    python -m bench.gap --model M --data D --keep F              # results in a folder; those there are kept

bf16     vLLM rounds its logits to the model's dtype, as it does by itself
logits   bf16 with logits in fp32, the default of --vllm.logits_dtype
fp16     engine and trainer in fp16, with logits in fp32
exact    bf16 with the exact forward on both sides (--rollout.exact)
fp32     engine and trainer in fp32 (unless named it is left out: nobody trains so)

A case is the real command in a process of its own: GRPO without KL on prompts with labels, one vLLM engine beside the
trainer on the same device (`--train.launcher local`). A right answer is worth 1; up to 0.1 more come by chance, so that
every sample is trained on and has log-probs of both sides. As in every run vLLM is asked for log-probs on one prompt in
16. The numbers are the run's own metrics: the mean gap and the KL of all steps, the median of the steps' 99th
percentiles, the largest gap of all. Tokens a second are those of generation alone, in the median step after the first
two. A random model shows little: its logits are small.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from bench.hybrid import vllm_version
from bench.results import write_section

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "bf16": ("bf16, logits in bf16", {"ds.param_dtype": "bf16", "vllm.logits_dtype": "model"}),
    "logits": ("bf16, logits in fp32", {"ds.param_dtype": "bf16", "vllm.logits_dtype": "fp32"}),
    "fp16": ("fp16, logits in fp32", {"ds.param_dtype": "fp16", "vllm.logits_dtype": "fp32"}),
    "exact": ("bf16, exact", {"ds.param_dtype": "bf16", "rollout.exact": "true"}),
    "fp32": ("fp32", {"ds.param_dtype": "fp32"}),
}
USUAL = ("bf16", "logits", "fp16", "exact")
UNMEASURED = 2
"""Steps at the beginning whose time does not count."""
REWARD_FILE = """
import zlib


def reward_func(queries, prompts, labels):
    def right(query, prompt, label):
        said = query[len(prompt):].rpartition("Answer:")[2].split()
        return bool(said) and said[0].rstrip(".") == str(label)

    return [
        right(*asked) + 0.1 * (zlib.crc32(asked[0].encode()) % 97) / 97
        for asked in zip(queries, prompts, labels)
    ]
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a machine is given."""

    steps: int
    prompts: int
    """Of a step."""
    samples: int
    prompt_tokens: int
    new_tokens: int
    """At most."""
    budget: int


GPU = Work(steps=100, prompts=64, samples=8, prompt_tokens=256, new_tokens=256, budget=65_536)
CPU = Work(steps=3, prompts=16, samples=2, prompt_tokens=256, new_tokens=32, budget=2048)


def run(case: str, work: Work, *, model: Path, data: Path, folder: Path) -> dict[str, Any]:
    """The run's own metrics, step by step."""
    from openrlhf.config import parse
    from openrlhf.observability.loggers import read_metrics
    from openrlhf.runs import rl_assembly

    rl_assembly._export = lambda *arguments: []  # nobody wants the model
    (folder / "reward.py").write_text(REWARD_FILE)
    flags = {
        "actor.model_name_or_path": model,
        "data.prompt_dataset": data,
        "data.input_key": "input",
        "data.label_key": "label",
        "data.apply_chat_template": "true",
        "data.max_samples": work.prompts * work.steps,
        "data.max_len": work.prompt_tokens + work.new_tokens,
        "reward.remote_url": folder / "reward.py",
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0,
        "rollout.batch_size": work.prompts,
        "rollout.n_samples_per_prompt": work.samples,
        "rollout.max_new_tokens": work.new_tokens,
        "train.batch_size": work.prompts * work.samples,
        "train.dynamic_batch_enable": "true",
        "train.max_tokens_per_gpu": work.budget,
        "train.total_steps": work.steps,
        "train.launcher": "local",
        "actor.lr_scheduler": "constant",
        "actor.adam.lr": 1e-6,
        "vllm.num_engines": 1,
        "ckpt.output_dir": folder / "out",
        "logger.run_dir": folder / "run",
        **CASES[case][1],
    }
    argv = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    result = rl_assembly.train(parse("train_ppo_ray", argv))
    records = [record for record in read_metrics(result.run_dir / "metrics.jsonl") if record["kind"] == "train"]
    if any(record["rollout/failed"] for record in records):
        raise RuntimeError(f"{case}: samples failed")
    return {"records": records, "work": asdict(work)}


def summary(found: dict[str, Any]) -> dict[str, float]:
    """The numbers of a case."""
    records = found["records"]
    measured = [record for record in records if "logprobs_diff" in record]
    if not measured:
        raise RuntimeError(
            "no step has measured the gap: give more --prompts, of which one in 16 is asked for log-probs"
        )
    timed = records[UNMEASURED:] or records
    samples = found["work"]["prompts"] * found["work"]["samples"]
    return {
        "steps": len(records),
        "mean": statistics.fmean(record["logprobs_diff"] for record in measured),
        "p99": statistics.median(record["logprobs_diff_p99"] for record in measured),
        "max": max(record["logprobs_diff_max"] for record in measured),
        "kl": statistics.fmean(record["vllm_kl"] for record in measured),
        "tokens_per_second": statistics.median(
            record["response_length"] * samples / record["timing/generation"] for record in timed
        ),
        "step_seconds": statistics.median(record["timing/step_total"] for record in timed),
        "first": statistics.fmean(record["logprobs_diff"] for record in measured[: math.ceil(len(measured) / 10)]),
        "last": statistics.fmean(record["logprobs_diff"] for record in measured[-math.ceil(len(measured) / 10) :]),
    }


def table(results: dict[str, dict[str, Any]], *, model: Path) -> str:
    from importlib.metadata import version

    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    numbers = {case: summary(found) for case, found in results.items()}
    work = Work(**next(iter(results.values()))["work"])

    def row(case: str) -> str:
        found, base = numbers[case], numbers.get("bf16")
        speed = f"{found['tokens_per_second']:,.0f}"
        if base is not None and case != "bf16":
            speed += f" ({found['tokens_per_second'] / base['tokens_per_second']:.2f}×)"
        columns = [
            CASES[case][0],
            f"{found['mean']:.2g}",
            f"{found['p99']:.2g}",
            f"{found['max']:.2g}",
            f"{found['kl']:+.1e}",
            f"{found['first']:.2g} → {found['last']:.2g}",
            speed,
            f"{found['step_seconds']:.2f}",
        ]
        return f"| {' | '.join(columns)} |"

    return "\n".join(
        [
            f"{model.resolve().parent.name}/{model.resolve().name}, {work.steps} steps of {work.prompts} prompts × "
            f"{work.samples} samples of at most {work.new_tokens} tokens; {name}, torch {torch.__version__}, vLLM "
            f"{vllm_version(version)}. Gaps in nats per token, of one prompt in 16; p99 is that of the median step. "
            "Repeat: `python -m bench.gap --model M --data train.jsonl --write`.",
            "",
            "| | mean gap | p99 | largest | KL | first → last tenth | generated tokens/s | s/step |",
            "|---|---:|---:|---:|---:|---:|---:|---:|",
            *map(row, results),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="folder of a trained model")
    parser.add_argument("--data", type=Path, required=True, help="prompts: lines with input (messages) and label")
    parser.add_argument("--write", action="store_true", help="write the section of bench/RESULTS.md")
    parser.add_argument("--case", choices=CASES, action="append", help=f"one of them; unless given: {', '.join(USUAL)}")
    parser.add_argument("--keep", type=Path, help="folder of results; those that are there are not measured again")
    for field in ("steps", "prompts", "samples", "new_tokens", "budget"):
        parser.add_argument(f"--{field}", type=int, help=f"unless given: {getattr(GPU, field):,} on a GPU")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    options = parser.parse_args()

    import torch

    given = {
        field: value
        for field in ("steps", "prompts", "samples", "new_tokens", "budget")
        if (value := getattr(options, field))
    }
    work = replace(GPU if torch.cuda.is_available() else CPU, **given)
    model, data = options.model.expanduser().resolve(), options.data.expanduser().resolve()
    if options.side:
        folder = options.keep / options.side  # what a run that was ended has measured is still there
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        found = run(options.side, work, model=model, data=data, folder=folder)
        # A file: vLLM's processes write to standard output as they like.
        (options.keep / f"{options.side}.json").write_text(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as temporary:
        keep = (options.keep or Path(temporary)).resolve()
        keep.mkdir(parents=True, exist_ok=True)
        results = {}
        for case in options.case or USUAL:
            result = keep / f"{case}.json"
            if not result.exists():
                command = [sys.executable, "-m", "bench.gap", "--side", case, "--keep", str(keep)]
                command += ["--model", str(model), "--data", str(data)]
                command += [word for field, value in given.items() for word in (f"--{field}", str(value))]
                subprocess.run(command, check=True, stdout=sys.stderr)
            results[case] = json.loads(result.read_text())
            print(case, json.dumps(summary(results[case])), file=sys.stderr, flush=True)
    body = table(results, model=model)
    print(body)
    if options.write:
        write_section(Path(__file__).with_name("RESULTS.md"), title="Engine against trainer", body=body)


if __name__ == "__main__":
    main()

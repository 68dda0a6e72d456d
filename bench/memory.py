"""One GPU for trainer and vLLM without a memory flag: what is decided, and what each really takes.

    python -m bench.memory                     # all shapes, one after the other
    python -m bench.memory --shape 135M        # one of them
    python -m bench.memory --write             # also rewrite this bench's section of bench/RESULTS.md
    python -m bench.memory --keep F            # results in a folder; those that are there are not measured again

Random weights of SmolLM2-135M's and Qwen2.5's shapes, GRPO without KL, a rule reward, one update of all samples;
end-of-sequence is ignored. It is the real command otherwise, in one process, for three steps. Of the trainer the peak
of torch's allocator is measured, of vLLM what is in use on the device beside that after a push. On a CPU nothing is
divided, and the run is only tried.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from bench.hybrid import CPU, GPU, PHASES, Work, run_flags, vllm_version, words, write_inputs
from bench.results import write_section

STEPS = 3
GIB = 2**30


class Shape(NamedTuple):
    work: Work
    flags: dict[str, Any]
    said: str = ""


CHECKPOINTING = {"actor.gradient_checkpointing_enable": "true"}
SMALL = replace(GPU, hidden=576, intermediate=1536, layers=30, heads=9, kv_heads=3, vocabulary=49_152)
LARGE = replace(
    GPU, prompts=16, prompt_tokens=128, new_tokens=128, budget=2048,
    hidden=3584, intermediate=18_944, layers=28, heads=28, kv_heads=4, vocabulary=152_064,
)  # fmt: skip
SHAPES = {
    "135M": Shape(SMALL, {}),
    "1.5B": Shape(GPU, {}),
    "7B": Shape(LARGE, CHECKPOINTING, ", checkpointing"),
    "7B-lora": Shape(
        replace(LARGE, budget=8192),
        {**CHECKPOINTING, "ds.lora.rank": 16, "ds.lora.alpha": 32},
        ", LoRA of rank 16, checkpointing",
    ),
}
ON_A_CPU = {"tiny": Shape(CPU, {})}


class Watched(NamedTuple):
    """What a run in this process decides about its device, and does."""

    settled: list[Any]
    """The decision, once it is made."""
    slept: list[float]
    """Seconds of each time that the engine fell asleep."""
    beside: list[float]
    """GiB of the device that are in use after each push beside torch's own: vLLM's."""

    def division(self) -> dict[str, Any]:
        """As numbers; nothing where nothing was divided."""
        import torch

        division = self.settled[0].division if self.settled else None
        if division is None:
            return {}
        return {
            "said": str(division),
            "share": division.memory.share,
            "sleeps": division.memory.sleeps,
            "estimated": division.training.total / GIB,
            "planned": (division.engine.fixed + division.cache) / GIB,
            "cache": division.cache / GIB,
            "taken": torch.cuda.max_memory_reserved() / GIB,
            "allocated": torch.cuda.max_memory_allocated() / GIB,
            "slept": self.slept,
            "beside": self.beside,
        }


def watch() -> Watched:
    """From here on; before a run begins."""
    import torch

    from openrlhf.rollout.vllm import engine_class
    from openrlhf.runs import engines
    from openrlhf.weight_sync.base import EngineWeightSync

    VllmEngine = engine_class()
    decide, fall_asleep, push = engines.engine_memory, VllmEngine.sleep, EngineWeightSync.push
    watched = Watched([], [], [])

    def deciding(*arguments: Any, **options: Any) -> Any:
        watched.settled.append(decide(*arguments, **options))
        return watched.settled[-1]

    async def sleeping(self: Any) -> None:
        start = time.perf_counter()
        await fall_asleep(self)
        watched.slept.append(time.perf_counter() - start)

    def pushing(self: Any, **options: Any) -> Any:
        metrics = push(self, **options)
        if torch.cuda.is_available():
            free, total = torch.cuda.mem_get_info()
            division = watched.settled[0].division if watched.settled else None
            others = 0 if division is None else division.device.others
            watched.beside.append((total - free - torch.cuda.memory_reserved() - others) / GIB)
        return metrics

    engines.engine_memory, VllmEngine.sleep, EngineWeightSync.push = deciding, sleeping, pushing
    return watched


def run(folder: Path, shape: Shape) -> dict[str, Any]:
    """What was decided, and what the run's own metrics and the device say."""
    from openrlhf.config import parse
    from openrlhf.observability.loggers import read_metrics
    from openrlhf.runs import rl_assembly

    chosen = rl_assembly.sampling_params  # no flag ignores end-of-sequence
    rl_assembly.sampling_params = lambda config, **options: chosen(config, **options).copy(ignore_eos=True)
    rl_assembly._export = lambda *arguments: []  # a model that nobody wants
    watched = watch()
    work = shape.work
    flags = run_flags(folder, work, steps=STEPS, launcher="local")
    flags |= {"actor.lr_scheduler": "constant", **shape.flags}
    result = rl_assembly.train(parse("train_ppo_ray", words(flags)))
    records = [record for record in read_metrics(result.run_dir / "metrics.jsonl") if record["kind"] == "train"]
    columns = {name: f"timing/{phase}" for name, phase in PHASES.items()} | {"total": "timing/step_total"}
    columns |= {f"{phase}_gb": f"memory/peak_{phase}_gb" for phase in ("generation", "training")}
    found: dict[str, Any] = {name: [record.get(metric, 0.0) for record in records] for name, metric in columns.items()}
    return found | watched.division() | {"cut": [record.get("perf/max_tokens_per_gpu") for record in records]}


def row(name: str, shape: Shape, found: dict[str, Any]) -> str:
    def median(column: str) -> float:
        return statistics.median(found[column][1:])

    work = shape.work
    described = f"{name.removesuffix('-lora')}{shape.said}; {work.budget:,} tokens"
    seconds = [f"{median(column):.2f}" for column in (*PHASES, "total")]
    if "said" not in found:
        return f"| {described} | nothing is divided | | | | | | {' | '.join(seconds)} |"
    decided = f"{'in turns' if found['sleeps'] else 'both at once'}, {found['share']:.2f}"
    memory = f"{median('generation_gb'):.0f} / {median('training_gb'):.0f}"
    times = len(found["slept"])
    return (
        f"| {described} | {decided} | {found['estimated']:.1f} / {found['taken']:.1f} ({found['allocated']:.1f}) | "
        f"{found['planned']:.1f} / {max(found['beside']):.1f} | {found['cache']:.1f} | {memory} | "
        f"{f'{times} times' if times else 'no'} | {' | '.join(seconds)} |"
    )


def table(results: dict[str, dict[str, Any]], shapes: dict[str, Shape]) -> str:
    from importlib.metadata import version

    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    cut = [name for name, found in results.items() if any(found["cut"])]
    return "\n".join(
        [
            f"{STEPS} steps of one process without a memory flag, random weights, {device}, torch {torch.__version__}, "
            f"vLLM {vllm_version(version)}. 135M and 1.5B: 64 prompts × 8 samples, 256 + 512 tokens; 7B (tied "
            "embeddings): 16 × 8, 128 + 128. GiB; of training the estimate, the peak of torch's allocator and, in "
            "brackets, of its tensors; of vLLM the plan and what it had. Seconds are medians but for the first step. "
            "Repeat: `python -m bench.memory --write`.",
            "",
            "| shape; micro-batch | decided, share of vLLM | training: estimated / taken | vLLM: planned / taken | "
            "keys and values | device sampling / training | slept | generate | score | train | sync | total, s |",
            "|---|---|---|---|---|---|---|---|---|---|---|---|",
            *(row(name, shapes[name], found) for name, found in results.items()),
            "",
            f"Micro-batches that had to be cut again: {', '.join(cut) or 'none'}.",
        ]
    )


def main() -> None:
    import torch

    shapes = SHAPES if torch.cuda.is_available() else ON_A_CPU
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shapes, action="append", help="one of them; all, unless given")
    parser.add_argument("--write", action="store_true", help="write the section of bench/RESULTS.md")
    parser.add_argument("--keep", type=Path, help="folder of results; those that are there are not measured again")
    parser.add_argument("--side", choices=shapes, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        found = run(options.folder, shapes[options.side])
        # A file: vLLM's processes write to standard output as they like.
        (options.keep / f"memory-{options.side}.json").write_text(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as temporary:
        keep = (options.keep or Path(temporary)).resolve()
        keep.mkdir(parents=True, exist_ok=True)
        results = {name: measured(name, shapes[name], keep) for name in options.shape or shapes}
    body = table(results, shapes)
    print(body)
    if options.write:
        write_section(Path(__file__).with_name("RESULTS.md"), title="Memory of one GPU, divided", body=body)


def measured(name: str, shape: Shape, keep: Path) -> dict[str, Any]:
    """In a process of its own, unless the result is there. The model is made in another: nothing of it may stay on the
    device."""
    result = keep / f"memory-{name}.json"
    if not result.exists():
        with tempfile.TemporaryDirectory() as folder:
            code = f"from bench.memory import *; make({name!r}, {folder!r})"
            subprocess.run([sys.executable, "-c", code], check=True, stdout=sys.stderr)
            command = [sys.executable, "-m", "bench.memory", "--side", name, "--folder", folder, "--keep", str(keep)]
            subprocess.run(command, check=True, stdout=sys.stderr)
    found = json.loads(result.read_text())
    print(name, json.dumps(found), file=sys.stderr, flush=True)
    return found


def make(name: str, folder: str) -> None:
    """Model, tokenizer, prompts and reward file."""
    write_inputs(Path(folder), (SHAPES | ON_A_CPU)[name].work, steps=STEPS)


if __name__ == "__main__":
    main()

"""What `openrlhf doctor` predicts beside what a run takes: peak memory and the seconds of a step.

    python -m bench.doctor                     # on a GPU: 135M, 1.5B and 7B shapes; on a CPU: small ones in fp32
    python -m bench.doctor --case 1.5B         # one or several of them
    python -m bench.doctor --repeats 3         # each of them so often, taking turns
    python -m bench.doctor --write             # also rewrite this bench's section of bench/RESULTS.md
    python -m bench.doctor --keep F            # results in a folder; those that are there are not measured again

Random weights, GRPO without KL, a rule reward, one update of all samples; end-of-sequence is ignored. It is the real
command otherwise, in a process of its own. That process makes the plan right before and after it runs. The first step
warms up; seconds are medians of the others. On a CPU both the doctor's products of matrices and the steps are measured
in seconds of the process's own time, because other jobs of a machine slow wall-clock time down by the minute: run it
with OMP_NUM_THREADS=1, for threads that wait for each other count as busy. Memory of a GPU is the peak of the device;
memory of a CPU is how far the process grows from the moment before anything is loaded.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from bench.hybrid import CPU, GPU, PHASES, Work, run_flags, words, write_inputs
from bench.memory import CHECKPOINTING, SMALL, watch
from bench.results import write_section

GIB = 2**30
USED = ("generation", "training")
STEPS = 3
LORA = {"ds.lora.rank": 16, "ds.lora.alpha": 32}
SLEEPING = {"vllm.enable_sleep": "true", "ds.enable_sleep": "true"}


class Case(NamedTuple):
    work: Work
    flags: Mapping[str, Any]
    launcher: str = "local"


LARGE = replace(GPU, prompts=16, hidden=3584, intermediate=18_944, heads=28, kv_heads=4, vocabulary=152_064)
ON_A_GPU = {
    "135M": Case(SMALL, {}),
    "1.5B": Case(GPU, {}),
    "1.5B-turns": Case(GPU, SLEEPING),
    "1.5B-checkpointing": Case(GPU, CHECKPOINTING),
    "1.5B-lora": Case(GPU, LORA),
    "1.5B-offload": Case(GPU, {"ds.adam_offload": "true", "train.colocate_all": "true"}, launcher="ray"),
    "7B-lora": Case(replace(LARGE, budget=8192), {**CHECKPOINTING, **LORA}),
    "7B-turns": Case(replace(LARGE, budget=4096), {**CHECKPOINTING, "ds.enable_sleep": "true"}),
}
"""No memory flag, but for those of the case: what sleeps is the run's own decision."""
BASE = replace(
    CPU, prompts=8, samples=8, prompt_tokens=64, new_tokens=64, budget=4096,
    hidden=256, intermediate=768, layers=4, heads=4, kv_heads=2, vocabulary=4096,
)  # fmt: skip
EMBEDDED = {"vllm.num_engines": 0}
ON_A_CPU = {
    "4M": Case(replace(BASE, prompts=32), EMBEDDED),
    "16M-deep": Case(replace(BASE, hidden=384, intermediate=1536, layers=8, heads=6, budget=8192), EMBEDDED),
    "14M-vocabulary": Case(replace(BASE, vocabulary=40_960), EMBEDDED),
    "16M-checkpointing": Case(
        replace(BASE, hidden=384, intermediate=1536, layers=8, heads=6, budget=8192), {**EMBEDDED, **CHECKPOINTING}
    ),
}


def run(folder: Path, case: Case) -> dict[str, Any]:
    """The plan, then the run: peak bytes and seconds of both."""
    import torch

    from openrlhf.config import parse
    from openrlhf.learners.rank import RankLearners
    from openrlhf.observability.loggers import read_metrics
    from openrlhf.planning.hardware import Machines, machines_here, measured_cpu
    from openrlhf.planning.plan import Expected, plan_rl
    from openrlhf.runs import local_launcher, rl_assembly
    from openrlhf.trainers.rl import RLTrainer

    on_a_gpu = torch.cuda.is_available()

    def here() -> Machines:
        return machines_here() if on_a_gpu else Machines(1, 1, measured_cpu(clock=time.process_time), here=True)

    own: dict[str, list[float]] = {"train": _own_time(RankLearners, "update"), "total": _own_time(RLTrainer, "step")}
    assert local_launcher is not None  # imported before memory is looked at
    work = case.work
    flags = run_flags(folder, work, steps=STEPS, launcher=case.launcher)
    flags |= {"actor.lr_scheduler": "constant", **case.flags}
    config = parse("train_ppo_ray", words(flags))
    expected = Expected(prompt_tokens=work.prompt_tokens, response_tokens=work.new_tokens, records=work.prompts * STEPS)
    before = plan_rl(config, here(), expected)
    chosen = rl_assembly.sampling_params  # no flag ignores end-of-sequence
    rl_assembly.sampling_params = lambda config, **options: chosen(config, **options).copy(ignore_eos=True)
    rl_assembly._export = lambda *arguments: []  # a model that nobody wants
    watched = watch() if on_a_gpu else None
    started = _resident()
    result = rl_assembly.train(config)
    after = plan_rl(config, here(), expected)  # the machine may have become slower meanwhile
    records = [record for record in read_metrics(result.run_dir / "metrics.jsonl") if record["kind"] == "train"][1:]
    columns = {name: f"timing/{phase}" for name, phase in PHASES.items()} | {"total": "timing/step_total"}
    found: dict[str, Any] = {
        name: statistics.median(record.get(metric, 0.0) for record in records) for name, metric in columns.items()
    }
    found["wall"] = found["total"]
    if not on_a_gpu:
        found |= {name: statistics.median(seconds[1:]) for name, seconds in own.items()}
        found["generate"] = found["total"] - found["train"]
    if on_a_gpu:
        peaks = {phase: max(record[f"memory/peak_{phase}_gb"] for record in records) for phase in USED}
        measured = max(peaks.values()) * GIB
        found |= {"peaks": peaks, "allocated": torch.cuda.max_memory_allocated()}
    else:
        measured = _peak() - started
    planned = {"generate": "generate", "score": "score", "update": "train", "push": "sync"}
    seconds: dict[str, list[float]] = {}
    for plan in (before, after):
        for phase in plan.times:
            seconds.setdefault(planned[phase.name], []).append(phase.seconds.total)
        seconds.setdefault("total", []).append(plan.step_seconds)
    return {
        "measured": found | {"bytes": measured},
        "predicted": {name: statistics.mean(both) for name, both in seconds.items()} | {"bytes": before.peak_bytes},
        "phases": {phase.phase: {part.name: part.bytes for part in phase.parts} for phase in before.pools[0].phases},
        "division": {} if watched is None else watched.division(),
        "rate": [plan.machines.device.flops for plan in (before, after)],
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "",
        "threads": torch.get_num_threads(),
    }


def _own_time(cls: Any, name: str) -> list[float]:
    """Seconds of this process's own time in each call of a method, from here on."""
    method, found = getattr(cls, name), []

    def timed(*arguments: Any, **options: Any) -> Any:
        start = time.process_time()
        result = method(*arguments, **options)
        found.append(time.process_time() - start)
        return result

    setattr(cls, name, timed)
    return found


def _resident() -> int:
    return _status("VmRSS")


def _peak() -> int:
    return _status("VmHWM")


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name))


def measured(name: str, *, repeats: int, keep: Path | None) -> list[dict[str, Any]]:
    """Each in a process of its own."""
    found = []
    for repeat in range(repeats):
        kept = None if keep is None else keep / f"{name}-{repeat}.json"
        if kept is not None and kept.exists():
            found.append(json.loads(kept.read_text()))
            continue
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "found.json"
            command = [sys.executable, "-m", "bench.doctor", "--inside", name, "--out", str(out)]
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
            if not out.exists():
                print(f"{name} failed:\n{done.stderr[-3000:]}", file=sys.stderr)
                continue
            found.append(json.loads(out.read_text()))
            if kept is not None:
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(out.read_text())
    return found


def row(name: str, found: list[dict[str, Any]]) -> str:
    """Medians over repeats, and the range of what was predicted over measured."""

    def middle(side: str, column: str) -> float:
        return statistics.median(one[side].get(column, 0.0) for one in found)

    ratios = [one["predicted"]["total"] / one["measured"]["total"] for one in found]
    memory = [one["predicted"]["bytes"] / one["measured"]["bytes"] for one in found]
    phases = [f"{middle('predicted', c):.2f} / {middle('measured', c):.2f}" for c in ("generate", "train")]
    spread = f" ({min(ratios):.2f} … {max(ratios):.2f})" if len(found) > 1 else ""
    return (
        f"| {name} | {middle('predicted', 'bytes') / GIB:.2f} / {middle('measured', 'bytes') / GIB:.2f} | "
        f"{statistics.median(memory):.2f} | {' | '.join(phases)} | {middle('predicted', 'total'):.2f} / "
        f"{middle('measured', 'total'):.2f} | {statistics.median(ratios):.2f}{spread} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", help="of the table; several: give it again")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    import torch

    cases = ON_A_GPU if torch.cuda.is_available() else ON_A_CPU
    if given.inside:
        with tempfile.TemporaryDirectory() as folder:
            write_inputs(Path(folder), cases[given.inside].work, steps=STEPS)
            given.out.write_text(json.dumps(run(Path(folder), cases[given.inside])))
        return
    lines = [
        "| case | GiB, predicted / measured | ratio | generate, s | update, s | step, s | ratio of steps |",
        "|---|---|---:|---|---|---|---|",
    ]
    about: dict[str, Any] = {}
    failed = []
    for name in given.case or cases:
        found = measured(name, repeats=given.repeats, keep=given.keep)
        if found:
            lines.append(row(name, found))
            print(lines[-1], flush=True)
            about = found[0]
        if len(found) < given.repeats:
            failed.append(name)
    device = about.get("device") or f"{platform.machine()}, {about.get('threads')} thread(s), fp32, embedded engine"
    text = (
        f"What `openrlhf doctor` plans beside what a run takes; {device}, torch {torch.__version__}; {given.repeats} "
        "run(s) of each case, medians of the steps after the first. On a CPU seconds are those of the process's own "
        "time, on a machine that other jobs use as well, and memory is the growth of the process; generation has all "
        "of a step but the update. Repeat: `OMP_NUM_THREADS=1 python -m bench.doctor --repeats 3 --write`.\n\n"
    )
    text += "\n".join(lines)
    print(text)
    if given.write:
        where = "CPU" if not torch.cuda.is_available() else "GPU"
        write_section(Path(__file__).with_name("RESULTS.md"), title=f"Doctor on a {where}", body=text)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()

"""vLLM alone, in one process on a device and in several that share its requests: seconds of a round.

    python -m bench.engine_processes                     # Qwen2.5-1.5B's and SmolLM2-135M's shapes; on a CPU a tiny one
    python -m bench.engine_processes --shape 135M --most 4
    python -m bench.engine_processes --scheduler vllm    # with vLLM's own scheduler, to compare with
    python -m bench.engine_processes --keep F            # results in a folder; those that are there are kept
    python -m bench.engine_processes --write             # also rewrite this bench's section of bench/RESULTS.md

Random weights; end-of-sequence is ignored, so every response has the same length; prompts are new in every round, and
no log-probs are asked for. All processes are started once, and a round is given to the first of them, to the first two,
and so on: first once each, then `--rounds` times each. The first round of all warms up.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.hybrid import CPU, GPU, Work, vllm_version, write_inputs
from bench.memory import SMALL
from bench.results import write_section

SHAPES = {"1.5B": GPU, "135M": SMALL}
ON_A_CPU = {"tiny": replace(CPU, prompts=32, samples=8, new_tokens=64)}
SCHEDULERS = {"ours": None, "vllm": "vLLM's own scheduler"}


def measure(folder: Path, work: Work, *, most: int, rounds: int, scheduler: str) -> dict[str, list[float]]:
    """Seconds of the rounds by the number of processes, in their order."""
    import torch

    from openrlhf.rollout.vllm import engine, start_engine
    from openrlhf.rollout.vllm.processes import VllmProcesses
    from openrlhf.rollout.vllm.settings import VllmSettings
    from openrlhf.types import SamplingParams

    if scheduler == "vllm":
        engine.SCHEDULERS = dict.fromkeys(engine.SCHEDULERS)
    gpu = torch.cuda.is_available()
    length = work.prompt_tokens + work.new_tokens
    per_token = 2 * work.layers * (work.hidden // work.heads * work.kv_heads) * 2
    requests = work.prompts * work.samples
    settings = VllmSettings(
        model=str(folder),
        max_model_len=length,
        dtype={"bf16": "bfloat16", "fp32": "float32"}[work.dtype],
        max_num_seqs=requests,
        gpu_memory_utilization=0.2,
        cache_bytes=int(1.1 * per_token * length * requests) if gpu else None,
        cpu_cache_gib=1,
        has_experts=False,
        engines=most,
    )
    params = SamplingParams(max_tokens=work.new_tokens, ignore_eos=True, logprobs=None, detokenize=False)
    rng = random.Random(0)

    async def a_round(processes: VllmProcesses) -> float:
        prompts = [[rng.randrange(2, work.vocabulary) for _ in range(work.prompt_tokens)] for _ in range(work.prompts)]
        start = time.perf_counter()
        await asyncio.gather(*(processes.generate(one, params) for one in prompts for _ in range(work.samples)))
        return time.perf_counter() - start

    found: dict[str, list[float]] = {str(count): [] for count in range(1, most + 1)}
    with contextlib.ExitStack() as started:
        engines = [started.enter_context(contextlib.closing(start_engine(settings, None))) for _ in range(most)]
        first = [(count, 1) for count in range(1, most + 1)]
        for count, times in [*first, *((count, rounds) for count in range(1, most + 1))]:
            for _ in range(times):
                found[str(count)].append(asyncio.run(a_round(VllmProcesses(engines[:count]))))
                print(count, f"{found[str(count)][-1]:.2f} s", file=sys.stderr, flush=True)
    return found


def table(results: dict[tuple[str, str], dict[str, list[float]]], works: dict[str, Work]) -> str:
    from importlib.metadata import version

    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    most = max(len(found) for found in results.values())
    rows = []
    for (shape, scheduler), found in results.items():
        cells = []
        for count in range(1, most + 1):
            seconds = found.get(str(count), [])
            timed = seconds[1:] or seconds  # the first of all warms up
            cells.append(f"{statistics.median(timed):.2f} ({min(timed):.2f} … {max(timed):.2f})" if timed else "")
        name = f"{shape}, {said}" if (said := SCHEDULERS[scheduler]) else shape
        rows.append(f"| {name} | {' | '.join(cells)} |")
    work = next(iter(works.values()))
    return "\n".join(
        [
            f"vLLM {vllm_version(version)} alone: seconds of a round of {work.prompts} prompts × {work.samples} "
            f"samples, {work.prompt_tokens} + {work.new_tokens} tokens, no log-probs, random weights in {work.dtype}; "
            f"{device}, torch {torch.__version__}. Medians, and the range. Repeat: `python -m bench.engine_processes`.",
            "",
            "| shape | 1 process | " + "".join(f"{count} processes | " for count in range(2, most + 1)),
            f"|---|{'---|' * most}",
            *rows,
        ]
    )


def main() -> None:
    import torch

    shapes = SHAPES if torch.cuda.is_available() else ON_A_CPU
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=shapes, action="append", help="one of them; all, unless given")
    parser.add_argument("--scheduler", choices=SCHEDULERS, action="append", help="one of them; ours, unless given")
    parser.add_argument("--most", type=int, default=3, help="processes")
    parser.add_argument("--rounds", type=int, default=4, help="for each number of processes, after one each")
    parser.add_argument("--keep", type=Path, help="folder of results; those that are there are not measured again")
    parser.add_argument("--write", action="store_true", help="write the section of bench/RESULTS.md")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        shape, _, scheduler = options.side.partition("-")
        found = measure(
            options.folder, shapes[shape], most=options.most, rounds=options.rounds, scheduler=scheduler
        )  # fmt: skip
        # A file: vLLM's processes write to standard output as they like.
        (options.keep / f"{options.side}.json").write_text(json.dumps(found))
        return
    results: dict[tuple[str, str], Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        keep = (options.keep or Path(temporary)).resolve()
        keep.mkdir(parents=True, exist_ok=True)
        for shape in options.shape or shapes:
            folder = Path(temporary) / "models" / shape
            for scheduler in options.scheduler or ["ours"]:
                result = keep / f"{shape}-{scheduler}.json"
                if not result.exists():
                    if not folder.exists():
                        folder.mkdir(parents=True)
                        write_inputs(folder, shapes[shape], steps=1)
                    command = [sys.executable, "-m", "bench.engine_processes", "--side", f"{shape}-{scheduler}"]
                    command += ["--folder", str(folder), "--keep", str(keep)]
                    command += ["--most", str(options.most), "--rounds", str(options.rounds)]
                    subprocess.run(command, check=True, stdout=sys.stderr)
                results[shape, scheduler] = json.loads(result.read_text())
    body = table(results, {shape: shapes[shape] for shape, _ in results})
    print(body)
    if options.write:
        write_section(Path(__file__).with_name("RESULTS.md"), title="Several processes of vLLM", body=body)


if __name__ == "__main__":
    main()

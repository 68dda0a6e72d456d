"""Start-up: the seconds from the command to the first sample, in parts, of the same command twice.

    python -m bench.startup                    # on a GPU: Qwen2.5-1.5B's shape in bf16; on a CPU: a small one in fp32
    python -m bench.startup --write            # also rewrite this bench's section of bench/RESULTS.md
    python -m bench.startup --launcher local   # one of the launchers
    python -m bench.startup --tree ../before   # the same with the package of another checkout, to compare with
    python -m bench.startup --graphs vllm      # CUDA graphs of vLLM's own list of batches, to compare with
    python -m bench.startup --keep F           # results in a folder; those that are there are not measured again

The command is the user's, in a process of its own: `python -m openrlhf.cli.train_ppo_ray`, two steps, an engine on the
trainer's device. What is compiled is kept in a folder of this bench, empty at first: the first run of each launcher
compiles, the second finds it. Files are in the system's cache in both. The parts are the run's own (`startup/…`); `to
the first step's line` is seen from outside, with the first step in it, and is there for checkouts without them.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.hybrid import CPU, GPU, LAUNCHERS, Work, run_flags, vllm_version, words
from bench.results import write_section

STEPS, RUNS = 2, 2
PARTS = {
    "imports": "imports",
    "cluster": "Ray",
    "data": "data",
    "reward": "reward",
    "vllm": "vLLM's import",
    "engine": "engine, waited for",
    "models": "models",
    "push": "push",
    "first_sample": "first sample",
}
INSIDE = {
    "engine_process": "process",
    "engine_weights": "weights",
    "engine_memory": "memory and compilation",
    "engine_cache": "cache",
    "engine_graphs": "graphs",
}
GRAPHS = """
import openrlhf.rollout.vllm.settings as settings

vllms = lambda most: [1, 2, 4, *range(8, min(256, most), 8), *range(256, most, 16), most]
settings.graph_sizes = lambda most: sorted({size for size in vllms(most) if size <= most})
"""


def run_once(folder: Path, work: Work, *, launcher: str, tree: Path | None, graphs: str) -> dict[str, Any]:
    """Runs the command; its parts, and what was seen from outside."""
    if tree is not None and graphs != "ours":
        raise ValueError("--graphs is for this checkout: another may have no such list")
    run_dir = folder / f"run-{time.time_ns()}"
    flags = run_flags(folder, work, steps=STEPS, launcher=launcher) | {"logger.run_dir": run_dir}
    program = ["-m", "openrlhf.cli.train_ppo_ray"]
    if graphs == "vllm":
        patched = folder / "patched.py"
        patched.write_text(
            GRAPHS + "\nif __name__ == '__main__':\n    from openrlhf.cli.train_ppo_ray import main\n\n    main()\n"
        )
        program = [str(patched)]
    kept = folder / f"compiled-{launcher}-{graphs}-{'here' if tree is None else tree.name}"
    environment = os.environ | {
        "PYTHONPATH": str((tree or Path.cwd()).resolve()),
        "VLLM_CACHE_ROOT": str(kept / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(kept / "inductor"),
        "TRITON_CACHE_DIR": str(kept / "triton"),
    }
    began, first_line, lines = time.monotonic(), None, []
    with subprocess.Popen(
        [sys.executable, *program, *words(flags)],
        cwd=tree,  # which `python -m` looks in first
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            lines.append(f"{time.monotonic() - began:7.2f} {line}")
            if first_line is None and line.lstrip().startswith("step 1/"):
                first_line = time.monotonic() - began
    print("".join(lines), file=sys.stderr)
    if process.returncode or first_line is None:
        raise RuntimeError(f"the run ended with status {process.returncode}")
    record = json.loads((run_dir / "metrics.jsonl").read_text().splitlines()[0])
    return {
        "first line": first_line,
        "step": record["timing/step_total"],
        "whole run": time.monotonic() - began,
        "parts": {name.partition("/")[2]: value for name, value in record.items() if name.startswith("startup/")},
    }


def table(results: dict[tuple[str, int], dict[str, Any]], work: Work, *, described: str) -> str:
    """`results`: by launcher and run."""
    from importlib.metadata import version

    import torch

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"

    def cell(parts: dict[str, float], part: str) -> str:
        return f"{parts[part]:.1f}" if part in parts else ""

    def row(key: tuple[str, int]) -> str:
        launcher, number = key
        found, parts = results[key], results[key]["parts"]
        columns = [cell(parts, part) for part in ("total", *PARTS)]
        outside = f"{found['first line']:.1f} ({found['step']:.1f})"
        which = "one process" if launcher == "local" else "Ray"
        return f"| {which}, run {number} | {' | '.join(columns)} | {outside} | {found['whole run']:.1f} |"

    def inside(key: tuple[str, int]) -> str:
        launcher, number = key
        columns = [cell(results[key]["parts"], part) for part in INSIDE]
        return f"| {'one process' if launcher == 'local' else 'Ray'}, run {number} | {' | '.join(columns)} |"

    return "\n".join(
        [
            f"{work.hidden} × {work.layers} Qwen2 in {work.dtype}, {name}, {os.cpu_count()} cores, torch "
            f"{torch.__version__}, vLLM {vllm_version(version)}{described}. Run 2 finds what run 1 has compiled. "
            "Seconds. Repeat: `python -m bench.startup --write`.",
            "",
            f"| | total | {' | '.join(PARTS.values())} | to the first step's line (the step) | whole run |",
            f"|---|{'---|' * (len(PARTS) + 3)}",
            *map(row, results),
            "",
            "The engine's own start, also where nobody waits for it:",
            "",
            f"| | {' | '.join(INSIDE.values())} |",
            f"|---|{'---|' * len(INSIDE)}",
            *map(inside, results),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the section of bench/RESULTS.md")
    parser.add_argument("--launcher", choices=LAUNCHERS, action="append", help="one of them; all, unless given")
    parser.add_argument("--tree", type=Path, help="another checkout, whose package is measured")
    parser.add_argument(
        "--graphs", choices=("ours", "vllm"), default="ours", help="batches that graphs are captured for"
    )
    parser.add_argument("--keep", type=Path, help="folder of results; those that are there are not measured again")
    options = parser.parse_args()

    import torch

    work = GPU if torch.cuda.is_available() else CPU
    results: dict[tuple[str, int], dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        keep = (options.keep or folder).resolve()
        keep.mkdir(parents=True, exist_ok=True)
        # In a process of its own, so that this one has nothing on the device.
        subprocess.run([sys.executable, "-c", WRITE, str(folder), str(STEPS)], check=True, stdout=sys.stderr)
        for launcher in options.launcher or LAUNCHERS:
            for number in range(1, RUNS + 1):
                tree = "" if options.tree is None else f"-{options.tree.resolve().name}"
                kept = keep / f"startup-{launcher}-{options.graphs}{tree}-{number}.json"
                if not kept.exists():
                    found = run_once(folder, work, launcher=launcher, tree=options.tree, graphs=options.graphs)
                    kept.write_text(json.dumps(found))
                results[launcher, number] = json.loads(kept.read_text())
                print(launcher, number, json.dumps(results[launcher, number]), file=sys.stderr, flush=True)
    described = "" if options.tree is None else f", the checkout {options.tree.resolve().name}"
    described += "" if options.graphs == "ours" else ", graphs for vLLM's own list of batches"
    body = table(results, work, described=described)
    print(body)
    if options.write:
        write_section(Path(__file__).with_name("RESULTS.md"), title="Start-up", body=body)


WRITE = """
import sys
from pathlib import Path

import torch
from bench.hybrid import CPU, GPU, write_inputs

write_inputs(Path(sys.argv[1]), GPU if torch.cuda.is_available() else CPU, steps=int(sys.argv[2]))
"""

if __name__ == "__main__":
    main()

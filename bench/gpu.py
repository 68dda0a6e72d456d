"""All measurements of one GPU that the documents quote, in the order of their worth, as many as fit into a time.

    python -m bench.gpu --seconds 1500                # all that is not there yet
    python -m bench.gpu --seconds 540 --real ~/real   # also those of a real model
    python -m bench.gpu --list                        # what there is, and about how long each takes
    python -m bench.gpu --only hybrid --only gap      # of some benches

Each is a bench of this folder with some of its flags, in a process of its own, one after the other, since most of them
measure time. Results are kept in `--keep`, and are not measured again: a machine that is lent for half an hour goes on
where the last one stopped (`--pack F` puts results, logs and tables into one file, `--unpack F` takes such a file). A
measurement that is not expected to end in time is not begun; one that takes three times as long as expected is ended.
What a measurement says is in `logs/` beside the results.

`--real` is a folder with `model`, `train.jsonl` and `held_out.jsonl` (lines with input, label and datasource). The
world needs its package: `openrlhf worlds install reasoning_gym`, or reasoning-gym beside this project.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PATIENCE = 3.0
"""A measurement may take so many times what is expected."""


class Measurement(NamedTuple):
    bench: str
    flags: str
    seconds: float
    """About, on an H200 whose file cache is warm."""

    @property
    def name(self) -> str:
        return " ".join(filter(None, (self.bench, self.flags)))

    @property
    def real(self) -> bool:
        return self.bench in ("gap", "score", "worlds")


MEASUREMENTS = (
    Measurement("hybrid", "--case together --case processes --launcher local", 320),
    Measurement("engine_processes", "--shape 1.5B --most 2", 150),
    Measurement("engine_processes", "--shape 135M", 190),
    *(
        Measurement("doctor", f"--case {case}", 150)
        for case in ("1.5B", "7B-lora", "1.5B-turns", "7B-turns", "1.5B-checkpointing", "1.5B-lora", "1.5B-offload")
    ),
    *(Measurement("hybrid", f"--case {case} --launcher ray", 150) for case in ("together", "processes")),
    *(Measurement("async_rl", f"--case gpu --pipeline {name}", 200) for name in ("sync", "partial", "mps")),
    Measurement("hybrid", "--case compiled --launcher local", 170),
    *(Measurement("trainer", f"--case {case}", 45) for case in ("0.6B-16384", "0.6B-65536", "4B-16384-lora")),
    *(Measurement("gap", f"--case {case}", 240) for case in ("logits", "exact", "bf16", "fp16")),
    *(Measurement("memory", f"--shape {shape}", 110) for shape in ("135M", "1.5B", "7B")),
    *(Measurement("score", f"--case {case}", 260) for case in ("sync", "partial", "async")),
    *(Measurement("startup", f"--launcher {launcher}", 220) for launcher in ("local", "ray")),
    *(Measurement("rollout_speed", f"--case {case}", 110) for case in ("plain", "fp8", "history")),
    Measurement("doctor", "--case 135M", 100),
    Measurement("worlds", "--case sums --steps 120", 300),
    Measurement("hybrid", "--case turns --launcher local", 260),
)


def command(one: Measurement, *, keep: Path, real: Path | None) -> list[str]:
    words = [sys.executable, "-m", f"bench.{one.bench}", *one.flags.split(), "--keep", str(keep / one.bench)]
    if one.real and real is not None:
        words += ["--model", str(real / "model")]
        words += ["--data", str(real / "train.jsonl")] if one.bench != "worlds" else []  # a world has its own
        words += ["--held-out", str(real / "held_out.jsonl")] if one.bench == "score" else []
    return words


def measure(one: Measurement, *, keep: Path, real: Path | None, most: float) -> str:
    """What became of it, in a word. One that takes longer than `most` seconds is ended with all that it has started."""
    done = keep / "done" / one.name.replace(" ", "_")
    if done.exists():
        return "there already"
    (keep / one.bench).mkdir(parents=True, exist_ok=True)
    log = keep / "logs" / f"{done.name}.txt"
    for path in (done, log):
        path.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        process = subprocess.Popen(
            command(one, keep=keep, real=real), cwd=ROOT, stdout=file, stderr=file, start_new_session=True
        )
        try:
            status = process.wait(timeout=most)
        except subprocess.TimeoutExpired:
            return f"ended after {most:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if status == 0:
        done.touch()
    return "measured" if status == 0 else f"failed with status {status}: see {log}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="for all of it")
    parser.add_argument("--keep", type=Path, default=Path("bench-kept"), help="folder of results and logs")
    parser.add_argument("--real", type=Path, help="folder of a real model and its tasks")
    parser.add_argument("--only", action="append", help="a bench; unless given: all")
    parser.add_argument("--list", action="store_true", help="only say what there is")
    parser.add_argument("--pack", type=Path, help="write the folder into this .tar.gz at the end")
    parser.add_argument("--unpack", type=Path, help="begin with what --pack wrote")
    given = parser.parse_args()
    keep, ends = given.keep.resolve(), time.monotonic() + given.seconds
    real = given.real.expanduser().resolve() if given.real else None
    if given.unpack:
        with tarfile.open(given.unpack) as archive:
            archive.extractall(keep, filter="data")
    for one in MEASUREMENTS:
        if given.only and one.bench not in given.only:
            continue
        if given.list:
            print(f"{one.seconds:5.0f} s  {one.name}")
        elif one.real and real is None:
            print(f"{one.name}: left out, it needs --real", flush=True)
        elif (left := ends - time.monotonic()) < one.seconds:
            print(f"{one.name}: left out, it takes about {one.seconds:.0f} s", flush=True)
        else:
            start = time.monotonic()
            said = measure(one, keep=keep, real=real, most=min(PATIENCE * one.seconds, left))
            print(f"{one.name}: {said} ({time.monotonic() - start:.0f} s)", flush=True)
    if given.pack:
        with tarfile.open(given.pack, "w:gz") as archive:
            for path in sorted(keep.rglob("*")):
                if path.name.startswith("rollouts"):
                    continue  # of runs, which are large and which no table is made of
                if path.is_file() and (path.suffix in (".json", ".jsonl", ".txt") or path.parent.name == "done"):
                    archive.add(path, arcname=path.relative_to(keep))


if __name__ == "__main__":
    main()

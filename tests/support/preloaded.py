"""Processes that begin with everything imported: seconds of work that one process does once, before it forks.

For tests of what processes do, not of how they are started. Arguments, current directory, environment, signals and exit
status are those of `python …`; but what reads the environment when it is imported has read that of the test.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from multiprocessing import connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

FORKS = multiprocessing.get_context("forkserver")
"""Of one server, which imports this when the first process is started."""
FORKS.set_forkserver_preload(
    [
        "killed_runs",
        "openrlhf.runs.rl_assembly",
        "openrlhf.runs.local_launcher",
        "openrlhf.runs.supervised_assembly",
        "openrlhf.backends.deepspeed",
        "datasets",
        "deepspeed",
        "peft",
        "transformers.optimization",
        "transformers.models.qwen2.modeling_qwen2",
        "transformers.models.qwen2.tokenization_qwen2",
    ]
)


def start(words: Sequence[str], *, cwd: Path, said: Path, environment: Mapping[str, str]) -> ForkServerProcess:
    """As `python *words`, a script or `-m` and a module. What it prints is added to the file `said`."""
    process = FORKS.Process(target=_run, args=(list(words), cwd, said, dict(environment)))
    process.start()
    return process


def run_ranks(count: int, words: Sequence[str], *, cwd: Path, said: Path, environment: Mapping[str, str]) -> None:
    """As `torchrun --nproc-per-node count *words`, to its end, which has to be a good one."""
    finish(start_ranks(count, words, cwd=cwd, said=said, environment=environment), said)


def start_ranks(
    count: int, words: Sequence[str], *, cwd: Path, said: Path, environment: Mapping[str, str]
) -> list[ForkServerProcess]:
    """As `start`, so many ranks that find each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": str(count)}
    own = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    return [start(words, cwd=cwd, said=said, environment={**environment, **meeting, **rank}) for rank in own]


def finish(processes: Sequence[ForkServerProcess], said: Path, *, seconds: float = 600.0) -> None:
    """Wait for all of them to end well; where one does not, the others are ended too."""
    deadline = time.monotonic() + seconds
    try:
        while running := [process for process in processes if process.exitcode is None]:
            ended = connection.wait([p.sentinel for p in running], timeout=max(0.0, deadline - time.monotonic()))
            assert ended, f"{words_of(said)}\nnot ended after {seconds:g} s"
            assert not any(process.exitcode for process in processes), words_of(said)
    finally:
        for process in processes:
            process.kill()
            process.join()


def words_of(said: Path) -> str:
    """The end of them."""
    return said.read_text(errors="replace")[-12000:]


def _run(words: list[str], cwd: Path, said: Path, environment: dict[str, str]) -> None:
    with said.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(cwd)
    os.environ |= environment
    import torch

    torch.set_num_threads(1)  # tiny models: more would wait for each other
    if "HF_DATASETS_CACHE" in environment:
        import datasets

        datasets.config.HF_DATASETS_CACHE = Path(environment["HF_DATASETS_CACHE"])
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(words[0], run_name="__main__")

"""Proofs over processes: two gloo ranks with the run's own backend compute the gradient of one."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pickle
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from openrlhf.proving import reference
from openrlhf.proving.plain_round import CUT_TOLERANCE
from openrlhf.proving.registry import KINDS, Disproved, proof
from openrlhf.proving.trial import RLTrial, SupervisedTrial, Weights
from openrlhf.utils import waits

RANKS = 2
DEADLINE = 600.0
"""Seconds that ranks may take. Imports, of DeepSpeed above all, take most of it."""


def _one_process(trial: RLTrial | SupervisedTrial) -> str | None:
    if importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed, which trains on several ranks, is not installed"
    if trial.several_ranks:
        return None
    return "the run is one process (--only ranks tries two all the same)"


@proof(
    "ranks",
    title="two ranks of the run's backend have the gradient of one",
    shows="Two processes with DeepSpeed at the run's ZeRO stage, each with its share of the samples in several "
    "micro-batches, give the optimizer the gradient that one process gives it.",
    remedy="Gradients of micro-batches or of ranks are lost or counted twice: look at --ds.zero_stage and the versions "
    "of DeepSpeed and torch.",
    kinds=KINDS,
    unless=_one_process,
    cost=4,
)
def ranks(trial: RLTrial | SupervisedTrial) -> str:
    folder = trial.folder / "ranks"
    folder.mkdir(exist_ok=True)
    job = (trial.config, trial.samples, 0) if isinstance(trial, RLTrial) else (trial.config, None, trial.count)
    with (folder / "job").open("wb") as file:
        pickle.dump(job, file)
    theirs = _started(folder)
    with _files_weights(trial):
        alone = trial.updated().policy if isinstance(trial, RLTrial) else _one_by_one(trial)
    gap, where = reference.gradient_gap(theirs, alone)
    if not gap <= CUT_TOLERANCE:
        raise Disproved(
            f"on two ranks (ZeRO {trial.config.ds.zero_stage}) the gradient is {gap:.2g} of its norm away from that of "
            f"one process, most in {where}; {CUT_TOLERANCE:g} is allowed"
        )
    return f"2 ranks, ZeRO {trial.config.ds.zero_stage}: {gap:.1g} of the norm apart"


def _one_by_one(trial: SupervisedTrial) -> dict[str, Tensor]:
    return trial.step([[i] for i in range(trial.count)]).gradient


@contextlib.contextmanager
def _files_weights(trial: RLTrial | SupervisedTrial) -> Iterator[None]:
    """The weights of the files, which are what ranks load."""
    modules = [kept.module for kept in trial.files]
    moved = [Weights(module) for module in modules]
    for kept in trial.files:
        kept.restore()
    try:
        yield
    finally:
        for kept in moved:
            kept.restore()


def _started(folder: Path) -> dict[str, Tensor]:
    """What two ranks leave; Disproved with the last lines of one that fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    logs = [folder / f"rank{rank}.log" for rank in range(RANKS)]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank, log in enumerate(logs):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(RANKS),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "CUDA_VISIBLE_DEVICES": "",
                "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
            }
            with log.open("wb") as said:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "openrlhf.proving.rank", str(folder)],
                        env=environment,
                        stdout=said,
                        stderr=subprocess.STDOUT,
                    )
                )
        _wait(processes, logs)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    return torch.load(folder / "gradient.pt", weights_only=True)


def _wait(processes: list[subprocess.Popen[bytes]], logs: list[Path]) -> None:
    end = time.monotonic() + DEADLINE
    with waits.waiting("for two ranks of a proof", deadline=DEADLINE):
        while any(process.poll() is None for process in processes):
            for process, log in zip(processes, logs, strict=True):
                if process.poll():
                    lines = log.read_text(errors="replace").strip().splitlines()
                    raise Disproved(f"a rank ended with status {process.returncode}: {lines[-1] if lines else ''}")
            if time.monotonic() > end:
                raise Disproved(f"two ranks have not finished in {DEADLINE:g} s")
            time.sleep(0.2)
            waits.mark_progress()
    for process, log in zip(processes, logs, strict=True):
        if process.returncode:
            lines = log.read_text(errors="replace").strip().splitlines()
            raise Disproved(f"a rank ended with status {process.returncode}: {lines[-1] if lines else ''}")

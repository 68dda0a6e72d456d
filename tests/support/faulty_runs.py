"""Small runs on a cluster in which a process is killed, and what they leave: who was sampled and trained on, and how."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from openrlhf.cluster.engines import RayEngines
from openrlhf.config import parse
from openrlhf.config.commands import RLConfig
from openrlhf.demo.model import write_model
from openrlhf.demo.sorting import make_task
from openrlhf.observability.ledger import read_trained
from openrlhf.observability.loggers import read_metrics

REPOSITORY = Path(__file__).resolve().parents[2]
REWARD = """
def reward_func(queries, prompts, labels):
    return [float(sum(map(ord, query)) % 5) for query in queries]
"""
ROUNDS, PROMPTS, SAMPLES = 3, 4, 2
"""Of a run: all its samples are in rollouts.jsonl."""


@dataclass(frozen=True)
class Inputs:
    """A model that has learned nothing, which so rarely stops by itself, and prompts for `ROUNDS` rounds."""

    folder: Path

    @staticmethod
    def made(folder: Path) -> Inputs:
        write_model(folder / "model", seed=0)
        make_task(seed=0, train=ROUNDS * PROMPTS).write(folder)
        (folder / "reward.py").write_text(REWARD)
        return Inputs(folder)

    def flags(self, run_dir: Path, **overrides: object) -> list[str]:
        """`overrides` are flags, `__` for `.`; True is a bare switch, None leaves a flag out."""
        values = {
            "actor.model_name_or_path": self.folder / "model",
            "data.prompt_dataset": self.folder / "train.jsonl",
            "data.label_key": "label",
            "data.max_len": 32,
            "reward.remote_url": self.folder / "reward.py",
            "algo.advantage.estimator": "reinforce",
            "algo.kl.init_coef": 0,
            "rollout.batch_size": PROMPTS,
            "rollout.n_samples_per_prompt": SAMPLES,
            "rollout.max_new_tokens": 24,
            "train.batch_size": PROMPTS * SAMPLES,
            "train.launcher": "ray",
            "train.full_determinism_enable": True,
            "actor.num_gpus_per_node": 1,
            "actor.adam.lr": 1e-3,
            "vllm.num_engines": 2,
            "vllm.sync_backend": "gloo",  # a process group, which a lost engine breaks
            "vllm.sync_verify": True,
            "ckpt.output_dir": run_dir.with_name("out"),
            "logger.run_dir": run_dir,
        } | {name.replace("__", "."): value for name, value in overrides.items()}
        words: list[str] = []
        for name, value in values.items():
            if value is not None:
                words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return words

    def config(self, run_dir: Path, **overrides: object) -> RLConfig:
        return parse("train_ppo_ray", self.flags(run_dir, **overrides))


def samples(run_dir: Path) -> dict[tuple[int, int], tuple[str, float]]:
    """(prompt, sample) → its text and reward. None was trained on in two rounds, and none has failed.

    A round that was trained a second time, from the checkpoint before it, counts once, with the same prompts.
    """
    rounds: dict[int, list[dict]] = {}
    for record in map(json.loads, (run_dir / "rollouts.jsonl").read_text().splitlines()):
        rounds.setdefault(record["step"], []).append(record)
    found = {}
    for records in rounds.values():
        assert all(record["reward"] is not None for record in records), records
        again = {(record["prompt_ordinal"], record["sample"]): record for record in records}
        assert len(records) % len(again) == 0, "a repeated round has the same prompts"
        assert not again.keys() & found.keys()
        found |= {key: (record["response"], record["reward"]) for key, record in again.items()}
    return found


def column(run_dir: Path, name: str) -> list[float]:
    """A metric, round by round."""
    return [record[name] for record in read_metrics(run_dir / "metrics.jsonl") if record["kind"] == "train"]


def logged(run_dir: Path, rounds: int) -> bool:
    """Whether so many are in the metrics."""
    path = run_dir / "metrics.jsonl"
    return path.exists() and path.read_bytes().count(b'"kind": "train"') >= rounds


def assert_every_prompt_once(run_dir: Path, *, rounds: int = ROUNDS) -> None:
    every = {(prompt, sample): 1 for prompt in range(ROUNDS * PROMPTS) for sample in range(SAMPLES)}
    assert Counter(one for step in read_trained(run_dir / "trained.jsonl") for one in step.trained) == every
    assert samples(run_dir).keys() == every.keys()
    assert column(run_dir, "global_step") == list(range(1, rounds + 1))
    assert column(run_dir, "rollout/failed") == [0] * rounds


# ------------------------------------------------------------------------------------------------------- killing


def actor_of(engines: RayEngines, engine: int) -> int:
    """The Ray worker that an engine lives in."""
    return engines._slots[engine].processes[0].number


def core_of(engines: RayEngines, engine: int) -> int:
    """vLLM's own process that samples."""
    (core,) = [
        process.number
        for process in engines._slots[engine].processes[1:]
        if "resource_tracker" not in "".join(psutil.Process(process.number).cmdline())
    ]
    return core


def kill(*pids: int, with_signal: signal.Signals = signal.SIGKILL) -> None:
    for pid in pids:
        os.kill(pid, with_signal)


@contextlib.contextmanager
def strike(engines: RayEngines, blow: Callable[[], None], *, at: int) -> Iterator[None]:
    """While open the so-manieth request is followed by a blow, as soon as an engine has some to answer: on a busy machine
    all of them may have been answered a moment later."""
    whole, count = engines.answer, 0

    async def answer(request, images=None):
        nonlocal count
        count += 1
        if count != at:
            return await whole(request, images)
        asked = asyncio.ensure_future(whole(request, images))
        while not (sum(engines._router.running) or asked.done()):
            await asyncio.sleep(0)
        blow()
        return await asked

    engines.answer = answer
    try:
        yield
    finally:
        del engines.answer
    assert count >= at, "it was struck"


def ranks_below(pid: int) -> list[int]:
    """Training ranks on the Ray that a process has started."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "".join(process.cmdline()).startswith("ray::WorkerActor"):
                found.append(process.pid)
    return found


class Command:
    """A run as a process of its own, with a checkpoint after every round."""

    def __init__(self, inputs: Inputs, folder: Path, environment: Mapping[str, str], **overrides: object) -> None:
        self.run_dir, self.checkpoints = folder / "run", folder / "checkpoints"
        saving = {"ckpt__path": self.checkpoints, "ckpt__save_steps": 1}
        self._said = folder / "said.txt"
        ours = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY), "VLLM_CPU_KVCACHE_SPACE": "1"}
        with self._said.open("wb") as said:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "openrlhf.cli.train_ppo_ray",
                    *inputs.flags(self.run_dir, **saving, **overrides),
                ],
                stdout=said,
                stderr=said,
                cwd=folder,
                env={**os.environ, **ours, **environment},
            )

    @property
    def said(self) -> str:
        return self._said.read_text()

    def wait_until(self, condition: Callable[[], bool], *, seconds: float = 300.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < end, self.said
            time.sleep(0.02)

    def ends_after_one_restart(self, *, seconds: float = 400.0) -> None:
        assert self.process.wait(seconds) == 0, self.said
        assert self.said.count("(restart 1 of 3)") == 1, self.said
        assert "restart 2 of 3" not in self.said
        assert "Traceback" not in self.said, self.said
        assert_every_prompt_once(self.run_dir)

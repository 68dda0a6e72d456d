"""A tiny model and data set on disk, and two ways to run the CLI on them: right here, and as a process of its own."""

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import living_children, wait_until

REPOSITORY = Path(__file__).resolve().parents[2]
os.environ.setdefault("RAY_worker_niceness", "0")  # else tests beside would starve Ray's workers
LONGEST_FIRST = (
    "test_ray_run.py",
    "test_recipes.py",
    "test_cluster_faults.py",
    "test_cluster_engines.py",
    "test_kill_ray.py",
    "test_learning_agents.py",
    "test_image_run.py",
    "test_deepspeed.py",
    "test_context_parallel.py",
    "test_algorithms.py",
    "test_learning.py",
    "test_ray_job.py",
    "test_broken_files.py",
    "test_vllm_engine.py",
    "test_bad_input.py",
    "test_stop_signals.py",
    "test_interrupt.py",
    "test_cluster_workers.py",
)
"""So that all workers end at about the same time."""
SHARE_A_CLUSTER = ("test_ray_run.py", "test_recipes.py", "test_cluster_faults.py", "test_cluster_engines.py")


RUN_FIXTURES = "cli start_cli run_cli workplace demo agent_demo mixture_demo files straight cluster runs server"
"""Fixtures for whole runs of a command, for Ray, and for ranks: a test that has one is slow."""


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent == Path(__file__).parent and not set(RUN_FIXTURES.split()).isdisjoint(item.fixturenames):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: LONGEST_FIRST.index(item.path.name) if item.path.name in LONGEST_FIRST else 99)


def pytest_xdist_make_scheduler(config, log):
    """A file's tests stay on one worker, and so do the files that share a cluster."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = Path(super()._split_scope(nodeid)).name
            return "cluster" if file in SHARE_A_CLUSTER else file

    return ByFile(config, log)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A finished command, and the run directory it was told to use."""

    rc: int
    out: str
    err: str
    """Log lines included."""
    seconds: float
    run_dir: Path

    @property
    def errors(self) -> list[str]:
        """The lines that say why a command was refused or ended."""
        return [line for line in self.err.splitlines() if line.startswith(("error: ", "train_ppo_ray: error: "))]

    @property
    def metrics(self) -> list[dict]:
        """Every line must be a whole object."""
        return [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """What a user brings. 8 prompts of 6 tokens, whose first is `first_prompt`."""

    model: Path
    data: Path
    records: list[dict]

    @property
    def first_prompt(self) -> str:
        return self.records[0]["input"]

    def flags(self, run_dir: Path, **overrides) -> list[str]:
        """Two rounds of 4 prompts, 2 samples each. `overrides` are flags, `__` for `.`; True is a bare switch."""
        values = {
            "actor.model_name_or_path": self.model,
            "data.prompt_dataset": self.data,
            "data.label_key": "label",
            "data.max_len": 16,
            "reward.remote_url": REPOSITORY / "openrlhf" / "demo" / "reward.py",
            "algo.advantage.estimator": "reinforce_baseline",
            "algo.kl.init_coef": 0,
            "rollout.batch_size": 4,
            "rollout.n_samples_per_prompt": 2,
            "rollout.max_new_tokens": 4,
            "train.batch_size": 8,
            "vllm.num_engines": 0,
            "ckpt.output_dir": run_dir.with_name("out"),
            "logger.run_dir": run_dir,
        }
        values |= {name.replace("__", "."): value for name, value in overrides.items()}
        words: list[str] = []
        for name, value in values.items():
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        return words


@pytest.fixture(scope="session")
def inputs(tmp_path_factory) -> Inputs:
    from openrlhf.demo.model import write_model
    from openrlhf.demo.sorting import make_task

    folder = tmp_path_factory.mktemp("inputs")
    write_model(folder / "model", seed=0)
    make_task(seed=0, train=8).write(folder)
    records = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    return Inputs(model=folder / "model", data=folder / "train.jsonl", records=records)


@pytest.fixture(scope="session")
def demo(tmp_path_factory):
    """The demo's data and warmed-up model."""
    from openrlhf.demo.sorting import make_task

    return _prepared(make_task(seed=0), "demo", tmp_path_factory)


@pytest.fixture(scope="session")
def agent_demo(tmp_path_factory):
    """The same of the multi-turn demo."""
    from openrlhf.demo.hunt import make_task

    return _prepared(make_task(seed=0), "agent_demo", tmp_path_factory)


def _prepared(task, name: str, tmp_path_factory):
    """By the first worker that asks; what it has learnt in a minute serves the others."""
    from demo_runs import Demo
    from filelock import FileLock

    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            Demo.prepared(task, tmp_path_factory.mktemp(name)).folder.rename(folder)
    return Demo(task, folder)


_open_cluster = contextlib.ExitStack()
_cluster = []


@pytest.fixture(scope="module")
def cluster(inputs, tmp_path_factory):
    """Ray and two vLLM engines, for runs of models of the demo's shape with up to 32 tokens.

    It stays for the next file that asks for it, and ends before another one's tests: a process has but one Ray.
    """
    from shared_cluster import shared_cluster

    from openrlhf.config import parse

    if not _cluster:
        folder = tmp_path_factory.mktemp("cluster")
        words = inputs.flags(folder / "run", data__max_len=32, vllm__num_engines=2)
        patch = _open_cluster.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        _cluster.append(_open_cluster.enter_context(shared_cluster(parse("train_ppo_ray", words), folder)))
    return _cluster[0]


def pytest_runtest_setup(item):
    if item.path.name not in SHARE_A_CLUSTER:
        _close_cluster()


def pytest_sessionfinish():
    _close_cluster()


def _close_cluster():
    _cluster.clear()
    _open_cluster.close()


@pytest.fixture
def cli(inputs, tmp_path, capfd, caplog, monkeypatch):
    """Runs `train_ppo_ray` in this process, from an empty directory; no process may be left afterwards."""
    import openrlhf.runs.rl_assembly  # noqa: F401, seconds of imports that no case should be charged with
    from openrlhf.cli.train_ppo_ray import main

    monkeypatch.chdir(tmp_path)
    torch_threads_before = _one_torch_thread()

    def run(*words: str, **overrides) -> Ran:
        run_dir = tmp_path / "run"
        others = set(living_children(os.getpid()))
        started = time.monotonic()
        rc = main([*inputs.flags(run_dir, **overrides), *words])
        seconds = time.monotonic() - started
        assert wait_until(lambda: {pid for pid in living_children(os.getpid()) if not _is_tracker(pid)} <= others)
        said = capfd.readouterr()
        return Ran(rc=rc, out=said.out, err=said.err + caplog.text, seconds=seconds, run_dir=run_dir)

    yield run
    _set_torch_threads(torch_threads_before)


def _is_tracker(pid: int) -> bool:
    """multiprocessing's, which lives as long as the process that once spawned something."""
    try:
        return "multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


@pytest.fixture
def start_cli(inputs, tmp_path):
    """Starts `python -m openrlhf.cli.train_ppo_ray` in a session of its own, as a terminal would; killed at the end."""
    processes: list[subprocess.Popen] = []

    def start(*, module="openrlhf.cli.train_ppo_ray", before=(), preexec_fn=None, **overrides) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *before, *inputs.flags(tmp_path / "run", **overrides)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
            start_new_session=True,
            preexec_fn=preexec_fn,
        )
        processes.append(process)
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture
def run_cli(start_cli, tmp_path):
    """Runs the CLI as a process of its own, to its end."""

    def run(*, timeout: float = 60.0, **options) -> Ran:
        started = time.monotonic()
        process = start_cli(**options)
        out, err = process.communicate(timeout=timeout)
        seconds = time.monotonic() - started
        return Ran(rc=process.returncode, out=out, err=err, seconds=seconds, run_dir=tmp_path / "run")

    return run


def _one_torch_thread() -> int:
    """Tiny matrices are slower on several threads, much slower on a busy machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    return before


def _set_torch_threads(count: int) -> None:
    import torch

    torch.set_num_threads(count)


@pytest.fixture
def workplace(tmp_path, monkeypatch) -> Iterator[Path]:
    """An empty current directory for commands that are run in this process, in one thread, with a cache of its own."""
    import torch

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield tmp_path
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """Files for the supervised trainers: the right answer repeats the first of three digits, the wrong one another."""
    from supervised_data import write_files

    return write_files(tmp_path_factory.mktemp("data"))

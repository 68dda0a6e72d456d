"""Runs as processes of their own that are killed with SIGKILL, and started again with the same command.

Each is a fork of a process that has imported everything: it starts in a fraction of a second, and dies like any other.
"""

import functools
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

import torch
from preloaded import FORKS
from processes import wait_until
from safetensors.torch import load_file

from openrlhf.observability.ledger import SampleId, TrainedStep, read_trained
from openrlhf.observability.loggers import read_metrics, without_times

REPOSITORY = Path(__file__).resolve().parents[2]
DIGITS = "0123456789"
SAVE_STEPS = 4
DEADLINE = 300.0
"""Of any run, in seconds."""
PYTHON = "OPENRLHF_TEST_PYTHON"
"""In the environment of a run: what starts its processes, in place of Python."""
GONE_WITHIN = 120.0
"""Seconds in which nothing is left of a run that was killed. Ray's agents take one of these two minutes to notice."""
MARK = "OPENRLHF_KILLED_RUN"
"""Is in the environment of every process that a run starts."""

JUDGE = """\
import time, zlib
def reward_func(queries, prompts, labels):
    if prompts[0].startswith("7"):
        raise ValueError("not this one")
    luck = [zlib.crc32(query.encode()) for query in queries]
    time.sleep(0.1 * (luck[0] % 4))
    return {"rewards": [n % 2 for n in luck], "scores": [n % 2 for n in luck]}
"""
"""Some calls take longer than others, so that there is always something in play. Prompts that begin with a 7 fail."""


def write_records(path: Path, records) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def make_inputs(folder: Path, *, count: int = 64) -> None:
    """`model`, and files in which the right answer repeats the prompt's first digit; `judge.py`, a reward."""
    from openrlhf.demo.model import write_model

    write_model(folder / "model", seed=0)
    rng = random.Random(0)
    prompts = ["".join(rng.choices(DIGITS, k=3)) + ">" for _ in range(count)]
    rows = [(p, p[0] * rng.randint(1, 4), str((int(p[0]) + 5) % 10) * 2) for p in prompts]
    write_records(folder / "sft.jsonl", [{"input": p, "output": right} for p, right, _ in rows])
    pairs = [{"prompt": p, "chosen": right, "rejected": wrong} for p, right, wrong in rows]
    write_records(folder / "pairs.jsonl", pairs)
    judged = [{"prompt": p, "response": a, "label": a == right} for p, right, wrong in rows for a in (right, wrong)]
    write_records(folder / "judged.jsonl", judged)
    write_records(folder / "prompts.jsonl", [{"input": p} for p, _, _ in rows[:PROMPTS]])
    (folder / "judge.py").write_text(JUDGE)


def words_of(values: dict) -> list[str]:
    """Flags as a command line; True is a bare switch, None leaves a flag out, a list is several words."""
    words = []
    for name, value in values.items():
        if value is None:
            continue
        given = [] if value is True else value if isinstance(value, list) else [value]
        words += [f"--{name}", *map(str, given)]
    return words


def flags(inputs: Path, folder: Path, **overrides) -> list[str]:
    """`overrides` are flags, `__` for `.`; True is a bare switch, None leaves a flag out."""
    values = {
        "model.model_name_or_path": inputs / "model",
        "data.max_len": 16,
        "train.batch_size": 8,
        "train.max_epochs": 4,
        "adam.lr": 1e-3,
        "lr_scheduler": "cosine",
        "ckpt.output_dir": folder / "out",
        "ckpt.path": folder / "checkpoints",
        "ckpt.save_steps": SAVE_STEPS,
        "ckpt.max_num": 2,
        "logger.run_dir": folder / "run",
    } | {name.replace("__", "."): value for name, value in overrides.items()}
    return words_of(values)


# ------------------------------------------------------------------------------------------------------- processes


@dataclass(frozen=True)
class Killed:
    """How a run that was to be killed ended."""

    seconds: float
    """After its start."""
    status: int
    """As `multiprocessing` has it: −9 after SIGKILL."""

    @property
    def in_time(self) -> bool:
        """It had not ended by itself before."""
        return self.status == -signal.SIGKILL


class Run:
    """A command in a folder of its own, started as often as one likes."""

    command: str
    inputs: Path
    folder: Path

    def words(self) -> list[str]:
        raise NotImplementedError

    @property
    def environment(self) -> dict[str, str]:
        """Beyond that of the tests."""
        return {MARK: str(self.folder)}

    @property
    def left(self) -> list[str]:
        """Processes that a run has started and that still live."""
        mark, found = f"{MARK}={self.folder}".encode(), []
        for environ in Path("/proc").glob("[0-9]*/environ"):
            try:
                if mark in environ.read_bytes().split(b"\0"):
                    name = environ.with_name("cmdline").read_bytes().split(b"\0")[0].decode()
                    found.append(f"{environ.parent.name} {name}")
            except OSError:  # another user's, or it has just ended
                continue
        return found

    def start(self, *, dies_at: str | None = None) -> "multiprocessing.process.BaseProcess":
        """`dies_at`: what of `checkpoint.folder` kills it when it comes to its second checkpoint."""
        _warm_up()
        self.folder.mkdir(exist_ok=True, parents=True)
        process = FORKS.Process(
            target=_process,
            args=(self.command, self.words(), self.folder, self.inputs / "cache", self.environment, dies_at),
        )
        process.start()
        return process

    def run(self) -> float:
        """To its end; how long that took."""
        started = time.monotonic()
        self.end(self.start())
        return time.monotonic() - started

    def end(self, process: "multiprocessing.process.BaseProcess") -> None:
        """Wait for it; it must end well, and in time."""
        process.join(DEADLINE)
        process.kill()
        process.join()
        assert process.exitcode == 0, self.said

    def kill_when(self, reached: Callable[[], bool], *, number: int = signal.SIGKILL) -> Killed:
        """Start it, and send the signal as soon as that is so. It must be in time."""
        process, started = self.start(), time.monotonic()
        try:
            while process.is_alive() and not reached() and time.monotonic() < started + DEADLINE:
                time.sleep(0.0005)
        finally:
            if process.is_alive():
                os.kill(process.pid, number)
            process.join(DEADLINE)
        return Killed(time.monotonic() - started, process.exitcode)

    def kill_after(self, seconds: float) -> Killed:
        end = time.monotonic() + seconds
        return self.kill_when(lambda: time.monotonic() >= end)

    def dies_at(self, method: str) -> Killed:
        """It kills itself in this method of `checkpoint.folder.Disk`, within its second checkpoint."""
        started = time.monotonic()
        process = self.start(dies_at=method)
        process.join(DEADLINE)
        return Killed(time.monotonic() - started, process.exitcode)

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def latest(self) -> str:
        """The checkpoint that a run would go on from."""
        path = self.checkpoints / "latest"
        return path.read_text().strip() if path.exists() else "nothing"

    @property
    def run_dir(self) -> Path:
        """A run that is killed before its first checkpoint begins anew, and so does its directory."""
        found = self.folder.glob("run*")
        return max(found, key=lambda path: (len(path.name), path.name), default=self.folder / "run")

    @property
    def said(self) -> str:
        return (self.folder / "said.txt").read_text()

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / "out" / "model.safetensors")

    @property
    def history(self) -> list[dict]:
        """Everything that was measured, times aside."""
        return [without_times(record) for record in read_metrics(self.run_dir / "metrics.jsonl")]


@functools.cache
def _warm_up() -> None:
    """Importing everything takes longer than a run: nobody's time should have it in it."""
    first = FORKS.Process(target=_nothing)
    first.start()
    first.join()


def _nothing() -> None:
    pass


def _process(
    command: str, words: list[str], folder: Path, cache: Path, environment: dict[str, str], dies_at: str | None
) -> None:
    """What the fork does: the command, in its folder."""
    os.environ.update(environment)
    sys.executable = environment.get(PYTHON, sys.executable)
    with (folder / "said.txt").open("ab") as said:
        os.dup2(said.fileno(), 1)
        os.dup2(said.fileno(), 2)
    os.chdir(folder)
    import datasets

    datasets.config.HF_DATASETS_CACHE = cache  # of all runs on these inputs
    torch.set_num_threads(1)
    if dies_at is not None:
        _die_in(dies_at)
    raise SystemExit(import_module(f"openrlhf.cli.{command}").main(words))


def _die_in(method: str) -> None:
    """`sync_tree`: the files of a checkpoint are written, and flushed; `rename`: they are, and have no name yet."""
    from openrlhf.checkpoint.folder import Disk

    before, drafts = getattr(Disk, method), []

    def dying(self, path, *more):
        if path.name.endswith(".partial") and "global_step" in path.name:
            drafts.append(path)
            if len(drafts) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
        return before(self, path, *more)

    setattr(Disk, method, dying)


def assert_same_weights(one: Run, other: Run) -> None:
    ours, theirs = one.weights, other.weights
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


# ------------------------------------------------------------------------------------------------------------- SFT


@dataclass
class Sft(Run):
    """64 examples, 8 a step, 4 epochs: 32 steps, evaluated after each epoch."""

    inputs: Path
    folder: Path

    command = "train_sft"
    STEPS = 32

    def words(self) -> list[str]:
        return flags(
            self.inputs, self.folder, data__dataset=self.inputs / "sft.jsonl", data__output_key="output",
            data__input_template="{}", eval__dataset=self.inputs / "sft.jsonl", ckpt__load_enable=True,
        )  # fmt: skip

    def kill(self, at: Literal["logged", "writing"], step: int) -> None:
        """Start it, and SIGKILL as soon as that step is logged, or its checkpoint is being written."""
        reached = self.logged if at == "logged" else self.writing
        assert self.kill_when(lambda: reached(step)).in_time, self.said
        assert reached(step), "a write that was begun was not ended"

    def logged(self, step: int) -> bool:
        """Whether that step is in the metrics."""
        path = self.run_dir / "metrics.jsonl"
        return path.exists() and path.read_bytes().count(b'"kind": "train"') >= step

    def writing(self, step: int) -> bool:
        """Whether that step's checkpoint is being written."""
        return (self.checkpoints / f".global_step{step}.partial").exists()


def assert_same_end(resumed: Sft, straight: Sft) -> None:
    """Weights to the bit, and one history of metrics."""
    assert_same_weights(resumed, straight)
    assert resumed.history == straight.history
    left = sorted(p.name for p in resumed.checkpoints.iterdir() if p.name != ".lock")
    assert left == [f"global_step{Sft.STEPS - SAVE_STEPS}", f"global_step{Sft.STEPS}", "latest"]


# -------------------------------------------------------------------------------------------------------------- RL

PROMPTS, EPISODES, SAMPLES = 16, 3, 3
"""48 ordinals, four a round: twelve rounds, a checkpoint after every other one."""
ROUNDS = PROMPTS * EPISODES // 4
PIPELINES = {
    "sync": {},
    "async": {"train.async_enable": True, "train.async_queue_size": 2},
    "partial": {
        "train.async_enable": True,
        "train.partial_rollout_enable": True,
        "train.async_queue_size": 2,
        "rollout.vllm_generate_batch_size": 6,
    },
}
FILTERED = {"algo.dynamic_filtering_enable": True, "algo.dynamic_filtering_range": [0, 1]}


@dataclass
class Rl(Run):
    """A pipeline over the prompts, which continues from whatever checkpoint it finds."""

    inputs: Path
    folder: Path
    more: dict = field(default_factory=dict)
    """Flags."""

    command = "train_ppo_ray"
    place: ClassVar[dict] = {"train.launcher": "local", "vllm.num_engines": 0}
    exact: ClassVar[bool] = True
    """Sync runs are the same to the bit."""

    def words(self) -> list[str]:
        return words_of(
            {
                "actor.model_name_or_path": self.inputs / "model",
                "data.prompt_dataset": self.inputs / "prompts.jsonl",
                "data.max_len": 16,
                "reward.remote_url": self.inputs / "judge.py",
                "algo.advantage.estimator": "reinforce_baseline",
                "algo.kl.init_coef": 0,
                "actor.adam.lr": 1e-3,
                "rollout.batch_size": 4,
                "rollout.n_samples_per_prompt": SAMPLES,
                "rollout.max_new_tokens": 6,
                "train.batch_size": 4 * SAMPLES,
                "train.num_episodes": EPISODES,
                "ckpt.output_dir": self.folder / "out",
                "ckpt.path": self.folder / "checkpoints",
                "ckpt.save_steps": 2,
                "ckpt.max_num": 2,
                "ckpt.auto_resume": True,
                "logger.run_dir": self.folder / "run",
            }
            | self.place
            | self.more
        )

    @property
    def ledger(self) -> list[TrainedStep]:
        return read_trained(self.run_dir / "trained.jsonl")

    @property
    def trained(self) -> Counter[SampleId]:
        """How often each sample was given to an update."""
        return Counter(sample for step in self.ledger for sample in step.trained)

    @property
    def fate(self) -> Counter[int]:
        """Of every prompt: how many rounds trained on it, or lost it to failures, or turned it away."""
        fates: Counter[int] = Counter()
        for step in self.ledger:
            fates.update({prompt for prompt, _ in step.trained + step.failed})
            fates.update(step.rejected_prompts)
        return fates


@dataclass(frozen=True)
class Try:
    """One run that is killed once, somewhere, and started again."""

    pipeline: str
    at: float | int | str
    """A share of the wall time of a run that nothing happens to, a number of rounds that are done, or the method of
    `Disk` in which it dies."""
    filtered: bool = False

    def __str__(self) -> str:
        if isinstance(self.at, str):
            return f"{self.kind}, in {self.at}"
        return f"{self.kind}, " + (f"{self.at:.0%}" if isinstance(self.at, float) else f"after round {self.at}")

    @property
    def kind(self) -> str:
        return self.pipeline + (", filtered" if self.filtered else "")

    @property
    def flags(self) -> dict:
        return PIPELINES[self.pipeline] | (FILTERED if self.filtered else {})


class Attempted(NamedTuple):
    """What happened to a run."""

    run: Rl
    killed: Killed
    before: int
    """Rounds that were trained when it was killed."""
    went_on_from: str

    def row(self, outcome: str) -> dict[str, str]:
        return {
            "killed": f"{self.killed.seconds:.1f} s",
            "rounds": str(self.before),
            "went_on_from": self.went_on_from,
            "outcome": outcome,
        }


class Straights:
    """Runs that nothing happens to, each kind once."""

    def __init__(self, inputs: Path, folder: Path, made: Callable[..., Rl] = Rl) -> None:
        self.inputs = inputs
        self.made = made
        self._folder = folder
        self._runs: dict[str, tuple[Rl, float]] = {}

    def of(self, attempt: Try) -> tuple[Rl, float]:
        """… and how long it took."""
        if attempt.kind not in self._runs:
            run = self.made(self.inputs, self._folder / attempt.kind.replace(", ", "_"), attempt.flags)
            self._runs[attempt.kind] = run, run.run()
        return self._runs[attempt.kind]


def attempt(one: Try, straights: Straights, folder: Path, *, made: Callable[..., Rl] | None = None) -> Attempted:
    """Kill it, start it again, and assert that nobody could tell. `made`: what it is, if not what `straights` are."""
    straight, seconds = straights.of(one)
    for number in range(1, 6):
        run = (made or straights.made)(straights.inputs, folder / str(number), one.flags)
        if isinstance(one.at, str):
            killed = run.dies_at(one.at)
        elif isinstance(one.at, float):
            killed = run.kill_after(one.at * seconds)
        else:
            killed = run.kill_when(lambda run=run: len(run.ledger) >= one.at)
        if killed.in_time:
            break
        assert killed.status == 0, run.said
        seconds = killed.seconds  # it was over before: nothing happened to it either, and the machine is quicker now
    assert killed.in_time, "never in time"
    assert wait_until(lambda: not run.left, GONE_WITHIN), run.left
    happened = Attempted(run, killed, len(run.ledger), run.latest)
    run.run()
    if one.filtered and one.pipeline != "sync":
        assert_every_prompt_had_its_turn(run)
    else:
        assert_nothing_lost_or_repeated(run, straight)
    if one.pipeline == "sync" and run.exact:
        assert_same_weights(run, straight)
        # Who is decoded together with whom shows in the last bit of what engine and policy are compared by; with a
        # filter it depends on how long a judge takes.
        assert one.filtered or run.history == straight.history
    return happened


def assert_nothing_lost_or_repeated(resumed: Rl, straight: Rl) -> None:
    """The samples that were trained on are those of a run that nothing happened to, as often: once."""
    assert resumed.trained == straight.trained
    assert set(resumed.trained.values()) == {1}
    assert resumed.fate == dict.fromkeys(range(PROMPTS * EPISODES), 1)


def assert_every_prompt_had_its_turn(resumed: Rl) -> None:
    """With dynamic filtering, which prompts are accepted depends on when they were sampled: none twice, none skipped."""
    assert set(resumed.trained.values()) == {1}
    assert resumed.fate == dict.fromkeys(range(PROMPTS * EPISODES), 1)
    rejected_prompts = [prompt for step in resumed.ledger for prompt in step.rejected_prompts]
    assert rejected_prompts, "the filter had something to do"

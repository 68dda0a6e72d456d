"""The plots of docs/algorithms.md and docs/distillation.md: real runs of the demo, then one picture per family.

    python docs/plots.py --run --family all --folder runs/plots --jobs 16    # the runs; those that finished are skipped
    python docs/plots.py --draw --family all --folder runs/plots             # their numbers and pictures → docs/images
    python docs/plots.py --draw --family all                                 # pictures again, from the numbers kept

All runs start from the same warmed-up model and use the demo's flags, except for what their label says.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import yaml

from openrlhf.cli.demo import PROMPTS, prepare, rl_flags
from openrlhf.demo.model import warm_up, write_model
from openrlhf.demo.sorting import make_task
from openrlhf.observability.charts import picture
from openrlhf.observability.loggers import read_metrics

ROOT = Path(__file__).resolve().parents[1]
IMAGES = ROOT / "docs" / "images"
EVAL_EVERY = 5
KL_TARGET = 0.05
TEACHER = "inputs/teacher"
"""Below the runs' folder: a model of twice the layers that was taught the task by examples."""
TAUGHT = f"--teacher.model_name_or_path {TEACHER}"
TWENTY = "--train.total_steps 20"
TEACHER_KNOWS = 0.97
"""The probability with which the teacher answers as the examples do."""
SIGMA = 1.0
"""Deviation of the mismatched engine's logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture of a figure: a metric of every variant that has it."""

    title: str
    metric: str
    kind: Literal["train", "eval"] = "train"
    by: Literal["step", "prompts asked"] = "step"
    percent: bool = True
    zero: bool = True
    """Heights begin at 0, not at the lowest number."""
    mark: tuple[str, float] | None = None
    """A horizontal line: its name and height."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """Runs that differ in one thing."""

    title: str
    variants: Mapping[str, str]
    """Label → flags over those of the family."""
    panels: Sequence[Panel]
    flags: str = ""
    sigma: float = 0.0
    """Above 0: on an engine that is off by so much (`mismatched_engine.py`)."""


SCORE = Panel(title="Right answers, training samples", metric="score")
HELD_OUT = Panel(title="Right answers, held-out problems", metric="eval_sorting_pass1", kind="eval", zero=False)

FAMILIES: dict[str, Family] = {
    "estimators": Family(
        title="Six advantage estimators",
        variants={
            "gae": "--algo.advantage.estimator gae --critic.adam.lr 1e-3",
            "reinforce": "--algo.advantage.estimator reinforce",
            "rloo": "--algo.advantage.estimator rloo",
            "reinforce_baseline": "--algo.advantage.estimator reinforce_baseline",
            "group_norm": "--algo.advantage.estimator group_norm",
            "dr_grpo": "--algo.advantage.estimator dr_grpo --algo.loss_agg constant",
        },
        panels=(SCORE, HELD_OUT),
    ),
    "losses": Family(
        title="Four policy losses, two epochs per rollout",
        flags="--train.max_epochs 2",
        variants={name: f"--actor.policy_loss_type {name}" for name in ("ppo", "gspo", "cispo", "sapo")},
        panels=(SCORE, Panel(title="Tokens clipped", metric="ppo_clip_ratio")),
    ),
    "kl": Family(
        title="KL to the reference model",
        variants={
            "no KL (c = 1e-6)": "--algo.kl.init_coef 1e-6",
            "k1 in the reward, c = 0.05": "--algo.kl.init_coef 0.05",
            "k2 as a loss, c = 0.05": "--algo.kl.init_coef 0.05 --algo.kl.estimator k2 --algo.kl.use_loss",
            "k2 as a loss, adaptive": "--algo.kl.use_loss --algo.kl.estimator k2 --algo.kl.init_coef 0.5 "
            f"--algo.kl.horizon 5000 --algo.kl.target {KL_TARGET}",
        },
        panels=(
            Panel(title="KL per token", metric="kl", percent=False, mark=(f"target {KL_TARGET}", KL_TARGET)),
            SCORE,
        ),
    ),
    "corrections": Family(
        title="Off-policy corrections on an engine with noisy logits",
        variants={
            "no correction": "",
            **{
                name: f"--algo.advantage.is_correction_enable --algo.advantage.is_correction_type {name}"
                for name in ("tis", "icepop", "seq-mask-tis")
            },
        },
        panels=(HELD_OUT, Panel(title="Tokens clamped or dropped", metric="is_corrected")),
        sigma=SIGMA,
    ),
    "distillation": Family(
        title="Distillation on the policy's own samples",
        variants={
            "RL alone": "",
            "reverse KL": f"{TAUGHT} --teacher.loss reverse --reward.weights 0",
            "teacher's reward": f"{TAUGHT} --reward.weights 0 {TWENTY}",
            "reverse KL and RL": f"{TAUGHT} --teacher.loss reverse {TWENTY}",
            "forward KL": f"{TAUGHT} --teacher.loss forward --reward.weights 0 {TWENTY}",
        },
        panels=(HELD_OUT, Panel(title="Divergence from the teacher", metric="teacher_kl", percent=False)),
    ),
    "sampling": Family(
        title="Dynamic sampling",
        variants={
            "every group": "",
            "dynamic sampling": "--algo.dynamic_filtering_enable",
        },
        panels=(
            Panel(title="Reward std in a trained group", metric="group_reward_std", percent=False),
            HELD_OUT,
            replace(HELD_OUT, by="prompts asked"),
        ),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One variant with one seed."""

    family: str
    label: str
    seed: int
    folder: Path = field(repr=False)

    @property
    def directory(self) -> Path:
        name = "".join(c if c.isalnum() else "-" for c in f"{self.family} {self.label} seed{self.seed}")
        return self.folder / name

    @property
    def metrics(self) -> Path:
        return self.directory / "metrics.jsonl"

    def plan(self, steps: int) -> dict[str, Any]:
        """What decides the numbers; a finished run with the same plan is not made again."""
        family = FAMILIES[self.family]
        words = f"{family.flags} {family.variants[self.label]}".split()
        return {"words": words, "seed": self.seed, "steps": steps, "sigma": family.sigma}

    def finished(self, plan: dict[str, Any]) -> bool:
        note = self.directory / "finished.json"
        return self.metrics.exists() and note.exists() and json.loads(note.read_text())["plan"] == plan

    def make(self, steps: int) -> str:
        """Run it unless it is there; returns one line for people."""
        plan = self.plan(steps)
        if self.finished(plan):
            return f"{self.directory.name}: is there"
        shutil.rmtree(self.directory, ignore_errors=True)
        self.directory.mkdir(parents=True)
        config = self.directory / "flags.yaml"
        flags = rl_flags(make_task(seed=0), self.folder, seed=self.seed, steps=plan["steps"]) | {
            "logger.run_dir": str(self.directory),
            "ckpt.output_dir": str(self.directory / "model"),
            "eval.steps": EVAL_EVERY,
        }
        config.write_text(yaml.safe_dump(flags, sort_keys=False))
        noise = [str(ROOT / "docs" / "mismatched_engine.py"), str(plan["sigma"])]
        command = noise if plan["sigma"] else ["-m", "openrlhf.cli.train_ppo_ray"]
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(filter(None, paths))
        one_core = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
        started = time.monotonic()
        with (self.directory / "log.txt").open("w") as log:
            status = subprocess.run(
                [sys.executable, *command, "--config", str(config), *plan["words"]],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=os.environ | one_core,
                cwd=self.folder,
            ).returncode
        if status:
            return f"{self.directory.name}: FAILED with status {status}, see {self.directory / 'log.txt'}"
        shutil.rmtree(self.directory / "model", ignore_errors=True)
        seconds = round(time.monotonic() - started, 1)
        (self.directory / "finished.json").write_text(json.dumps({"plan": plan, "seconds": seconds}))
        return f"{self.directory.name}: {seconds:.0f} s"


def runs(families: Sequence[str], *, folder: Path, seeds: int) -> Iterator[Run]:
    """Seed by seed: if time runs out, every variant has its first runs."""
    for seed in range(seeds):
        for family in families:
            for label in FAMILIES[family].variants:
                yield Run(family=family, label=label, seed=seed, folder=folder.resolve())


def make_all(wanted: Sequence[Run], *, folder: Path, jobs: int, steps: int) -> int:
    """Make what is missing, `jobs` at a time; the exit status."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # so that the warmed-up model is the same wherever it is made
    inputs = folder.resolve() / "inputs"
    if not (inputs / "ready").exists():
        inputs.mkdir(parents=True, exist_ok=True)
        prepare(make_task(seed=0), inputs, seed=0)
        (inputs / "ready").touch()
    if any(TEACHER in run.plan(steps)["words"] for run in wanted):
        make_teacher(folder.resolve() / TEACHER)
    failed = 0
    with ThreadPoolExecutor(jobs) as pool:
        making = [pool.submit(run.make, steps) for run in wanted]
        for number, made in enumerate(as_completed(making), start=1):
            print(f"[{number}/{len(wanted)}] {made.result()}", flush=True)
            failed += "FAILED" in made.result()
    return min(failed, 1)


def make_teacher(folder: Path) -> None:
    """Unless it is there."""
    if (folder / "ready").exists():
        return
    task = make_task(seed=0)
    write_model(folder, seed=1, characters=task.characters, layers=4)
    said = {}
    steps = warm_up(folder, task.train, seed=1, until=TEACHER_KNOWS, on_step=said.__setitem__)
    print(f"teacher: answers as worked with probability {said[steps]:.2f} after {steps} steps", flush=True)
    (folder / "ready").touch()


def collect(name: str, found: Mapping[str, Sequence[Sequence[Mapping[str, Any]]]]) -> dict[str, Any]:
    """What is drawn of a family, few numbers: `found` has the records of every run of a label."""
    family = FAMILIES[name]
    panels = []
    for panel in family.panels:
        curves = []
        for label, records in found.items():
            points = _across_seeds([_points(panel, each) for each in records])
            if points:
                curves.append({"name": label, "points": points})
        mark = {"name": panel.mark[0], "value": panel.mark[1]} if panel.mark else None
        look = {"title": panel.title, "x": panel.by, "percent": panel.percent, "zero": panel.zero, "mark": mark}
        panels.append(look | {"curves": curves})
    return {"title": family.title, "panels": panels}


def _points(panel: Panel, records: Sequence[Mapping[str, Any]]) -> list[tuple[float, float]]:
    train = [record for record in records if record["kind"] == "train"]
    asked = [record.get("rollout/judged_groups", PROMPTS) for record in train]
    prompts = [0, *accumulate(asked)]
    chosen = [r for r in records if r["kind"] == panel.kind and isinstance(r.get(panel.metric), int | float)]
    return [(r["step"] if panel.by == "step" else prompts[r["step"]], r[panel.metric]) for r in chosen]


def _across_seeds(runs_: Sequence[Sequence[tuple[float, float]]]) -> list[list[float]]:
    """[x, value] of one run; [x, mean, lowest, highest] of several, as far as all of them go."""
    points = []
    for together in zip(*runs_, strict=False):
        x, values = fmean(x for x, _ in together), [value for _, value in together]
        spread = [min(values), max(values)] if len(values) > 1 else []
        points.append([float(f"{number:.4g}") for number in (x, fmean(values), *spread)])
    return points


def draw(name: str, wanted: Sequence[Run], *, images: Path) -> Path:
    """Write the family's picture; with runs, first their numbers, else from the numbers kept."""
    numbers, file = images / "data" / f"{name}.json", images / f"{name}.svg"
    numbers.parent.mkdir(parents=True, exist_ok=True)
    if wanted:
        found: dict[str, list[Any]] = {}
        for run in wanted:
            if not run.metrics.exists():
                raise SystemExit(f"{run.metrics} is missing: make the runs first (--run), with the same --seeds")
            found.setdefault(run.label, []).append(list(read_metrics(run.metrics)))
        numbers.write_text(json.dumps(collect(name, found), separators=(",", ":")) + "\n")
    elif not numbers.exists():
        raise SystemExit(f"{numbers} is missing: give the --folder of the runs")
    file.write_text(picture(json.loads(numbers.read_text())), encoding="utf-8")
    return file


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--run", action="store_true", help="make the runs")
    what.add_argument("--draw", action="store_true", help="write docs/images")
    parser.add_argument("--family", choices=[*FAMILIES, "all"], default="all")
    parser.add_argument("--folder", type=Path, help="where the runs are; with --draw, none: the numbers kept")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one core each (default 1)")
    parser.add_argument("--steps", type=int, default=50, help="RL steps of a run (default 50)")
    parser.add_argument(
        "--seeds", type=int, default=1, help="runs of every variant; drawn as mean and range (default 1)"
    )
    parser.add_argument("--images", type=Path, default=IMAGES, help="where pictures go (default docs/images)")
    options = parser.parse_args(argv)
    if options.run and not options.folder:
        parser.error("--run needs --folder")
    if not 1 <= options.steps <= 62:  # 8,000 problems, each asked once
        parser.error("--steps must be 1 to 62: after that the problems repeat")
    families = list(FAMILIES) if options.family == "all" else [options.family]
    if options.run:
        wanted = list(runs(families, folder=options.folder, seeds=options.seeds))
        return make_all(wanted, folder=options.folder, jobs=options.jobs, steps=options.steps)
    for name in families:
        wanted = list(runs([name], folder=options.folder, seeds=options.seeds)) if options.folder else []
        print(draw(name, wanted, images=options.images))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

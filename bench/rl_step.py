"""One local RL step against TRL's GRPOTrainer, side by side on this machine: `python -m bench.rl_step [--write]`.

The same 4M-parameter Qwen2 in fp32, the same prompts (32 of 32 tokens), 8 samples each of at most 64 tokens, GRPO,
no KL, one AdamW update of all 256 samples per step, a rule reward. Each side runs in a process of its own, in turns;
the table shows the median over steps, the first of each process (start-up) left out. TRL gets the better of two
settings: four micro-batches, or sixteen.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import statistics
import string
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from bench.results import write_section

PROMPTS, SAMPLES, PROMPT_TOKENS, NEW_TOKENS, STEPS = 32, 8, 32, 64, 5
VOCABULARY = 4096
LEARNING_RATE = 1e-4
TOKENS_PER_MICRO_BATCH = 4096
"""Ours; TRL's best of two is about 6,000 padded tokens."""

REWARD_FILE = """
def reward_func(queries, prompts, labels):
    return [sum(c in "02468" for c in q[len(p):]) / 64 for q, p in zip(queries, prompts)]
"""


def write_inputs(folder: Path) -> None:
    """Model, tokenizer (one token per letter), prompts and reward file, for both sides."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

    known = ["<pad>", "<eos>", *string.ascii_letters]
    words = [*known, *(f"t{i}" for i in range(len(known), VOCABULARY))]
    tokenizer = Qwen2Tokenizer(
        vocab={word: i for i, word in enumerate(words)},
        merges=[],
        unk_token="<pad>",
        pad_token="<pad>",
        eos_token="<eos>",
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)
    rng = random.Random(0)
    lines = [{"input": "".join(rng.choices(string.ascii_letters, k=PROMPT_TOKENS))} for _ in range(PROMPTS * STEPS)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (folder / "reward.py").write_text(REWARD_FILE)


def run_ours(folder: Path) -> dict:
    """Seconds of each step, from the run's own metrics: everything from the first prompt to the new weights."""
    from openrlhf.config import parse
    from openrlhf.observability.loggers import read_metrics
    from openrlhf.runs.rl_assembly import train

    flags = {
        "actor.model_name_or_path": folder,
        "data.prompt_dataset": folder / "prompts.jsonl",
        "data.max_len": PROMPT_TOKENS + NEW_TOKENS,
        "reward.remote_url": folder / "reward.py",
        "algo.advantage.estimator": "group_norm",
        "algo.kl.init_coef": 0,
        "rollout.batch_size": PROMPTS,
        "rollout.n_samples_per_prompt": SAMPLES,
        "rollout.max_new_tokens": NEW_TOKENS,
        "train.batch_size": PROMPTS * SAMPLES,
        "train.dynamic_batch_enable": True,
        "train.max_tokens_per_gpu": TOKENS_PER_MICRO_BATCH,
        "actor.adam.lr": LEARNING_RATE,
        "actor.lr_scheduler": "constant",
        "vllm.num_engines": 0,
        "ckpt.output_dir": folder / "out",
        "logger.run_dir": folder / f"run-{time.time_ns()}",
    }
    argv = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    result = train(parse("train_ppo_ray", argv))
    records = [r for r in read_metrics(result.run_dir / "metrics.jsonl") if r["kind"] == "train"]
    return {
        "seconds": [r["timing/step_total"] for r in records],
        "generation": [r["timing/generation"] for r in records],
        "training": [r["timing/ppo_train"] for r in records],
        "length": statistics.mean(r["response_length"] for r in records),
    }


def run_trl(folder: Path, *, micro_batches: int) -> dict:
    """Seconds from one optimizer step's end to the next one's."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    texts = [json.loads(line)["input"] for line in (folder / "prompts.jsonl").read_text().splitlines()]
    ends: list[float] = []
    lengths: list[float] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if not ends:
                ends.append(time.perf_counter())

        def on_step_end(self, args, state, control, **kwargs):
            ends.append(time.perf_counter())

    def reward(prompts, completions, completion_ids, **kwargs):
        lengths.extend(len(ids) for ids in completion_ids)
        return [sum(c in "02468" for c in text) / 64 for text in completions]

    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=[reward],
        train_dataset=Dataset.from_dict({"prompt": texts}),
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=PROMPTS * SAMPLES // micro_batches,
            gradient_accumulation_steps=micro_batches,
            num_generations=SAMPLES,
            max_completion_length=NEW_TOKENS,
            max_steps=STEPS,
            learning_rate=LEARNING_RATE,
            lr_scheduler_type="constant",
            temperature=1.0,
            beta=0.0,
            loss_type="grpo",
            bf16=False,
            gradient_checkpointing=False,
            use_cpu=True,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
        callbacks=[Clock()],
    )
    trainer.train()
    seconds = [b - a for a, b in itertools.pairwise(ends)]
    return {"seconds": seconds, "length": statistics.mean(lengths)}


SIDES = {
    "ours": run_ours,
    "trl-4": lambda folder: run_trl(folder, micro_batches=4),
    "trl-16": lambda folder: run_trl(folder, micro_batches=16),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the section of bench/RESULTS.md")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        print(json.dumps(SIDES[options.side](options.folder)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_inputs(folder)
        results: dict[str, list[dict]] = {side: [] for side in SIDES}
        for _ in range(options.repeats):
            for side in SIDES:
                command = [sys.executable, "-m", "bench.rl_step", "--side", side, "--folder", str(folder)]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                results[side].append(json.loads(done.stdout.splitlines()[-1]))
                print(side, results[side][-1], file=sys.stderr, flush=True)
    body = table(results)
    print(body)
    if options.write:
        write_section(Path(__file__).with_name("RESULTS.md"), title="One local RL step", body=body)


def table(results: dict[str, list[dict]]) -> str:
    from importlib.metadata import version

    def median(side: str, key: str = "seconds") -> float:
        return statistics.median(s for run in results[side] for s in run[key][1:])

    trl = min(("trl-4", "trl-16"), key=median)
    ratio = median(trl) / median("ours")
    rows = [
        f"{PROMPTS} prompts × {SAMPLES} samples, {PROMPT_TOKENS} + at most {NEW_TOKENS} tokens, one update, no KL; "
        f"4M-parameter Qwen2, fp32, {os.cpu_count()} cores ({platform.machine()}), torch {version('torch')}, "
        f"transformers {version('transformers')}, TRL {version('trl')}. `python -m bench.rl_step --write`.",
        "",
        "| | seconds per step | mean response tokens | ratio |",
        "|---|---|---|---|",
        *(
            f"| TRL GRPOTrainer, {side.removeprefix('trl-')} micro-batches | {median(side):.2f} "
            f"| {results[side][0]['length']:.1f} | |"
            for side in ("trl-4", "trl-16")
        ),
        f"| openrlhf | {median('ours'):.2f} (generation {median('ours', 'generation'):.2f}, "
        f"update {median('ours', 'training'):.2f}) | {results['ours'][0]['length']:.1f} | **{ratio:.2f}×** |",
    ]
    return "\n".join(rows)


if __name__ == "__main__":
    main()

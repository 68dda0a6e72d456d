"""Embedded engine against `model.generate`, side by side on this machine: `python -m bench.engine [--write]`.

A 4M-parameter Qwen2 in fp32 without end-of-sequence token, so every request runs to its limit. Each repeat runs both;
the table shows medians, and the spread of the ratio within a repeat.

    even    256 requests of 32 prompt tokens and 96 new ones; generate gets them as one batch
    ragged  1,024 requests, limits uniform in 8 … 256, 256 at a time; generate gets four batches, each to its longest
    group   32 prompts of 96 tokens, 8 samples each; generate gets all 256 rows

Tokens per second count the tokens that were asked for. On a machine with other work set OMP_WAIT_POLICY=PASSIVE:
threads that spin at barriers while others want the core cost both sides a factor of five.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen2Config

from bench.results import write_section
from openrlhf.models.attention import ATTENTION
from openrlhf.rollout.embedded import EmbeddedEngine
from openrlhf.types import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    name: str
    prompts: list[list[int]]
    limits: list[int]

    @property
    def tokens(self) -> int:
        return sum(self.limits)


def cases() -> list[Case]:
    rng = random.Random(0)

    def prompt(n: int) -> list[int]:
        return [rng.randrange(1, 4096) for _ in range(n)]

    grouped = [prompt(96) for _ in range(32)]
    return [
        Case(name="even", prompts=[prompt(32) for _ in range(256)], limits=[96] * 256),
        Case(
            name="ragged", prompts=[prompt(32) for _ in range(1024)], limits=[rng.randint(8, 256) for _ in range(1024)]
        ),
        Case(name="group", prompts=[p for p in grouped for _ in range(8)], limits=[96] * 256),
    ]


def build_model() -> torch.nn.Module:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def run_engine(engine: EmbeddedEngine, case: Case, *, temperature: float) -> None:
    async def everything() -> None:
        calls = [
            engine.generate(prompt, SamplingParams(temperature=temperature, max_tokens=limit))
            for prompt, limit in zip(case.prompts, case.limits, strict=True)
        ]
        results = await asyncio.gather(*calls)
        assert sum(len(r.token_ids) for r in results) == case.tokens

    engine.model.set_attn_implementation(ATTENTION)
    asyncio.run(engine.resume(engine.version + 1))  # or it would remember the prompts of the last repeat
    asyncio.run(everything())


def run_generate(model: torch.nn.Module, case: Case, *, temperature: float) -> None:
    model.set_attn_implementation("sdpa")
    for start in range(0, len(case.prompts), 256):
        ids = torch.tensor(case.prompts[start : start + 256])
        # top_k=0: Transformers would otherwise cut to 50 and sort; this is its cheapest plain sampling.
        how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max(case.limits[start : start + 256]),
            **how,
        )


def timed(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="name of one case")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--machine", default="", help="how the report calls this machine")
    parser.add_argument("--write", action="store_true", help="replace the section in --out")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "RESULTS.md")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    model = build_model()
    parameters = sum(p.numel() for p in model.parameters())
    model.set_attn_implementation(ATTENTION)
    engine = EmbeddedEngine(model, None, max_model_len=512, max_batch_size=256)

    lines = [
        "| case | tokens | engine tok/s | generate tok/s | ratio (min … max) |",
        "|---|---:|---:|---:|---|",
    ]
    for case in cases():
        if args.only and case.name != args.only:
            continue
        run_engine(engine, case, temperature=args.temperature)  # warm up
        pairs = []
        for _ in range(args.repeats):
            ours = timed(lambda case=case: run_engine(engine, case, temperature=args.temperature))
            theirs = timed(lambda case=case: run_generate(model, case, temperature=args.temperature))
            pairs.append((ours, theirs))
            print(f"{case.name}: engine {ours:.2f} s, generate {theirs:.2f} s, ratio {theirs / ours:.2f}", flush=True)
        ours, theirs = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratios = sorted(b / a for a, b in pairs)
        lines.append(
            f"| {case.name} | {case.tokens:,} | {case.tokens / ours:,.0f} | {case.tokens / theirs:,.0f} "
            f"| {statistics.median(ratios):.2f}× ({ratios[0]:.2f} … {ratios[-1]:.2f}) |"
        )
    table = "\n".join(lines)
    print(table)
    if args.write:
        write_section(args.out, title="Embedded engine", body=describe(table, parameters=parameters, args=args))


def describe(table: str, *, parameters: int, args: argparse.Namespace) -> str:
    return (
        f"`python -m bench.engine --write`: {parameters / 1e6:.1f}M-parameter Qwen2, fp32, temperature "
        f"{args.temperature:g}, log-probs on, {args.threads} threads on {args.machine or platform.processor()} "
        f"({len(os.sched_getaffinity(0))} CPU cores given to the process), torch {torch.__version__}, transformers "
        f"{transformers.__version__}. Medians of {args.repeats} interleaved repeats, the ratio within each.\n\n"
        f"{table}\n\n"
        "`even`: 256 × (32 + 96) tokens, generate in one batch. `ragged`: 1,024 requests with limits uniform in "
        "8 … 256, 256 at a time; generate in four batches, each to its longest. `group`: 32 prompts of 96 tokens × 8 "
        "samples.\n"
    )


if __name__ == "__main__":
    main()

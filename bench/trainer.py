"""The update of a policy in RL: tokens per second, share of the GPU's peak, and where its time goes.

    python -m bench.trainer                        # on a GPU: all cases; on a CPU: small ones in fp32
    python -m bench.trainer --write                # also rewrite this bench's section of bench/RESULTS.md
    python -m bench.trainer --case 0.6B-16384      # one or several of them
    python -m bench.trainer --profile              # also what the device did in one update, kernel by kernel
    python -m bench.trainer --keep F               # results in a folder; those that are there are not measured again

The learners of a run, as its flags make them, on random weights of a real shape and random tokens; no engine, no other
process. An update is forward and backward of all micro-batches, and the step of fp32 master weights. `N-T` are two
packs of one sequence of T tokens each, with gradient checkpointing; `N-T-lora` trains an adapter of rank 16; `round` is
the round of `bench.hybrid`: 64 prompts of 256 tokens × 8 samples of 512. The best of several updates, after one that
warms up. Share of peak as in `bench.sft`: nothing that is computed twice is counted twice; and of an adapter's base the
gradients that are not computed are not counted.
"""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from bench.results import write_section
from bench.sft import PEAK

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
NAME = torch.cuda.get_device_name() if CUDA else "CPU"
GIB = 2**30
UPDATES = 3
"""After the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table."""

    config: Any
    groups: int
    """Prompts."""
    samples: int
    """Of each."""
    prompt: int
    response: int
    budget: int
    """Tokens of a micro-batch."""
    flags: dict[str, Any] = field(default_factory=dict)
    elsewhere: str = ""
    """What others have published for the same, and where."""

    @property
    def trained_share(self) -> float:
        """Of the arithmetic of a layer's matrices: their own gradients are a third of it."""
        return 2 / 3 if "ds.lora.rank" in self.flags else 1.0

    @property
    def tokens(self) -> int:
        """Of all samples; those of a prompt share its forward."""
        return self.groups * self.samples * (self.prompt + self.response)

    def flops(self) -> float:
        """6 per weight and token that is computed, 12 · heads · head size per layer and pair that attends; the output
        head's on actions only."""
        c, P, R, G = self.config, self.prompt, self.response, self.samples
        head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        wide, narrow = c.num_attention_heads * head_dim, c.num_key_value_heads * head_dim
        layer = 2 * c.hidden_size * (wide + narrow) + 3 * c.hidden_size * c.intermediate_size
        body = c.num_hidden_layers * layer * (P + G * R)
        head = c.vocab_size * c.hidden_size * G * R
        pairs = P * P / 2 + G * (P * R + R * R / 2)
        linear = 6 * (body + head) * self.trained_share
        return self.groups * (linear + 12 * wide * c.num_hidden_layers * pairs)


def qwen3(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int) -> Any:
    return transformers.Qwen3Config(
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=128,
        tie_word_embeddings=True,
        max_position_embeddings=131_072,
        rope_theta=1e6,
    )


def qwen2(hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> Any:
    return transformers.Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=True,
        max_position_embeddings=32_768,
        rope_theta=1e6,
    )


def gpu_cases() -> dict[str, Case]:
    small, large = qwen3(1024, 3072, 28, 16, 8), qwen3(2560, 9728, 36, 32, 8)
    checkpointed = {"actor.gradient_checkpointing_enable": "true"}
    adapted = {**checkpointed, "ds.lora.rank": 16, "ds.lora.alpha": 32}

    def pack(config: Any, tokens: int, flags: dict[str, Any], elsewhere: str = "") -> Case:
        sizes = {"groups": 2, "samples": 1, "prompt": 256, "response": tokens - 256, "budget": tokens}
        return Case(config=config, **sizes, flags=flags, elsewhere=elsewhere)

    return {
        "round": Case(
            config=qwen2(1536, 8960, 28, 12, 2, 151_936), groups=64, samples=8, prompt=256, response=512, budget=16_384
        ),
        "0.6B-16384": pack(small, 16_384, checkpointed, "11,900, 11.1 %"),
        "0.6B-65536": pack(small, 65_536, checkpointed, "10,150, 26.8 %"),
        "0.6B-16384-lora": pack(small, 16_384, adapted),
        "0.6B-65536-lora": pack(small, 65_536, adapted),
        "4B-16384": pack(large, 16_384, checkpointed),
        "4B-65536": pack(large, 65_536, checkpointed),
        "4B-16384-lora": pack(large, 16_384, adapted, "6,200, 21.7 %"),
        "4B-65536-lora": pack(large, 65_536, adapted),
    }


def cpu_cases() -> dict[str, Case]:
    config = qwen2(64, 192, 2, 4, 2, 512)
    sizes = {"prompt": 8, "response": 24, "budget": 256}
    adapted = {"actor.gradient_checkpointing_enable": "true", "ds.lora.rank": 4}
    return {
        "round": Case(config=config, groups=4, samples=4, **sizes),
        "tiny-lora": Case(config=config, groups=4, samples=1, **sizes, flags=adapted),
    }


def make_training(case: Case, more: dict[str, Any]) -> Any:
    """The models and learners of a run with these flags. Weights are made on the device, not read."""
    from openrlhf.config import parse
    from openrlhf.models import loading
    from openrlhf.runs.rl_models import RLTraining, load_models

    def made(loader: Any, path: Any, config: Any, settings: Any, **options: Any) -> Any:
        with torch.device(DEVICE):
            return loader.from_config(config, dtype=settings.dtype)

    with tempfile.TemporaryDirectory() as folder:
        case.config.architectures = [f"{type(case.config).__name__.removesuffix('Config')}ForCausalLM"]
        case.config.save_pretrained(folder)
        flags = {
            "actor.model_name_or_path": folder,
            "data.prompt_dataset": "none",
            "data.max_len": case.prompt + case.response,
            "reward.remote_url": "none.py",
            "algo.advantage.estimator": "group_norm",
            "algo.kl.init_coef": 0,
            "rollout.batch_size": case.groups,
            "rollout.n_samples_per_prompt": case.samples if case.samples > 1 else 2,
            "train.batch_size": case.groups * case.samples,
            "train.dynamic_batch_enable": "true",
            "train.max_tokens_per_gpu": case.budget,
            "train.launcher": "local",
            "actor.lr_scheduler": "constant",
            "ds.param_dtype": "bf16" if CUDA else "fp32",
            "vllm.num_engines": 0,
            **case.flags,
            **more,
        }
        config = parse("train_ppo_ray", [word for name, value in flags.items() for word in (f"--{name}", str(value))])
        torch.manual_seed(0)
        kept, loading._load_model = loading._load_model, made
        try:
            models = load_models(config, DEVICE)
        finally:
            loading._load_model = kept
    return RLTraining(config, models, total_steps=100, device=DEVICE)


def make_batch(case: Case) -> Any:
    from openrlhf.types import SampleKey, Segment, TrainingBatch, TrainingSample

    rng = random.Random(0)
    generator = torch.Generator().manual_seed(0)
    samples = []
    for group in range(case.groups):
        prompt = torch.randint(case.config.vocab_size, (case.prompt,), generator=generator)
        for sample in range(case.samples):
            response = torch.randint(case.config.vocab_size, (case.response,), generator=generator)
            T = case.prompt + case.response
            segment = Segment(
                token_ids=torch.cat([prompt, response]),
                action_mask=torch.arange(T) >= case.prompt,
                rollout_logprobs=None,
                versions=torch.zeros(T, dtype=torch.int32),
                turn_rewards=torch.zeros(T),
            )
            key = SampleKey(group, sample)
            samples.append(TrainingSample(key=key, segment=segment, rewards_A=torch.zeros(case.response)))
    batch = TrainingBatch(samples=samples)
    batch.advantages_A = batch.per_action([rng.uniform(-1, 1) for _ in samples])
    return batch


def measure(case: Case, more: dict[str, Any], *, profile: bool) -> dict[str, float]:
    if CUDA:
        torch.cuda.reset_peak_memory_stats()
    training, batch = make_training(case, more), make_batch(case)
    seconds = []
    for _ in range(1 + UPDATES):
        _wait()
        start = time.perf_counter()
        training.learners.update(batch)
        _wait()
        seconds.append(time.perf_counter() - start)
    if profile and CUDA:
        print(profiled(lambda: training.learners.update(batch)), file=sys.stderr, flush=True)
    peak = torch.cuda.max_memory_allocated() / GIB if CUDA else 0.0
    return {"first": seconds[0], "seconds": min(seconds[1:]), "all": seconds, "gib": peak}


def _wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def profiled(work: Any) -> str:
    """The device's time by kind of kernel, the longest kernels, and how long it had nothing to do."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        work()
        _wait()
    events = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in events)
    busy, until = 0.0, spans[0][0]
    for start, end, _ in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    whole = until - spans[0][0]
    kinds: dict[str, float] = collections.Counter()
    names: dict[str, float] = collections.Counter()
    counts: dict[str, int] = collections.Counter()
    for start, end, name in spans:
        kinds[kind_of(name)] += end - start
        names[name] += end - start
        counts[name] += 1
    lines = [f"whole {whole / 1e6:.3f} s, busy {busy / 1e6:.3f} s, idle {(whole - busy) / 1e6:.3f} s"]
    lines += [f"  {us / 1e6:7.3f} s  {kind}" for kind, us in sorted(kinds.items(), key=lambda kv: -kv[1])]
    lines += [
        f"  {us / 1e6:7.3f} s  {counts[name]:6d} ×  {name[:150]}"
        for name, us in sorted(names.items(), key=lambda kv: -kv[1])[:40]
    ]
    return "\n".join(lines)


def kind_of(name: str) -> str:
    lowered = name.lower()
    for kind, parts in {
        "attention": ("flash", "fmha", "sdpa", "cudnn_generated"),
        "matrix products": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas"),
        "triton": ("triton", "_kernel"),
        "copies": ("memcpy", "memset", "copy"),
        "multi-tensor": ("multi_tensor",),
        "indexing": ("index", "gather", "scatter"),
        "reductions": ("reduce", "norm"),
    }.items():
        if any(part in lowered for part in parts):
            return kind
    return "elementwise and others"


def table(results: dict[str, dict[str, Any]], cases: dict[str, Case]) -> str:
    def rows() -> Iterator[str]:
        for name, found in results.items():
            case = cases[name.partition("+")[0]]
            rate = case.tokens / found["seconds"]
            share = f"{case.flops() / found['seconds'] / PEAK[NAME]:.1%}" if NAME in PEAK else ""
            yield (
                f"| {name} | {found['seconds']:.2f} | {rate:,.0f} | {share} | {found['gib']:.0f} | {case.elsewhere} |"
            )

    return "\n".join(
        [
            f"The update alone, {'bf16' if CUDA else 'fp32'}, random weights, {NAME}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}, plain torch. `round`: Qwen2.5-1.5B's shape, 64 × 8 samples of "
            "256 + 512 tokens, no gradient checkpointing. Others: Qwen3's shapes, packs of one sequence each, gradient "
            "checkpointing on. Beside it what prime-rl publishes for one H100, whose peak in bf16 is that of an H200. "
            "Repeat: `python -m bench.trainer --write`.",
            "",
            "| case | s | tokens/s | share of peak | GiB | prime-rl: tokens/s, share |",
            "|---|---|---|---|---|---|",
            *rows(),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the section of bench/RESULTS.md")
    parser.add_argument("--case", action="append", help="one of them; all, unless given")
    parser.add_argument("--flags", nargs="*", default=[], metavar="NAME=VALUE", help="flags of the run besides")
    parser.add_argument("--keep", type=Path, help="folder of results; those that are there are not measured again")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    cases = gpu_cases() if CUDA else cpu_cases()
    more = dict(word.split("=", 1) for word in options.flags)
    results = {}
    for name in options.case or list(cases):
        label = "+".join([name, *options.flags])
        kept = options.keep and options.keep / f"{label}.json"
        if kept and kept.exists():
            results[label] = json.loads(kept.read_text())
            continue
        try:
            results[label] = measure(cases[name], more, profile=options.profile)
        except torch.OutOfMemoryError as error:
            print(f"{label}: {error}", file=sys.stderr, flush=True)
            continue
        finally:
            if CUDA:
                torch.cuda.empty_cache()
        print(label, json.dumps(results[label]), file=sys.stderr, flush=True)
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(results[label]))
    body = table(results, cases)
    print(body)
    if options.write:
        write_section(Path(__file__).with_name("RESULTS.md"), title="The update alone", body=body)


if __name__ == "__main__":
    main()

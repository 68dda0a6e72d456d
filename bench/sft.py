"""Supervised fine-tuning: tokens per second and share of the GPU's peak, packed against padded, torch beside ZeRO-2.

    python -m bench.sft                  # on a GPU: Qwen2.5-1.5B's shape in bf16; on a CPU: a small model in fp32
    python -m bench.sft --write          # also rewrite this bench's section of bench/RESULTS.md

Random weights of a real shape. `even`: sequences of 4,096 tokens, which need no padding: what the arithmetic allows.
`long-tailed`: log-normal lengths (median 403, at most 4,096). `padded` is transformers' own forward and loss on
micro-batches of neighbours in length, padded to the longest, as many as the same budget holds; its tokens count without
the padding. A step is forward and backward of all micro-batches and the update of fp32 master weights. Peak is the
dense bf16 rate; the arithmetic counted is 6 per weight and token and causal attention, nothing computed twice.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from bench.results import write_section
from openrlhf.backends.base import Backend
from openrlhf.backends.torch import TorchBackend
from openrlhf.config.backend import BackendSection
from openrlhf.config.training import AdamSection, OptimizerSection
from openrlhf.data.schedule import divide
from openrlhf.models.body import fuse_norms
from openrlhf.models.compilation import compile_layers
from openrlhf.models.policy import Policy
from openrlhf.models.support import examine
from openrlhf.types import PackedTokens

PEAK = {"NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA A100-SXM4-80GB": 312e12}
SETTINGS = OptimizerSection(adam=AdamSection(lr=1e-5), lr_scheduler="constant")
WAYS = {"even": ("compiled", "torch", "deepspeed", "padded"), "long-tailed": ("compiled", "torch", "padded")}
LABELS = {
    "torch": "packed, plain torch",
    "compiled": "packed, plain torch, `--ds.deepcompile`",
    "deepspeed": "packed, DeepSpeed ZeRO-2",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a machine is given."""

    config: transformers.Qwen2Config
    dtype: torch.dtype
    longest: int
    budget: int
    """Tokens of a micro-batch."""
    step_tokens: int
    steps: int


def gpu_work() -> Work:
    config = transformers.Qwen2Config(
        vocab_size=151_936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=32_768,
        rope_theta=1e6,
    )
    return Work(config=config, dtype=torch.bfloat16, longest=4096, budget=16_384, step_tokens=131_072, steps=4)


def cpu_work() -> Work:
    config = transformers.Qwen2Config(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return Work(config=config, dtype=torch.float32, longest=512, budget=2048, step_tokens=16_384, steps=3)


def lengths_of(kind: str, work: Work) -> list[int]:
    if kind == "even":
        return [work.longest] * (work.step_tokens // work.longest)
    rng = np.random.default_rng(0)
    drawn = np.clip(rng.lognormal(np.log(work.longest / 10), 1, 100_000).astype(int), 8, work.longest)
    return drawn[: int(np.searchsorted(drawn.cumsum(), work.step_tokens))].tolist()


def make_model(work: Work, device: torch.device) -> Any:
    with torch.device(device):
        return transformers.Qwen2ForCausalLM._from_config(copy.deepcopy(work.config), dtype=work.dtype).train()


def flops(work: Work, lengths: list[int]) -> float:
    """Of forward and backward: 6 per weight (the head's included, the embedding is a look-up) and token; attention
    3 · 2 · 2 · D per layer and pair of tokens that see each other."""
    c = work.config
    head_dim = c.hidden_size // c.num_attention_heads
    attention = c.hidden_size * (2 * c.hidden_size + 2 * c.num_key_value_heads * head_dim)
    weights = c.num_hidden_layers * (attention + 3 * c.hidden_size * c.intermediate_size) + c.vocab_size * c.hidden_size
    pairs = sum(n * (n + 1) / 2 for n in lengths)
    return 6.0 * weights * sum(lengths) + 12.0 * c.num_hidden_layers * c.hidden_size * pairs


Share = Callable[[nn.Module, list[torch.Tensor]], torch.Tensor]


def packed_nll(module: nn.Module, sequences: list[torch.Tensor]) -> torch.Tensor:
    """Our way: one stream, the head in chunks."""
    device = next(module.parameters()).device
    masks = [torch.arange(len(s)) > 0 for s in sequences]
    tokens = PackedTokens.from_sequences(sequences, masks).to(device)
    return -module(tokens, temperature=1.0).logprobs_A.sum()


def padded_nll(module: nn.Module, sequences: list[torch.Tensor]) -> torch.Tensor:
    """Transformers' way: a rectangle and a mask, all logits."""
    device = next(module.parameters()).device
    ids = nn.utils.rnn.pad_sequence(sequences, batch_first=True).to(device)
    mask = torch.arange(ids.shape[1], device=device) < torch.tensor([len(s) for s in sequences], device=device)[:, None]
    labels = ids.masked_fill(~mask, -100)
    return module(input_ids=ids, attention_mask=mask, labels=labels, use_cache=False).loss


def by_padded_budget(lengths: list[int], budget: int) -> list[list[int]]:
    """Neighbours in length, as many as fit when padded to the longest: the best that padding can do."""
    batches: list[list[int]] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batches and lengths[batches[-1][0]] * (len(batches[-1]) + 1) <= budget:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches


def measure(backend: Backend, work: Work, lengths: list[int], micro_batches: list[list[int]], share: Share) -> float:
    """Tokens per second, the best of several steps after one that warms up."""
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(work.config.vocab_size, (n,), generator=generator) for n in lengths]
    seconds = []
    for _ in range(1 + work.steps):
        _wait()
        start = time.perf_counter()
        for micro in micro_batches:
            backend.backward(share(backend.module, [sequences[i] for i in micro]) / sum(lengths))
        backend.step()
        _wait()
        seconds.append(time.perf_counter() - start)
    return sum(lengths) / min(seconds[1:])


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@contextlib.contextmanager
def started(way: str, work: Work, device: torch.device) -> Iterator[tuple[Backend, Share]]:
    model = make_model(work, device)
    if way == "padded":
        yield TorchBackend(model, SETTINGS), padded_nll
    else:
        support = examine(model, native_attention="sdpa")
        (compile_layers if way == "compiled" else fuse_norms)(model)
        policy = Policy(model, packed=support.packed, transform=support.transform)
        if way == "deepspeed":
            from openrlhf.backends.deepspeed import DeepSpeedBackend
            from openrlhf.backends.ranks import join

            ranks = join(also_alone=True)
            yield DeepSpeedBackend(policy, SETTINGS, BackendSection(zero_stage=2)), packed_nll
            ranks.close()
        else:
            yield TorchBackend(policy, SETTINGS), packed_nll
    del model
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    work = gpu_work() if device.type == "cuda" else cpu_work()
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    rows = []
    for kind, ways in WAYS.items():
        lengths = lengths_of(kind, work)
        for way in ways if device.type == "cuda" else (w for w in ways if w not in ("compiled", "deepspeed")):
            if way == "padded":
                cut = by_padded_budget(lengths, work.budget)
                filled = sum(lengths) / sum(lengths[micro[0]] * len(micro) for micro in cut)
            else:
                cut = divide(range(len(lengths)), lengths, token_budget=work.budget)[0]
                filled = sum(lengths) / (len(cut) * work.budget)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            with started(way, work, device) as (backend, share):
                rate = measure(backend, work, lengths, cut, share)
                del backend
            peak = f"{torch.cuda.max_memory_allocated() / 2**30:.0f} GiB" if device.type == "cuda" else ""
            used = f"{flops(work, lengths) / sum(lengths) * rate / PEAK[name]:.1%}" if name in PEAK else ""
            label = LABELS.get(way, way)
            rows.append(f"| {kind} | {label} | {filled:.1%} | {rate:,.0f} | {used} | {peak} |")
            print(rows[-1], flush=True)
    shape = "Qwen2.5-1.5B's shape in bf16" if device.type == "cuda" else "a 4M-parameter Qwen2 in fp32"
    body = (
        f"{shape}, random weights, {name}, torch {torch.__version__}, transformers {transformers.__version__}; "
        f"micro-batches of {work.budget:,} tokens, {work.step_tokens:,} a step, no gradient checkpointing. "
        "Repeat: `python -m bench.sft`.\n\n"
        "| lengths | | fill | tokens/s | share of peak | peak memory |\n|---|---|---|---|---|---|\n" + "\n".join(rows)
    )
    if args.write:
        write_section(
            Path(__file__).with_name("RESULTS.md"), title=f"Supervised fine-tuning on {name}", body=body + "\n"
        )


if __name__ == "__main__":
    main()

"""A training forward and backward with and without shared prompts: `python -m bench.prefixes [--write]`.

Samples of the same prompt compute it once (`models/prefixes.py`). On CUDA a Qwen2.5-0.5B shape in bf16, on CPU a
4M-parameter one in fp32; random weights and tokens.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time
from pathlib import Path

import torch
import transformers as hf

from bench.results import write_section
from openrlhf.models.policy import Policy
from openrlhf.models.support import examine
from openrlhf.types import PackedTokens, Segment

CASES = [(128, 512, 8), (512, 512, 8), (1024, 256, 8), (2048, 512, 16)]
"""Prompt tokens, response tokens, samples of the prompt."""


def make_model() -> Policy:
    cuda = torch.cuda.is_available()
    shape = (896, 4864, 24, 14, 2, 151_936) if cuda else (256, 768, 4, 4, 2, 4096)
    hidden, intermediate, layers, heads, key_heads, vocabulary = shape
    config = hf.Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config)
    model = model.to("cuda", torch.bfloat16) if cuda else model
    return Policy(model, packed=examine(model, native_attention="sdpa").packed)


def make_stream(prompt: int, response: int, samples: int) -> PackedTokens:
    shared = torch.randint(4096, (prompt,))
    segments = []
    for _ in range(samples):
        T = prompt + response
        segments.append(
            Segment(
                token_ids=torch.cat([shared, torch.randint(4096, (response,))]),
                action_mask=torch.arange(T) >= prompt,
                rollout_logprobs=None,
                versions=torch.zeros(T, dtype=torch.int32),
                turn_rewards=torch.zeros(T),
            )
        )
    return PackedTokens.from_segments(segments)


def seconds(policy: Policy, tokens: PackedTokens) -> float:
    start = time.perf_counter()
    policy(tokens, temperature=1.0).logprobs_A.sum().backward()
    policy.zero_grad()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the section of bench/RESULTS.md")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    policy = make_model()
    device = next(policy.parameters()).device
    where = torch.cuda.get_device_name() if device.type == "cuda" else f"{torch.get_num_threads()} CPU threads"
    rows = [
        f"Forward and backward of one prompt's samples, {where}, torch {torch.__version__}; "
        f"median of {options.repeats}, taking turns. Repeat: `python -m bench.prefixes`.",
        "",
        "| prompt + response × samples | each sample whole | prompt shared | ratio |",
        "|---|---|---|---|",
    ]
    for prompt, response, samples in CASES if device.type == "cuda" else CASES[:3]:
        shared = make_stream(prompt, response, samples).to(device)
        whole = dataclasses.replace(shared, shared_prefixes=())
        times: dict[str, list[float]] = {"shared": [], "whole": []}
        for repeat in range(options.repeats + 1):
            for name, tokens in (("whole", whole), ("shared", shared)):
                taken = seconds(policy, tokens)
                if repeat:
                    times[name].append(taken)
        a, b = statistics.median(times["whole"]), statistics.median(times["shared"])
        rows.append(f"| {prompt} + {response} × {samples} | {a * 1e3:.0f} ms | {b * 1e3:.0f} ms | **{a / b:.2f}×** |")
        print(rows[-1], flush=True)
    body = "\n".join(rows)
    print(body)
    if options.write:
        write_section(Path(__file__).with_name("RESULTS.md"), title="Shared prompts", body=body)


if __name__ == "__main__":
    main()

"""Long sequences: one optimizer step of a policy on one sequence, the longest that trains, and context parallelism.

    python -m bench.long                        # on a GPU: Qwen2.5-1.5B's shape in bf16; on a CPU: a small one in fp32
    python -m bench.long --write                # also rewrite this bench's section of bench/RESULTS.md
    python -m bench.long --part longest         # lengths, longest or context; all, unless given
    python -m bench.long --tokens 8192 32768    # other lengths

Random weights and tokens, plain torch with fp32 masters and moments, no other process.

lengths   Tokens per second and peak memory of one step on one sequence, with gradient checkpointing and without. Share
          of peak as in `bench.sft`: nothing that is computed twice is counted twice.
longest   The longest sequence whose step fits into the device's memory, to 5 %, with and without checkpointing, and
          with the MLP in tiles (`models/tiles.py`) and not. Layers attend to the last 1,024 tokens only: attention
          holds as much memory as ever, and a step of a million tokens takes seconds. It begins where a line through
          the memory of two lengths meets the limit. On a CPU memory is what tensors take, and the limit is made up.
context   What sharing a stream costs one rank alone, and all shards of 2 and 4 ranks played in this process
          (`models/exchange.py`) against the whole: log-probs and the gradient, beside the noise of bf16 (the whole in
          fp32) and of computing one sequence at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import gc
import statistics
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.results import write_section
from bench.sft import PEAK, SETTINGS, Work, flops, gpu_work
from openrlhf.backends.torch import TorchBackend
from openrlhf.models.body import fuse_norms
from openrlhf.models.context import Context, share_streams
from openrlhf.models.exchange import Exchange, play
from openrlhf.models.policy import Policy
from openrlhf.models.support import examine
from openrlhf.models.tiles import LONG, TILE, tile_mlps
from openrlhf.types import PackedTokens

PARTS = ("lengths", "longest", "context")
WINDOW = 1024
PRECISION = 0.05
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
NAME = torch.cuda.get_device_name() if CUDA else "CPU"
GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a machine is given."""

    work: Work
    lengths: tuple[int, ...]
    packed: tuple[int, ...]
    """Sequences of the stream that ranks share."""
    long: int
    tile: int
    memory: int
    """Bytes of the device; on a CPU made up."""


def gpu_sizes() -> Sizes:
    work = gpu_work()
    work.config.max_position_embeddings = 2**20
    total = torch.cuda.get_device_properties(0).total_memory
    lengths = (8_192, 32_768, 131_072)
    return Sizes(work=work, lengths=lengths, packed=(6_000, 1_500, 500, 192), long=LONG, tile=TILE, memory=total)


def cpu_sizes() -> Sizes:
    config = transformers.Qwen2Config(
        vocab_size=512,
        hidden_size=64,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    work = Work(config=config, dtype=torch.float32, longest=0, budget=0, step_tokens=0, steps=0)
    lengths, packed = (128, 256, 512), (60, 17, 9, 2)
    return Sizes(work=work, lengths=lengths, packed=packed, long=200, tile=64, memory=48 * 2**20)


def say(text: str) -> None:
    print(text, flush=True)


# ---------------------------------------------------------------------------------------------------- memory


class TensorMemory(TorchDispatchMode):
    """On a CPU: the bytes of all tensors that are made while it is open and still live; so many at most."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit
        self._live: set[int] = set()
        self._now = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._live:
            return
        self._live.add(key)
        self._now += size
        weakref.finalize(storage, self._gone, key, size)
        self.peak = max(self.peak, self._now)
        if self._now > self._limit:
            raise torch.OutOfMemoryError(f"{self._now} bytes of {self._limit}")

    def _gone(self, key: int, size: int) -> None:
        self._live.discard(key)
        self._now -= size


class Peak:
    """The most memory that was taken while it was open."""

    bytes = 0

    @contextlib.contextmanager
    def measured(self, limit: int) -> Iterator[None]:
        if CUDA:
            torch.cuda.reset_peak_memory_stats()
            yield
            torch.cuda.synchronize()
            self.bytes = torch.cuda.max_memory_allocated()
        else:
            with TensorMemory(limit) as memory:
                yield
            self.bytes = memory.peak


def free() -> None:
    gc.collect()
    if CUDA:
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------- models and steps


def make_policy(sizes: Sizes, *, checkpointing: bool, tiled: bool = True, window: int | None = None) -> Policy:
    config = copy.deepcopy(sizes.work.config)
    if window is not None:
        config.use_sliding_window, config.sliding_window = True, window
        config.layer_types = ["sliding_attention"] * config.num_hidden_layers
    torch.manual_seed(0)
    with torch.device(DEVICE):
        model: Any = transformers.Qwen2ForCausalLM._from_config(config, dtype=sizes.work.dtype)
    fuse_norms(model)
    support = examine(model, native_attention="sdpa")
    assert support.packed, support.reason
    if tiled:
        tile_mlps(model, long=sizes.long, tile=sizes.tile)
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return Policy(model, packed=True, transform=support.transform).train()


def stream_of(lengths: Sequence[int], sizes: Sizes) -> PackedTokens:
    """The first token of each is a prompt, the others are actions."""
    generator = torch.Generator().manual_seed(0)
    sequences = [torch.randint(sizes.work.config.vocab_size, (n,), generator=generator) for n in lengths]
    return PackedTokens.from_sequences(sequences, [torch.arange(n) > 0 for n in lengths]).to(DEVICE)


@dataclass(frozen=True, slots=True)
class Step:
    seconds: float
    passes: int
    """Peak memory of forward and backward."""
    update: int
    """Peak memory of the optimizer step: the same for every sequence."""

    @property
    def peak(self) -> int:
        return max(self.passes, self.update)


def try_step(backend: TorchBackend, length: int, sizes: Sizes) -> Step | None:
    """One optimizer step on one sequence; None: memory was not enough."""
    tokens, passes, update, fits = stream_of([length], sizes), Peak(), Peak(), False
    free()
    start = time.perf_counter()
    try:
        with passes.measured(sizes.memory):
            backend.backward(-backend.module(tokens, temperature=1.0).logprobs_A.mean())
        with update.measured(sizes.memory):
            backend.step()
        fits = True
    except torch.OutOfMemoryError:
        pass
    seconds = time.perf_counter() - start
    if not fits:  # not in the `except`: its error holds every tensor
        backend.drop_gradients()
        free()
        return None
    return Step(seconds, passes.bytes, update.bytes)


# ------------------------------------------------------------------------------------------------------ parts


def measure_lengths(sizes: Sizes) -> list[str]:
    rows = [
        "| tokens of the sequence | gradient checkpointing | s | tokens/s | share of peak | peak memory |",
        "|---|---|---|---|---|---|",
    ]
    for checkpointing in (False, True):
        backend = TorchBackend(make_policy(sizes, checkpointing=checkpointing), SETTINGS)
        try_step(backend, min(sizes.lengths), sizes)  # warms up
        for length in sizes.lengths:
            done = try_step(backend, length, sizes)
            if done is not None and length <= min(sizes.lengths) * 4:
                done = try_step(backend, length, sizes) or done  # short ones again: the first has allocated memory
            way = "yes" if checkpointing else "no"
            if done is None:
                rows.append(f"| {length:,} | {way} | does not fit | | | |")
            else:
                rate = length / done.seconds
                arithmetic = flops(sizes.work, [length]) / done.seconds
                share = f"{arithmetic / PEAK[NAME]:.1%}" if NAME in PEAK else ""
                rows.append(
                    f"| {length:,} | {way} | {done.seconds:.2f} | {rate:,.0f} | {share} | {_memory(done.peak)} |"
                )
            say(rows[-1])
        del backend
        free()
    return rows


def _memory(count: float) -> str:
    return f"{count / GIB:.1f} GiB" if CUDA else f"{count / 2**20:.1f} MiB"


def measure_longest(sizes: Sizes) -> list[str]:
    rows = [
        "| gradient checkpointing | MLP | longest sequence that trains | memory per 1,000 tokens | before the first |",
        "|---|---|---|---|---|",
    ]
    for checkpointing in (False, True):
        for tiled in (True, False):
            policy = make_policy(sizes, checkpointing=checkpointing, tiled=tiled, window=WINDOW if CUDA else None)
            backend = TorchBackend(policy, SETTINGS)
            longest, slope, base = find_longest(backend, sizes)
            rows.append(
                f"| {'yes' if checkpointing else 'no'} | {'in tiles' if tiled else 'whole'} | **{longest:,}** | "
                f"{_memory(1000 * slope)} | {_memory(base)} |"
            )
            say(rows[-1])
            del backend, policy
            free()
    return rows


def find_longest(backend: TorchBackend, sizes: Sizes) -> tuple[int, float, float]:
    """The longest, to `PRECISION`; and the line of its memory: bytes per token, and without any."""
    short, longer = sizes.long, 2 * sizes.long
    try_step(backend, short, sizes)  # makes the optimizer's state
    first, second = try_step(backend, short, sizes), try_step(backend, longer, sizes)
    if first is None or second is None:
        return 0, 0.0, 0.0
    slope = (second.passes - first.passes) / (longer - short)
    base = first.passes - slope * short
    fits, too_long, length = longer, 0, max(longer + 1, int(0.97 * (sizes.memory - base) / slope))
    tries = 0
    while not too_long or too_long - fits > PRECISION * fits:
        done, tries = try_step(backend, length, sizes), tries + 1
        say(f"    {length:,} tokens: {'no' if done is None else f'{_memory(done.peak)}, {done.seconds:.1f} s'}")
        if done is None:
            too_long = length
        else:
            fits = length
        if not too_long:
            length = int(fits * (1 + PRECISION))
        elif tries == 1:  # the guess was a little too long, if the line was right
            length = max(fits + 1, int(too_long * (1 - PRECISION)))
        else:
            length = (fits + too_long) // 2
    return fits, slope, base


@dataclass(frozen=True, slots=True)
class Trained:
    logprobs_A: Tensor
    gradient: dict[str, Tensor]


def trained(policy: Policy, tokens: PackedTokens, context: Context | None = None, *, weight: float = 1.0) -> Trained:
    own = copy.deepcopy(policy)
    share_streams(own, context)
    logprobs_A = own(tokens, temperature=1.0).logprobs_A
    (weight * logprobs_A.mean()).backward()
    return Trained(logprobs_A.detach(), {name: p.grad.float() for name, p in own.named_parameters()})


def one_by_one(policy: Policy, sizes: Sizes, tokens: PackedTokens) -> Trained:
    """The same, a forward for each sequence."""
    parts = [trained(policy, sequence, weight=sequence.num_actions / tokens.num_actions) for sequence in tokens.split()]
    gradient = {name: sum(part.gradient[name] for part in parts) for name in parts[0].gradient}
    return Trained(torch.cat([part.logprobs_A for part in parts]), gradient)


def measure_context(sizes: Sizes) -> list[str]:
    policy, tokens = make_policy(sizes, checkpointing=False), stream_of(sizes.packed, sizes)
    rows = [_cost_of_one(policy, tokens), ""]
    say(rows[0])
    whole = trained(policy, tokens)
    rows += [
        "| computed as | log-probs, mean difference | largest | gradient, relative difference |",
        "|---|---|---|---|",
    ]

    def row(name: str, found: Trained) -> None:
        gap_A = (found.logprobs_A - whole.logprobs_A).abs()
        total = sum(float(g.square().sum()) for g in whole.gradient.values()) ** 0.5
        gap = sum(float((found.gradient[n] - g).square().sum()) for n, g in whole.gradient.items()) ** 0.5
        rows.append(f"| {name} | {float(gap_A.mean()):.1e} | {float(gap_A.max()):.1e} | {gap / total:.1e} |")
        say(rows[-1])

    if CUDA:  # how far bf16 itself is from more digits: what any other order of rounding may differ by
        row("the whole in fp32", trained(copy.deepcopy(policy).float(), tokens))
        free()
    row("one sequence at a time", one_by_one(policy, sizes, tokens))
    for ring in (False, True):
        for size in (2, 4):

            def run(exchange: Exchange, ring: bool = ring) -> Trained:
                return trained(policy, tokens, Context(exchange=exchange, always_ring=ring))

            parts = play(size, run)
            gradient = {name: sum(part.gradient[name] for part in parts) for name in parts[0].gradient}
            row(f"{size} shards, {'by ring' if ring else 'by heads'}", Trained(parts[0].logprobs_A, gradient))
            del parts, gradient
            free()
    return rows


def _cost_of_one(policy: Policy, tokens: PackedTokens, repeats: int = 8) -> str:
    """Forward and backward without a context, and as the only rank of one, taking turns."""

    def seconds(context: Context | None) -> float:
        share_streams(policy, context)
        _wait()
        start = time.perf_counter()
        policy(tokens, temperature=1.0).logprobs_A.mean().backward()
        policy.zero_grad()
        _wait()
        return time.perf_counter() - start

    def both(exchange: Exchange) -> list[tuple[float, float]]:
        return [(seconds(None), seconds(Context(exchange=exchange))) for _ in range(repeats + 1)][1:]

    times = play(1, both)[0]
    share_streams(policy, None)
    alone, of_one = (statistics.median(column) for column in zip(*times, strict=True))
    return (
        f"A stream of {tokens.num_tokens:,} tokens, forward and backward: {alone * 1e3:.1f} ms without context "
        f"parallelism, which is the path of `--ds.ring_attn_size 1`; {of_one * 1e3:.1f} ms as the only rank of a group."
    )


def _wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the section of bench/RESULTS.md")
    parser.add_argument("--part", choices=PARTS, action="append", help="one of them; all, unless given")
    parser.add_argument("--tokens", type=int, nargs="+", help="lengths of the sequence, in the place of the usual ones")
    options = parser.parse_args()
    sizes = gpu_sizes() if CUDA else cpu_sizes()
    lengths = tuple(options.tokens or sizes.lengths)
    c = sizes.work.config
    sections = [
        f"{c.hidden_size} × {c.num_hidden_layers} Qwen2 in {'bf16' if CUDA else 'fp32'}, random weights, {NAME}, torch "
        f"{torch.__version__}; plain torch, fp32 masters and moments. MLPs in tiles of {sizes.tile:,} tokens from a "
        f"sequence of {sizes.long:,} on. Repeat: `python -m bench.long`."
    ]
    say(sections[0])
    for part in options.part or PARTS:
        say(f"\n{part}")
        start = time.perf_counter()
        if part == "lengths":
            found = measure_lengths(dataclasses.replace(sizes, lengths=lengths))
        elif part == "longest":
            found = measure_longest(sizes)
        else:
            found = measure_context(sizes)
        say(f"({time.perf_counter() - start:.0f} s)")
        sections.append("\n".join(found))
    body = "\n\n".join(sections)
    say(f"\n{body}")
    if options.write:
        title = "Long sequences" + (f" on {NAME}" if CUDA else "")
        write_section(Path(__file__).with_name("RESULTS.md"), title=title, body=body)


if __name__ == "__main__":
    main()

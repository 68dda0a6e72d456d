"""Chunked log-probs and entropies against the plain way, at a real vocabulary: peak memory and time.

    python -m bench.logprobs                       # 4,096 tokens, 151,936 entries, fp32; the plain way takes 13 GB
    python -m bench.logprobs --tokens 512          # a smaller machine
    python -m bench.logprobs --write               # also rewrite this bench's section of bench/RESULTS.md

Each run is a fresh process: peak memory is the growth of its high-water mark (`ru_maxrss`) over what stood there before
the forward, so the model's own tensors do not count and the gradients do. The two ways take turns, and the best of
their runs is reported, because machines have other work.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from bench.results import write_section
from openrlhf.models.logprobs import chunked_logprobs

_WAYS = ("full", "chunked")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One forward and backward in a fresh process."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    checksum: float
    """Sum of both results: the two ways must agree."""


def compute(way: str, hidden_AD: Tensor, weight_VD: Tensor, targets_A: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies, [A] each."""
    if way == "full":
        return plain(hidden_AD, weight_VD, targets_A)
    logprobs_A, entropy_A = chunked_logprobs(hidden_AD, weight_VD, targets_A, with_entropy=True)
    assert entropy_A is not None
    return logprobs_A, entropy_A


def plain(hidden_AD: Tensor, weight_VD: Tensor, targets_A: Tensor) -> tuple[Tensor, Tensor]:
    """What one writes first: all logits at once, and autograd."""
    logp_AV = torch.log_softmax(hidden_AD @ weight_VD.t(), dim=-1)
    return logp_AV.gather(1, targets_A[:, None]).squeeze(1), -(logp_AV.exp() * logp_AV).sum(-1)


def measure(way: str, *, tokens: int, vocab: int, hidden: int) -> Run:
    generator = torch.Generator().manual_seed(0)
    hidden_AD = torch.randn(tokens, hidden, generator=generator).requires_grad_()
    weight_VD = torch.randn(vocab, hidden, generator=generator).mul_(0.02).requires_grad_()
    targets_A = torch.randint(vocab, (tokens,), generator=generator)

    # A small run first: it loads the kernels and their scratch memory.
    warm_up = compute(way, hidden_AD[:64], weight_VD[:512], targets_A[:64] % 512)
    torch.autograd.grad(warm_up[0].sum() + warm_up[1].sum(), hidden_AD)
    before = _peak_bytes()
    wall, cpu = time.perf_counter(), time.process_time()
    logprobs_A, entropy_A = compute(way, hidden_AD, weight_VD, targets_A)
    (logprobs_A.sum() + entropy_A.sum()).backward()
    return Run(
        wall_s=time.perf_counter() - wall,
        cpu_s=time.process_time() - cpu,
        peak_bytes=_peak_bytes() - before,
        checksum=float(logprobs_A.detach().sum() + entropy_A.detach().sum()),
    )


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _in_fresh_process(way: str, sizes: dict[str, int]) -> Run:
    command = [sys.executable, "-m", "bench.logprobs", "--way", way]
    for name, value in sizes.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"the {way} run ended with code {done.returncode}; -9 means out of memory: lower --tokens")
    return Run(**json.loads(done.stdout))


def report(runs: dict[str, list[Run]], *, sizes: dict[str, int]) -> str:
    best = {
        way: {
            "wall": min(r.wall_s for r in runs[way]),
            "cpu": min(r.cpu_s for r in runs[way]),
            "peak": max(r.peak_bytes for r in runs[way]),
        }
        for way in _WAYS
    }
    full, chunked = best["full"], best["chunked"]
    lines = [
        f"Log-prob and entropy, forward and backward, fp32: {sizes['tokens']:,} tokens, {sizes['vocab']:,} entries, "
        f"hidden size {sizes['hidden']}, {torch.get_num_threads()} threads, torch {torch.__version__}; "
        f"best of {len(runs['full'])}, taking turns.",
        "",
        "| | extra peak memory | wall time | CPU time |",
        "|---|---|---|---|",
        *(
            f"| {name} | {best[way]['peak'] / 1e9:.2f} GB | {best[way]['wall']:.1f} s | {best[way]['cpu']:.1f} s |"
            for way, name in (("full", "all logits at once"), ("chunked", "chunked"))
        ),
        f"| chunked / all | {chunked['peak'] / full['peak']:.3f} | {chunked['wall'] / full['wall']:.2f} "
        f"| {chunked['cpu'] / full['cpu']:.2f} |",
        "",
        f"Of the chunked peak, {4e-9 * sizes['vocab'] * sizes['hidden']:.2f} GB is the weight's gradient itself. "
        "Repeat: `python -m bench.logprobs`.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--hidden", type=int, default=896)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="rewrite this bench's section of bench/RESULTS.md")
    parser.add_argument("--way", choices=_WAYS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = {"tokens": args.tokens, "vocab": args.vocab, "hidden": args.hidden}
    if args.way:
        print(json.dumps(asdict(measure(args.way, **sizes))))
        return
    runs: dict[str, list[Run]] = {way: [] for way in _WAYS}
    for _ in range(args.repeats):
        for way in _WAYS:
            runs[way].append(_in_fresh_process(way, sizes))
            print(f"{way:8s} {runs[way][-1]}", file=sys.stderr, flush=True)
    full, chunked = (runs[way][0].checksum for way in _WAYS)
    if abs(full - chunked) > 1e-4 * abs(full):
        raise SystemExit(f"the two ways disagree: {full} and {chunked}")
    text = report(runs, sizes=sizes)
    print(text)
    if args.write:
        write_section(Path(__file__).with_name("RESULTS.md"), title="Chunked log-probs", body=text)


if __name__ == "__main__":
    main()

"""How full micro-batches are, and how even ranks, on a long-tailed length distribution; no model, a minute on one core.

    python -m bench.packing            # print
    python -m bench.packing --write    # also rewrite this bench's section of bench/RESULTS.md

Lengths are log-normal (median 403 tokens), at most 4,096. `padded`: samples in the order they come, as many as fit the
budget when each is padded to the longest of its micro-batch. `bound`: no cut into whole micro-batches, as many on every
rank, can be fuller.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import numpy as np

from bench.results import write_section
from openrlhf.data.schedule import Schedule

BUDGET, STEPS = 4096, 20


def padded_fill(lengths: list[int], *, budget: int) -> float:
    """Share of real tokens when neighbours are padded to the longest of them."""
    room, batch = 0, [lengths[0]]
    for length in lengths[1:]:
        if max(*batch, length) * (len(batch) + 1) > budget:
            room += max(batch) * len(batch)
            batch = []
        batch.append(length)
    return sum(lengths) / (room + max(batch) * len(batch))


def measure(batch_size: int, ranks: int) -> str:
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(6, 1, batch_size * STEPS).astype(int), 8, BUDGET).tolist()
    schedules = [
        Schedule(lengths, batch_size=batch_size, rank=rank, ranks=ranks, token_budget=BUDGET) for rank in range(ranks)
    ]
    tokens = forwards = least = 0
    uneven, padded = [], []
    for number in range(STEPS):
        shares = [schedule.step(number) for schedule in schedules]
        loads = [sum(lengths[i] for bin_ in share.micro_batches for i in bin_) for share in shares]
        tokens += sum(loads)
        forwards += sum(len(share.micro_batches) for share in shares)
        least += ranks * math.ceil(sum(loads) / (BUDGET * ranks))
        uneven.append(max(loads) / np.mean(loads) - 1)
        padded.append(padded_fill([lengths[i] for i in shares[0].samples], budget=BUDGET))
    fill, bound = tokens / (forwards * BUDGET), tokens / (least * BUDGET)
    return f"| {batch_size:,} | {ranks} | {fill:.1%} | {bound:.1%} | {np.mean(padded):.1%} | {max(uneven):.2%} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    rows = [measure(batch_size, ranks) for batch_size in (128, 512, 2048) for ranks in (1, 8)]
    body = "\n".join(
        [
            f"Long-tailed lengths (log-normal, median 403, at most 4,096 tokens), budget {BUDGET:,}, {STEPS} steps. "
            "Fill is real tokens ÷ room of all forwards; the bound is what whole micro-batches, as many on every rank, "
            "allow at best. Repeat: `python -m bench.packing --write`.",
            "",
            "| samples a step | ranks | fill | bound | padded | heaviest rank over the mean |",
            "|---|---|---|---|---|---|",
            *rows,
        ]
    )
    print(body)
    if args.write:
        write_section(Path(__file__).with_name("RESULTS.md"), title="Packing", body=body)


if __name__ == "__main__":
    main()

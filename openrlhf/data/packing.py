"""How samples are cut into micro-batches, and rounds into optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence


def by_count(indices: Sequence[int], *, size: int) -> list[list[int]]:
    """At most `size` samples each, in order."""
    return [list(indices[start : start + size]) for start in range(0, len(indices), size)]


def by_tokens(indices: Sequence[int], lengths: Sequence[int], *, budget: int) -> list[list[int]]:
    """As few micro-batches as first-fit-decreasing finds, each of at most `budget` tokens, evenly filled.

    `lengths[i]` belongs to sample i. A sample longer than the budget cannot be cut; it goes alone.
    """
    longest_first = sorted(indices, key=lambda i: (-lengths[i], i))
    bins = _first_fit(longest_first, lengths, budget)
    balanced = _balance(longest_first, lengths, count=len(bins))
    # Balancing spreads tokens without looking at the budget; where it went over, keep first-fit's answer.
    if all(len(b) <= 1 or sum(lengths[i] for i in b) <= budget for b in balanced):
        bins = balanced
    return [sorted(b) for b in bins if b]


def evenly(indices: Sequence[int], *, parts: int) -> list[list[int]]:
    """`parts` runs whose sizes differ by at most one; some are empty when there are too few samples."""
    size, extra = divmod(len(indices), parts)
    cut: list[list[int]] = []
    start = 0
    for part in range(parts):
        end = start + size + (part < extra)
        cut.append(list(indices[start:end]))
        start = end
    return cut


def _first_fit(longest_first: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for i in longest_first:
        for b, left in enumerate(room):
            if lengths[i] <= left:
                bins[b].append(i)
                room[b] -= lengths[i]
                break
        else:
            bins.append([i])
            room.append(budget - lengths[i])
    return bins


def _balance(longest_first: Sequence[int], lengths: Sequence[int], *, count: int) -> list[list[int]]:
    """Longest first, each to the lightest bin so far."""
    bins: list[list[int]] = [[] for _ in range(count)]
    load = [0] * count
    for i in longest_first:
        lightest = min(range(count), key=load.__getitem__)
        bins[lightest].append(i)
        load[lightest] += lengths[i]
    return bins

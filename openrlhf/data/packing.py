"""Packing: samples into micro-batches, rounds into optimizer steps."""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Hashable, Sequence
from typing import TypeVar

T = TypeVar("T")


def by_count(indices: Sequence[int], *, size: int) -> list[list[int]]:
    """Micro-batches of at most `size` samples each, in order."""
    return [list(indices[start : start + size]) for start in range(0, len(indices), size)]


def by_tokens(
    indices: Sequence[int], lengths: Sequence[int], *, budget: int, families: Sequence[Hashable] | None = None
) -> list[list[int]]:
    """As few micro-batches as first-fit-decreasing finds, each of at most `budget` tokens, evenly filled.

    `lengths[i]` belongs to sample i. A sample longer than the budget cannot be cut; it goes alone. Samples of the same
    family (`families[i]`) stand side by side in the same micro-batch as far as the budget allows.
    """
    bundles = _bundles(indices, lengths, budget, families)
    sizes = [sum(lengths[i] for i in bundle) for bundle in bundles]
    longest_first = sorted(range(len(bundles)), key=lambda b: (-sizes[b], bundles[b]))
    bins = _first_fit(longest_first, sizes, budget)
    balanced = balance(longest_first, sizes, count=len(bins))
    # First-fit finds how few micro-batches are enough, but fills the first ones and leaves the last nearly empty. On
    # several ranks the fullest one decides the time. So the same number of bins is filled again, evenly. That ignores
    # the budget; where a bin exceeds it, first-fit's bins are kept.
    if all(len(b) <= 1 or sum(sizes[i] for i in b) <= budget for b in balanced):
        bins = balanced
    return [[i for bundle in sorted(bundles[b] for b in bin_) for i in bundle] for bin_ in bins if bin_]


def _bundles(
    indices: Sequence[int], lengths: Sequence[int], budget: int, families: Sequence[Hashable] | None
) -> list[list[int]]:
    """Samples that stay together: a family (the samples of a prompt, which share its forward), or as much of it as the
    budget holds."""
    if families is None:
        return [[i] for i in indices]
    members: dict[Hashable, list[int]] = {}
    for i in sorted(indices):
        members.setdefault(families[i], []).append(i)
    return [
        [family[k] for k in sorted(bin_)]
        for family in members.values()
        for bin_ in _first_fit(range(len(family)), [lengths[i] for i in family], budget)
    ]


def evenly(items: Sequence[T], *, parts: int) -> list[list[T]]:
    """`parts` runs whose sizes differ by at most one; some are empty when there are too few items."""
    if not parts:
        return []
    size, extra = divmod(len(items), parts)
    cut: list[list[T]] = []
    start = 0
    for part in range(parts):
        end = start + size + (part < extra)
        cut.append(list(items[start:end]))
        start = end
    return cut


def by_middle(sizes: Sequence[int], *, parts: int) -> list[int]:
    """The index of each item's part. Items are laid end to end, and the line is cut into `parts` equal pieces: an item
    belongs to the piece in which its middle lies.

    So parts have about the same size, and adjacent items stay together.
    """
    total, before = sum(sizes), 0
    chosen: list[int] = []
    for size in sizes:
        chosen.append((2 * before + size) * parts // (2 * total))
        before += size
    return chosen


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


def best_fit(longest_first: Sequence[int], lengths: Sequence[int], *, budget: int) -> list[list[int]]:
    """Each sample into the fullest bin that still has room for it: best-fit decreasing, O(n log n).

    At most 11/9 of the fewest bins + 1 (Johnson 1974). A sample longer than the budget goes alone.
    """
    bins: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (room, bin), ascending
    for i in longest_first:
        place = bisect.bisect_left(rooms, (lengths[i], -1))
        if place < len(rooms):
            room, b = rooms.pop(place)
            bins[b].append(i)
        else:
            room, b = max(budget, lengths[i]), len(bins)
            bins.append([i])
        bisect.insort(rooms, (room - lengths[i], b))
    return bins


def balance(
    longest_first: Sequence[int], lengths: Sequence[int], *, count: int, at_most: int | None = None
) -> list[list[int]]:
    """Longest first, each to the lightest of `count` bins so far, of those with less than `at_most` samples.

    Without that limit no bin is heavier than another by more than its longest sample, and none is empty as long as
    there are samples for all.
    """
    bins: list[list[int]] = [[] for _ in range(count)]
    open_bins = [(0, b) for b in range(count)]  # (load, bin), a heap
    for i in longest_first:
        load, b = heapq.heappop(open_bins)
        bins[b].append(i)
        if at_most is None or len(bins[b]) < at_most:
            heapq.heappush(open_bins, (load + lengths[i], b))
    return bins

"""Which finished groups a round trains on when generation does not wait for training.

A group is begun with the weights of some version, and trained on by the round that leads from version v to v + 1. Its
staleness is v minus the version of its oldest token. It may not exceed a bound S: a group begun at version s must be in
one of the rounds up to v = s + S. A round takes B groups.

Nobody waits for the slowest of a batch: a round takes the B oldest of those that have finished. But only if the others
can still be in time: whatever was begun at s or before, and is not taken now, has s + S − v rounds left, so there may
be at most (s + S − v)·B of those. If there are more, the round waits until enough of the older ones have finished. With
at most S·B groups begun and not trained on, it never waits in vain: when all have finished, the B oldest will do.

Where the engine is d updates behind, what begins now is of version v − d and has d rounds less: there may be at most
(S − d)·B.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


def chosen(
    finished: Mapping[int, int], unfinished: Collection[int], *, version: int, batch_size: int, bound: int
) -> list[int] | None:
    """Ordinals of the groups that the next round trains on, oldest first; None: wait until more have finished.

    `finished`: ordinal → version it was begun with. `unfinished`: versions that those still in play were begun with.
    Without any in play a round may be small.
    """
    if len(finished) < batch_size and unfinished:
        return None
    order = sorted(finished, key=lambda ordinal: (finished[ordinal], ordinal))
    taken, left = order[:batch_size], order[batch_size:]
    starts = sorted([*unfinished, *(finished[ordinal] for ordinal in left)])
    in_time = all(count <= (start + bound - version) * batch_size for count, start in enumerate(starts, 1))
    return taken if in_time or not unfinished else None


def bound_of(capacity: int, *, batch_size: int) -> int:
    """The staleness that so many groups, begun and not trained on, can come to: rounds it takes to train on them."""
    return -(-capacity // batch_size)


def room_for(capacity: int, *, batch_size: int, behind: int) -> int:
    """Groups that may be begun and not trained on, while the engine is so many updates behind."""
    return min(capacity, (bound_of(capacity, batch_size=batch_size) - behind) * batch_size)

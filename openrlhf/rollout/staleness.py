"""Which finished groups a round trains on when generation does not wait for training.

A group is begun with the weights of some version, and trained on by the round that leads from version v to v + 1. Its
staleness is v minus the version of its oldest token. It may not exceed a bound S: a group begun at version s must be in
one of the rounds up to v = s + S. A round takes B groups.

A round does not wait for the slowest groups: it takes the B oldest of those that have finished, but only if the others
can still be in time. The groups that were begun at version s or before, and are not taken now, have s + S − v rounds
left, so there may be at most (s + S − v)·B of them. If there are more, the round waits until enough of the older ones
have finished. With at most S·B groups begun and not trained on, this wait always ends: when all groups have finished,
the B oldest satisfy the condition.

Where the engine is d updates behind, a group that begins now has version v − d, and d rounds less: there may be at most
(S − d)·B of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping


def chosen(
    finished: Mapping[int, int], unfinished: Collection[int], *, version: int, batch_size: int, bound: int
) -> list[int] | None:
    """The ordinals of the groups that the next round trains on, oldest first; None: wait until more have finished.

    `finished`: ordinal → the version that the group was begun with. `unfinished`: the versions of the groups that are
    still being played. If there are none of these, a round may have fewer than `batch_size` groups.
    """
    if len(finished) < batch_size and unfinished:
        return None
    order = sorted(finished, key=lambda ordinal: (finished[ordinal], ordinal))
    taken, left = order[:batch_size], order[batch_size:]
    starts = sorted([*unfinished, *(finished[ordinal] for ordinal in left)])
    # In ascending order, the `count`-th start has `count` groups that are as old or older, itself included. All of them
    # must fit into the rounds that are left for this one.
    in_time = all(count <= (start + bound - version) * batch_size for count, start in enumerate(starts, 1))
    return taken if in_time or not unfinished else None


def bound_of(capacity: int, *, batch_size: int) -> int:
    """The staleness bound S for so many groups, begun and not trained on: the rounds that it takes to train on them."""
    return -(-capacity // batch_size)


def room_for(capacity: int, *, batch_size: int, behind: int) -> int:
    """The number of groups that may be begun and not trained on, while the engine is `behind` updates behind."""
    return min(capacity, (bound_of(capacity, batch_size=batch_size) - behind) * batch_size)

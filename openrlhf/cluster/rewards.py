"""Reward models on their ranks: a forward that the driver waits for."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from openrlhf.cluster.services import Sequences
from openrlhf.cluster.workers import WorkerError, WorkerGroup
from openrlhf.data.packing import by_middle
from openrlhf.rewards.base import RewardGoneError
from openrlhf.rewards.batching import Forward, Item

DEADLINE = 600.0
"""Of one forward, in seconds."""


class RewardRanks:
    """Reward models, before and after their ranks are there."""

    def __init__(self) -> None:
        self._group: WorkerGroup | None = None
        self.threads = ThreadPoolExecutor(thread_name_prefix="reward-ranks")
        """Where forwards are waited for."""

    def bind(self, group: WorkerGroup) -> None:
        self._group = group

    def forward(self, model: int) -> Forward:
        """Of the so-manieth reward model."""
        return lambda items: self._judge(model, items)

    def _judge(self, model: int, items: Sequence[Item]) -> list[float]:
        assert self._group is not None, "rewards are asked for after the ranks have started"
        shares = split(items, len(self._group))
        try:
            scores = self._group.call(
                "judge", model, shares=[(Sequences.of(share),) for share in shares], deadline=DEADLINE
            )
        except WorkerError as error:
            raise RewardGoneError(str(error)) from error
        return [score for rank in scores for score in rank]


def split(items: Sequence[Item], ranks: int) -> list[list[Item]]:
    """A share for every rank, of about as many tokens; neighbours, who share a beginning, stay together."""
    shares: list[list[Item]] = [[] for _ in range(ranks)]
    for item, rank in zip(items, by_middle([len(item.token_ids) for item in items], parts=ranks), strict=True):
        shares[rank].append(item)
    return shares

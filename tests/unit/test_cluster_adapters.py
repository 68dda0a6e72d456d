"""The driver's side of models on ranks, with ranks that are plain objects."""

import torch

from openrlhf.cluster.adapters import RewardRanks
from openrlhf.rewards.batching import Item


class Group:
    """Two shares of two ranks each. A rank scores a sequence by its length, and remembers how many it was given."""

    share_count = 2

    def __init__(self) -> None:
        self.given: list[list[int]] = []

    def call(self, method, model, *, shares, deadline):
        assert method == "judge"
        per_rank = [sequences for (sequences,) in shares for _ in range(2)]
        self.given = [[len(ids) for ids in sequences.token_ids] for sequences in per_rank]
        return [[model + len(item.token_ids) for item in sequences.items()] for sequences in per_rank]

    def by_share(self, answers):
        return answers[::2]


def test_each_sequence_is_judged_by_one_share_and_answered_once():
    group, ranks = Group(), RewardRanks()
    ranks.bind(group)
    items = [Item(torch.zeros(length, dtype=torch.int64), 0) for length in (5, 4, 3, 6)]
    assert ranks.forward(100)(items) == [105, 104, 103, 106]
    assert group.given == [[5, 4], [5, 4], [3, 6], [3, 6]]
    ranks.threads.shutdown()

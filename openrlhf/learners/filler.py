"""A micro-batch that counts for nothing. Ranks compute together, so one that has fewer runs it until all are done."""

from __future__ import annotations

import torch

from openrlhf.types import PackedBatch, PackedTokens


def filler() -> PackedBatch:
    """Two tokens, one of them an action. Its columns are 0, except old log-probs: those are the current ones."""
    tokens = PackedTokens.from_sequences([torch.zeros(2, dtype=torch.int64)], [torch.tensor([False, True])])
    zero = torch.zeros(1)
    return PackedBatch(
        tokens=tokens,
        rows=torch.zeros(1, dtype=torch.int64),
        rollout_logprobs_A=zero,
        reference_logprobs_A=zero,
        values_A=zero,
        returns_A=zero,
        advantages_A=zero,
    )

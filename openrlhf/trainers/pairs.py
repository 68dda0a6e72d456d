"""Pairs on their way into a model: chosen and rejected side by side, their common beginning computed once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from openrlhf.types import PackedTokens

if TYPE_CHECKING:
    from openrlhf.data.preferences import Pair


def pack_pairs(pairs: Sequence[Pair]) -> PackedTokens:
    """Sequences chosen 0, rejected 0, chosen 1, rejected 1, …; the targets of both are the actions.

    A pair shares as many tokens as both begin with: the prompt, and what their answers have in common.
    """
    answers = [answer for pair in pairs for answer in (pair.chosen, pair.rejected)]
    shared = [n for pair in pairs for n in (0, common_beginning(pair.chosen.token_ids, pair.rejected.token_ids))]
    return PackedTokens.from_sequences(
        [answer.token_ids for answer in answers],
        [answer.target_mask for answer in answers],
        shared_prefixes=shared,
    )


def common_beginning(first: Tensor, second: Tensor) -> int:
    """How many tokens both begin with, each keeping at least one of its own."""
    room = min(len(first), len(second)) - 1
    differs = (first[:room] != second[:room]).nonzero()
    return int(differs[0]) if len(differs) else room

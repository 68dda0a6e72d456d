"""What is done to the rewards of an episode before anything is compared.

The order is: raw → overlong penalty → stop-properly penalty → clip. Rewards come as a 1-D tensor with one entry per
turn of one episode, or per action token with a turn's reward on its last one; either way the last entry is the
last turn's. A response is what the policy writes in one turn: that is what the limit of tokens is for.
"""

from __future__ import annotations

import torch
from torch import Tensor


def normalise(rewards: Tensor, *, mean: float, std: float) -> Tensor:
    """(r − mean) / std: a reward model's scores in the units of the data it was trained on."""
    if std <= 0:
        raise ValueError(f"rewards are divided by their standard deviation, which must be > 0, got {std}")
    return (rewards - mean) / std


def overlong_penalty(length: int, *, limit: int, buffer: float, factor: float) -> float:
    """0 up to limit − buffer tokens, then falling linearly to −factor at the limit, and −factor beyond it.

        over = min(length − (limit − buffer), buffer);  −factor · over / buffer  if over > 0

    The soft overlong punishment of DAPO (arXiv:2503.14476).
    """
    if not 0 < buffer <= limit:
        raise ValueError(f"the overlong buffer must be above 0 and at most {limit}, the longest response; got {buffer}")
    over = min(length - (limit - buffer), buffer)
    return -factor * over / buffer if over > 0 else 0.0


def stop_properly(turn_rewards: Tensor, *, coef: float) -> Tensor:
    """What a truncated episode keeps of its rewards (ProRL's stop-properly penalty). Not for those that ended.

    coef in [0, 1]: every reward times coef. coef < 0: the total becomes coef, on the last turn, whatever was earned.
    """
    if coef > 1:
        raise ValueError(f"a truncated episode cannot keep more than it earned: coef must be <= 1, got {coef}")
    if coef >= 0:
        return turn_rewards * coef
    replaced = torch.zeros_like(turn_rewards)
    replaced[-1] = coef
    return replaced

"""The critic's loss: one number per action token."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class ValueLoss(NamedTuple):
    """The critic's loss and what people want to know about it."""

    loss_A: Tensor
    clipped_A: Tensor
    """bool [A]: where the clip took the gradient away."""


def value_loss(values_A: Tensor, old_values_A: Tensor, returns_A: Tensor, *, value_clip: float) -> ValueLoss:
    """l_t = ½ max((v_clip − R)², (v − R)²),  v_clip = v_old + clamp(v − v_old, −ε, ε).

    The value function's counterpart of PPO's clip (arXiv:2005.12729): once v has moved by more than ε towards R, it
    is not pulled further within this round; away from R the pull back is never cut.
    """
    held_A = old_values_A + (values_A - old_values_A).clamp(-value_clip, value_clip)
    free_error_A, held_error_A = (values_A - returns_A) ** 2, (held_A - returns_A) ** 2
    return ValueLoss(0.5 * torch.max(free_error_A, held_error_A), (held_error_A > free_error_A).detach())

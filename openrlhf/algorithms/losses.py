"""Policy losses: one number per action token. How they are summed is `reduction`'s business."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class TokenLoss(NamedTuple):
    """A policy loss and what people want to know about it."""

    loss_A: Tensor
    clipped_A: Tensor
    """bool [A]: where the clip took the gradient away."""


def ppo_loss(
    logprobs_A: Tensor, old_logprobs_A: Tensor, advantages_A: Tensor, *, clip_low: float, clip_high: float
) -> TokenLoss:
    """l_t = −min(ρ_t A_t, clip(ρ_t, 1−ε_low, 1+ε_high) A_t),  ρ_t = exp(log π(t) − log π_old(t)).

    PPO (arXiv:1707.06347) with the two clip bounds set apart as in DAPO (arXiv:2503.14476). The exponent is held
    within ±20, so that no ratio overflows.
    """
    ratio_A = (logprobs_A - old_logprobs_A).clamp(-20.0, 20.0).exp()
    unclipped_A = ratio_A * advantages_A
    clipped_A = ratio_A.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages_A
    return TokenLoss(-torch.min(unclipped_A, clipped_A), (clipped_A < unclipped_A).detach())


POLICY_LOSSES: dict[str, Callable[..., TokenLoss]] = {"ppo": ppo_loss}


def get_policy_loss(name: str) -> Callable[..., TokenLoss]:
    if name not in POLICY_LOSSES:
        raise ValueError(f"unknown policy loss {name!r}; known: {', '.join(POLICY_LOSSES)}")
    return POLICY_LOSSES[name]

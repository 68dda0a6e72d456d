"""Advantage estimators: from the rewards of a prompt's samples to one number per action token.

For the critic-free estimators the advantage of an action token is

    A_t = (R_t − b) / s,    R_t = Σ_{k ≥ t} γ^(k−t) r_k   over action tokens k of the same episode,

where r_k is the turn reward if token k ends a turn, else 0. b and s come from the totals of the prompt's samples
and are what distinguishes the estimators; some are then whitened over all action tokens of the round.

Adding an estimator is one entry in `ESTIMATORS`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Shaping(NamedTuple):
    """What a group's statistics make of each member's rewards: (reward − baseline) / scale."""

    baseline_G: Tensor
    scale_G: Tensor


def no_shaping(totals_G: Tensor) -> Shaping:
    """b = 0, s = 1: the raw reward."""
    return Shaping(torch.zeros_like(totals_G), torch.ones_like(totals_G))


def group_mean(totals_G: Tensor) -> Shaping:
    """b = mean of the group, the sample itself included; s = 1."""
    return Shaping(totals_G.mean().expand_as(totals_G), torch.ones_like(totals_G))


def leave_one_out(totals_G: Tensor) -> Shaping:
    """b_i = mean of the other members; s = 1. Unbiased: the baseline does not depend on sample i."""
    others = (totals_G.sum() - totals_G) / (len(totals_G) - 1)
    return Shaping(others, torch.ones_like(totals_G))


def group_zscore(totals_G: Tensor) -> Shaping:
    """b = mean, s = unbiased standard deviation + 1e-9: a group whose members agree gives advantage 0."""
    return Shaping(totals_G.mean().expand_as(totals_G), (totals_G.std(correction=1) + 1e-9).expand_as(totals_G))


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """One way from rewards to advantages."""

    shape: Callable[[Tensor], Shaping]
    whiten: bool
    """Normalise over all action tokens of the round."""
    needs_group: bool
    """Compares a prompt's samples: needs two or more of them, and γ = 1."""
    paper: str


ESTIMATORS: dict[str, Estimator] = {
    # REINFORCE++: plain returns, normalised over the whole batch instead of per prompt.
    "reinforce": Estimator(shape=no_shaping, whiten=True, needs_group=False, paper="arXiv:2501.03262"),
    # REINFORCE++-baseline: the group's mean as baseline, then normalised over the whole batch.
    "reinforce_baseline": Estimator(shape=group_mean, whiten=True, needs_group=True, paper="arXiv:2501.03262"),
    # RLOO: the other samples' mean as baseline.
    "rloo": Estimator(shape=leave_one_out, whiten=False, needs_group=True, paper="arXiv:2402.14740"),
    # GRPO: z-score within the group.
    "group_norm": Estimator(shape=group_zscore, whiten=False, needs_group=True, paper="arXiv:2402.03300"),
    # Dr. GRPO: GRPO without the division by the standard deviation.
    "dr_grpo": Estimator(shape=group_mean, whiten=False, needs_group=True, paper="arXiv:2503.20783"),
}


def get_estimator(name: str) -> Estimator:
    if name not in ESTIMATORS:
        raise ValueError(f"unknown advantage estimator {name!r}; known: {', '.join(ESTIMATORS)}")
    return ESTIMATORS[name]


def rewards_to_come(rewards_A: Tensor, *, gamma: float = 1.0, later: float = 0.0) -> Tensor:
    """R_t = r_t + γ R_{t+1} over the action tokens of one sample; `later` stands after its last token.

    Environment tokens between turns are not in the column, so they do not discount.
    """
    if gamma == 1.0:
        return rewards_A.flip(0).cumsum(0).flip(0) + later
    returns_A = torch.empty_like(rewards_A)
    running = later
    for t in range(len(rewards_A) - 1, -1, -1):
        running = float(rewards_A[t]) + gamma * running
        returns_A[t] = running
    return returns_A


class Moments(NamedTuple):
    """Sums that cross ranks; mean and variance of the union are a function of their sums."""

    total: float
    total_squared: float
    size: int

    @staticmethod
    def of(values: Tensor) -> Moments:
        doubles = values.double()
        return Moments(float(doubles.sum()), float((doubles * doubles).sum()), values.numel())

    @property
    def mean(self) -> float:
        return self.total / max(self.size, 1)

    @property
    def variance(self) -> float:
        """Of the population, over `size` values."""
        return max(self.total_squared / max(self.size, 1) - self.mean**2, 0.0)


def whiten(values: Tensor, moments: Moments, *, divide_by_std: bool = True) -> Tensor:
    """(x − mean) / sqrt(max(variance, 1e-8)); without the division if `divide_by_std` is off."""
    centred = values - moments.mean
    if not divide_by_std:
        return centred
    return centred / max(moments.variance, 1e-8) ** 0.5

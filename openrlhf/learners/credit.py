"""From rewards, KL and values to one advantage per action token: the formulas of `algorithms`, on a round's batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from openrlhf.algorithms.advantages import Estimator, discounted_returns, gae
from openrlhf.types import TrainingBatch, TrainingSample


@dataclass(frozen=True, slots=True, kw_only=True)
class CreditSettings:
    """How credit is given."""

    estimator: Estimator
    gamma: float = 1.0
    lambd: float = 1.0
    divide_by_std: bool = True
    """Whitening divides by the standard deviation; off, it only takes the mean away."""


class Credit(NamedTuple):
    advantages_A: Tensor
    """Before whitening, which needs the sums of all ranks."""
    returns_A: Tensor | None
    """What a critic is trained towards; None without one."""
    totals_E: Tensor
    """Per episode: its total, as the comparison with the other samples left it where there is one, less the price of
    its KL. Under no estimator is it discounted."""


def give_credit(batch: TrainingBatch, settings: CreditSettings, *, costs_A: Tensor | None = None) -> Credit:
    """With r the shaped rewards and k = `costs_A` (c·KL_t where KL is part of the reward, else None):

        with a critic            GAE over r_t − k_t
        where samples compare    A_t = what came of the comparison − Σ_{i ≥ t} k_i
        otherwise                A_t = Σ_{i ≥ t} γ^(i−t) (r_i − k_i)

    The price of KL is no part of what samples are compared by: it is not scaled by the group's spread.
    """
    if not len(batch):
        return Credit(torch.empty(0), torch.empty(0) if settings.estimator.needs_critic else None, torch.empty(0))
    offsets = batch.episode_offsets
    first = offsets[:-1]
    rewards_A = torch.cat([sample.rewards_A for sample in batch.samples])
    costs_A = torch.zeros_like(rewards_A) if costs_A is None else costs_A
    if settings.estimator.needs_group:
        compared_A = torch.cat([_compared(sample) for sample in batch.samples])
        advantages_A = compared_A - discounted_returns(costs_A, offsets)
        return Credit(advantages_A, None, advantages_A[first])
    totals_E = discounted_returns(rewards_A - costs_A, offsets)[first]
    if settings.estimator.needs_critic:
        if batch.values_A is None:
            raise ValueError("gae needs the critic's values, and the batch has none")
        result = gae(rewards_A - costs_A, batch.values_A, offsets, gamma=settings.gamma, lambd=settings.lambd)
        return Credit(result.advantages_A, result.returns_A, totals_E)
    return Credit(discounted_returns(rewards_A - costs_A, offsets, gamma=settings.gamma), None, totals_E)


def _compared(sample: TrainingSample) -> Tensor:
    if sample.compared_A is None:
        raise ValueError(f"sample {sample.key} was not compared with the others of its prompt")
    return sample.compared_A

"""Advantage estimators: from the rewards of a prompt's samples to one number per action token.

For the critic-free estimators the advantage of an action token is

    A_t = (R_t − b) / s,    R_t = Σ_{k ≥ t} γ^(k−t) r_k   over action tokens k of the same episode,

where r_k is the turn reward if token k ends a turn, else 0. b and s come from the totals of the prompt's samples
and are what distinguishes the estimators; some are then whitened over all action tokens of the round. With a critic,
`gae` takes the place of R_t − b.

Environment tokens between turns are in no column: they neither discount nor carry a value. Columns hold several
samples end to end; `offsets` says where each lies (see `columns`). The segments of an episode may stand as samples of
their own, each told what comes after it; or, next to each other and in order, as one sample.

Adding an estimator is one entry in `ESTIMATORS`: the command line reads its choices there, which is why this file
imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from openrlhf.algorithms.columns import discounted_sums, shift_left

if TYPE_CHECKING:
    from torch import Tensor


class Shaping(NamedTuple):
    """What a group's statistics make of each member's rewards: (reward − baseline) / scale."""

    baseline_G: Tensor
    scale_G: Tensor


def no_shaping(totals_G: Tensor) -> Shaping:
    """b = 0, s = 1: the raw reward."""
    return Shaping(totals_G.new_zeros(totals_G.shape), totals_G.new_ones(totals_G.shape))


def group_mean(totals_G: Tensor) -> Shaping:
    """b = mean of the group, the sample itself included; s = 1."""
    mean = _for_statistics(totals_G).mean()
    return Shaping(mean.to(totals_G.dtype).expand_as(totals_G), totals_G.new_ones(totals_G.shape))


def leave_one_out(totals_G: Tensor) -> Shaping:
    """b_i = mean of the other members; s = 1. Unbiased: the baseline does not depend on sample i."""
    doubles_G = _for_statistics(totals_G)
    others_G = (doubles_G.sum() - doubles_G) / (len(doubles_G) - 1)
    return Shaping(others_G.to(totals_G.dtype), totals_G.new_ones(totals_G.shape))


def group_zscore(totals_G: Tensor) -> Shaping:
    """b = mean, s = unbiased standard deviation + 1e-9; s = ∞ if the members agree.

    A group that agrees has nothing to compare: its advantage is 0 at every token. Without the ∞, an episode's later
    turns, whose rewards-to-come are not its total, would be divided by 1e-9.
    """
    std = _for_statistics(totals_G).std(correction=1)
    scale = (std + 1e-9).masked_fill(std == 0, float("inf")).to(totals_G.dtype)
    return Shaping(group_mean(totals_G).baseline_G, scale.expand_as(totals_G))


def _for_statistics(totals_G: Tensor) -> Tensor:
    """In float64: a float32 mean of equal rewards may be off in its last bit, and that spread gives z-scores of ±1."""
    if len(totals_G) < 2:
        raise ValueError(f"comparing the samples of a prompt needs two or more of them, got {len(totals_G)}")
    return totals_G.double()


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """One way from rewards to advantages."""

    shape: Callable[[Tensor], Shaping]
    whiten: bool
    """Normalise over all action tokens of the round."""
    needs_group: bool
    """Compares a prompt's samples: needs two or more of them, and γ = 1."""
    needs_critic: bool = False
    """Advantages are those of `gae`, from a critic's values."""
    paper: str


ESTIMATORS: dict[str, Estimator] = {
    # GAE: a critic says what to expect at every token.
    "gae": Estimator(shape=no_shaping, whiten=True, needs_group=False, needs_critic=True, paper="arXiv:1506.02438"),
    # REINFORCE++: plain returns, normalised over the whole batch instead of per prompt.
    "reinforce": Estimator(shape=no_shaping, whiten=True, needs_group=False, paper="arXiv:2501.03262"),
    # RLOO: the other samples' mean as baseline.
    "rloo": Estimator(shape=leave_one_out, whiten=False, needs_group=True, paper="arXiv:2402.14740"),
    # REINFORCE++-baseline: the group's mean as baseline, then normalised over the whole batch.
    "reinforce_baseline": Estimator(shape=group_mean, whiten=True, needs_group=True, paper="arXiv:2501.03262"),
    # GRPO: z-score within the group.
    "group_norm": Estimator(shape=group_zscore, whiten=False, needs_group=True, paper="arXiv:2402.03300"),
    # Dr. GRPO: GRPO without the division by the standard deviation.
    "dr_grpo": Estimator(shape=group_mean, whiten=False, needs_group=True, paper="arXiv:2503.20783"),
}


def get_estimator(name: str) -> Estimator:
    if name not in ESTIMATORS:
        raise ValueError(f"unknown advantage estimator {name!r}; known: {', '.join(ESTIMATORS)}")
    return ESTIMATORS[name]


def discounted_returns(
    rewards_A: Tensor, offsets: Sequence[int], *, gamma: float = 1.0, later_N: Tensor | None = None
) -> Tensor:
    """R_t = r_t + γ R_{t+1} within each sample; `later_N` (default 0) stands for R behind its last token."""
    return discounted_sums(rewards_A, offsets, decay=gamma, later_N=later_N)


class GAE(NamedTuple):
    """What a critic's values make of rewards."""

    advantages_A: Tensor
    returns_A: Tensor
    """A + V: what the critic is trained towards."""


def gae(
    rewards_A: Tensor,
    values_A: Tensor,
    offsets: Sequence[int],
    *,
    gamma: float,
    lambd: float,
    next_values_N: Tensor | None = None,
    next_advantages_N: Tensor | None = None,
) -> GAE:
    """A_t = δ_t + γλ A_{t+1},  δ_t = r_t + γ V_{t+1} − V_t  within each sample  (arXiv:1506.02438).

    V_{t+1} is the value at the next action token, across a turn's end too. Behind a sample's last token V and A are
    `next_values_N` and `next_advantages_N`, default 0: there the episode is over.
    """
    errors_A = rewards_A + gamma * shift_left(values_A, offsets, last_N=next_values_N) - values_A
    advantages_A = discounted_sums(errors_A, offsets, decay=gamma * lambd, later_N=next_advantages_N)
    return GAE(advantages_A, advantages_A + values_A)


class Moments(NamedTuple):
    """Sums that cross ranks; mean and variance of the union are a function of their sums."""

    total: float
    total_squared: float
    size: int

    @staticmethod
    def of(values: Tensor) -> Moments:
        doubles = values.double()
        return Moments(float(doubles.sum()), float((doubles * doubles).sum()), values.numel())

    @staticmethod
    def merged(parts: Iterable[Moments]) -> Moments:
        """Those of all ranks' values together."""
        totals, squares, sizes = zip(*parts, strict=True)
        return Moments(sum(totals), sum(squares), sum(sizes))

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

"""Advantage estimators: from the rewards of a prompt's samples to one number per action token.

Estimators that compare a prompt's samples give an action token of turn k

    A = (x − b) / s,

where x is the return that the token is credited with, and the baseline b and the scale s come from the returns of the
prompt's samples. The estimators differ in b and s. `Turns` says what x is: the total of the episode, its return to go
from turn k on, or its rewards turn by turn. Some estimators are then whitened over all action tokens of the round.

The others credit a token with the rewards after it, R_t = Σ_{i ≥ t} γ^(i−t) r_i over action tokens i of the same
episode, where r_i is the turn's reward if token i ends a turn, else 0; with a critic, `gae` takes the place of R_t, and
`remax` takes the reward of a greedy sample of the prompt from it, which depends on no sample that is trained on.

Environment tokens between turns are in no column: they neither discount nor carry a value. Columns hold several
samples end to end; `offsets` says where each lies (see `columns`). The segments of an episode are adjacent and in
order, as one sample.

Adding an estimator is one entry in `ESTIMATORS`: the command line reads its choices there, which is why this file
imports no torch.

Before anything is compared, the rewards of an episode are shaped, in this order: raw → overlong penalty →
stop-properly penalty → clip. Rewards come as a 1-D tensor with one entry per turn of one episode, or per action token
with a turn's reward on its last one; either way the last entry is the last turn's. A response is what
the policy writes in one turn: that is what the limit of tokens is for.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import comb
from typing import TYPE_CHECKING, NamedTuple

from openrlhf.algorithms.columns import discounted_sums, shift_left

if TYPE_CHECKING:
    from torch import Tensor

FLOAT32_EPSILON = 2.0**-23
ROUNDING = 4 * FLOAT32_EPSILON
"""Sums of float32 rewards that differ by no more than this part of what was added up do not differ.

A float32 reward r may be off by ε/2 · |r|, and so a sum of such rewards by ε/2 · Σ|r|, and the difference of two sums
by ε · Σ|r|. Four times that leaves room for sums that users' code has taken in float32 before."""


PASS_K = 4
"""Samples of a subset in pass@k training, unless a run says otherwise."""


class Shaping(NamedTuple):
    """How each value of a group is normalised: (value − baseline) / scale. Shaped as the values."""

    baseline_M: Tensor
    scale_M: Tensor
    values_M: Tensor | None = None
    """What takes the place of the values themselves; None: nothing does."""


def group_mean(values_M: Tensor, samples_M: Tensor) -> Shaping:
    """b = mean of the group, the sample itself included; s = 1."""
    return Shaping(values_M.mean(0).expand_as(values_M), values_M.new_ones(values_M.shape))


def leave_one_out(values_M: Tensor, samples_M: Tensor) -> Shaping:
    """b_i = mean over the other samples; s = 1. Unbiased where x is: the baseline does not depend on sample i."""
    sums_G = values_M.new_zeros((int(samples_M.max()) + 1, *values_M.shape[1:])).index_add(0, samples_M, values_M)
    others_M = len(values_M) - samples_M.bincount()[samples_M]
    others_M = others_M.reshape(-1, *[1] * (values_M.dim() - 1))
    return Shaping((values_M.sum(0) - sums_G[samples_M]) / others_M, values_M.new_ones(values_M.shape))


def group_zscore(values_M: Tensor, samples_M: Tensor) -> Shaping:
    """b = mean, s = unbiased standard deviation + 1e-9."""
    scale = values_M.std(0, correction=1) + 1e-9
    return Shaping(group_mean(values_M, samples_M).baseline_M, scale.expand_as(values_M))


def over_mean(values_M: Tensor, samples_M: Tensor) -> Shaping:
    """b = s = mean of the group; where that is not above 0, but for rounding, everyone has 0. For rewards that are not
    negative.

    MaxRL: with rewards of 0 and 1, G samples and the success rate p, the gradient is on average that of
    Σ_{k=1..G−1} pass@k / k, the first terms of log p: a prompt weighs Σ_{k<G−1} (1 − p)^k, up to 1/p.
    """
    mean_M = group_mean(values_M, samples_M).baseline_M
    return Shaping(mean_M, mean_M.masked_fill(mean_M <= ROUNDING * values_M.abs().amax(0), float("inf")))


def best_of_subsets(values_M: Tensor, samples_M: Tensor, *, k: int = PASS_K) -> Shaping:
    """Pass@k training: subsets of k of the group's n samples earn what their best sample did, and every sample has
    the mean of the subsets that it is in. b and s are mean and standard deviation (of the population) of all subsets.

    With the values in ascending order, v_j is the best of C(j−1, k−1) of the C(n, k) subsets; of the C(n−1, k−1) with
    sample i it is that of C(j−2, k−2) where j > i, and v_i of C(i−1, k−1). For values of 0 and 1, c of which are 1,
    these are the paper's b = 1 − C(n−c, k) / C(n, k), s = √(b (1 − b)), 1 for a right sample, and
    1 − C(n−c−1, k−1) / C(n−1, k−1) for a wrong one. Where all subsets earn the same, and where there is only one
    (n ≤ k), everyone has 0.
    """
    n = len(values_M)
    if n <= k:
        return Shaping(values_M, values_M.new_ones(values_M.shape))
    ascending_M, order_M = values_M.sort()
    best_M = values_M.new_tensor([comb(j, k - 1) / comb(n, k) for j in range(n)])
    mean = (best_M * ascending_M).sum()
    spread = (best_M * (ascending_M - mean) ** 2).sum().sqrt()
    beyond = [comb(j - 1, k - 2) if k > 1 and j > 0 else 0 for j in range(n)]
    own_M = values_M.new_tensor([comb(j, k - 1) / comb(n - 1, k - 1) for j in range(n)])
    later_M = values_M.new_tensor([count / comb(n - 1, k - 1) for count in beyond]) * ascending_M
    credit_M = own_M * ascending_M + later_M.sum() - later_M.cumsum(0)
    credits_M = credit_M.new_empty(n).index_copy(0, order_M, credit_M)
    scale = spread.masked_fill(spread <= ROUNDING * values_M.abs().max(), float("inf"))
    return Shaping(mean.expand_as(values_M), scale.expand_as(values_M), credits_M)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """One way from rewards to advantages."""

    shape: Callable[..., Shaping] | None = None
    """Baseline and scale of values [M] that are compared, from them and the sample that each is of (int64 [M]); of
    values [M, K] for each column by itself. In float64. None: a sample is not compared with others."""
    whiten: bool
    """Normalise over all action tokens of the round."""
    greedy_baseline: bool = False
    """b is the reward of a greedy sample of the prompt, which is played for that and not trained on; x is R_t."""
    needs_critic: bool = False
    """Advantages are those of `gae`, from a critic's values."""
    takes_k: bool = False
    """`shape` has a parameter k, which `with_k` gives it."""
    by_part: bool = False
    """Where the reward is a weighted sum of several, each of these is compared by itself (`part_advantages`)."""
    outcome_only: bool = False
    """Samples are compared by the totals of their episodes, and by nothing else."""
    takes_gains: bool = False
    """Rewards must not be negative: a prompt whose samples earn less than nothing on average teaches nothing."""
    synonyms: tuple[str, ...] = ()
    """Other tools' words for it, which --algo.advantage.estimator takes as well."""
    paper: str

    @property
    def needs_group(self) -> bool:
        """Compares a prompt's samples: needs two or more of them, and γ = 1."""
        return self.shape is not None

    def with_k(self, k: int) -> Estimator:
        """The same with the size of its subsets; itself where it has none."""
        if not self.takes_k or self.shape is None:
            return self
        return dataclasses.replace(self, shape=functools.partial(self.shape, k=k))


ESTIMATORS: dict[str, Estimator] = {
    # GAE: a critic says what to expect at every token.
    "gae": Estimator(whiten=True, needs_critic=True, synonyms=("ppo",), paper="arXiv:1506.02438"),
    # REINFORCE++: plain returns, normalised over the whole batch instead of per prompt.
    "reinforce": Estimator(whiten=True, synonyms=("reinforce++", "reinforce_plus_plus"), paper="arXiv:2501.03262"),
    # ReMax: the greedy sample's reward as baseline.
    "remax": Estimator(whiten=False, greedy_baseline=True, paper="arXiv:2310.10505"),
    # RLOO: the other samples' mean as baseline.
    "rloo": Estimator(shape=leave_one_out, whiten=False, paper="arXiv:2402.14740"),
    # REINFORCE++-baseline: the group's mean as baseline, then normalised over the whole batch.
    "reinforce_baseline": Estimator(
        shape=group_mean,
        whiten=True,
        synonyms=("reinforce++-baseline", "reinforce_plus_plus_baseline"),
        paper="arXiv:2501.03262",
    ),
    # GRPO: z-score within the group.
    "group_norm": Estimator(shape=group_zscore, whiten=False, synonyms=("grpo",), paper="arXiv:2402.03300"),
    # Dr. GRPO: GRPO without the division by the standard deviation.
    "dr_grpo": Estimator(shape=group_mean, whiten=False, paper="arXiv:2503.20783"),
    # MaxRL: divided by the mean, so that a prompt weighs as in maximum likelihood.
    "maxrl": Estimator(shape=over_mean, whiten=False, takes_gains=True, synonyms=("max_rl",), paper="arXiv:2602.02710"),
    # Pass@k training: what counts is the best of k samples.
    "pass_at_k": Estimator(
        shape=best_of_subsets,
        whiten=False,
        takes_k=True,
        outcome_only=True,
        synonyms=("pass@k", "passk"),
        paper="arXiv:2508.10751",
    ),
    # GDPO: a z-score of each reward by itself, their weighted sum, then normalised over the whole batch.
    "gdpo": Estimator(
        shape=group_zscore,
        whiten=True,
        by_part=True,
        outcome_only=True,
        paper="arXiv:2601.05242",
    ),
}


def get_estimator(name: str) -> Estimator:
    if name not in ESTIMATORS:
        raise ValueError(f"unknown advantage estimator {name!r}; known: {', '.join(ESTIMATORS)}")
    return ESTIMATORS[name]


class Turns(StrEnum):
    """The return x that an action token of turn k is credited with where a prompt's samples are compared."""

    OUTCOME = "outcome"
    """The total of its episode: every action token of an episode has the same advantage."""
    TO_GO = "to_go"
    """What its episode earned from turn k on, compared with what the others earned from their turn k on. Episodes that
    ended before turn k earned 0 from there on."""
    STEP = "step"
    """The process supervision of GRPO (arXiv:2402.03300, section 4.1.3): the rewards of all turns of all samples are
    compared with each other, and a token has the sum over its own and later turns of what came out. Where all samples
    earned the same turn by turn it has 0: the formula would compare their first turn with their second."""


class TurnRewards(NamedTuple):
    """The rewards of one episode, turn by turn."""

    rewards_K: Tensor
    """float64 [K]"""
    sizes_K: Tensor
    """float64 [K]: the sum of the absolute values of each reward's terms. It tells how much of the reward may be
    rounding error."""


def turn_advantages(
    episodes: Sequence[TurnRewards], shape: Callable[[Tensor, Tensor], Shaping], turns: Turns
) -> list[Tensor]:
    """The advantage of each turn of each of a prompt's episodes, float64 [K] each; all tokens of a turn share it.

    With r_ij the reward of turn j of sample i, and K_i its turns:

        outcome    A_ik = norm(Σ_j r_ij)                 compared with the totals of the group
        to_go      A_ik = norm_k(Σ_{j ≥ k} r_ij)         compared with those of turn k, where K_i < k: 0
        step       A_ik = Σ_{j ≥ k} norm(r_ij)           compared with all turns of all samples; 0 if all are alike
    """
    import torch  # here, so that the registry imports without it

    if len(episodes) < 2:
        raise ValueError(f"comparing the samples of a prompt needs two or more of them, got {len(episodes)}")
    counts = [len(episode.rewards_K) for episode in episodes]
    samples_G = torch.arange(len(episodes))
    if turns is Turns.STEP:
        if _alike(episodes):
            return [torch.zeros_like(episode.rewards_K) for episode in episodes]
        samples_M = samples_G.repeat_interleave(torch.tensor(counts))
        rewards_M = torch.cat([episode.rewards_K for episode in episodes])
        sizes_M = torch.cat([episode.sizes_K for episode in episodes])
        steps = compared(rewards_M, sizes_M, samples_M, shape).split(counts)
        return [_to_come(steps_K) for steps_K in steps]
    if turns is Turns.OUTCOME:
        totals_G = torch.stack([episode.rewards_K.sum() for episode in episodes])
        sizes_G = torch.stack([episode.sizes_K.sum() for episode in episodes])
        advantages_G = compared(totals_G, sizes_G, samples_G, shape)
        return [advantage.expand(count) for advantage, count in zip(advantages_G, counts, strict=True)]
    padded = torch.nn.utils.rnn.pad_sequence  # [K, G], 0 where an episode has ended
    returns_GK = padded([_to_come(episode.rewards_K) for episode in episodes]).T
    sizes_GK = padded([_to_come(episode.sizes_K) for episode in episodes]).T
    advantages_GK = compared(returns_GK, sizes_GK, samples_G, shape)
    return [row[:count] for row, count in zip(advantages_GK, counts, strict=True)]


def part_advantages(values_GP: Tensor, weights_GP: Tensor, shape: Callable[[Tensor, Tensor], Shaping]) -> Tensor:
    """A_i = Σ_p w_ip norm_p(r_ip), float64 [G]: each of P rewards is compared with the group's by itself, and where all
    samples earned the same it is left out.

    GDPO (arXiv:2601.05242), where norm is the z-score of the group. A weight says what a reward counts; its own scale
    is of no consequence. In a group of two of which one earned nothing, a z-score of the sum is the same whether the
    other earned one reward or both; this one is twice as large. Whitening is its last step. The paper's formula
    normalises over the samples of the batch; here it is over their tokens, as for all estimators that whiten.
    """
    import torch  # here, so that the registry imports without it

    if len(values_GP) < 2:
        raise ValueError(f"comparing the samples of a prompt needs two or more of them, got {len(values_GP)}")
    samples_G = torch.arange(len(values_GP))
    return (weights_GP * compared(values_GP, values_GP.abs(), samples_G, shape)).sum(1)


def compared(
    values_M: Tensor, sizes_M: Tensor, samples_M: Tensor, shape: Callable[[Tensor, Tensor], Shaping]
) -> Tensor:
    """(value − b) / s; exactly 0 for all if the values agree, which is when they differ by rounding only.

    Without that, 0.3 + 0.3 + 0.3 and 0.9 would be 6e-8 apart, and a z-score makes ±1 and more of any spread.
    """
    shaping = shape(values_M, samples_M)
    found_M = values_M if shaping.values_M is None else shaping.values_M
    return ((found_M - shaping.baseline_M) / shaping.scale_M).masked_fill(_agree(values_M, sizes_M), 0.0)


def _agree(values_M: Tensor, sizes_M: Tensor) -> Tensor:
    return values_M.amax(0) - values_M.amin(0) <= ROUNDING * sizes_M.amax(0)


def _alike(episodes: Sequence[TurnRewards]) -> bool:
    """Whether all episodes have the same number of turns, and the same reward in each turn."""
    import torch

    if len({len(episode.rewards_K) for episode in episodes}) > 1:
        return False
    rewards_GK, sizes_GK = (torch.stack(columns) for columns in zip(*episodes, strict=True))
    return bool(_agree(rewards_GK, sizes_GK).all())


def _to_come(values_K: Tensor) -> Tensor:
    """y_k = Σ_{j ≥ k} x_j."""
    return values_K.flip(0).cumsum(0).flip(0)


def discounted_returns(rewards_A: Tensor, offsets: Sequence[int], *, gamma: float = 1.0) -> Tensor:
    """R_t = r_t + γ R_{t+1} within each sample, 0 behind its last token."""
    return discounted_sums(rewards_A, offsets, decay=gamma)


class GAE(NamedTuple):
    """Advantages and returns from rewards and a critic's values."""

    advantages_A: Tensor
    returns_A: Tensor
    """A + V: the targets of the critic."""


def gae(
    rewards_A: Tensor,
    values_A: Tensor,
    offsets: Sequence[int],
    *,
    gamma: float,
    lambd: float,
) -> GAE:
    """A_t = δ_t + γλ A_{t+1},  δ_t = r_t + γ V_{t+1} − V_t  within each sample  (arXiv:1506.02438).

    V_{t+1} is the value at the next action token, across a turn's end too. Behind a sample's last token V and A
    are 0: there the episode is over.
    """
    errors_A = rewards_A + gamma * shift_left(values_A, offsets) - values_A
    advantages_A = discounted_sums(errors_A, offsets, decay=gamma * lambd)
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
        """The sums over the values of all ranks."""
        totals, squares, sizes = zip(*parts, strict=True)
        return Moments(sum(totals), sum(squares), sum(sizes))

    @property
    def mean(self) -> float:
        return self.total / max(self.size, 1)

    @property
    def variance(self) -> float:
        """The variance of the population, over `size` values."""
        return max(self.total_squared / max(self.size, 1) - self.mean**2, 0.0)


def whiten(values: Tensor, moments: Moments, *, divide_by_std: bool = True) -> Tensor:
    """(x − mean) / sqrt(max(variance, 1e-8)); without the division if `divide_by_std` is off.

    Values that differ by rounding only become exactly 0.
    """
    if moments.variance <= ROUNDING**2 * moments.mean**2:
        return values.new_zeros(values.shape)
    centred = values - moments.mean
    if not divide_by_std:
        return centred
    return centred / max(moments.variance, 1e-8) ** 0.5


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
    """The rewards that a truncated episode keeps (ProRL's stop-properly penalty). Other episodes are not changed.

    coef in [0, 1]: every reward times coef. coef < 0: the total becomes coef, on the last turn, whatever was earned.
    """
    if coef > 1:
        raise ValueError(f"a truncated episode cannot keep more than it earned: coef must be <= 1, got {coef}")
    if coef >= 0:
        return turn_rewards * coef
    replaced = turn_rewards.new_zeros(turn_rewards.shape)
    replaced[-1] = coef
    return replaced

"""The advantages of a round: from the rewards of episodes to one number per action token. The whole stage, in order.

    step                   where                 from                        to
    1. shape_rewards       driver                an episode's rewards        rewards after penalties and clip
    2. compare_group       driver                all episodes of a prompt    `TrainingSample.compared_A`
       ---- samples go to their ranks, which score them ----
    3. KLCost              each rank             log-probs and reference     what each token pays for its KL
    4. give_credit         each rank             rewards, costs, values      advantages, and returns for a critic
    5. whiten_over_ranks   each rank, together   moments of all ranks        advantages of mean 0, variance 1
    6. TeacherReward       each rank             log-probs and teacher       what a teacher says, added to these

The driver does steps 1 and 2 because a group's statistics need all samples of a prompt, which may lie on several ranks
later (`training_samples`). Ranks do the others because log-probs and values are columns that they alone have
(`assign_advantages`). The formulas, with their papers, are in `algorithms.advantages`; statistics are in float64.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from openrlhf.algorithms.advantages import (
    ROUNDING,
    Estimator,
    Moments,
    TurnRewards,
    Turns,
    discounted_returns,
    gae,
    overlong_penalty,
    part_advantages,
    stop_properly,
    turn_advantages,
    whiten,
)
from openrlhf.algorithms.kl import KLEstimator, k1
from openrlhf.backends.ranks import ALONE, Ranks
from openrlhf.observability.metrics import Metrics
from openrlhf.types import (
    Group,
    OtherPrompt,
    Outcome,
    RewardPart,
    Segment,
    TrainingBatch,
    TrainingSample,
    Trajectory,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardShaping:
    """The penalties and the clip that an episode's rewards get before episodes are compared, in this order."""

    overlong_buffer: float | None = None
    """Tokens before `response_limit` in which the reward falls; None: no such penalty."""
    overlong_factor: float = 1.0
    response_limit: int = 0
    """Most tokens of one turn."""
    stop_properly: float | None = None
    """The part of its rewards that a truncated episode keeps: a factor in [0, 1], or a total below 0. None: all."""
    clip_range: tuple[float, float] = (-10.0, 10.0)
    """Each turn's reward is clipped to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageSettings:
    """How a run makes advantages of rewards."""

    estimator: Estimator
    shaping: RewardShaping = RewardShaping()
    turns: Turns = Turns.OUTCOME
    """What of a sample is compared with the other samples of its prompt."""
    gamma: float = 1.0
    lambd: float = 1.0
    divide_by_std: bool = True
    """Whitening divides by the standard deviation; off, it only takes the mean away."""


# ---- steps 1 and 2: on the driver ----


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSamples:
    """The training samples of a round's groups."""

    samples: list[TrainingSample]
    metrics: Metrics
    clipped_rewards: int
    """Rewards that the clip range changed: of turns, or of sources where each of several is compared by itself."""
    rewards: int
    """All of these."""
    losses: int = 0
    """Prompts whose samples earned less than nothing on average, under an estimator for rewards that are not negative:
    they teach nothing."""


def training_samples(groups: Sequence[Group], settings: AdvantageSettings) -> ComparedSamples:
    """One `TrainingSample` per segment of every judged episode.

    Episodes of a prompt are compared with those of the same agent. One that has no other of its agent gives no sample
    under estimators that compare, nor one whose greedy sample failed under an estimator that needs it. An episode in
    which the policy sampled nothing still counts in its group's statistics; it has no token to train.
    """
    samples: list[TrainingSample] = []
    metrics = Metrics()
    clipped = rewards = lonely = losses = 0
    for whole, members in ((group, members) for group in groups for members in group.by_agent.values()):
        if settings.estimator.needs_group and len(members) < 2:
            lonely += len(members)
            continue
        if settings.estimator.greedy_baseline:
            whole_count, members = len(members), tuple(m for m in members if m.greedy_reward is not None)
            lonely += whole_count - len(members)
        charged = [shape_rewards(member, settings.shaping, metrics) for member in members]
        shaped = [earned.clip(settings.shaping.clip_range) for earned in charged]
        if settings.estimator.by_part:
            pairs = [both for a, b in zip(charged, shaped, strict=True) for both in zip(a.parts, b.parts, strict=True)]
            rewards += len(pairs)
            clipped += sum(one.value != other.value for one, other in pairs)
        else:
            rewards += sum(int(earned.rewarded().sum()) for earned in charged)
            clipped += sum(int((a.rewards_A != b.rewards_A).sum()) for a, b in zip(charged, shaped, strict=True))
        metrics.mean("reward", sum(float(earned.rewards_A.sum()) for earned in charged), len(members))
        if settings.estimator.takes_gains:
            size = sum(float(earned.sizes_A.sum()) for earned in shaped)
            losses += sum(float(earned.rewards_A.sum()) for earned in shaped) < -ROUNDING * size
        compared = compare_group(shaped, settings, shared_actions(whole, members))
        for member, earned, compared_A in zip(members, shaped, compared, strict=True):
            baseline = 0.0
            if settings.estimator.greedy_baseline and member.greedy_reward is not None:
                low, high = settings.shaping.clip_range
                baseline = min(max(member.greedy_reward, low), high)
            samples.extend(_segments(member, earned.rewards_A.float(), compared_A, baseline, whole.prompt.teacher_ids))
    metrics.mean("reward_clipped", clipped, rewards)
    metrics.last("rollout/left_alone", lonely)
    return ComparedSamples(samples=samples, metrics=metrics, clipped_rewards=clipped, rewards=rewards, losses=losses)


class SampleMaker:
    """`training_samples` with the settings of a run. It warns once when rewards were clipped, and once when an
    estimator cannot use them."""

    def __init__(self, settings: AdvantageSettings) -> None:
        self._settings = settings
        self._warned_of_clipping = self._warned_of_losses = False

    def __call__(self, groups: Sequence[Group]) -> ComparedSamples:
        made = training_samples(groups, self._settings)
        if made.clipped_rewards and not self._warned_of_clipping:
            logger.warning(
                "%d of %d rewards lie outside --reward.clip_range %g %g and were clipped; widen it if they are meant",
                made.clipped_rewards,
                made.rewards,
                *self._settings.shaping.clip_range,
            )
            self._warned_of_clipping = True
        if made.losses and not self._warned_of_losses:
            logger.warning(
                "--algo.advantage.estimator maxrl: the samples of %d of %d prompts earned less than 0 on average, and "
                "teach nothing: give rewards that are not negative, such as 0 and 1, or choose another estimator",
                made.losses,
                len(groups),
            )
            self._warned_of_losses = True
        return made


class EpisodeRewards(NamedTuple):
    """The rewards of an episode, over the action tokens of all its segments; without such tokens it has one entry."""

    rewards_A: Tensor
    """float64: a turn's reward stands on its last token."""
    sizes_A: Tensor
    """float64: the sum of the absolute values of what each reward was added up from."""
    turns_A: Tensor
    """int64: which turn of the episode each token is of."""
    parts: tuple[RewardPart, ...] = ()
    """What the episode's total is the weighted sum of: the rewards that were given, and each penalty."""

    @staticmethod
    def of(member: Trajectory) -> EpisodeRewards:
        rewards_A = torch.cat([segment.turn_rewards[segment.action_mask] for segment in member.segments]).double()
        ends_A = torch.cat([segment.turn_ends_A for segment in member.segments])
        if not len(rewards_A):
            rewards_A, ends_A = torch.tensor([member.reward], dtype=torch.float64), torch.ones(1, dtype=torch.bool)
        sizes_A = rewards_A.abs()
        if member.reward_size is not None:
            sizes_A[-1] = member.reward_size
        parts = member.reward_parts or (RewardPart("reward", float(rewards_A.sum())),)
        return EpisodeRewards(rewards_A, sizes_A, ends_A.cumsum(0) - ends_A.long(), parts)

    def rewarded(self) -> Tensor:
        """bool: tokens that carry a reward, the last action's being one even when it is 0."""
        rewarded_A = self.rewards_A != 0
        rewarded_A[-1] = True
        return rewarded_A

    def clip(self, clip_range: tuple[float, float]) -> EpisodeRewards:
        low, high = torch.tensor(clip_range, dtype=torch.float32).tolist()  # as rewards come: 0.3 is not above 0.3
        rewards_A = torch.where(self.rewarded(), self.rewards_A.clamp(low, high), self.rewards_A)
        # A bound of the range is as it was given, and no sum.
        sizes_A = torch.where(rewards_A == self.rewards_A, self.sizes_A, rewards_A.abs())
        parts = tuple(part._replace(value=min(max(part.value, low), high)) for part in self.parts)
        return self._replace(rewards_A=rewards_A, sizes_A=sizes_A, parts=parts)

    def per_turn(self) -> TurnRewards:
        empty_K = self.rewards_A.new_zeros(int(self.turns_A[-1]) + 1)
        return TurnRewards(
            empty_K.index_add(0, self.turns_A, self.rewards_A), empty_K.index_add(0, self.turns_A, self.sizes_A)
        )


def shape_rewards(member: Trajectory, shaping: RewardShaping, metrics: Metrics) -> EpisodeRewards:
    """An episode's rewards after the penalties on its length, before the clip.

    A turn that is too long pays for itself; of a truncated episode's rewards a part is left. Where several rewards are
    compared each by itself, the penalty on length is one more of them, and a truncated episode keeps as much of each.
    """
    rewards_A, sizes_A, turns_A, parts = EpisodeRewards.of(member)
    if shaping.overlong_buffer is not None:
        lengths_K = turns_A.bincount() if member.num_actions else torch.zeros(1, dtype=torch.int64)
        penalties = [
            overlong_penalty(
                length,
                limit=shaping.response_limit,
                buffer=shaping.overlong_buffer,
                factor=shaping.overlong_factor,
            )
            for length in lengths_K.tolist()
        ]
        metrics.mean("overlong_penalty", sum(penalties), 1)
        ends_K = turns_A.bincount().cumsum(0) - 1
        penalties_K = torch.tensor(penalties, dtype=torch.float64)
        rewards_A = rewards_A.index_add(0, ends_K, penalties_K)
        sizes_A = sizes_A.index_add(0, ends_K, penalties_K.abs())
        parts = (*parts, RewardPart("overlong_penalty", sum(penalties)))
    if shaping.stop_properly is not None and member.outcome is Outcome.TRUNCATED:
        rewards_A = stop_properly(rewards_A, coef=shaping.stop_properly)
        sizes_A = stop_properly(sizes_A, coef=shaping.stop_properly).abs()
        parts = tuple(part._replace(value=max(shaping.stop_properly, 0.0) * part.value) for part in parts)
        parts = (*parts, RewardPart("stop_properly", min(shaping.stop_properly, 0.0)))
    return EpisodeRewards(rewards_A, sizes_A, turns_A, parts)


def compare_group(
    members: Sequence[EpisodeRewards], settings: AdvantageSettings, shared: Sequence[Sequence[int]] | None = None
) -> Sequence[Tensor | None]:
    """Each member's comparison with the group, float32 [A]; None under estimators that compare nothing.

    `shared[i][j]`: how many leading action tokens members i and j have in common because one of them is a fork of the
    other (`shared_actions`); None: none have any. Such a token is compared with the members that do not share it: with
    B the common beginning of the forks F and R_i their rewards, the gradient on B is Σ_{i ∈ F} (R_i − b) ∇ log π(B),
    which is that of the expected reward if b does not depend on B, so it may have no member of F in it. A token that
    all members share is compared with nothing, and gets 0.
    """
    if settings.estimator.shape is None:
        return [None] * len(members)
    shape, turns = settings.estimator.shape, settings.turns
    per_turn = [earned.per_turn() for earned in members]

    def among(places: Sequence[int]) -> Sequence[Tensor]:
        if settings.estimator.by_part:
            found_G = part_advantages(*_parts([members[i] for i in places]), shape)
            return [a.expand(len(per_turn[i].rewards_K)) for a, i in zip(found_G, places, strict=True)]
        return turn_advantages([per_turn[i] for i in places], shape, turns)

    advantages = among(range(len(members)))
    compared = [a_K[earned.turns_A].float() for a_K, earned in zip(advantages, members, strict=True)]
    for i, common in enumerate(shared or ()):
        own_A, begin = compared[i], 0
        for end in sorted({count for j, count in enumerate(common) if j != i}):
            others = [j for j, count in enumerate(common) if j != i and count <= begin]
            if not others:
                own_A[begin:end] = 0.0
            elif end > begin:
                a_K = among([i, *others])[0]
                own_A[begin:end] = a_K[members[i].turns_A[begin:end]].float()
            begin = end
    return compared


def _parts(members: Sequence[EpisodeRewards]) -> tuple[Tensor, Tensor]:
    """Values and weights [G, P] of all rewards that some member has; those of another are 0."""
    names = list(dict.fromkeys(part.name for member in members for part in member.parts))
    found = [{part.name: part for part in member.parts} for member in members]
    missing = {part.name: part._replace(value=0.0) for member in members for part in member.parts}
    rows = [[named.get(name, missing[name]) for name in names] for named in found]
    values_GP = torch.tensor([[part.value for part in row] for row in rows], dtype=torch.float64)
    return values_GP, torch.tensor([[part.weight for part in row] for row in rows], dtype=torch.float64)


def shared_actions(group: Group, members: Sequence[Trajectory]) -> list[list[int]] | None:
    """How many leading action tokens any two of the members have in common, by `Trajectory.fork`; None: none have any.

    Two forks of a third have in common what both have of it; a fork of a fork has of the first what is left of that.
    """
    everyone = group.trajectories  # forks of a sample that has failed, or plays another role, have something in common
    if all(member.fork is None for member in everyone):
        return None
    where = {member.key.sample: i for i, member in enumerate(everyone)}
    shared = [[0] * len(everyone) for _ in everyone]
    for i, member in enumerate(everyone):
        shared[i][i] = sys.maxsize
        if member.fork is not None:
            for j in range(i):
                shared[i][j] = shared[j][i] = min(member.fork.actions, shared[where[member.fork.sample]][j])
    places = [where[member.key.sample] for member in members]
    return [[shared[i][j] for j in places] for i in places]


def _segments(
    member: Trajectory,
    rewards_A: Tensor,
    compared_A: Tensor | None,
    baseline: float,
    teacher_ids: tuple[int, ...],
) -> list[TrainingSample]:
    samples = []
    start = 0
    first = next((segment for segment in member.segments if segment.num_actions), member.segments[0])
    for index, segment in enumerate(member.segments):
        own = slice(start, start + segment.num_actions)
        if own.stop > own.start:
            samples.append(
                TrainingSample(
                    key=member.key._replace(segment=index),
                    segment=segment,
                    rewards_A=rewards_A[own],
                    compared_A=None if compared_A is None else compared_A[own],
                    baseline=baseline,
                    other_prompt=other_prompt(first, segment, teacher_ids),
                )
            )
        start = own.stop
    return samples


def other_prompt(first: Segment, segment: Segment, teacher_ids: tuple[int, ...]) -> OtherPrompt | None:
    """What a teacher reads in the place of the prompt: of the tokens before the episode's first action.

    `first`: the episode's first segment with an action. A later one begins with the same prompt, or its history was
    rewritten, and then the teacher reads it as it is (None).
    """
    prompt = int(first.action_mask.int().argmax())
    begins_alike = torch.equal(segment.token_ids[:prompt], first.token_ids[:prompt])
    if not teacher_ids or not begins_alike or bool(segment.action_mask[:prompt].any()):
        return None
    return OtherPrompt(prompt, teacher_ids)


# ---- steps 3 to 5: on the ranks ----


class KLCost(NamedTuple):
    """The price of KL to the reference where it is a part of every token's reward."""

    estimator: KLEstimator
    coef: float


class TeacherReward(NamedTuple):
    """A teacher's word as a reward for each token. It is no part of what is compared, whitened, or learnt by a critic:
    what it weighs beside the task's reward is `coef`, under every estimator."""

    coef: float
    gamma: float
    """Discount of what follows a token. 0: each token earns its own; 1: the gradient is that of the KL divergence of
    whole responses, with all of its variance."""

    def advantages(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """[A] each: c · Σ_{i ≥ t} γ^(i−t) (log p(i) − log π(i)), and log π − log p; log-ratios are held within ±10."""
        assert batch.old_logprobs_A is not None  # from `score`
        assert batch.teacher_logprobs_A is not None
        kl_A = k1(batch.old_logprobs_A, batch.teacher_logprobs_A)
        if not len(batch):
            return kl_A, kl_A
        return -self.coef * discounted_returns(kl_A, batch.episode_offsets, gamma=self.gamma), kl_A


class Credit(NamedTuple):
    advantages_A: Tensor
    """Before whitening, which needs the sums of all ranks."""
    returns_A: Tensor | None
    """What a critic is trained towards; None without one."""
    totals_E: Tensor
    """Per episode: its total, as the comparison with the other samples left it where there is one, less the price of
    its KL. Under no estimator is it discounted."""


def assign_advantages(
    batch: TrainingBatch,
    settings: AdvantageSettings,
    *,
    kl_cost: KLCost | None = None,
    teacher: TeacherReward | None = None,
    ranks: Ranks = ALONE,
) -> Metrics:
    """Fill in `advantages_A` and `returns_A` of this rank's batch; returns the metrics of all ranks. Collective.

    `kl_cost`: None where KL is no part of the reward. `teacher`: None where no teacher rewards tokens.
    """
    own, costs_A = Metrics(), None
    if kl_cost is not None:
        assert batch.old_logprobs_A is not None  # from `score`
        assert batch.reference_logprobs_A is not None
        kl_A = kl_cost.estimator(batch.old_logprobs_A, batch.reference_logprobs_A)
        own.mean("kl", float(kl_A.sum()), batch.num_actions)
        costs_A = kl_cost.coef * kl_A
    credit = give_credit(batch, settings, costs_A=costs_A)
    own.mean("return", float(credit.totals_E.sum()), len(credit.totals_E))
    batch.advantages_A = whiten_over_ranks(credit.advantages_A, settings, ranks)
    batch.returns_A = credit.returns_A
    if teacher is not None:
        taught_A, kl_A = teacher.advantages(batch)
        batch.advantages_A = batch.advantages_A + taught_A
        own.mean("teacher_kl", float(kl_A.sum()), batch.num_actions)
    return Metrics.merged(ranks.gather(own))


def give_credit(batch: TrainingBatch, settings: AdvantageSettings, *, costs_A: Tensor | None = None) -> Credit:
    """With r the shaped rewards and k = `costs_A` (c·KL_t where KL is part of the reward, else None):

        with a critic            GAE over r_t − k_t
        where samples compare    A_t = what came of the comparison − Σ_{i ≥ t} k_i
        otherwise                A_t = Σ_{i ≥ t} γ^(i−t) (r_i − k_i) − b, b the greedy sample's reward if there is one

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
    returns_A = discounted_returns(rewards_A - costs_A, offsets, gamma=settings.gamma)
    return Credit(returns_A - batch.per_action([sample.baseline for sample in batch.samples]), None, totals_E)


def whiten_over_ranks(advantages_A: Tensor, settings: AdvantageSettings, ranks: Ranks = ALONE) -> Tensor:
    """Normalised over the action tokens of all ranks, under estimators that do so. Collective under those."""
    if not settings.estimator.whiten:
        return advantages_A
    moments = Moments.merged(ranks.gather(Moments.of(advantages_A)))
    return whiten(advantages_A, moments, divide_by_std=settings.divide_by_std)


def may_get_advantages(batch: TrainingBatch, settings: AdvantageSettings) -> list[int]:
    """The samples that may get an advantage other than 0, as far as is known before steps 3 to 5.

    Where the comparison is the last word (no whitening, and no price of KL on top) a sample that it gave 0 keeps 0.
    """
    compares = settings.estimator.needs_group and not settings.estimator.whiten
    return [i for i, sample in enumerate(batch.samples) if not compares or bool(_compared(sample).any())]


def _compared(sample: TrainingSample) -> Tensor:
    if sample.compared_A is None:
        raise ValueError(f"sample {sample.key} was not compared with the others of its prompt")
    return sample.compared_A

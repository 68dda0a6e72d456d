"""The plain side of a round: what definitions say about samples that were played, by transformers and `reference`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from openrlhf.learners.advantages import other_prompt
from openrlhf.proving import reference
from openrlhf.proving.reference import PlainModel
from openrlhf.proving.trial import RLTrial
from openrlhf.types import Group, Outcome, SampleKey, Segment, Trajectory

LOGPROB_TOLERANCE = 2e-3
"""Two right ways to compute a log-prob in fp32 were less than 1e-4 apart on models of up to 30 layers."""
GRADIENT_TOLERANCE = 5e-3
"""Two right gradients were less than 1e-4 apart, as a part of their norm."""
CUT_TOLERANCE = 1e-3
"""The same gradient, cut and ordered otherwise."""


def inputs_of(segment: Segment, device: torch.device) -> dict[str, Any]:
    """The images among the tokens, as transformers' own models take them."""
    if not segment.images:
        return {}
    images = [placed.image for placed in segment.images]
    named: dict[str, Any] = {}
    for name in images[0].tensors:
        named[name] = torch.cat([image.tensors[name] for image in images]).to(device)
    types = torch.zeros(1, len(segment), dtype=torch.long)
    for start, image in segment.images:
        types[0, start : start + len(image)][image.is_feature] = 1
    named["mm_token_type_ids"] = types.to(device)
    return named


def plain_logprobs(trial: RLTrial, segment: Segment, *, of: PlainModel | None = None) -> Tensor:
    """float32 [A], without gradient. `of`: None is the policy."""
    model = trial.plain if of is None else of
    with torch.no_grad():
        logits = model.logits(segment.token_ids, **inputs_of(segment, trial.device))
    logits = reference.over_supports(logits, segment)
    column = reference.logprobs(logits, segment.token_ids, temperature=trial.config.rollout.temperature)
    return column[segment.action_mask.to(column.device)].cpu()


def plain_values(trial: RLTrial, segment: Segment, *, gradient: bool = False) -> Tensor:
    """float32 [A]: the critic's value before each action token."""
    critic = trial.models.critic
    assert critic is not None
    with torch.set_grad_enabled(gradient):
        hidden = trial.plain_critic.hidden(segment.token_ids)
        values = hidden @ critic.head.weight.float()[0]
        if critic.normalisation is not None:
            values = (values - critic.normalisation.mean) / critic.normalisation.std
    before = torch.cat([values.new_zeros(1), values[:-1]])
    return before[segment.action_mask.to(before.device)].cpu()


class PlainRound:
    """The samples of some groups, with everything that the definitions say about them."""

    def __init__(self, trial: RLTrial, groups: Sequence[Group]) -> None:
        config = trial.config
        self.segments: list[Segment] = []
        self.as_taught: list[Segment] = []
        """What a teacher reads of each."""
        self.owners: list[int] = []
        """The episode of each segment."""
        self.keys: list[SampleKey] = []
        """Of each segment."""
        self.episodes: list[reference.PlainEpisode] = []
        for group in groups:
            judged = [t for t in group.trajectories if t.outcome is not Outcome.FAILED and t.reward is not None]
            for agent in sorted({t.agent for t in judged}):
                members = [t for t in judged if t.agent == agent]
                if config.uses_group_baseline and len(members) < 2:
                    continue
                for member in members:
                    if config.algo.advantage.estimator != "remax" or member.greedy_reward is not None:
                        self._add(member, group.prompt.teacher_ids)
        self.reference_logprobs = (
            [plain_logprobs(trial, s, of=trial.plain_reference) for s in self.segments]
            if config.uses_reference
            else None
        )
        self.current = [plain_logprobs(trial, segment) for segment in self.segments]
        costs = None
        if self.reference_logprobs is not None and not config.algo.kl.use_loss:
            rows = [
                config.algo.kl.init_coef * reference.kl_estimate(now - ref, config.algo.kl.estimator)
                for now, ref in zip(self.current, self.reference_logprobs, strict=True)
            ]
            costs = self._by_episode(rows)
        self.values = [plain_values(trial, segment) for segment in self.segments] if config.uses_critic else None
        values = None if self.values is None else self._by_episode(self.values)
        self.advantages = reference.advantages(self.episodes, config, kl_costs=costs, values=values)
        if config.teacher_rewards:
            gaps = [
                plain_logprobs(trial, segment, of=trial.plain_teacher) - now
                for segment, now in zip(self.as_taught, self.current, strict=True)
            ]
            for own, earned in zip(self.advantages, self._by_episode(gaps), strict=True):
                follows = 0.0
                for t in reversed(range(len(own))):
                    follows = max(-10.0, min(10.0, earned[t])) + config.teacher.gamma * follows
                    own[t] += config.teacher.coef * follows
        self.returns: list[list[float]] | None = None
        if values is not None:
            self.returns = reference.returns_of(reference.unwhitened_gae(self.episodes, config, values, costs), values)

    def _add(self, member: Trajectory, teacher_ids: tuple[int, ...]) -> None:
        lengths: list[int] = []
        rewards: list[float] = []
        acting = [(index, segment) for index, segment in enumerate(member.segments) if segment.num_actions]
        for index, segment in acting:
            self.segments.append(segment)
            other = other_prompt(acting[0][1], segment, teacher_ids)
            self.as_taught.append(segment if other is None else segment.reading(other))
            self.keys.append(member.key._replace(segment=index))
            self.owners.append(len(self.episodes))
            length, earned = 0, segment.turn_rewards[segment.action_mask].double().tolist()
            for place, ends in enumerate(segment.turn_ends_A.tolist()):
                length += 1
                if ends:
                    lengths.append(length)
                    rewards.append(sum(earned[place - length + 1 : place + 1]))
                    length = 0
        self.episodes.append(
            reference.PlainEpisode(
                group=(member.key.prompt, member.agent),
                turns=lengths,
                rewards=rewards,
                truncated=member.outcome is Outcome.TRUNCATED,
                greedy=member.greedy_reward or 0.0,
                parts={name: (value, weight) for name, value, weight in member.reward_parts},
            )
        )

    def _by_episode(self, rows: Sequence[Tensor]) -> list[list[float]]:
        result: list[list[float]] = [[] for _ in self.episodes]
        for owner, row in zip(self.owners, rows, strict=True):
            result[owner] += row.double().tolist()
        return result

    def column(self, per_episode: Sequence[Sequence[float]]) -> Tensor:
        """[A]: in the order of a batch, whose episodes come one after the other."""
        return torch.tensor([x for row in per_episode for x in row], dtype=torch.float32)

    def split(self, column: Tensor) -> list[Tensor]:
        return list(column.split([segment.num_actions for segment in self.segments]))


def played(trial: RLTrial) -> PlainRound:
    """The plain side of the trial's samples, worked out once."""
    if trial.worked_out is None:
        trial.worked_out = PlainRound(trial, trial.samples)
    return trial.worked_out


def spread(count: int, *, config: Any, shift: int = 0) -> Tensor:
    """Log-ratios on both sides of every clip bound, one after the other; of a loss that multiplies those of a sequence
    such that the product stays near 1."""
    scale = 0.2 if config.actor.policy_loss_type == "vespo" else 1.0
    far = math.log(config.actor.dual_clip) + 0.5 if config.actor.dual_clip else 1.5
    pattern = [0.05, far, -0.05, 0.6, -0.6, -1.5, 0.15, -0.25, 1.0]
    return scale * torch.tensor([pattern[(i + shift) % len(pattern)] for i in range(count)])


def worst(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.double().cpu() - theirs.double().cpu()).abs().max()) if len(ours) else 0.0

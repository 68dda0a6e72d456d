"""What a rank of a cluster loads and offers: its crew's part of the models, behind one service."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from openrlhf.cluster.placement import Role
from openrlhf.cluster.services import CriticService, PolicyService, RankService, ReferenceService
from openrlhf.config.commands import RLConfig
from openrlhf.learners.filler import filler
from openrlhf.learners.rank import CriticLearners
from openrlhf.rewards.batching import Forward, Item
from openrlhf.runs.distribution import Distribution
from openrlhf.runs.preflight import policy_tokenizer
from openrlhf.runs.process import prepare_process
from openrlhf.runs.rank_engines import RankWeights
from openrlhf.runs.reward_sources import load_reward_model
from openrlhf.runs.rl_models import (
    CRITIC,
    LocalTraining,
    critic_part,
    kept_critic,
    load_critic,
    load_models,
    load_reference,
    reference_scorer,
    step_settings,
)
from openrlhf.runs.settings import model_dtype, optimizer_settings


def rank_service(config: RLConfig, roles: Collection[Role], *, total_steps: int) -> RankService:
    """Meet the other ranks and load what these roles need. Collective."""
    return _Rank(config, total_steps=total_steps).service(roles)


class _Rank:
    """One rank, as it loads."""

    def __init__(self, config: RLConfig, *, total_steps: int) -> None:
        self._config = config
        self._total_steps = total_steps
        self._distribution = Distribution.of("auto", config.ds)
        self._device = prepare_process(config.train, self._distribution.ranks)

    def service(self, roles: Collection[Role]) -> RankService:
        beside = {"judges": self._judges() if Role.REWARD in roles else ()}
        if Role.ACTOR in roles:
            return self._policy(roles, beside)
        if Role.CRITIC in roles:
            return self._critic(beside)
        if Role.REFERENCE in roles:
            with self._loading():
                reference = load_reference(self._config, self._device)
            scorer = reference_scorer(self._config, reference, self._distribution, device=self._device)
            return ReferenceService(scorer, **beside)
        return RankService(**beside)

    def _policy(self, roles: Collection[Role], beside: dict[str, Any]) -> PolicyService:
        config, ranks = self._config, self._distribution.ranks
        with self._loading():
            models = load_models(
                config, self._device, with_reference=Role.REFERENCE in roles, with_critic=Role.CRITIC in roles
            )
        training = LocalTraining(
            config, models, total_steps=self._total_steps, device=self._device, distribution=self._distribution
        )
        return PolicyService(
            training.learners,
            RankWeights(config, models.policy, training.policy_backend, ranks),
            kept=training.checkpointed(policy_tokenizer(config)),
            sleepers=training.backends,
            **beside,
        )

    def _critic(self, beside: dict[str, Any]) -> CriticService:
        config, ranks = self._config, self._distribution.ranks
        with self._loading():
            critic = load_critic(config, self._device)
        steps = step_settings(config)
        settings = optimizer_settings(config.critic, total_steps=self._total_steps)
        backend = self._distribution.train(critic, settings)
        kept = kept_critic(backend, critic, policy_tokenizer(config), ranks)
        part = critic_part(config, critic, backend, self._distribution, device=self._device)
        return CriticService(
            CriticLearners(part, steps, ranks=ranks), kept={CRITIC: kept}, sleepers=[backend], **beside
        )

    def _judges(self) -> list[Forward]:
        return [self._judge(path) for path in self._config.reward.model_paths]

    def _judge(self, path: str) -> Forward:
        """A reward model. One that is shared out over ranks is run by all of them, whoever has something to ask."""
        with self._loading():
            model = load_reward_model(
                path,
                self._config,
                self._device,
                trust_remote_code=self._config.actor.trust_remote_code,
                distribution=self._distribution,
                offload=self._config.reward.offload,
            )
        nothing = [Item(filler().tokens.token_ids, 0)] if self._distribution.shares_out_weights else []

        def score(batch: Sequence[Item]) -> list[float]:
            if batch:
                return model.score(batch)
            if nothing:
                model.score(nothing)
            return []

        return score

    def _loading(self) -> Any:
        return self._distribution.loading(model_dtype(self._config.ds.param_dtype, self._device))

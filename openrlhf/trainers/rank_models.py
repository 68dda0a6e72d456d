"""What a rank of a cluster loads and offers: its crew's part of the models, behind one service."""

from __future__ import annotations

from collections.abc import Collection

from openrlhf.cluster.learners import CriticService, PolicyService, RankService, ReferenceService
from openrlhf.cluster.placement import Role
from openrlhf.config.roots import RLConfig
from openrlhf.learners.rank import CriticLearners
from openrlhf.trainers.distribution import Distribution
from openrlhf.trainers.local_models import (
    LocalTraining,
    critic_part,
    load_critic,
    load_models,
    load_reference,
    reference_scorer,
    step_settings,
)
from openrlhf.trainers.running import prepare_process
from openrlhf.trainers.settings import model_dtype, optimizer_settings


def rank_service(config: RLConfig, roles: Collection[Role], *, rounds: int) -> RankService:
    """Meet the other ranks and load what these roles need. Collective."""
    distribution = Distribution.of("auto", config.ds)
    device = prepare_process(config.train, distribution.ranks)
    loading = distribution.loading(model_dtype(config.ds.param_dtype, device))
    if Role.ACTOR in roles:
        with loading:
            models = load_models(
                config, device, with_reference=Role.REFERENCE in roles, with_critic=Role.CRITIC in roles
            )
        training = LocalTraining(config, models, rounds=rounds, device=device, distribution=distribution)
        return PolicyService(training.learners)
    if Role.CRITIC in roles:
        with loading:
            critic = load_critic(config, device)
        steps = step_settings(config)
        settings = optimizer_settings(config.critic, total_steps=rounds * steps.steps_per_round)
        part = critic_part(config, distribution.train(critic, settings), device=device, ranks=distribution.ranks)
        return CriticService(CriticLearners(part, steps, ranks=distribution.ranks))
    if Role.REFERENCE in roles:
        with loading:
            reference = load_reference(config, device)
        return ReferenceService(reference_scorer(config, reference, distribution, device=device))
    raise ValueError(f"nothing to load for {', '.join(roles)}")

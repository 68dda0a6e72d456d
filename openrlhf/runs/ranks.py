"""The parts that a process of a cluster builds: a rank's part of the models behind one service, or an engine."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from typing import Any

from openrlhf.backends.base import Backend, start_backend
from openrlhf.backends.ranks import Ranks
from openrlhf.cluster.engines import EngineHandles
from openrlhf.cluster.placement import Role
from openrlhf.cluster.services import CriticService, FrozenService, PolicyService, RankService
from openrlhf.config.commands import RLConfig
from openrlhf.learners.rank import CriticLearners
from openrlhf.learners.steps import filler
from openrlhf.models.loading import model_dtype
from openrlhf.models.policy import Policy
from openrlhf.rewards.batching import Forward, Item
from openrlhf.runs.engines import sends_decoder_only, weight_sender
from openrlhf.runs.local_copies import local_copies
from openrlhf.runs.preflight import policy_tokenizer
from openrlhf.runs.process import prepare_process, process_device
from openrlhf.runs.reward_sources import load_reward_model
from openrlhf.runs.rl_models import (
    CRITIC,
    RLTraining,
    critic_part,
    kept_critic,
    load_critic,
    load_models,
    load_reference,
    load_teacher,
    model_teacher,
    policy_vocabulary,
    reference_scorer,
    step_settings,
)
from openrlhf.weight_sync.base import PolicyWeights, Pushed
from openrlhf.weight_sync.probe import Probe
from openrlhf.weight_sync.transports import WeightSender


def rank_service(config: RLConfig, roles: Collection[Role], *, total_steps: int) -> RankService:
    """Meet the other ranks and load what these roles need. Collective."""
    return _Rank(config, total_steps=total_steps).service(roles)


class _Rank:
    """One rank, as it loads."""

    def __init__(self, config: RLConfig, *, total_steps: int) -> None:
        self._config = config = local_copies(config)
        self._total_steps = total_steps
        self._distribution = start_backend("auto", config.ds)
        self._device = prepare_process(config.train, self._distribution.ranks)

    def service(self, roles: Collection[Role]) -> RankService:
        beside: dict[str, Any] = {"judges": self._judges() if Role.REWARD in roles else ()}
        if Role.ACTOR in roles:
            return self._policy(roles, beside)
        if Role.CRITIC in roles:
            return self._critic(beside)
        if Role.REFERENCE in roles or Role.TEACHER in roles:
            return self._frozen(roles, beside)
        return RankService(**beside)

    def _frozen(self, roles: Collection[Role], beside: dict[str, Any]) -> FrozenService:
        config, scorer, teacher = self._config, None, None
        if Role.REFERENCE in roles:
            with self._loading():
                reference = load_reference(config, self._device)
            scorer = reference_scorer(config, reference, self._distribution, device=self._device)
        if Role.TEACHER in roles:
            with self._loading():
                model = load_teacher(config, self._device)
            teacher = model_teacher(
                config, model, self._distribution, vocabulary=policy_vocabulary(config), device=self._device
            )
        return FrozenService(reference=scorer, teacher=teacher, **beside)

    def _policy(self, roles: Collection[Role], beside: dict[str, Any]) -> PolicyService:
        config, ranks = self._config, self._distribution.ranks
        with self._loading():
            models = load_models(
                config,
                self._device,
                with_reference=Role.REFERENCE in roles,
                with_critic=Role.CRITIC in roles,
                with_teacher=Role.TEACHER in roles,
            )
        training = RLTraining(
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
        assert critic is not None  # this rank was started for it
        steps = step_settings(config)
        backend = self._distribution.train(critic, config.critic, total_steps=self._total_steps)
        kept = kept_critic(backend, critic, policy_tokenizer(config), ranks)
        part = critic_part(config, critic, backend, self._distribution, device=self._device)
        return CriticService(
            CriticLearners(part, steps, ranks=ranks), kept={CRITIC: kept}, sleepers=[backend], **beside
        )

    def _judges(self) -> list[Forward]:
        return [self._judge(path) for path in self._config.reward.model_paths]

    def _judge(self, path: str) -> Forward:
        """A reward model. All ranks that shard its weights run it together, whichever of them has a request; those that
        compute each sample together have the same requests."""
        with self._loading():
            model = load_reward_model(
                path,
                self._config,
                self._device,
                distribution=self._distribution,
                offload=self._config.reward.offload,
            )
        nothing = [Item(filler().tokens.token_ids, 0)] if self._distribution.shards_weights else []

        def score(batch: Sequence[Item]) -> list[float]:
            if batch:
                return model.score(batch)
            if nothing:
                model.score(nothing)
            return []

        return score

    def _loading(self) -> Any:
        return self._distribution.loading(model_dtype(self._config.ds.param_dtype, self._device))


class RankWeights:
    """A rank's side of transfers of the policy's weights. Methods are collective."""

    def __init__(self, config: RLConfig, policy: Policy, backend: Backend, ranks: Ranks) -> None:
        self._config = config
        self._backend = backend
        self._ranks = ranks
        self._weights = PolicyWeights(
            policy,
            backend,
            only_decoder=sends_decoder_only(config, sleeps=config.engines_sleep is True),
            as_adapter=config.vllm.lora_sync == "adapter",
        )
        self._engines: list[Any] = []
        """Those that the sender is for: a process group has members."""
        self._sender: WeightSender | None = None

    def send(self, engines: EngineHandles, *, needs_base: bool) -> Pushed:
        if self._sender is None or engines.actors != self._engines:
            address = os.environ["MASTER_ADDR"]
            self._sender = weight_sender(
                self._config, process_device(), ranks=self._ranks, engines=len(engines.actors), address=address
            )
            self._engines = engines.actors
        return self._weights.send(self._sender, engines.load_weights, needs_base=needs_base)

    def probe(self, probe: Probe) -> list[float]:
        return probe.policy_side(self._backend.module)

"""The parts that a process of a cluster builds: a rank's part of the models behind one service, or an engine."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from openrlhf.backends.base import Backend, start_backend
from openrlhf.backends.ranks import Ranks
from openrlhf.cluster.placement import Role
from openrlhf.cluster.services import CriticService, PolicyService, RankService, ReferenceService
from openrlhf.config.commands import RLConfig
from openrlhf.learners.rank import CriticLearners
from openrlhf.learners.steps import filler
from openrlhf.models.loading import model_dtype
from openrlhf.models.policy import Policy
from openrlhf.rewards.batching import Forward, Item
from openrlhf.runs.engine_settings import EngineMemory, transfer_backend, vllm_settings
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
    reference_scorer,
    step_settings,
)
from openrlhf.weight_sync.probe import Probe


def rank_service(config: RLConfig, roles: Collection[Role], *, total_steps: int) -> RankService:
    """Meet the other ranks and load what these roles need. Collective."""
    return _Rank(config, total_steps=total_steps).service(roles)


class _Rank:
    """One rank, as it loads."""

    def __init__(self, config: RLConfig, *, total_steps: int) -> None:
        self._config = config
        self._total_steps = total_steps
        self._distribution = start_backend("auto", config.ds)
        self._device = prepare_process(config.train, self._distribution.ranks)

    def service(self, roles: Collection[Role]) -> RankService:
        beside: dict[str, Any] = {"judges": self._judges() if Role.REWARD in roles else ()}
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
        """A reward model. All ranks that share its weights run it together, whichever of them has a request."""
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


def build_engine(config: RLConfig, *, engines: int) -> tuple[Any, Any]:
    """One of so many engines, and the client of its weight transfers. One that sleeps does so from the start."""
    from openrlhf.rollout.vllm.engine import VllmEngine
    from openrlhf.weight_sync.vllm_transfer import EngineClient

    device = process_device()
    memory = EngineMemory(config.vllm.gpu_memory_utilization, sleeps=engines_sleep(config, device))
    engine = VllmEngine(vllm_settings(config, device, memory, engines=engines), policy_tokenizer(config))
    if memory.sleeps:
        asyncio.run(engine.sleep())
    return engine, EngineClient(engine)


def engines_sleep(config: RLConfig, device: torch.device) -> bool:
    """Whether engines sleep. Engines that share the actor's devices start before its models, whose need is not known
    then."""
    return device.type == "cuda" and config.engines_sleep is not False


class RankWeights:
    """A rank's side of transfers of the policy's weights. Methods are collective."""

    def __init__(self, config: RLConfig, policy: Policy, backend: Backend, ranks: Ranks) -> None:
        self._config = config
        self._policy = policy
        self._backend = backend
        self._ranks = ranks
        self._client: Any = None
        self._trainer: Any = None
        self._source: Any = None

    def connect(self, client: Any) -> None:
        from openrlhf.weight_sync.vllm_compat import connect
        from openrlhf.weight_sync.vllm_source import PolicyWeights
        from openrlhf.weight_sync.vllm_transfer import trainer_info

        backend = transfer_backend(self._config, process_device())
        vllm = self._config.vllm
        meeting = {
            "address": os.environ["MASTER_ADDR"],
            "workers": client.num_engines * vllm.devices_per_engine,
            "transport": vllm.sync_backend,
        }
        info = trainer_info(backend, checksums=vllm.sync_verify, ranks=self._ranks, **meeting)
        self._client = client
        self._source = PolicyWeights(self._policy, self._backend)
        self._trainer = connect(info, client=client, source=self._source)

    def send(self) -> int:
        self._source.require_finite()
        before = self._client.num_updates
        self._trainer.send_weights()
        return self._client.num_updates - before

    def probe(self, probe: Probe) -> list[float]:
        return probe.policy_side(self._backend.module)


if TYPE_CHECKING:
    from openrlhf.cluster.services import WeightSender

    _: type[WeightSender] = RankWeights

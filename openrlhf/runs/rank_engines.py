"""An engine of a cluster, made in its own process, and how weights get from the policy's ranks to it."""

from __future__ import annotations

import os
from typing import Any

import torch

from openrlhf.backends.base import Backend
from openrlhf.backends.ranks import Ranks
from openrlhf.config.commands import RLConfig
from openrlhf.models.policy import Policy
from openrlhf.runs.engine_settings import EngineMemory, transfer_backend, vllm_settings
from openrlhf.runs.preflight import policy_tokenizer
from openrlhf.runs.process import process_device
from openrlhf.weight_sync.probe import Probe


def engine_on_a_seat(config: RLConfig, *, engines: int) -> tuple[Any, Any]:
    """One of so many engines, and the client of its weight transfers. One that sleeps does so from the start."""
    from openrlhf.rollout.vllm.engine import VllmEngine
    from openrlhf.weight_sync.vllm_transfer import EngineClient

    device = process_device()
    memory = EngineMemory(config.vllm.gpu_memory_utilization, sleeps=engines_sleep(config, device))
    engine = VllmEngine(vllm_settings(config, device, memory, engines=engines), policy_tokenizer(config))
    if memory.sleeps:
        engine.sleep()
    return engine, EngineClient(engine)


def engines_sleep(config: RLConfig, device: torch.device) -> bool:
    """Engines that share the actor's devices start before its models: what these will need, nobody knows then."""
    return device.type == "cuda" and config.engines_sleep is not False


class RankWeights:
    """A rank's side of transfers of the policy's weights. Methods are collective. Implements `WeightSender`."""

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

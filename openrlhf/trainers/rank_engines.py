"""An engine of a cluster, made in its own process, and how weights get from the policy's ranks to it."""

from __future__ import annotations

from typing import Any

import torch

from openrlhf.backends.base import Backend
from openrlhf.backends.ranks import Ranks
from openrlhf.config.roots import RLConfig
from openrlhf.models.loading import load_tokenizer
from openrlhf.trainers.engine_settings import EngineMemory, transfer_backend, vllm_settings
from openrlhf.trainers.running import process_device
from openrlhf.weight_sync.vllm_names import IPC_BACKEND


def engine_on_a_seat(config: RLConfig, *, engines: int) -> tuple[Any, Any]:
    """One of so many engines, and the client of its weight transfers. One that sleeps does so from the start."""
    from openrlhf.rollout.vllm.engine import VllmEngine
    from openrlhf.weight_sync.vllm_transfer import EngineClient

    tokenizer = load_tokenizer(
        config.actor.model_name_or_path,
        use_fast=not config.data.disable_fast_tokenizer,
        trust_remote_code=config.actor.trust_remote_code,
    )
    device = process_device()
    memory = EngineMemory(config.vllm.gpu_memory_utilization, sleeps=engines_sleep(config, device))
    engine = VllmEngine(vllm_settings(config, device, memory, engines=engines), tokenizer)
    if memory.sleeps:
        engine.sleep()
    return engine, EngineClient(engine)


def engines_sleep(config: RLConfig, device: torch.device) -> bool:
    """Engines that share the actor's devices start before its models: what these will need, nobody knows then."""
    return device.type == "cuda" and config.engines_sleep is not False


def connect_engines(config: RLConfig, backend: Backend, ranks: Ranks, client: Any) -> Any:
    """This rank's side of transfers to the engines that `client` speaks to."""
    from openrlhf.weight_sync.vllm_compat import connect
    from openrlhf.weight_sync.vllm_source import ModelWeights
    from openrlhf.weight_sync.vllm_transfer import IpcTrainerInfo, RpcTrainerInfo

    if transfer_backend(config, process_device()) == IPC_BACKEND:
        info = IpcTrainerInfo(rank=ranks.index, ranks=ranks)
    else:
        info = RpcTrainerInfo(rank=ranks.index)
    return connect(info, client=client, source=ModelWeights(backend.module.model))

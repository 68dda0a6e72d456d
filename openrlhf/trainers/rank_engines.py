"""An engine of a cluster, made in its own process, and how weights get from the policy's ranks to it."""

from __future__ import annotations

from typing import Any

from openrlhf.backends.base import Backend
from openrlhf.backends.ranks import Ranks
from openrlhf.config.roots import RLConfig
from openrlhf.models.loading import load_tokenizer
from openrlhf.trainers.local_engines import vllm_settings
from openrlhf.trainers.running import process_device


def engine_on_a_seat(config: RLConfig) -> tuple[Any, Any]:
    """The engine, and the client of its weight transfers."""
    from openrlhf.rollout.vllm.engine import VllmEngine
    from openrlhf.weight_sync.vllm_transfer import EngineClient

    tokenizer = load_tokenizer(
        config.actor.model_name_or_path,
        use_fast=not config.data.disable_fast_tokenizer,
        trust_remote_code=config.actor.trust_remote_code,
    )
    engine = VllmEngine(vllm_settings(config, process_device()), tokenizer)
    return engine, EngineClient(engine)


def connect_engines(backend: Backend, ranks: Ranks, client: Any) -> Any:
    """This rank's side of transfers to the engines that `client` speaks to."""
    from openrlhf.weight_sync.vllm_compat import connect
    from openrlhf.weight_sync.vllm_source import ModelWeights
    from openrlhf.weight_sync.vllm_transfer import RpcTrainerInfo

    return connect(RpcTrainerInfo(rank=ranks.index), client=client, source=ModelWeights(backend.module.model))

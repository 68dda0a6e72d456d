"""The engine of a local run, and how weights get there: the embedded one, or vLLM beside the trainer."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from openrlhf.config.errors import ConfigError
from openrlhf.config.roots import RLConfig
from openrlhf.rollout.base import Engine
from openrlhf.rollout.embedded import EmbeddedEngine
from openrlhf.trainers.hybrid import GIB, SleepingEngine, TrainedShape, engine_share, needs_sleep, training_bytes
from openrlhf.trainers.local_models import LocalModels
from openrlhf.trainers.settings import model_dtype
from openrlhf.weight_sync.base import WeightSync
from openrlhf.weight_sync.in_process import InProcessWeightSync
from openrlhf.weight_sync.vllm_names import IPC_BACKEND, RPC_BACKEND

logger = logging.getLogger(__name__)


class LocalEngine(NamedTuple):
    engine: Engine
    weights: WeightSync
    sleepers: tuple[SleepingEngine, ...] = ()
    """Engines that sleep while the policy is trained. They do so from the start: the first push wakes them."""


@contextlib.contextmanager
def opened_engine(config: RLConfig, models: LocalModels, tokenizer: Any, device: torch.device) -> Iterator[LocalEngine]:
    """Ready to sample, or asleep; nothing of it is left afterwards."""
    if config.vllm.num_engines:
        with _vllm(config, models, tokenizer, device) as opened:
            yield opened
    else:
        engine = EmbeddedEngine(
            models.policy.model,
            tokenizer,
            max_model_len=config.data.max_len,
            seed=config.train.seed,
            # Only an agent comes back to a history it has shown before.
            reuse_prefixes=config.train.agent_func_path is not None,
        )
        yield LocalEngine(engine, InProcessWeightSync(engine))


@contextlib.contextmanager
def _vllm(config: RLConfig, models: LocalModels, tokenizer: Any, device: torch.device) -> Iterator[LocalEngine]:
    transfer = transfer_backend(config.vllm.sync_backend, device)
    # Seconds of imports, of a library that most runs do without.
    from openrlhf.rollout.vllm.engine import VllmEngine
    from openrlhf.rollout.vllm.settings import VllmSettings
    from openrlhf.weight_sync.vllm_source import ModelWeights
    from openrlhf.weight_sync.vllm_transfer import IpcTrainerInfo, RpcTrainerInfo, VllmWeightSync

    memory = engine_memory(config, models, device)
    settings = VllmSettings(
        model=config.actor.model_name_or_path,
        max_model_len=config.data.max_len,
        dtype=str(model_dtype(config.ds.param_dtype, device)).removeprefix("torch."),
        max_num_seqs=places(config.generate_batch_size * config.samples_per_prompt),
        tensor_parallel_size=config.vllm.tensor_parallel_size,
        gpu_memory_utilization=memory.share,
        enforce_eager=config.vllm.enforce_eager,
        enable_sleep=memory.sleeps,
        trust_remote_code=config.actor.trust_remote_code,
        seed=config.train.seed,
        deterministic=config.train.full_determinism_enable,
        transfer_backend=transfer,
    )
    source = ModelWeights(models.policy.model)
    info = (IpcTrainerInfo if transfer == IPC_BACKEND else RpcTrainerInfo)(rank=0)
    with contextlib.closing(VllmEngine(settings, tokenizer)) as engine:
        if memory.sleeps:
            engine.sleep()
        weights = VllmWeightSync(engine, source, init_info=info)
        yield LocalEngine(engine, weights, (engine,) if memory.sleeps else ())


def transfer_backend(wanted: str, device: torch.device) -> str:
    """How weights reach an engine that shares the trainer's device; `wanted` is `--vllm.sync_backend`."""
    if wanted not in ("nccl", "gloo"):
        raise ConfigError(f"--vllm.sync_backend {wanted}: give nccl, or gloo for weights that travel by CPU memory")
    return IPC_BACKEND if device.type == "cuda" and wanted == "nccl" else RPC_BACKEND


def places(requests: int) -> int:
    """Sequences that vLLM samples at once, for a rollout of so many requests.

    No more than its largest CUDA graph is captured for, and enough for an evaluation that asks for more than a round.
    """
    return min(512, max(256, requests))


class EngineMemory(NamedTuple):
    share: float
    """Of the device's memory."""
    sleeps: bool


def engine_memory(config: RLConfig, models: LocalModels, device: torch.device) -> EngineMemory:
    """What an engine may take beside models that are loaded, and whether training needs it in between."""
    asked = config.vllm.gpu_memory_utilization
    if device.type != "cuda":
        return EngineMemory(asked, sleeps=False)
    checkpointing = config.actor.gradient_checkpointing_enable
    trained = [_shape(m, checkpointing=checkpointing) for m in (models.policy, models.critic) if m is not None]
    free, total = torch.cuda.mem_get_info(device)
    staying = [] if config.ds.enable_sleep else [shape.state_bytes for shape in trained]
    share = engine_share(asked, free=free, total=total, staying=staying)
    if share < asked:
        logger.info(
            "vLLM takes %.2f of the device's memory, not %.2f (--vllm.gpu_memory_utilization): %.1f GiB are free, and "
            "training keeps %.1f (--ds.enable_sleep: nothing)",
            share,
            asked,
            free / GIB,
            sum(staying) / GIB,
        )
    sleeps = config.vllm.enable_sleep
    if sleeps is None:
        tokens = (
            config.train.max_tokens_per_gpu
            if config.train.dynamic_batch_enable
            else config.train.micro_batch_size * config.data.max_len
        )
        needed = [training_bytes(shape, tokens=tokens) for shape in trained]
        sleeps = needs_sleep(share, free=free, total=total, training=needed)
    return EngineMemory(share, sleeps=sleeps)


def _shape(module: nn.Module, *, checkpointing: bool) -> TrainedShape:
    config = module.model.config.get_text_config()
    trained = [p for p in module.parameters() if p.requires_grad]
    return TrainedShape(
        parameters=sum(p.numel() for p in trained),
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        intermediate=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        element_bytes=next(module.parameters()).element_size(),
        checkpointing=checkpointing,
    )

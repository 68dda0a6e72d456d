"""How vLLM engines are started: from flags to settings, and what of a device's memory they may have."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from openrlhf.config.commands import RLConfig
from openrlhf.config.rules import required
from openrlhf.models.loading import model_dtype
from openrlhf.models.policy import Policy
from openrlhf.models.value import ValueModel
from openrlhf.observability.usage import GIB
from openrlhf.rollout.vllm.settings import VllmSettings
from openrlhf.runs.rl_models import RLModels
from openrlhf.weight_sync.vllm_names import GROUP_BACKEND, IPC_BACKEND, RPC_BACKEND

logger = logging.getLogger(__name__)


class EngineMemory(NamedTuple):
    share: float
    """The engine's share of the device's memory."""
    sleeps: bool


def vllm_settings(config: RLConfig, device: torch.device, memory: EngineMemory, *, engines: int = 1) -> VllmSettings:
    """The settings of one of so many engines."""
    return VllmSettings(
        model=required(config.actor.model_name_or_path),
        max_model_len=config.data.max_len,
        dtype=str(model_dtype(config.ds.param_dtype, device)).removeprefix("torch."),
        max_num_seqs=places(-(-config.generate_batch_size * config.samples_per_prompt // engines)),
        tensor_parallel_size=config.vllm.tensor_parallel_size,
        pipeline_parallel_size=config.vllm.pipeline_parallel_size,
        gpu_memory_utilization=memory.share,
        enforce_eager=config.vllm.enforce_eager,
        enable_prefix_caching=config.engines_cache_prefixes,
        enable_sleep=memory.sleeps,
        trust_remote_code=config.actor.trust_remote_code,
        seed=config.train.seed,
        deterministic=config.train.full_determinism_enable,
        engines=engines,
        transfer_backend=transfer_backend(config, device),
    )


def transfer_backend(config: RLConfig, device: torch.device) -> str:
    """How weights reach an engine.

    By handles to the memory of a device that it shares with the actor; through a process group between devices or, for
    gloo, between processes of a cluster; else inside calls, which Ray's object store carries.
    """
    if config.vllm.sync_backend == "gloo":
        return GROUP_BACKEND if config.train.launcher == "ray" and not config.vllm.sync_with_ray else RPC_BACKEND
    if device.type != "cuda" or (config.vllm.sync_with_ray and config.train.launcher != "local"):
        return RPC_BACKEND
    return IPC_BACKEND if config.engines_share_devices else GROUP_BACKEND


def places(requests: int) -> int:
    """Sequences that vLLM samples at once, for a rollout of so many requests.

    No more than its largest CUDA graph is captured for, and enough for an evaluation that asks for more than a round.
    """
    return min(512, max(256, requests))


def engine_memory(config: RLConfig, models: RLModels, device: torch.device) -> EngineMemory:
    """The memory that an engine may take beside models that are loaded, and whether training needs it in between."""
    asked = config.vllm.gpu_memory_utilization
    if device.type != "cuda":
        return EngineMemory(asked, sleeps=False)
    checkpointing = config.actor.gradient_checkpointing_enable
    trained = [_shape(m, checkpointing=checkpointing) for m in (models.policy, models.critic) if m is not None]
    free, total = torch.cuda.mem_get_info(device)
    staying = [] if config.optimizer_sleeps else [shape.state_bytes for shape in trained]
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
    sleeps = config.engines_sleep
    if sleeps is None:
        tokens = (
            config.train.max_tokens_per_gpu
            if config.train.dynamic_batch_enable
            else config.train.micro_batch_size * config.data.max_len
        )
        needed = [training_bytes(shape, tokens=tokens) for shape in trained]
        sleeps = needs_sleep(share, free=free, total=total, training=needed)
    return EngineMemory(share, sleeps=sleeps)


def _shape(module: Policy | ValueModel, *, checkpointing: bool) -> TrainedShape:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedShape:
    """The figures of a model from which the memory of its training follows."""

    parameters: int
    """Trained ones."""
    layers: int
    hidden: int
    intermediate: int
    element_bytes: int
    checkpointing: bool

    @property
    def state_bytes(self) -> int:
        """The bytes that stay from step to step beside the weights: two moments, and a master of 16-bit weights, in
        fp32."""
        return (12 if self.element_bytes < 4 else 8) * self.parameters


def training_bytes(shape: TrainedShape, *, tokens: int) -> int:
    """What training a loaded model takes beside its weights, for micro-batches of so many tokens; an estimate.

    To the state come gradients in fp32. Activations of a layer are about 12 vectors of the hidden size (norms, queries,
    keys, values, attention, residuals) and 4 of the intermediate one (gate, its activation, up, their product) per
    token; checkpointing keeps one vector a layer, and all of one layer. For 1.5B parameters and 16,384 tokens: 23 + 46
    GiB; `bench.sft` saw 73 GiB with 3 of weights.
    """
    whole = shape.element_bytes * (12 * shape.hidden + 4 * shape.intermediate)
    kept = shape.element_bytes * shape.hidden
    per_token = whole + shape.layers * kept if shape.checkpointing else shape.layers * whole
    return shape.state_bytes + 4 * shape.parameters + tokens * per_token


def engine_share(asked: float, *, free: int, total: int, staying: Iterable[int] = ()) -> float:
    """The share of a device's memory that an engine may take, where models are loaded already.

    vLLM does not start where less is free than it is to take. `staying` is what the trainer keeps there while the
    engine samples (`TrainedShape.state_bytes`, unless its backends sleep); 3 GiB more are left for contexts and for
    weights on their way.
    """
    return max(0.0, min(asked, (free - sum(staying) - 3 * GIB) / total))


def needs_sleep(share: float, *, free: int, total: int, training: Iterable[int]) -> bool:
    """Whether an engine with this share leaves too little for training (`training_bytes` of each trained model).

    With half as much again as is estimated: a run that sleeps in vain loses a little time each round, one that does
    not sleep where it should have ends.
    """
    return 1.5 * sum(training) > free - share * total

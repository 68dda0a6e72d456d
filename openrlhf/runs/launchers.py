"""Launchers: they bind a run to this process or to a Ray cluster. The loop does not know which."""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from openrlhf.checkpoint.manager import CheckpointedModel
from openrlhf.cluster.placement import plan, requested
from openrlhf.config.commands import RLConfig
from openrlhf.config.effects import newly_without_effect
from openrlhf.learners.workers import Workers
from openrlhf.observability.usage import Usage
from openrlhf.rewards.base import RewardSource
from openrlhf.rollout.base import ControlledEngine
from openrlhf.rollout.requests import RequestHandler
from openrlhf.trainers.hybrid import DeviceTurns
from openrlhf.utils.event_loops import LoopRunner
from openrlhf.weight_sync.base import WeightSync

if TYPE_CHECKING:
    from openrlhf.runs.rl_models import RLTraining

logger = logging.getLogger(__name__)


class RunParts(NamedTuple):
    """The loop's parts, where they live."""

    engine: ControlledEngine
    workers: Workers
    weights: WeightSync
    kept: Mapping[str, CheckpointedModel]
    """Trained models, by their folder in a checkpoint."""
    turns: DeviceTurns
    """Puts engine and optimizer states to sleep in turns, where they share a device."""
    usage: Callable[[], Mapping[str, Usage]]
    """The use of devices since the last call, by the name of their node."""
    requests: RequestHandler | None = None
    """Passes agents' requests on to engines in other processes; None: the engine is in this process."""
    start: Mapping[str, float] = MappingProxyType({})
    """Seconds that they took to start, by part (`observability.startup`)."""
    training: RLTraining | None = None
    """The models and what trains them, where they are in this process; None: they are elsewhere."""


class Launcher(Protocol):
    """Binds a run to machines."""

    def reward(self) -> RewardSource | None:
        """Whatever judges samples, not started yet; None: an agent does."""
        ...

    def build(self, *, total_steps: int, loop: LoopRunner) -> AbstractContextManager[RunParts]:
        """Ready for a run of so many optimizer steps; nothing of it is left afterwards."""
        ...


LauncherFactory = Callable[[RLConfig, Any], AbstractContextManager[Launcher]]
"""A launcher for a configuration and the policy's tokenizer."""


def make_launcher(config: RLConfig, tokenizer: Any) -> AbstractContextManager[Launcher]:
    """The launcher of a configuration that `resolve_launcher` returned. What cannot work fails here, before any model
    is loaded."""
    if config.train.launcher == "ray":
        from openrlhf.runs.ray_launcher import ray_launcher

        return ray_launcher(config, tokenizer)
    from openrlhf.runs.local_launcher import local_launcher

    return local_launcher(config, tokenizer)


def resolve_launcher(config: RLConfig) -> RLConfig:
    """With a launcher, and of a local run with a number of engines, where these were left to the machine."""
    if needs_ray(config, os.environ, devices=torch.cuda.device_count()):
        return _told(config, dataclasses.replace(config, train=dataclasses.replace(config.train, launcher="ray")))
    workers, engines = config.actor.world_size or 1, config.vllm.num_engines
    if workers > 1 and config.train.launcher == "auto":
        logger.info(
            "on this machine the run is one process: the actor's %d workers (--actor.num_nodes × "
            "--actor.num_gpus_per_node) become 1; --train.launcher ray starts them all",
            workers,
        )
    if engines is None:
        engines = int(torch.cuda.is_available() and importlib.util.find_spec("vllm") is not None)
    return _told(
        config,
        dataclasses.replace(
            config,
            train=dataclasses.replace(config.train, launcher="local"),
            vllm=dataclasses.replace(config.vllm, num_engines=engines),
        ),
    )


def _told(config: RLConfig, settled: RLConfig) -> RLConfig:
    """`settled`; what it leaves of the user's flags without an effect is said."""
    for line in newly_without_effect(config, settled):
        logger.info(line)
    return settled


def needs_ray(config: RLConfig, environment: Mapping[str, str], *, devices: int) -> bool:
    """`auto` is Ray where there is one to join, or where the run is larger than a process with one device.

    `devices`: GPUs of this machine.
    """
    if config.train.launcher != "auto":
        return config.train.launcher == "ray"
    if environment.get("RAY_ADDRESS") or (config.vllm.num_engines or 0) > 1 or config.vllm.devices_per_engine > 1:
        return True
    if config.ds.ranks_per_share > 1:
        return True
    if devices > 1:
        return plan(requested(config, devices_per_node=devices, engines_by_default=True)).devices > 1
    return False

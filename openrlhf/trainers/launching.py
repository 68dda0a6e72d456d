"""What a run is bound to: this process, or a Ray cluster. The loop does not know which."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from openrlhf.checkpoint.manager import Kept
from openrlhf.cluster.placement import plan, requested
from openrlhf.config.roots import RLConfig
from openrlhf.learners.base import Workers
from openrlhf.rewards.base import RewardSource
from openrlhf.rollout.base import Engine
from openrlhf.weight_sync.base import WeightSync


class Bound(NamedTuple):
    """The loop's parts, where they live."""

    engine: Engine
    workers: Workers
    weights: WeightSync
    kept: Mapping[str, Kept]
    """Trained models, by their folder in a checkpoint."""


class Launcher(Protocol):
    """Binds a run to machines."""

    def reward(self) -> RewardSource | None:
        """Whatever judges samples, not started yet; None: an agent does."""
        ...

    def bound(self, *, rounds: int) -> AbstractContextManager[Bound]:
        """Ready for a run of so many rounds; nothing of it is left afterwards."""
        ...


Launch = Callable[[RLConfig, Any], AbstractContextManager[Launcher]]
"""A launcher for a configuration and the policy's tokenizer."""


def launched(config: RLConfig, tokenizer: Any) -> AbstractContextManager[Launcher]:
    """What `--train.launcher` says. What cannot work is found here, before anything is loaded."""
    if needs_ray(config, os.environ, devices=torch.cuda.device_count()):
        from openrlhf.trainers.ray_launch import ray_launched

        return ray_launched(config, tokenizer)
    from openrlhf.trainers.local_launch import local_launched

    return local_launched(config, tokenizer)


def settled(config: RLConfig) -> RLConfig:
    """With a number of engines, where it was left to the machine and Ray does not decide it."""
    if config.vllm.num_engines is not None or needs_ray(config, os.environ, devices=torch.cuda.device_count()):
        return config
    engines = int(torch.cuda.is_available() and importlib.util.find_spec("vllm") is not None)
    return dataclasses.replace(config, vllm=dataclasses.replace(config.vllm, num_engines=engines))


def needs_ray(config: RLConfig, environment: Mapping[str, str], *, devices: int) -> bool:
    """`auto` is Ray where there is one to join, or where the run is larger than a process with one device.

    `devices`: GPUs of this machine.
    """
    if config.train.launcher != "auto":
        return config.train.launcher == "ray"
    if environment.get("RAY_ADDRESS") or (config.vllm.num_engines or 0) > 1 or config.vllm.tensor_parallel_size > 1:
        return True
    if devices > 1:
        return plan(requested(config, devices_per_node=devices, engines_by_default=True)).devices > 1
    return False

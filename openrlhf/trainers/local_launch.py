"""A run in one process: models, engine and loop beside each other."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from openrlhf.config.roots import RLConfig
from openrlhf.rewards.base import RewardSource
from openrlhf.trainers.launching import Bound
from openrlhf.trainers.local_engines import opened_engine, require_engine
from openrlhf.trainers.local_models import LocalTraining, load_models
from openrlhf.trainers.reward_sources import build_reward, reward_model_here
from openrlhf.trainers.running import process_device

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def local_launched(config: RLConfig, tokenizer: Any) -> Iterator[LocalLauncher]:
    workers, device = config.actor.world_size or 1, process_device()
    if workers > 1 and config.train.launcher == "auto":
        logger.info(
            "on this machine the run is one process: the actor's %d workers (--actor.num_nodes × "
            "--actor.num_gpus_per_node) become 1; --train.launcher ray starts them all",
            workers,
        )
    require_engine(config.vllm, device)
    yield LocalLauncher(config, tokenizer, device)


@dataclass(frozen=True, slots=True)
class LocalLauncher:
    """Everything is right here. Implements `Launcher`."""

    config: RLConfig
    tokenizer: Any
    device: torch.device

    def reward(self) -> RewardSource | None:
        return build_reward(self.config, reward_model_here(self.config, self.tokenizer, self.device))

    @contextlib.contextmanager
    def bound(self, *, rounds: int) -> Iterator[Bound]:
        models = load_models(self.config, self.device)
        with opened_engine(self.config, models.policy, self.tokenizer, self.device) as (engine, weights):
            training = LocalTraining(self.config, models, rounds=rounds, device=self.device)
            yield Bound(engine, training.workers, weights, training.checkpointed(self.tokenizer))

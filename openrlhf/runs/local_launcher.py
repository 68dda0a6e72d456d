"""A run in one process: models, engine and loop beside each other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from openrlhf.config.commands import RLConfig
from openrlhf.observability.usage import Usage, UsageMeter
from openrlhf.rewards.base import RewardSource
from openrlhf.runs.launchers import Bound
from openrlhf.runs.local_engines import opened_engine, require_engine
from openrlhf.runs.process import process_device
from openrlhf.runs.reward_sources import build_reward, reward_model_here
from openrlhf.runs.rl_models import LocalTraining, load_models
from openrlhf.trainers.hybrid import HybridSwitch, HybridWeightSync, HybridWorkers


@contextlib.contextmanager
def local_launched(config: RLConfig, tokenizer: Any) -> Iterator[LocalLauncher]:
    device = process_device()
    require_engine(config, device)
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
    def bound(self, *, total_steps: int) -> Iterator[Bound]:
        models = load_models(self.config, self.device)
        with opened_engine(self.config, models, self.tokenizer, self.device) as opened:
            training = LocalTraining(self.config, models, total_steps=total_steps, device=self.device)
            sleepers = training.backends if self.config.optimizer_sleeps else ()
            switch = HybridSwitch(engines=opened.sleepers, backends=sleepers)
            with _usage(self.device) as usage:
                yield Bound(
                    opened.engine,
                    HybridWorkers(training.workers, switch, usage=usage),
                    HybridWeightSync(opened.weights, switch),
                    training.checkpointed(self.tokenizer),
                )


@contextlib.contextmanager
def _usage(device: torch.device) -> Iterator[Callable[[], Mapping[str, Usage]]]:
    """Of a GPU. Whoever trains on a CPU has this machine's tools, and one process to look at."""
    if device.type != "cuda":
        yield dict
        return
    with contextlib.closing(UsageMeter()) as meter:
        yield lambda: {"local": meter.take()}

"""A run in one process: models, engine (the embedded one, or vLLM beside the trainer) and loop."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from openrlhf.config.commands import RLConfig
from openrlhf.observability.usage import Usage, UsageMeter
from openrlhf.rewards.base import RewardSource
from openrlhf.runs.engine_memory import Settled, review_training
from openrlhf.runs.engines import engine_kind
from openrlhf.runs.launchers import RunParts
from openrlhf.runs.local_copies import local_copies
from openrlhf.runs.process import process_device
from openrlhf.runs.reward_sources import build_reward, reward_model_here
from openrlhf.runs.rl_models import RLModels, RLTraining, load_models
from openrlhf.trainers.hybrid import DeviceTurns
from openrlhf.utils.event_loops import LoopRunner

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def local_launcher(config: RLConfig, tokenizer: Any) -> Iterator[LocalLauncher]:
    config, device = local_copies(config), process_device()
    engine_kind(config).require(config, device)
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
        def load(device_ready: Callable[[], None]) -> RLModels:
            return load_models(self.config, self.device, device_ready=device_ready)

        with engine_kind(self.config).open(self.config, load, self.tokenizer, self.device, loop) as opened:
            training = RLTraining(self.config, opened.models, total_steps=total_steps, device=self.device)
            turns = DeviceTurns(
                loop,
                engine=opened.engine if opened.settled.memory.sleeps else None,
                backends=training.backends if self.config.optimizer_sleeps else (),
                after_first=lambda: self._review(opened.settled),
            )
            with _usage(self.device) as usage:
                kept = training.checkpointed(self.tokenizer)
                yield RunParts(
                    opened.engine,
                    training.learners,
                    opened.weights,
                    kept,
                    turns,
                    usage,
                    start=opened.start,
                    training=training,
                )

    def _review(self, settled: Settled) -> None:
        if settled.division is not None:
            review_training(settled.division, self.config, torch.cuda.max_memory_reserved(self.device))


@contextlib.contextmanager
def _usage(device: torch.device) -> Iterator[Callable[[], Mapping[str, Usage]]]:
    """The use of a GPU. On a CPU nothing is measured: there is one process, and the machine's own tools show it."""
    if device.type != "cuda":
        yield dict
        return
    with contextlib.closing(UsageMeter()) as meter:
        yield lambda: {"local": meter.take()}


if TYPE_CHECKING:
    from openrlhf.runs.launchers import Launcher

    _: type[Launcher] = LocalLauncher

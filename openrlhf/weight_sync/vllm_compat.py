"""Where vLLM 0.26 and 0.32 differ for a trainer: the arguments of its side of a weight transfer."""

from __future__ import annotations

import inspect
from typing import Any

from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer import TrainerWeightTransferEngine, WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.base import WeightSource

_TAKES_CONFIG = "config" in inspect.signature(TrainerWeightTransferEngine.__init__).parameters
"""0.26: the trainer's side is given a configuration and the backend's name. 0.32: its init info names the backend."""


def configuration(backend: str) -> tuple[WeightTransferConfig, ...]:
    """The positional arguments of the base class's constructor."""
    return (WeightTransferConfig(backend=backend),) if _TAKES_CONFIG else ()


def connect(init_info: Any, *, client: Any, source: WeightSource) -> TrainerWeightTransferEngine:
    """The trainer's engine for `init_info.backend`, ready to send."""
    backend = init_info.backend
    named = (backend, *configuration(backend)) if _TAKES_CONFIG else ()
    return WeightTransferTrainerFactory.trainer_init(*named, init_info, client=client, source=source)

"""Reinforcement learning for language models: algorithm × execution mode × pipeline, one loop.

>>> from openrlhf import train_rl
>>> result = train_rl({"actor.model_name_or_path": "Qwen/Qwen3-0.6B"}, reward=my_function, data=my_records)

Importing it is fast: what a name needs is imported when the name is used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from openrlhf.api import RunError, TrainResult, train_dpo, train_rl, train_rm, train_sft
    from openrlhf.config import ConfigError, DPOConfig, RLConfig, RMConfig, SFTConfig
    from openrlhf.trainers.callbacks import StopTraining

_HOMES = {
    "openrlhf.api": ("RunError", "TrainResult", "train_dpo", "train_rl", "train_rm", "train_sft"),
    "openrlhf.config": ("ConfigError", "DPOConfig", "RLConfig", "RMConfig", "SFTConfig"),
    "openrlhf.trainers.callbacks": ("StopTraining",),
}

__all__ = [
    "ConfigError",
    "DPOConfig",
    "RLConfig",
    "RMConfig",
    "RunError",
    "SFTConfig",
    "StopTraining",
    "TrainResult",
    "train_dpo",
    "train_rl",
    "train_rm",
    "train_sft",
]


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

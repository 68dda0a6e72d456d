"""Typed configuration of every command: `parse("train_ppo_ray", argv)` gives an `RLConfig`. Imports no torch."""

from openrlhf.config.commands import (
    ROOTS,
    Config,
    DPOConfig,
    LoraCombinerConfig,
    RLConfig,
    RMConfig,
    ServeRMConfig,
    SFTConfig,
)
from openrlhf.config.fields import ConfigError
from openrlhf.config.parser import parse
from openrlhf.config.rules import require_runnable
from openrlhf.config.schema import to_dict, to_yaml

__all__ = [
    "ROOTS",
    "Config",
    "ConfigError",
    "DPOConfig",
    "LoraCombinerConfig",
    "RLConfig",
    "RMConfig",
    "SFTConfig",
    "ServeRMConfig",
    "parse",
    "require_runnable",
    "to_dict",
    "to_yaml",
]

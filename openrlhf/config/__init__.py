"""Typed configuration of every command: `parse("train_ppo_ray", argv)` gives an `RLConfig`. Imports no torch."""

from openrlhf.config.errors import ConfigError, NotBuiltError
from openrlhf.config.parser import parse
from openrlhf.config.roots import (
    ROOTS,
    Config,
    DPOConfig,
    LoraCombinerConfig,
    RLConfig,
    RMConfig,
    ServeRMConfig,
    SFTConfig,
)
from openrlhf.config.rules import require_runnable
from openrlhf.config.schema import to_dict, to_yaml
from openrlhf.config.unbuilt import refuse_unbuilt

__all__ = [
    "ROOTS",
    "Config",
    "ConfigError",
    "DPOConfig",
    "LoraCombinerConfig",
    "NotBuiltError",
    "RLConfig",
    "RMConfig",
    "SFTConfig",
    "ServeRMConfig",
    "parse",
    "refuse_unbuilt",
    "require_runnable",
    "to_dict",
    "to_yaml",
]

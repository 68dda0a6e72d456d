"""From flags to what models and backends are told."""

from __future__ import annotations

from typing import Any

import torch

from openrlhf.backends.optimizer import MuonSettings, OptimizerSettings
from openrlhf.config.backend import LoraSection
from openrlhf.config.fields import ConfigError
from openrlhf.config.training import OptimizerSection
from openrlhf.models.adapters import LoraSettings
from openrlhf.models.body import NoRoutersError, experts_per_token


def model_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]


def optimizer_settings(section: OptimizerSection, *, total_steps: int) -> OptimizerSettings:
    muon = section.muon
    return OptimizerSettings(
        lr=section.adam.lr,
        betas=section.adam.betas,
        eps=section.adam.eps,
        weight_decay=section.adam.weight_decay,
        muon=MuonSettings(lr=muon.lr, momentum=muon.momentum, ns_steps=muon.ns_steps, nesterov=muon.nesterov)
        if section.optim == "muon"
        else None,
        max_norm=section.max_norm,
        scheduler=section.lr_scheduler,
        warmup_ratio=section.lr_warmup_ratio,
        min_lr_ratio=section.min_lr_ratio,
        total_steps=total_steps,
    )


def lora_settings(section: LoraSection, *, seed: int) -> LoraSettings | None:
    """None: all weights are trained."""
    if not section.rank:
        return None
    return LoraSettings(
        rank=section.rank,
        alpha=section.alpha,
        targets=section.target_modules,
        dropout=section.dropout,
        seed=seed,
    )


def balanced_experts(model_config: Any, *, flag: str) -> int:
    """Experts of a token, for a run that is to keep them equally busy. Raises ConfigError where there are none."""
    try:
        return experts_per_token(model_config, flag=flag)
    except NoRoutersError as error:
        raise ConfigError(str(error)) from error

"""Optimizer and schedule settings, and what they mean for a module's parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import get_scheduler


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW and its schedule."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_norm: float = 1.0
    """Gradient clip; 0 disables."""
    scheduler: str = "constant"
    """A name transformers' `get_scheduler` knows."""
    warmup_ratio: float = 0.0
    min_lr_ratio: float = 0.1
    """Used by the `*_with_min_lr` schedules."""
    total_steps: int = 1
    """Optimizer steps of the whole run."""


def no_decay(name: str, parameter: nn.Parameter) -> bool:
    """Biases and norm weights are vectors; only matrices are decayed."""
    return parameter.dim() < 2 or name.endswith("bias")


def parameter_groups(
    named: list[tuple[str, nn.Parameter]], settings: OptimizerSettings, *, stands_for: dict[str, nn.Parameter]
) -> list[dict[str, Any]]:
    """Two AdamW groups, decayed and not. `stands_for[name]` is the tensor the optimizer updates for a parameter."""
    decayed = [stands_for[name] for name, p in named if not no_decay(name, p)]
    plain = [stands_for[name] for name, p in named if no_decay(name, p)]
    groups = [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_scheduler(
    optimizer: torch.optim.Optimizer, settings: OptimizerSettings
) -> torch.optim.lr_scheduler.LRScheduler:
    """The named schedule over `total_steps`, after ceil(total_steps · warmup_ratio) steps of warm-up."""
    specific = {"min_lr_rate": settings.min_lr_ratio} if settings.scheduler.endswith("with_min_lr") else None
    return get_scheduler(
        settings.scheduler,
        optimizer,
        num_warmup_steps=math.ceil(settings.total_steps * settings.warmup_ratio),
        num_training_steps=settings.total_steps,
        scheduler_specific_kwargs=specific,
    )

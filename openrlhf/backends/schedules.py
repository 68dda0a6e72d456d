"""Learning-rate schedules by their Hugging Face names, as a factor of the peak rate."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

DECAY_SHARE = 0.1
"""Share of the run that `warmup_stable_decay` spends decaying; more gains nothing (MiniCPM, arXiv 2404.06395)."""


def share_of(steps: int, ratio: float) -> int:
    """ceil(steps · ratio)."""
    # 100 · 0.07 is 7.000000000000001 in floating point, which is no eighth step.
    return math.ceil(round(steps * ratio, 6))


def rate_factor(name: str, *, total_steps: int, warmup_ratio: float, min_lr_ratio: float) -> Callable[[int], float]:
    """The schedule `name` as a function: learning rate ÷ peak, given the number of optimizer steps already done.

    A factor of the step alone, so that one schedule serves parameters with different peaks, and resuming needs only
    the number of steps. `name` is one of `config.optimizer.SCHEDULES`; `min_lr_ratio` is for `*_with_min_lr`.

    The w steps of a warm-up have 1/w, 2/w … 1. Transformers begins most of its schedules at 0/w, with a step that
    changes nothing.
    """
    from transformers import get_scheduler  # brings transformers' trainer along, and peft where it is installed

    warmup = share_of(total_steps, warmup_ratio)
    specific: dict[str, float] = {}
    if name.endswith("with_min_lr"):
        specific["min_lr_rate"] = min_lr_ratio
    elif name == "polynomial":
        specific["lr_end"] = 0.0  # transformers' 1e-7 is no factor: a tenth of a usual RL rate, nothing of Muon's
    elif name == "warmup_stable_decay":
        specific["num_decay_steps"] = min(share_of(total_steps, DECAY_SHARE), total_steps - warmup)
    # At a peak of 1 the rate is the factor.
    unit = torch.optim.SGD([torch.zeros(())], lr=1.0)
    scheduler = get_scheduler(
        name,
        unit,
        num_warmup_steps=warmup,
        num_training_steps=max(total_steps, warmup + 1),  # polynomial divides by the steps after warm-up
        scheduler_specific_kwargs=specific,
    )
    after = scheduler.lr_lambdas[0]
    if name == "constant":
        return after
    return lambda done: (done + 1) / warmup if done < warmup else after(done)

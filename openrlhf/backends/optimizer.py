"""Optimizers and their schedule: which optimizer updates which parameter, learning rates, the loss scale of fp16."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.backends.base import whole_shape
from openrlhf.backends.state import NotFiniteError
from openrlhf.config.backend import BackendSection
from openrlhf.config.training import OptimizerSection

logger = logging.getLogger(__name__)


def no_decay(name: str, parameter: nn.Parameter) -> bool:
    """Biases, and everything that is a vector: the weights of every norm, whatever it is called."""
    return len(whole_shape(parameter)) < 2 or name.endswith("bias")


def vocabulary_tables(module: nn.Module) -> set[nn.Parameter]:
    """Parameters of embeddings and of output heads, found by identity: a tied one counts, whatever its name.

    Each row belongs to one token (or position) and sees gradients on its own; orthogonalising rows against each other
    means nothing there.
    """
    tables: list[nn.Module | None] = []
    for part in module.modules():
        if isinstance(part, nn.Embedding):
            tables.append(part)
        for getter in ("get_input_embeddings", "get_output_embeddings"):
            if hasattr(part, getter):
                with contextlib.suppress(NotImplementedError):  # a part of a model that has none, a vision tower
                    tables.append(getattr(part, getter)())
    return {parameter for table in tables if table is not None for parameter in table.parameters()}


def muon_parameters(module: nn.Module) -> set[nn.Parameter]:
    """The parameters that Muon updates: matrices inside the network. One row or column is a vector; stacked experts
    are not a matrix."""
    matrices = {p for p in module.parameters() if len(whole_shape(p)) == 2 and min(whole_shape(p)) > 1}
    return matrices - vocabulary_tables(module)


def adamw_groups(
    named: Sequence[tuple[str, nn.Parameter]], *, weight_decay: float, stands_for: Mapping[str, nn.Parameter]
) -> list[dict[str, Any]]:
    """Two groups, decayed and not. `stands_for[name]` is the tensor the optimizer updates for a parameter."""
    decayed = [stands_for[name] for name, p in named if not no_decay(name, p)]
    plain = [stands_for[name] for name, p in named if no_decay(name, p)]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_optimizers(
    module: nn.Module, section: OptimizerSection, *, stands_for: Mapping[str, nn.Parameter]
) -> list[torch.optim.Optimizer]:
    """Muon if asked for, then AdamW for the rest; each only if it has something to update."""
    matrices, rest = divided(module, section, trained=stands_for)
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(
            torch.optim.Muon(
                [stands_for[name] for name, _ in matrices],
                # Steps of lr·√max(1, rows/columns), for which the usual rate of 0.02 is meant. The alternative,
                # 0.2·lr·√max(rows, columns), is meant for rates of AdamW.
                adjust_lr_fn="original",
                **muon_arguments(section),
            )
        )
    if rest:
        optimizers.append(make_adamw(rest, section, stands_for=stands_for))
    return optimizers


def divided(
    module: nn.Module, section: OptimizerSection, *, trained: Collection[str]
) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    """The parameters that Muon updates, and those that AdamW updates."""
    named = [(name, p) for name, p in module.named_parameters() if name in trained]
    chosen = muon_parameters(module) if section.optim == "muon" else set()
    return [(name, p) for name, p in named if p in chosen], [(name, p) for name, p in named if p not in chosen]


def muon_arguments(section: OptimizerSection) -> dict[str, Any]:
    """What torch's Muon is told (https://kellerjordan.github.io/posts/muon); the weight decay is AdamW's."""
    return {"weight_decay": section.adam.weight_decay, **dataclasses.asdict(section.muon)}


def make_adamw(
    named: Sequence[tuple[str, nn.Parameter]], section: OptimizerSection, *, stands_for: Mapping[str, nn.Parameter]
) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        adamw_groups(named, weight_decay=section.adam.weight_decay, stands_for=stands_for),
        lr=section.adam.lr,
        betas=section.adam.betas,
        eps=section.adam.eps,
        # One kernel per group on CUDA; on CPU the fused and the plain loop differ little for small models.
        fused=True,
    )


def trained_dtype(module: nn.Module) -> torch.dtype:
    return next(p.dtype for p in module.parameters() if p.requires_grad)


_DTYPES = {None: torch.float32, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def sum_dtype(ds: BackendSection, weights: torch.dtype) -> torch.dtype:
    """--ds.grad_accum_dtype: the dtype in which gradients of weights of this dtype are added up over micro-batches.

    fp32 weights have gradients of fp32, which stay so: --ds.param_dtype auto may turn out to be fp32.
    """
    asked = _DTYPES[ds.grad_accum_dtype]
    if asked != torch.float32 and weights == torch.float32:
        logger.info("--ds.grad_accum_dtype %s is not used: trained weights are fp32 here", ds.grad_accum_dtype)
        return torch.float32
    return asked


STATE_KINDS: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.Muon: ("momentum_buffer",),
}


class ScheduledOptimizers:
    """Optimizers that step together. One schedule scales the learning rate of every group, each from its own peak."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer], factor: Callable[[int], float]) -> None:
        """`factor(n)`: learning rate ÷ peak of the step after n steps."""
        self._optimizers = optimizers
        self._factor = factor
        self._steps = 0
        self._owner = {p: o for o in optimizers for group in o.param_groups for p in group["params"]}
        for group in self._groups():
            group["initial_lr"] = group["lr"]
        self._set_rates()

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next step; that of the first optimizer, if they differ."""
        return float(next(self._groups())["lr"])

    def step(self) -> None:
        """Update, forget the gradients, move on along the schedule."""
        for optimizer in self._optimizers:
            optimizer.step()
        self.zero_grad()
        self._steps += 1
        self._set_rates()

    def zero_grad(self) -> None:
        for optimizer in self._optimizers:
            optimizer.zero_grad(set_to_none=True)

    @property
    def steps(self) -> int:
        """Taken so far."""
        return self._steps

    @steps.setter
    def steps(self, count: int) -> None:
        """Go on as after that many."""
        self._steps = count
        self._set_rates()

    def kinds(self, parameter: nn.Parameter) -> tuple[str, ...]:
        """Names of the tensors that are kept for a parameter, once it has been updated."""
        return STATE_KINDS[type(self._owner[parameter])]

    def kept_for(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """The moments by name; empty before the first update."""
        return dict(self._owner[parameter].state.get(parameter, {}))

    def keep_for(self, parameter: nn.Parameter, kept: Mapping[str, Tensor]) -> None:
        """Go on with these, which are copied; with none, as if the parameter had never been updated."""
        state = self._owner[parameter].state
        state.pop(parameter, None)
        if kept:
            state[parameter] = {
                kind: tensor.to(parameter.device, torch.float32, copy=True) for kind, tensor in kept.items()
            }

    def _groups(self) -> Iterator[dict[str, Any]]:
        return (group for optimizer in self._optimizers for group in optimizer.param_groups)

    def _set_rates(self) -> None:
        for group in self._groups():
            group["lr"] = group["initial_lr"] * self._factor(self._steps)


DECAY_SHARE = 0.1
"""Share of the run that `warmup_stable_decay` spends decaying; more gains nothing (MiniCPM, arXiv 2404.06395)."""


def share_of(steps: int, ratio: float) -> int:
    """ceil(steps · ratio)."""
    # 100 · 0.07 is 7.000000000000001 in floating point, which is no eighth step.
    return math.ceil(round(steps * ratio, 6))


def rate_factor(section: OptimizerSection, *, total_steps: int) -> Callable[[int], float]:
    """The schedule as a function: learning rate ÷ peak, given the number of optimizer steps already done.

    A factor of the step alone, so that one schedule serves parameters with different peaks, and resuming needs only
    the number of steps.

    The w steps of a warm-up have 1/w, 2/w … 1. Transformers begins most of its schedules at 0/w, with a step that
    changes nothing.
    """
    from transformers import get_scheduler  # brings transformers' trainer along, and peft where it is installed

    name, warmup = section.lr_scheduler, share_of(total_steps, section.lr_warmup_ratio)
    specific: dict[str, float] = {}
    if name.endswith("with_min_lr"):
        specific["min_lr_rate"] = section.min_lr_ratio
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


INITIAL_LOSS_SCALE = 2.0**16
GOOD_STEPS_BEFORE_GROWTH = 2_000


@dataclass(slots=True)
class LossScale:
    """The factor that losses are multiplied with, so that gradients of fp16 do not round to 0; a step divides by it.

    It is doubled after `GOOD_STEPS_BEFORE_GROWTH` good steps in a row. It is halved when a gradient overflows, and that
    step is left out (Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740).
    """

    value: float = INITIAL_LOSS_SCALE
    good_steps: int = 0

    def after_good_step(self) -> None:
        self.good_steps += 1
        if self.good_steps == GOOD_STEPS_BEFORE_GROWTH:
            self.value, self.good_steps = self.value * 2.0, 0

    def after_overflow(self) -> None:
        """Raises NotFiniteError where scaling is not what makes gradients overflow."""
        if self.value <= 1.0:
            raise NotFiniteError(
                "gradients are infinite or not a number, and no longer scaled up: this model does not train in fp16; "
                "use --ds.param_dtype bf16 or fp32, or a lower learning rate"
            )
        self.value, self.good_steps = self.value / 2.0, 0

    def scalar_state(self) -> dict[str, Any]:
        """As `Backend.scalar_state` keeps it."""
        return {"loss_scale": self.value, "good_steps": self.good_steps}

    def load(self, numbers: Mapping[str, Any]) -> None:
        """Load the loss scale; the state of a run in another dtype has none, and it starts anew."""
        self.value = float(numbers.get("loss_scale", INITIAL_LOSS_SCALE))
        self.good_steps = int(numbers.get("good_steps", 0))

"""Optimizer settings, which optimizer updates which parameter, and optimizers that step together."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.backends.schedules import rate_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class MuonSettings:
    """Muon, for the matrices of a module (https://kellerjordan.github.io/posts/muon)."""

    lr: float
    momentum: float = 0.95
    ns_steps: int = 5
    """Newton–Schulz iterations."""
    nesterov: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSettings:
    """AdamW, Muon for the matrices if asked for, and the schedule of both."""

    lr: float
    """Peak of AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """Decoupled; of Muon's matrices too."""
    muon: MuonSettings | None = None
    """None: AdamW updates everything."""
    max_norm: float = 1.0
    """Gradient clip; 0 disables. Hardly matters to Muon, whose steps have the same size whatever the gradient's."""
    scheduler: str = "constant"
    """One of `config.optimizer.SCHEDULES`."""
    warmup_ratio: float = 0.0
    min_lr_ratio: float = 0.1
    """Used by the `*_with_min_lr` schedules."""
    total_steps: int = 1
    """Optimizer steps of the whole run."""

    def rate_factor(self) -> Callable[[int], float]:
        """Learning rate ÷ peak, given the number of steps already taken."""
        return rate_factor(
            self.scheduler,
            total_steps=self.total_steps,
            warmup_ratio=self.warmup_ratio,
            min_lr_ratio=self.min_lr_ratio,
        )


def no_decay(name: str, parameter: nn.Parameter) -> bool:
    """Biases, and everything that is a vector: the weights of every norm, whatever it is called."""
    return len(whole_shape(parameter)) < 2 or name.endswith("bias")


def whole_shape(parameter: nn.Parameter) -> torch.Size:
    """Its shape, also where ranks share it out and this one holds a flat piece (ZeRO-3)."""
    return getattr(parameter, "ds_shape", parameter.shape)


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
    """What Muon updates: matrices inside the network. One row or column is a vector; stacked experts are no matrix."""
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
    module: nn.Module, settings: OptimizerSettings, *, stands_for: Mapping[str, nn.Parameter]
) -> list[torch.optim.Optimizer]:
    """Muon if asked for, then AdamW for the rest; each only if it has something to update."""
    matrices, rest = divided(module, settings, trained=stands_for)
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(
            torch.optim.Muon(
                [stands_for[name] for name, _ in matrices],
                # Steps of lr·√max(1, rows/columns), for which the usual rate of 0.02 is meant. The alternative,
                # 0.2·lr·√max(rows, columns), is meant for rates of AdamW.
                adjust_lr_fn="original",
                **muon_arguments(settings),
            )
        )
    if rest:
        optimizers.append(make_adamw(rest, settings, stands_for=stands_for))
    return optimizers


def divided(
    module: nn.Module, settings: OptimizerSettings, *, trained: Collection[str]
) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    """What Muon updates, and what AdamW does."""
    named = [(name, p) for name, p in module.named_parameters() if name in trained]
    chosen = muon_parameters(module) if settings.muon else set()
    return [(name, p) for name, p in named if p in chosen], [(name, p) for name, p in named if p not in chosen]


def muon_arguments(settings: OptimizerSettings) -> dict[str, Any]:
    if settings.muon is None:
        raise ValueError("these are settings without Muon")
    return {
        "lr": settings.muon.lr,
        "weight_decay": settings.weight_decay,
        "momentum": settings.muon.momentum,
        "nesterov": settings.muon.nesterov,
        "ns_steps": settings.muon.ns_steps,
    }


def make_adamw(
    named: Sequence[tuple[str, nn.Parameter]], settings: OptimizerSettings, *, stands_for: Mapping[str, nn.Parameter]
) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        adamw_groups(named, weight_decay=settings.weight_decay, stands_for=stands_for),
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        # One kernel per group on CUDA; on CPU the fused and the plain loop differ little for small models.
        fused=True,
    )


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
        """Of the next step; of the first optimizer, if they differ."""
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
        """By their names; empty before the first update."""
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

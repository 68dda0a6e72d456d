"""One process, plain torch: CPU or one GPU."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.backends.averaging import WeightAverage
from openrlhf.backends.loss_scale import LossScale
from openrlhf.backends.optimizer import OptimizerSettings, ScheduledOptimizers, make_optimizers
from openrlhf.backends.parking import Parking
from openrlhf.backends.state import AVERAGE, PARAMETERS, require_names, whole
from openrlhf.backends.weights import ModuleWeights


class TorchBackend(ModuleWeights):
    """fp32 master weights, moments and gradient sums, whatever dtype the module computes in. Implements `Backend`.

    An fp32 module is its own master. For 16 bits a master copy is kept; each micro-batch's gradient is added to the
    master's in fp32 as soon as autograd has finished it, and the module gets the rounded result of a step. Losses of
    fp16 modules are scaled, and a step whose gradient overflows is left out.
    """

    def __init__(self, module: nn.Module, settings: OptimizerSettings, *, ema_beta: float | None = None) -> None:
        """`ema_beta`: decay of an average of the weights to be saved in their place; None keeps none."""
        super().__init__(module)
        self._max_norm = settings.max_norm
        self._trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self._masters = {name: self._master_of(p) for name, p in self._trained.items()}
        self._shadowed = [(p, self._masters[name]) for name, p in self._trained.items() if self._masters[name] is not p]
        self._optimizers = ScheduledOptimizers(
            make_optimizers(module, settings, stands_for=self._masters),
            settings.rate_factor(),
        )
        self._average = None if ema_beta is None else WeightAverage(self._masters, beta=ema_beta)
        self._parking = Parking()
        # Gradients pass through frozen weights too.
        self._scale = LossScale() if any(p.dtype == torch.float16 for p in module.parameters()) else None

    @staticmethod
    def _master_of(parameter: nn.Parameter) -> nn.Parameter:
        if parameter.dtype == torch.float32:
            return parameter
        master = nn.Parameter(parameter.detach().float().clone())

        def add_to_master(p: nn.Parameter) -> None:
            gradient = p.grad.float()
            master.grad = gradient if master.grad is None else master.grad.add_(gradient)
            p.grad = None

        parameter.register_post_accumulate_grad_hook(add_to_master)
        return master

    @property
    def module(self) -> nn.Module:
        return self._module

    @property
    def learning_rate(self) -> float:
        return self._optimizers.learning_rate

    def backward(self, loss: Tensor) -> None:
        (loss * self._scale.value if self._scale else loss).backward()

    def step(self) -> float:
        if self._scale:
            torch._foreach_div_([m.grad for m in self._masters.values() if m.grad is not None], self._scale.value)
        # A max norm of infinity measures without clipping.
        norm = float(nn.utils.clip_grad_norm_(list(self._masters.values()), self._max_norm or float("inf")))
        if self._scale and not math.isfinite(norm):
            self._optimizers.zero_grad()
            self._scale.after_overflow()
            return norm
        self._optimizers.step()
        self._round_into_module()
        if self._average:
            self._average.update()
        if self._scale:
            self._scale.after_good_step()
        return norm

    def drop_gradients(self) -> None:
        self._module.zero_grad()
        self._optimizers.zero_grad()

    def why_no_other_try(self) -> None:
        return None

    def sleep(self) -> None:
        own = [master for _, master in self._shadowed]
        kept = [t for master in self._masters.values() for t in self._optimizers.kept_for(master).values()]
        averages = [self._average.of(name) for name in self._masters] if self._average else []
        self._parking.park([*own, *kept, *averages])

    def wake(self) -> None:
        self._parking.fetch()

    def weights_to_save(self) -> contextlib.AbstractContextManager[None]:
        return self._average.swapped_into(self._trained) if self._average else contextlib.nullcontext()

    def numbers(self) -> dict[str, Any]:
        return {"steps": self._optimizers.steps} | (self._scale.numbers() if self._scale else {})

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, master in self._masters.items():
            yield f"{PARAMETERS}/{name}", master.detach()
            for kind, tensor in self._optimizers.kept_for(master).items():
                yield f"{kind}/{name}", tensor
            if self._average:
                yield f"{AVERAGE}/{name}", self._average.of(name)

    @torch.no_grad()
    def load(self, numbers: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        kinds = {name: self._optimizers.kinds(master) for name, master in self._masters.items()}
        require_names(tensors, kinds)
        for name, master in self._masters.items():
            master.copy_(whole(tensors, f"{PARAMETERS}/{name}", master.shape))
            kept = [kind for kind in kinds[name] if f"{kind}/{name}" in tensors]
            self._optimizers.keep_for(master, {kind: tensors[f"{kind}/{name}"] for kind in kept})
            if self._average:
                self._average.of(name).copy_(tensors.get(f"{AVERAGE}/{name}", master))
        self._round_into_module()
        self._optimizers.steps = numbers["steps"]
        if self._scale:
            self._scale.load(numbers)

    @torch.no_grad()
    def _round_into_module(self) -> None:
        for parameter, master in self._shadowed:
            parameter.copy_(master)

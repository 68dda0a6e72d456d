"""One process, plain torch: CPU or one GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.backends.optimizer import OptimizerSettings, make_scheduler, parameter_groups


class TorchBackend:
    """AdamW on fp32 master weights, with fp32 gradient accumulation, whatever dtype the module computes in.

    An fp32 module is its own master. For bf16 or fp16 a master copy is kept; each micro-batch's gradient is added
    to the master's in fp32 as soon as autograd has finished it, and the module gets the rounded result of a step.
    """

    def __init__(self, module: nn.Module, settings: OptimizerSettings) -> None:
        self._module = module
        self._max_norm = settings.max_norm
        named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
        self._masters = {name: self._master_of(p) for name, p in named}
        self._shadowed = [(p, self._masters[name]) for name, p in named if self._masters[name] is not p]
        # One fused kernel per group on CUDA; on CPU the fused and the plain loop differ little for small models.
        self._optimizer = torch.optim.AdamW(
            parameter_groups(named, settings, stands_for=self._masters),
            lr=settings.lr,
            betas=settings.betas,
            eps=settings.eps,
            fused=True,
        )
        self._scheduler = make_scheduler(self._optimizer, settings)

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
        return float(self._scheduler.get_last_lr()[0])

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def step(self) -> float:
        masters = list(self._masters.values())
        # A max norm of infinity measures without clipping.
        norm = nn.utils.clip_grad_norm_(masters, self._max_norm or float("inf"))
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        with torch.no_grad():
            for parameter, master in self._shadowed:
                parameter.copy_(master)
        self._scheduler.step()
        return float(norm)

    def state_dict(self) -> dict[str, Any]:
        return {
            "parameters": {name: master.detach() for name, master in self._masters.items()},
            "optimizer": self._optimizer.state_dict(),
            "scheduler": self._scheduler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, master in self._masters.items():
                master.copy_(state["parameters"][name])
            for parameter, master in self._shadowed:
                parameter.copy_(master)
        self._optimizer.load_state_dict(state["optimizer"])
        self._scheduler.load_state_dict(state["scheduler"])

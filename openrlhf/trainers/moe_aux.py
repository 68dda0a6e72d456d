"""Any objective plus the load-balancing loss of a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from openrlhf.algorithms.losses import load_balancing_loss
from openrlhf.models.body import RouterLog
from openrlhf.trainers.supervised import Batch, MetricNames, MicroBatchLoss, Objective


class BalancedObjective:
    """L + c · Σ_m (T_m / T) B_m: the balancing loss of each micro-batch m, weighted by its share of the step's tokens.

    B is a product of means over the tokens of one forward, so it depends a little on how a step is cut. With one
    forward per step it is the loss that transformers' models add.
    """

    def __init__(self, objective: Objective, *, coef: float, top_k: int) -> None:
        """`top_k`: the number of experts that a token is routed to."""
        self._objective = objective
        self._coef = coef
        self._top_k = top_k
        self.names: MetricNames = objective.names
        self.lengths = objective.lengths

    def begin(self, module: nn.Module, batch: Batch) -> Callable[[Sequence[int]], MicroBatchLoss]:
        asking = _Asking(module)
        compute_plain_loss = self._objective.begin(asking, batch)
        total = sum(self.lengths[i] for i in batch.samples)

        def compute_loss(micro: Sequence[int]) -> MicroBatchLoss:
            asking.log = log = RouterLog()
            plain = compute_plain_loss(micro)
            balance = load_balancing_loss(log.logits, top_k=self._top_k)
            tokens = sum(self.lengths[i] for i in micro)
            plain.metrics.mean("aux_loss", balance.detach().double() * tokens, tokens)
            return MicroBatchLoss(plain.loss + self._coef * tokens / total * balance, plain.metrics)

        return compute_loss

    def state_dict(self) -> dict[str, Any]:
        return self._objective.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._objective.load_state_dict(state)


class _Asking(nn.Module):
    """The module, with its routers' logits recorded in `log` at every call."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self.log = RouterLog()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, router_log=self.log, **kwargs)


if TYPE_CHECKING:
    _: type[Objective] = BalancedObjective

"""Any objective, with the load-balancing loss of a mixture of experts beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import nn

from openrlhf.algorithms.losses import load_balancing_loss
from openrlhf.models.body import RouterLog
from openrlhf.trainers.supervised import Batch, MetricNames, MicroBatchLoss, Objective


class BalancedObjective:
    """L + c · Σ_m (T_m / T) B_m: the balancing loss of each micro-batch m by its share of the step's tokens.

    B is a product of means over tokens that are routed together, so that it depends, a little, on how a step is cut;
    as one forward it is what transformers' models add to their loss.
    """

    def __init__(self, objective: Objective, *, coef: float, top_k: int) -> None:
        """`top_k`: experts of a token."""
        self._objective = objective
        self._coef = coef
        self._top_k = top_k
        self.names: MetricNames = objective.names
        self.lengths = objective.lengths

    def begin(self, module: nn.Module, batch: Batch) -> Callable[[Sequence[int]], MicroBatchLoss]:
        asking = _Asking(module)
        share_of = self._objective.begin(asking, batch)
        total = sum(self.lengths[i] for i in batch.samples)

        def share(micro: Sequence[int]) -> MicroBatchLoss:
            asking.log = log = RouterLog()
            plain = share_of(micro)
            balance = load_balancing_loss(log.logits, top_k=self._top_k)
            tokens = sum(self.lengths[i] for i in micro)
            plain.metrics.mean("aux_loss", float(balance.detach()) * tokens, tokens)
            return MicroBatchLoss(plain.loss + self._coef * tokens / total * balance, plain.metrics)

        return share

    def state_dict(self) -> dict[str, Any]:
        return self._objective.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._objective.load_state_dict(state)


class _Asking(nn.Module):
    """The module, asked for its routers' logits whenever it is called."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self.log = RouterLog()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._module(*args, router_log=self.log, **kwargs)


if TYPE_CHECKING:
    _: type[Objective] = BalancedObjective

"""What a learner asks of a training backend."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor, nn


class Backend(Protocol):
    """Owns a module, its optimizers and their schedule."""

    @property
    def module(self) -> nn.Module:
        """What to call for a forward."""
        ...

    @property
    def learning_rate(self) -> float:
        """That of the next optimizer step; of the matrices, where Muon has a rate of its own."""
        ...

    def backward(self, loss: Tensor) -> None:
        """Add this micro-batch's gradient; losses are already weighted, so gradients simply add up."""
        ...

    def step(self) -> float:
        """One optimizer step on the accumulated gradient; returns its norm before clipping."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

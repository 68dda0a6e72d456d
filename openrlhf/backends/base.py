"""What a learner asks of a training backend."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn


class Backend(Protocol):
    """Owns a module, its optimizers and their schedule, and an average of the weights if one is wanted."""

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

    def weights_to_save(self) -> AbstractContextManager[None]:
        """While open, the module holds the weights to export: their average if one is kept, else the live ones.

        Afterwards it holds the live ones, whatever happened.
        """
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

"""What the loop asks of weight synchronisation."""

from __future__ import annotations

from typing import Protocol

from openrlhf.observability.metrics import Metrics


class WeightSyncError(RuntimeError):
    """The engine does not have the policy's weights, and must not go on."""


class WeightSync(Protocol):
    """Brings the policy's weights to the engine."""

    def push(self, *, version: int) -> Metrics:
        """After this call the engine samples with the current weights and calls them `version`.

        Raises `WeightSyncError` if it cannot be so; then the engine samples nothing until another push succeeds.
        """
        ...

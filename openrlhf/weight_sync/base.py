"""What the loop asks of weight synchronisation."""

from __future__ import annotations

from typing import Protocol


class WeightSync(Protocol):
    """Brings the policy's weights to the engine."""

    def push(self, *, version: int) -> None:
        """After this call the engine samples with the current weights and calls them `version`."""
        ...

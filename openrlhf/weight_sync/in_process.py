"""The engine runs on the policy's own weights: a push is a new version number."""

from __future__ import annotations

from openrlhf.observability.metrics import Metrics
from openrlhf.rollout.embedded import EmbeddedEngine


class InProcessWeightSync:
    """The update has changed the engine's weights in place; only their name has to follow."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    def push(self, *, version: int) -> Metrics:
        self._engine.set_version(version)
        return Metrics()

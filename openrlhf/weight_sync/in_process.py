"""The engine runs on the policy's own weights: a push is a new version number."""

from __future__ import annotations

from torch import nn

from openrlhf.backends.state import not_finite, some
from openrlhf.observability.metrics import Metrics
from openrlhf.rollout.base import EngineControl
from openrlhf.utils.event_loops import LoopRunner
from openrlhf.weight_sync.base import WeightSyncError


class InProcessWeightSync:
    """The update has changed the engine's weights in place; only their name has to follow."""

    def __init__(self, engine: EngineControl, module: nn.Module, loop: LoopRunner) -> None:
        """`module`: the policy, whose weights are the engine's. `loop`: where the engine is asked."""
        self._engine = engine
        self._module = module
        self._loop = loop

    def push(self, *, version: int) -> Metrics:
        if bad := not_finite(dict(self._module.named_parameters())):
            raise WeightSyncError(f"version {version} is not sampled from: weights are not finite: {some(bad)}")
        self._loop.run(self._engine.resume(version))
        return Metrics()

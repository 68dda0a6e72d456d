"""The order of a push into engines with weights of their own, wherever they and the policy live."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from openrlhf.observability.metrics import Metrics
from openrlhf.weight_sync.base import WeightSyncError


class PausedEngine(Protocol):
    """One engine, or many as one."""

    def hold(self) -> None:
        """Sample nothing until `go_on`."""
        ...

    def go_on(self, *, version: int) -> None: ...


def push(
    engine: PausedEngine, *, version: int, send: Callable[[], int], probe_gap: Callable[[], float] | None
) -> Metrics:
    """Hold, send, go on with the new version, verify. Requests under way stop, and go on with the new weights.

    A push that fails leaves the engine held: some of its weights may be new, or wrong. Another one starts over.

    Args:
        send: brings the weights there; how many buckets they were.
        probe_gap: how far the engine is from the policy; raises WeightSyncError. None: nothing is verified.
    """
    metrics = Metrics()
    engine.hold()
    try:
        buckets = send()
    except Exception as error:
        raise WeightSyncError(f"the push of version {version} failed: {error}") from error
    engine.go_on(version=version)
    metrics.last("sync/buckets", buckets)
    if probe_gap is not None:
        try:
            metrics.last("sync/probe_gap", probe_gap())
        except WeightSyncError:
            engine.hold()
            raise
    return metrics

"""The order of a push into engines with weights of their own, wherever they and the policy live."""

from __future__ import annotations

from collections.abc import Callable

from openrlhf.observability.metrics import Metrics
from openrlhf.rollout.base import EngineControl
from openrlhf.utils.event_loops import LoopRunner
from openrlhf.weight_sync.base import WeightSyncError


def push(
    engine: EngineControl,
    *,
    version: int,
    loop: LoopRunner,
    send: Callable[[], int],
    probe_gap: Callable[[], float] | None,
) -> Metrics:
    """Pause, wake, send, resume with the new version, verify. Requests under way stop, and go on with the new weights.

    A push that fails leaves the engine paused: some of its weights may be new, or wrong. Another one starts over.

    Args:
        loop: runs what is asked of the engine.
        send: brings the weights there; how many blocks they were.
        probe_gap: how far the engine is from the policy; raises WeightSyncError. None: nothing is verified.
    """
    metrics = Metrics()
    loop.run(_ready_for_weights(engine))
    try:
        buckets = send()
    except Exception as error:
        raise WeightSyncError(f"the push of version {version} failed: {error}") from error
    loop.run(engine.resume(version))
    metrics.last("sync/buckets", buckets)
    if probe_gap is not None:
        try:
            metrics.last("sync/probe_gap", probe_gap())
        except WeightSyncError:
            loop.run(engine.pause())
            raise
    return metrics


async def _ready_for_weights(engine: EngineControl) -> None:
    await engine.pause()
    await engine.wake()

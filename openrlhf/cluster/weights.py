"""From the policy's ranks to the engines: the driver says when, the weights go from process to process."""

from __future__ import annotations

from openrlhf.cluster.engines import EngineClients, RayEngines
from openrlhf.cluster.workers import WorkerError, WorkerGroup
from openrlhf.observability.metrics import Metrics
from openrlhf.weight_sync.base import WeightSyncError
from openrlhf.weight_sync.probe import Probe

DEADLINE = 1800.0
"""Of sending all weights, in seconds."""


class RayWeightSync:
    """The loop's push, for engines and ranks that have processes of their own. Implements `WeightSync`."""

    def __init__(self, policy: WorkerGroup, engines: RayEngines, *, probe: Probe | None = None) -> None:
        """With a `probe` every push is verified."""
        self._policy = policy
        self._engines = engines
        self._probe = probe
        policy.call("connect_engines", EngineClients(engines), deadline=DEADLINE)

    def push(self, *, version: int) -> Metrics:
        """Requests under way stop, and go on with the new weights; what was cached of old ones is gone.

        A push that fails leaves the engines held: some of their weights may be new, or wrong.
        """
        metrics = Metrics()
        self._engines.hold()
        try:
            buckets = self._policy.call("send_weights", deadline=DEADLINE)[0]
        except WorkerError as error:
            raise WeightSyncError(f"the push of version {version} failed: {error}") from error
        self._engines.go_on(version=version)
        metrics.last("sync/buckets", buckets)
        if self._probe is not None:
            try:
                metrics.last("sync/probe_gap", self._largest_gap(self._probe, version))
            except WeightSyncError:
                self._engines.hold()
                raise
        return metrics

    def _largest_gap(self, probe: Probe, version: int) -> float:
        policy = self._policy.call("probe", probe, deadline=DEADLINE)[0]
        engines = self._engines.call_all("prompt_logprobs", probe.token_ids)
        return max(probe.compare(policy, engine, version=version) for engine in engines)

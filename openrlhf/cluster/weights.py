"""From the policy's ranks to the engines: the driver says when, the weights go from process to process."""

from __future__ import annotations

from openrlhf.cluster.engines import EngineClients, RayEngines
from openrlhf.cluster.workers import WorkerGroup
from openrlhf.observability.metrics import Metrics
from openrlhf.weight_sync.probe import Probe
from openrlhf.weight_sync.pushing import push

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
        probe = self._probe
        gap = None if probe is None else lambda: self._largest_gap(probe, version)
        return push(self._engines, version=version, send=self._send, probe_gap=gap)

    def _send(self) -> int:
        return self._policy.call("send_weights", deadline=DEADLINE)[0]

    def _largest_gap(self, probe: Probe, version: int) -> float:
        policy = self._policy.call("probe", probe, deadline=DEADLINE)[0]
        engines = self._engines.call_all("prompt_logprobs", probe.token_ids)
        return max(probe.compare(policy, engine, version=version) for engine in engines)

"""From the policy's ranks to the engines: the driver says when, the weights go from process to process."""

from __future__ import annotations

from openrlhf.cluster.engines import EngineClients, RayEngines
from openrlhf.cluster.workers import WorkerGroup
from openrlhf.weight_sync.probe import compare

DEADLINE = 1800.0
"""Of sending all weights, in seconds."""


class RayWeightSync:
    """The loop's push, for engines and ranks that have processes of their own. Implements `WeightSync`."""

    def __init__(self, policy: WorkerGroup, engines: RayEngines, *, probe_tokens: tuple[int, ...] = ()) -> None:
        """With `probe_tokens` every push is verified: their log-probs must be the same on both sides."""
        self._policy = policy
        self._engines = engines
        self._probe_tokens = probe_tokens
        policy.call("connect_engines", EngineClients(engines), deadline=DEADLINE)

    def push(self, *, version: int) -> None:
        """Requests under way stop, and go on with the new weights; what was cached of old ones is gone."""
        self._engines.hold()
        self._policy.call("send_weights", deadline=DEADLINE)
        self._engines.go_on(version=version)
        if self._probe_tokens:
            ours = self._policy.call("probe", self._probe_tokens, deadline=DEADLINE)[0]
            for theirs in self._engines.call_all("prompt_logprobs", self._probe_tokens):
                compare(ours, theirs, version=version)

"""From the policy's ranks to the engines: the driver says when, the weights go from process to process."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from openrlhf.cluster.engines import EngineLostError, RayEngines
from openrlhf.cluster.learners import DEADLINE as UPDATE
from openrlhf.cluster.services import Sent
from openrlhf.cluster.workers import WorkerError, WorkerGroup
from openrlhf.observability.metrics import Metrics
from openrlhf.utils.event_loops import LoopRunner
from openrlhf.weight_sync.base import Pushed, push
from openrlhf.weight_sync.probe import Probe

DEADLINE = 1800.0 + UPDATE
"""Of sending all weights, in seconds; ranks may have to finish a round's update before."""


class RayWeightSync:
    """The loop's push, for engines and ranks that have processes of their own.

    An engine that replaces another is given the weights as the ranks have them when they find time for it, called by
    the version they are: between an update and the push after it that is the version which will be pushed.
    """

    def __init__(
        self, policy: WorkerGroup, engines: RayEngines, loop: LoopRunner, *, probe: Probe | None = None
    ) -> None:
        """With a `probe` every push is verified."""
        self._policy = policy
        self._engines = engines
        self._loop = loop
        self._probe = probe
        self._sent = Sent(pushed=Pushed(), version=0, probed=[])
        self._sending = threading.Lock()

    def push(self, *, version: int) -> Metrics:
        probe = self._probe
        gap = None if probe is None else lambda: self._largest_gap(probe)
        with self._sending:
            metrics = push(self._engines, version=version, loop=self._loop, send=self._send, probe_gap=gap)
        metrics.last("rollout/engines_replaced", self._engines.take_replaced())
        return metrics

    def _send(self) -> Pushed:
        """To all that sample; where one is lost on the way, to the others once more. Where one needs the base of an
        adapter all get it: a process group has one sender for all its members."""
        while sampling := self._engines.sampling:
            try:
                return self._send_to(list(sampling), needs_base=self._engines.needs_base).pushed
            except WorkerError:
                if not self._lost_one_of(sampling):
                    raise
                # The others have a part of the weights already: they forget it, and are sent all of them.
                self._loop.run(self._engines.pause())
        return Pushed()

    def _lost_one_of(self, sampling: dict[int, Any]) -> bool:
        """Whether one of these is gone, of which nobody may have heard yet."""
        if self._engines.sampling == sampling:
            self._loop.run(self._engines.check_health())
        return self._engines.sampling != sampling

    def supply(self, engine: int) -> None:
        """What a push does, for one engine that nobody asks yet. Raises WorkerError if the engine fails.

        Where all are paused a push is to come, which brings this one its weights too.
        """
        with self._sending:
            handle = self._engines.handles([engine])
            handle.pause()
            handle.wake()
            if not self._engines.paused:
                sent = self._send_alone(engine)
                handle.resume(sent.version)
                if self._probe is not None:
                    (found,) = handle.logprobs(self._probe.token_ids)
                    self._probe.compare(sent.probed, found, version=sent.version)
            self._engines.admit(engine)

    def _send_alone(self, engine: int) -> Sent:
        """Of a failure the engine is innocent if it is well."""
        try:
            return self._send_to([engine], needs_base=True)
        except WorkerError as error:
            self._engines.handles([engine]).check_health()
            raise EngineLostError(f"a new engine gets no weights: {error}") from error

    def _send_to(self, engines: Sequence[int], *, needs_base: bool) -> Sent:
        handles = self._engines.handles(engines)
        self._sent = self._policy.call("send_weights", handles, needs_base, self._probe, deadline=DEADLINE)[0]
        return self._sent

    def _largest_gap(self, probe: Probe) -> float:
        found = self._loop.run(self._engines.all_logprobs(probe.token_ids))
        sent = self._sent
        return max((probe.compare(sent.probed, engine, version=sent.version) for engine in found), default=0.0)


if TYPE_CHECKING:
    from openrlhf.weight_sync.base import WeightSync

    _: type[WeightSync] = RayWeightSync

"""From the policy to what samples: what the loop asks of weight synchronisation, and the order of a push.

SharedWeightSync   the engine samples with the policy's own tensors: a push is a new version number
EngineWeightSync   one engine with weights of its own: a push sends them, block by block (`transports`)
push               the order of a push into engines with weights of their own, wherever they and the policy live
PolicyWeights      what is sent: the policy's weights as the model's files would hold them
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from torch import Tensor, nn

from openrlhf.backends.base import Weights
from openrlhf.backends.state import not_finite, some
from openrlhf.models.file_weights import file_weights
from openrlhf.models.policy import Policy, tower_names
from openrlhf.observability.metrics import Metrics
from openrlhf.rollout.base import EngineControl
from openrlhf.utils.event_loops import LoopRunner
from openrlhf.weight_sync.blocks import WeightBlock, WeightSyncError

if TYPE_CHECKING:
    from openrlhf.weight_sync.probe import LocalProbe
    from openrlhf.weight_sync.transports import WeightSender


class WeightSync(Protocol):
    """Brings the policy's weights to the engine."""

    def push(self, *, version: int) -> Metrics:
        """After this call the engine samples with the current weights and calls them `version`.

        Raises `WeightSyncError` if it cannot be so; then the engine samples nothing until another push succeeds.
        """
        ...


class PolicyWeights:
    """The weights of a policy, whole, whatever trains it and on how many ranks. Tied ones come once, adapters are
    merged (`models.file_weights`). Every rank has one, and iterates when the others do."""

    def __init__(self, policy: Policy, weights: Weights, *, only_decoder: bool = False) -> None:
        """`weights`: the policy's backend, or its `ModuleWeights`. Raises for a policy whose weights cannot be sent.

        `only_decoder`: a vision tower is not sent, because it is frozen and the engines have it.
        """
        self._policy = policy
        self._weights = weights
        self._left_out = frozenset(tower_names(policy) if only_decoder else ())
        for _ in file_weights(policy, weights.weight_shapes()):
            pass

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        whole = self._weights.whole_weights()
        sent = ((name, tensor) for name, tensor in whole if name not in self._left_out)
        return file_weights(self._policy, sent)

    def require_finite(self) -> None:
        """Before anything is sent. Collective. Raises WeightSyncError."""
        if bad := self._weights.weights_not_finite():
            raise WeightSyncError(f"weights are not finite: {some(bad)}")


class SharedWeightSync:
    """The update has changed the engine's weights in place; only their version has to follow."""

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


class EngineWeightSync:
    """One engine, and a policy in this process."""

    def __init__(
        self,
        engine: EngineControl,
        weights: PolicyWeights,
        sender: WeightSender,
        loop: LoopRunner,
        *,
        probe: LocalProbe | None = None,
    ) -> None:
        """`loop`: where the engine is asked. With a `probe` every push is verified."""
        self._engine = engine
        self._weights = weights
        self._sender = sender
        self._loop = loop
        self._probe = probe

    def push(self, *, version: int) -> Metrics:
        probe = self._probe
        gap = None if probe is None else lambda: self._gap(probe, version=version)
        return push(self._engine, version=version, loop=self._loop, send=self._send, probe_gap=gap)

    def _send(self) -> int:
        self._weights.require_finite()
        return self._sender.send(self._weights, self._deliver)

    def _deliver(self, block: WeightBlock) -> None:
        self._loop.run(self._engine.load_weights([block]))

    def _gap(self, probe: LocalProbe, *, version: int) -> float:
        return probe.check(self._loop.run(self._engine.logprobs(probe.probe.token_ids)), version=version)


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
        blocks = send()
    except Exception as error:
        raise WeightSyncError(f"the push of version {version} failed: {error}") from error
    loop.run(engine.resume(version))
    metrics.last("sync/buckets", blocks)
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


if TYPE_CHECKING:
    _: list[type[WeightSync]] = [SharedWeightSync, EngineWeightSync]

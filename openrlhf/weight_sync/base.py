"""From the policy to what samples: what the loop asks of weight synchronisation, and the order of a push.

SharedWeightSync   the engine samples with the policy's own tensors: a push is a new version number
EngineWeightSync   one engine with weights of its own: a push sends them, block by block (`transports`)
push               the order of a push into engines with weights of their own, wherever they and the policy live
PolicyWeights      what is sent: the policy's weights as the model's files would hold them, or its base and its adapter
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor, nn

from openrlhf.backends.base import Weights
from openrlhf.backends.state import not_finite, some
from openrlhf.models.adapters import is_adapter
from openrlhf.models.file_weights import FileAdapter, file_weights
from openrlhf.models.policy import Policy, tower_names
from openrlhf.observability.metrics import Metrics
from openrlhf.rollout.base import EngineControl
from openrlhf.utils.event_loops import LoopRunner
from openrlhf.weight_sync.blocks import AdapterSpec, WeightBlock, WeightSyncError

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


class Pushed(NamedTuple):
    """What was delivered to the engines."""

    blocks: int = 0
    num_bytes: int = 0


class LoadWeights(Protocol):
    """Has engines take a block of weights, of this adapter if there is one."""

    def __call__(self, block: WeightBlock, *, adapter: AdapterSpec | None = None) -> None: ...


class PolicyWeights:
    """The weights of a policy, whole, whatever trains it and on how many ranks (`models.file_weights`). Tied ones come
    once. An adapter is merged into them; or it is sent beside its base, which goes to an engine once. Every rank has
    one of these, and sends when the others do."""

    def __init__(
        self, policy: Policy, weights: Weights, *, only_decoder: bool = False, as_adapter: bool = False
    ) -> None:
        """`weights`: the policy's backend, or its `ModuleWeights`. Raises for a policy whose weights cannot be sent.

        `only_decoder`: a vision tower is not sent, because it is frozen and the engines have it. `as_adapter`: engines
        hold the policy's adapter as one.
        """
        self._policy = policy
        self._weights = weights
        self._left_out = frozenset(tower_names(policy) if only_decoder else ())
        for _ in file_weights(policy, weights.weight_shapes()):
            pass
        self._adapter = FileAdapter(policy) if as_adapter else None

    def send(self, sender: WeightSender, load: LoadWeights, *, needs_base: bool) -> Pushed:
        """All weights; with an adapter that engines hold as one, the base where they need it, and then the adapter.

        Collective. Raises WeightSyncError. `needs_base`: the same on every rank.
        """
        if bad := self._weights.weights_not_finite():
            raise WeightSyncError(f"weights are not finite: {some(bad)}")
        pushed = Pushed()

        def deliver(block: WeightBlock, *, adapter: AdapterSpec | None = None) -> None:
            nonlocal pushed
            load(block, adapter=adapter)
            pushed = Pushed(pushed.blocks + 1, pushed.num_bytes + block.num_bytes)

        adapter = self._adapter
        if adapter is None:
            sender.send(self, deliver)
            return pushed
        if needs_base:
            sender.send(self.base(), deliver)
        spec = AdapterSpec(config=adapter.config, modules=adapter.modules)
        sender.send(adapter.tensors(self._weights.whole_weights(only=is_adapter)), partial(deliver, adapter=spec))
        return pushed

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """By the names of the model's files; an adapter is merged. Collective: every rank iterates to the end."""
        return file_weights(self._policy, self._weights.whole_weights(only=self._is_sent))

    def base(self) -> Iterator[tuple[str, Tensor]]:
        """Without the adapter: what it is trained beside, which for weights of 4 bits is not what files hold."""
        named = self._weights.whole_weights(only=lambda name: self._is_sent(name) and not is_adapter(name))
        return file_weights(self._policy, named, merge=False)

    def _is_sent(self, name: str) -> bool:
        return name not in self._left_out


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

    def _send(self) -> Pushed:
        return self._weights.send(self._sender, self._load, needs_base=self._engine.needs_base)

    def _load(self, block: WeightBlock, *, adapter: AdapterSpec | None = None) -> None:
        self._loop.run(self._engine.load_weights([block], adapter=adapter))

    def _gap(self, probe: LocalProbe, *, version: int) -> float:
        return probe.check(self._loop.run(self._engine.logprobs(probe.probe.token_ids)), version=version)


def push(
    engine: EngineControl,
    *,
    version: int,
    loop: LoopRunner,
    send: Callable[[], Pushed],
    probe_gap: Callable[[], float] | None,
) -> Metrics:
    """Pause, wake, send, resume with the new version, verify. Requests under way stop, and go on with the new weights.

    A push that fails leaves the engine paused: some of its weights may be new, or wrong. Another one starts over.

    Args:
        loop: runs what is asked of the engine.
        send: brings the weights there; what they were.
        probe_gap: how far the engine is from the policy; raises WeightSyncError. None: nothing is verified.
    """
    metrics = Metrics()
    loop.run(_ready_for_weights(engine))
    if (drafts := loop.run(engine.take_draft_counts())) is not None:
        metrics.mean("rollout/draft_acceptance", drafts.accepted, drafts.drafted)
        metrics.mean("rollout/draft_gain", drafts.accepted, drafts.open_steps)
        metrics.mean("rollout/tokens_per_step", drafts.tokens, drafts.steps)
    try:
        pushed = send()
    except Exception as error:
        raise WeightSyncError(f"the push of version {version} failed: {error}") from error
    loop.run(engine.resume(version))
    metrics.last("sync/buckets", pushed.blocks)
    metrics.last("sync/bytes", pushed.num_bytes)
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

"""The stack probes of a cluster's processes, read by the driver: on its own machine directly, elsewhere by a Ray task.

A rank that hangs answers no call; reading its stack probe (`utils.stack_probe`) needs no answer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from openrlhf.utils import stack_probe, waits
from openrlhf.utils.stack_probe import Address

LOOK_SECONDS = 30.0
"""Time for a task on another node, which Ray has to start there first."""

LOOKING = threading.Lock()
"""Held while probes are read, and while the connection to Ray ends: Ray ends a process that calls it without one."""

_T = TypeVar("_T")


class ProbeAddress(NamedTuple):
    """The stack probe of a process on a node of the cluster."""

    node_id: str
    address: Address


def install_here() -> ProbeAddress:
    """Install the stack probe of this process, which Ray has started."""
    import ray

    return ProbeAddress(ray.get_runtime_context().get_node_id(), stack_probe.install())


class StackProbes:
    """The stack probes of named actors. They are among the peers of `utils.waits` until they are closed."""

    def __init__(self, names: Sequence[str], references: Sequence[Any]) -> None:
        """`references`: Ray references to the `ProbeAddress` of each actor."""
        self._names = names
        self._references = references
        waits.peers.add(self)

    def close(self) -> None:
        """The actors end: nobody needs to know what they do."""
        waits.peers.discard(self)

    def stacks(self) -> dict[str, str]:
        return self._read(stack_probe.stacks, otherwise=lambda error: f"not to be had: {error}")

    def idle_seconds(self) -> float:
        idle = self._read(stack_probe.idle_seconds, otherwise=lambda _: float("inf"))
        return min(idle.values(), default=float("inf"))

    def _read(self, look: Callable[[Address], _T], *, otherwise: Callable[[Exception], _T]) -> dict[str, _T]:
        """The answer of `look` for each actor, asked at the same time; nothing when the connection to Ray has ended."""
        import ray

        with LOOKING:
            return self._read_all(look, otherwise) if ray.is_initialized() else {}

    def _read_all(self, look: Callable[[Address], _T], otherwise: Callable[[Exception], _T]) -> dict[str, _T]:
        import ray

        here = ray.get_runtime_context().get_node_id()
        found: dict[str, _T] = {}
        asked: dict[str, Any] = {}
        for name, reference in zip(self._names, self._references, strict=True):
            try:
                at = ray.get(reference, timeout=1.0)
                if at.node_id == here:
                    found[name] = look(at.address)
                else:
                    asked[name] = _look_there(look, at)
            except Exception as error:  # the actor has never started, or its node is gone
                found[name] = otherwise(error)
        for name, reference in asked.items():
            try:
                found[name] = ray.get(reference, timeout=LOOK_SECONDS)
            except Exception as error:
                found[name] = otherwise(error)
        return found


def _look_there(look: Callable[[Address], _T], at: ProbeAddress) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(at.node_id, soft=False)
    return ray.remote(look).options(num_cpus=0, scheduling_strategy=there).remote(at.address)


if TYPE_CHECKING:
    from openrlhf.utils.waits import PeerProcesses

    _: type[PeerProcesses] = StackProbes

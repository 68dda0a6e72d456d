"""Processes of a cluster, looked at from the driver: on its own machine directly, elsewhere by a task that Ray runs.

A rank that hangs answers no call. Its beacon (`utils.stack_probe`) needs none.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

from openrlhf.utils import stack_probe as beacon
from openrlhf.utils import waits
from openrlhf.utils.stack_probe import Address

LOOK_SECONDS = 30.0
"""A task that looks has to be started on the other node first."""

LOOKING = threading.Lock()
"""Held by whoever looks, and by whoever ends the connection to Ray: a call without one ends the process at once."""

_T = TypeVar("_T")


class Beacon(NamedTuple):
    """Where to look for a process."""

    node_id: str
    address: Address


def lit_here() -> Beacon:
    """Of this process, which Ray has started."""
    import ray

    return Beacon(ray.get_runtime_context().get_node_id(), beacon.lit())


class Beacons:
    """Of actors that have names. A `waits.Neighbour` for as long as it lives."""

    def __init__(self, names: Sequence[str], references: Sequence[Any]) -> None:
        """`references`: each to the `Beacon` of one."""
        self._names = names
        self._references = references
        waits.neighbours.add(self)

    def stacks(self) -> dict[str, str]:
        return self._seen(beacon.stacks, otherwise=lambda error: f"not to be had: {error}")

    def idle_seconds(self) -> float:
        return min(self._seen(beacon.idle_seconds, otherwise=lambda _: float("inf")).values(), default=float("inf"))

    def _seen(self, look: Callable[[Address], _T], *, otherwise: Callable[[Exception], _T]) -> dict[str, _T]:
        """What `look` says of each, all at once; nothing when the connection to Ray has ended."""
        import ray

        with LOOKING:
            return self._seen_by(look, otherwise) if ray.is_initialized() else {}

    def _seen_by(self, look: Callable[[Address], _T], otherwise: Callable[[Exception], _T]) -> dict[str, _T]:
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
            except Exception as error:  # it never came to be, or its node is gone
                found[name] = otherwise(error)
        for name, reference in asked.items():
            try:
                found[name] = ray.get(reference, timeout=LOOK_SECONDS)
            except Exception as error:
                found[name] = otherwise(error)
        return found


def _look_there(look: Callable[[Address], _T], at: Beacon) -> Any:
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    there = NodeAffinitySchedulingStrategy(at.node_id, soft=False)
    return ray.remote(look).options(num_cpus=0, scheduling_strategy=there).remote(at.address)

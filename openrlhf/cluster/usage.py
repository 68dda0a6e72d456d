"""How busy and how full the devices of a run are, node by node."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from openrlhf.cluster.engines import RayEngines
from openrlhf.cluster.workers import WorkerGroup
from openrlhf.observability.usage import Usage

DEADLINE = 60.0
"""Of an answer, in seconds."""


class NodeUsage:
    """Asks everybody who has a device. Metrics call a node by its address."""

    def __init__(self, groups: Iterable[WorkerGroup], engines: RayEngines) -> None:
        self._groups = list(dict.fromkeys(groups))
        self._engines = engines

    def __call__(self) -> dict[str, Usage]:
        answers = [answer for group in self._groups for answer in group.usage(deadline=DEADLINE)]
        return by_node([*answers, *self._engines.usage()])


def by_node(answers: Sequence[tuple[str, Usage]]) -> dict[str, Usage]:
    """The mean of how busy a node's devices were, and the most that one of them held."""
    nodes: dict[str, list[Usage]] = {}
    for node, usage in answers:
        nodes.setdefault(node, []).append(usage)
    return {
        node: Usage(sum(one.busy for one in seen) / len(seen), max(one.peak_gb for one in seen))
        for node, seen in nodes.items()
    }

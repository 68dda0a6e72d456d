"""A few trajectories of every step, for people to read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from openrlhf.observability.jsonl import JsonLinesWriter

if TYPE_CHECKING:
    from openrlhf.types import Group, Trajectory


class RolloutLog:
    """rollouts.jsonl: one line per trajectory, at most `per_step` of them a step (0: none).

    Which ones does not depend on who finished first: whole groups by prompt ordinal, as many as fit. A first
    group that alone is too large gives its first samples.
    """

    def __init__(self, path: Path, *, per_step: int = 8) -> None:
        if per_step < 0:
            raise ValueError(f"per_step must be >= 0, got {per_step}")
        self._per_step = per_step
        self._lines = JsonLinesWriter(path)

    def write(self, step: int, groups: Sequence[Group]) -> None:
        for group, trajectory in self._chosen(groups):
            self._lines.write(_record(step, group, trajectory))

    def close(self) -> None:
        self._lines.close()

    def _chosen(self, groups: Sequence[Group]) -> Iterator[tuple[Group, Trajectory]]:
        room = self._per_step
        for place, group in enumerate(sorted(groups, key=lambda g: g.prompt.ordinal)):
            members = sorted(group.trajectories, key=lambda t: t.key)
            if place > 0 and len(members) > room:
                return
            for trajectory in members[:room]:
                yield group, trajectory
            room -= min(room, len(members))


def _record(step: int, group: Group, trajectory: Trajectory) -> dict[str, Any]:
    return {
        "step": step,
        "prompt_ordinal": group.prompt.ordinal,
        "sample": trajectory.key.sample,
        "prompt": group.prompt.text,
        "response": trajectory.text.removeprefix(group.prompt.text),
        "label": group.prompt.label,
        "reward": trajectory.reward,
        "score": trajectory.score,
        "response_length": trajectory.num_actions,
        "outcome": str(trajectory.outcome),
        "error": trajectory.error,
    }

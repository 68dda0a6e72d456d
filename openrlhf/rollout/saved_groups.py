"""Groups that wait to be trained on, as a checkpoint keeps them: plain values and tensors."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from openrlhf.types import Group, Outcome, Prompt, SampleKey, Segment, Trajectory


def group_state(group: Group) -> dict[str, Any]:
    """Without its prompt, which its ordinal stands for."""
    return {"ordinal": group.prompt.ordinal, "trajectories": [_trajectory_state(t) for t in group.trajectories]}


def group_from(state: dict[str, Any], prompt: Prompt) -> Group:
    return Group(prompt=prompt, trajectories=tuple(_trajectory_from(t) for t in state["trajectories"]))


def _trajectory_state(trajectory: Trajectory) -> dict[str, Any]:
    segments = [_values(segment) for segment in trajectory.segments]
    return _values(trajectory) | {"segments": segments, "outcome": str(trajectory.outcome)}


def _trajectory_from(state: dict[str, Any]) -> Trajectory:
    segments = tuple(Segment(**segment) for segment in state["segments"])
    return Trajectory(
        **state | {"key": SampleKey(*state["key"]), "segments": segments, "outcome": Outcome(state["outcome"])}
    )


def _values(record: Trajectory | Segment) -> dict[str, Any]:
    return {field.name: getattr(record, field.name) for field in fields(record)}

"""Engines and ranks that take turns on their devices, for whoever says whose turn it is."""

from __future__ import annotations

from dataclasses import dataclass

from openrlhf.cluster.engines import RayEngines
from openrlhf.cluster.workers import WorkerGroup

DEADLINE = 600.0
"""Of moving state off a device or back, in seconds."""


@dataclass(frozen=True, slots=True)
class EngineSleep:
    """All engines at once. Implements `trainers.hybrid.SleepingEngine`."""

    engines: RayEngines

    def sleep(self) -> None:
        self.engines.sleep()


@dataclass(frozen=True, slots=True)
class GroupSleep:
    """The optimizer states of a group. Implements `trainers.hybrid.SleepingBackend`."""

    group: WorkerGroup

    def sleep(self) -> None:
        self.group.call("sleep", deadline=DEADLINE)

    def wake(self) -> None:
        self.group.call("wake", deadline=DEADLINE)

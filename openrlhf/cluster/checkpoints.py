"""Models that ranks train, for whoever keeps checkpoints on the driver."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openrlhf.checkpoint.folder import CheckpointError
from openrlhf.cluster.workers import WorkerError, WorkerGroup

DEADLINE = 3600.0
"""Of writing or reading a model, in seconds."""


@dataclass(frozen=True, slots=True)
class RankKept:
    """A model on the ranks of a group, which see the same file system as the driver. Implements `Kept`."""

    group: WorkerGroup
    name: str
    """In a checkpoint, and of the model on its ranks."""

    def expected_bytes(self, *, resumable: bool) -> int:
        return self._call("expected_bytes", resumable=resumable)

    def write(self, folder: Path, state: dict[str, Any], *, resumable: bool) -> None:
        self._call("write", folder, state, resumable=resumable)

    def load(self, folder: Path) -> None:
        self._call("load", folder)

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        try:
            return self.group.call(method, self.name, *arguments, **options, deadline=DEADLINE)[0]
        except WorkerError as error:
            if isinstance(error.reason, CheckpointError):
                raise CheckpointError(str(error.reason)) from error
            raise

"""The workers that score and train, as the RL loop sees them: four methods over a batch that the workers hold.

In one process they are a `learners.rank.RankLearners`; on a cluster `cluster.learners.RayWorkers` with ranks behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from openrlhf.observability.metrics import Metrics
from openrlhf.types import Group


class Placed(NamedTuple):
    """A round that lies on its ranks."""

    batch: Any
    """A handle for the workers' other methods."""
    metrics: Metrics
    """The metrics of shaping and comparing rewards."""


class Workers(Protocol):
    """Holds the models. The batch is a handle: what it is, and on how many ranks it lies, is their business."""

    def place(self, groups: Sequence[Group]) -> Placed:
        """Make training samples of groups and give each sample its rank, which it keeps."""
        ...

    def score(self, batch: Any) -> None:
        """All forwards of frozen weights: old log-probs, reference log-probs, values."""
        ...

    def assign_advantages(self, batch: Any) -> Metrics:
        """From rewards to one advantage per action token; only sums cross ranks."""
        ...

    def update(self, batch: Any) -> Metrics:
        """The round's optimizer steps."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Their state without the models: the number of rounds, the price of KL."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

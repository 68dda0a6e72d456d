"""The workers that score and train: what the loop knows of them, and those of one process.

Workers        four methods over a batch that the workers hold
LocalWorkers   one rank in this process, which has all samples; `cluster.learners` has the ranks of a cluster
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from openrlhf.learners.advantages import SampleMaker
from openrlhf.learners.rank import RankLearners
from openrlhf.observability.metrics import Metrics
from openrlhf.types import Group, TrainingBatch


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


class LocalWorkers:
    """One rank, which has all samples."""

    def __init__(self, learners: RankLearners, make_samples: SampleMaker) -> None:
        self._learners = learners
        self._make_samples = make_samples

    def place(self, groups: Sequence[Group]) -> Placed:
        made = self._make_samples(groups)
        return Placed(TrainingBatch(samples=made.samples), made.metrics)

    def score(self, batch: TrainingBatch) -> None:
        self._learners.score(batch)

    def assign_advantages(self, batch: TrainingBatch) -> Metrics:
        return self._learners.assign_advantages(batch)

    def update(self, batch: TrainingBatch) -> Metrics:
        return self._learners.update(batch)

    def state_dict(self) -> dict[str, Any]:
        return self._learners.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._learners.load_state_dict(state)


if TYPE_CHECKING:
    _: type[Workers] = LocalWorkers

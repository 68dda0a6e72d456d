"""The workers of one process: models, scoring and updates all right here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from openrlhf.learners.advantages import SampleMaker
from openrlhf.learners.base import Placed
from openrlhf.learners.rank import RankLearners
from openrlhf.observability.metrics import Metrics
from openrlhf.types import Group, TrainingBatch


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
    from openrlhf.learners.base import Workers

    _: type[Workers] = LocalWorkers

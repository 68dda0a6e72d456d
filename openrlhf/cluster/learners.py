"""The loop's workers on a cluster: the driver shares samples out, the ranks score and train them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from openrlhf.cluster.transport import PackedSamples
from openrlhf.cluster.workers import WorkerGroup
from openrlhf.learners.rank import RankLearners
from openrlhf.learners.samples import SampleMaker
from openrlhf.learners.sharing import share_out
from openrlhf.learners.steps import StepSettings
from openrlhf.observability.metrics import Metrics
from openrlhf.types import Group, TrainingBatch

DEADLINE = 3600.0
"""Of one stage of a round, in seconds."""


class RankService:
    """In a rank's process: the learners, and the samples they have at the moment."""

    def __init__(self, learners: RankLearners) -> None:
        self._learners = learners
        self._batch = TrainingBatch(samples=[])

    def hold(self, share: PackedSamples) -> None:
        self._batch = TrainingBatch(samples=share.samples())

    def score(self) -> None:
        self._learners.score(self._batch)

    def assign_advantages(self) -> Metrics:
        return self._learners.assign_advantages(self._batch)

    def update(self) -> Metrics:
        return self._learners.update(self._batch)

    def state_dict(self) -> dict[str, Any]:
        return self._learners.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._learners.load_state_dict(state)


@dataclass(frozen=True, slots=True)
class HeldBatch:
    """A round's samples, which lie on their ranks."""

    round_index: int
    metrics: Metrics
    """Of placing them."""


class RayWorkers:
    """A group of `RankService`s. Implements `learners.base.Workers`."""

    def __init__(self, group: WorkerGroup, make_samples: SampleMaker, steps: StepSettings) -> None:
        self._group = group
        self._make_samples = make_samples
        self._steps = steps
        self._rounds = 0

    def place(self, groups: Sequence[Group]) -> HeldBatch:
        import ray

        shaped = self._make_samples(groups)
        self._rounds += 1
        shares = share_out(shaped.samples, self._steps, round_index=self._rounds, ranks=len(self._group))
        references = [ray.put(PackedSamples.of(share)) for share in shares]
        self._group.call("hold", shares=references, deadline=DEADLINE)
        return HeldBatch(self._rounds, shaped.metrics)

    def score(self, batch: HeldBatch) -> None:
        self._ask("score", batch)

    def assign_advantages(self, batch: HeldBatch) -> Metrics:
        return Metrics.merged([batch.metrics, self._ask("assign_advantages", batch)])

    def update(self, batch: HeldBatch) -> Metrics:
        return self._ask("update", batch)

    def _ask(self, stage: str, batch: HeldBatch) -> Any:
        """What the first rank says: it has gathered what is to be known of all."""
        if batch.round_index != self._rounds:
            raise ValueError(f"{stage}: the samples of round {batch.round_index} have made room for others")
        return self._group.call(stage, deadline=DEADLINE)[0]

    def state_dict(self) -> dict[str, Any]:
        return self._group.call("state_dict", deadline=DEADLINE)[0]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._rounds = state["rounds"]
        self._group.call("load_state_dict", state, deadline=DEADLINE)

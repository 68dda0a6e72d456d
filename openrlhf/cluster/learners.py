"""The loop's workers on a cluster: the driver makes a round's samples and shares them out, the ranks train them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from openrlhf.cluster.placement import Role
from openrlhf.cluster.transport import packed_parts
from openrlhf.cluster.workers import WorkerGroup
from openrlhf.learners.advantages import SampleMaker
from openrlhf.learners.steps import StepSettings, assign_to_ranks
from openrlhf.learners.workers import Placed
from openrlhf.observability.metrics import Metrics
from openrlhf.types import Group, SampleKey
from openrlhf.utils import waits

DEADLINE = 3600.0
"""Of one stage of a round, in seconds."""


@dataclass(frozen=True, slots=True)
class HeldBatch:
    """A round's samples, which lie on their ranks."""

    round_index: int
    keys: Mapping[int, list[set[SampleKey]]]
    """Number of shares → the samples of each share."""


class RayWorkers:
    """Groups of `cluster.services`: the policy's, and those of models that live elsewhere.

    The driver makes a round's samples from its groups, and Ray brings each to its ranks, once per round. What ranks
    compute of them (log-probs, values, returns) goes from rank to rank as columns, which the driver does not see.
    Ranks that compute samples together (tensor and context parallelism) have the same share of them: one exports a
    column, and all of them import it.
    """

    def __init__(
        self,
        policy: WorkerGroup,
        make_samples: SampleMaker,
        steps: StepSettings,
        *,
        critic: WorkerGroup | None = None,
        reference: WorkerGroup | None = None,
        teacher: WorkerGroup | None = None,
        teacher_columns: Sequence[str] = (),
    ) -> None:
        """`critic`, `reference`, `teacher`: None where there is none, or where it lives with the policy.

        `teacher_columns`: those that the teacher fills.
        """
        self._policy = policy
        self._critic = critic
        self._reference = reference
        self._teacher = teacher
        self._teacher_columns = teacher_columns
        # The reference and the teacher may share processes, which score for both.
        found = [group for group in (policy, critic, reference, teacher) if group is not None]
        self._groups = [group for i, group in enumerate(found) if group not in found[:i]]
        self._make_samples = make_samples
        self._steps = steps
        self._rounds = 0

    @classmethod
    def of(
        cls,
        groups: Mapping[Role, WorkerGroup],
        make_samples: SampleMaker,
        steps: StepSettings,
        *,
        teacher_columns: Sequence[str] = (),
    ) -> RayWorkers:
        """From the group of each role; those of one spec have the same."""
        policy = groups[Role.ACTOR]
        critic, reference, teacher = (
            None if groups.get(role) in (None, policy) else groups[role]
            for role in (Role.CRITIC, Role.REFERENCE, Role.TEACHER)
        )
        return cls(
            policy,
            make_samples,
            steps,
            critic=critic,
            reference=reference,
            teacher=teacher,
            teacher_columns=teacher_columns,
        )

    def place(self, groups: Sequence[Group]) -> Placed:
        import ray

        made = self._make_samples(groups)
        self._rounds += 1
        sizes = sorted({group.share_count for group in self._groups})
        shared = [assign_to_ranks(made.samples, self._steps, round_index=self._rounds, ranks=count) for count in sizes]
        parts = {owners: ray.put(part) for owners, part in packed_parts(made.samples, shared).items()}
        for group in self._groups:
            size = sizes.index(group.share_count)
            shares = [
                tuple(part for owners, part in parts.items() if owners[size] == index)
                for index in range(group.share_count)
            ]
            group.call("load_samples", shares=shares, deadline=DEADLINE)
        keys = {
            count: [{sample.key for sample in share} for share in shares]
            for count, shares in zip(sizes, shared, strict=True)
        }
        return Placed(HeldBatch(self._rounds, keys), made.metrics)

    def score(self, batch: HeldBatch) -> None:
        for group in self._groups:
            self._ask(group, "score", batch)
        if self._reference is not None:
            self._send("reference_logprobs_A", self._reference, self._policy, batch)
        if self._teacher is not None:
            for name in self._teacher_columns:
                self._send(name, self._teacher, self._policy, batch)
        if self._critic is not None:
            self._send("values_A", self._critic, self._policy, batch)

    def assign_advantages(self, batch: HeldBatch) -> Metrics:
        metrics = self._ask(self._policy, "assign_advantages", batch)
        if self._critic is not None:
            self._send("returns_A", self._policy, self._critic, batch)
        return metrics

    def update(self, batch: HeldBatch, *, keep: bool = False) -> Metrics:
        critic = [] if self._critic is None else [self._ask(self._critic, "update", batch)]
        return Metrics.merged([*critic, self._ask(self._policy, "update", batch, keep=keep)])

    def columns(self, batch: HeldBatch, keys: Collection[SampleKey]) -> dict[SampleKey, dict[str, np.ndarray]]:
        """Of each share one rank answers, with those of its samples that are asked for."""
        import ray

        self._require_held(batch, "columns")
        references = self._policy.call_remote_ref("columns", list(keys), deadline=DEADLINE)
        found: dict[SampleKey, dict[str, np.ndarray]] = {}
        with waits.waiting("for the columns of logged samples", deadline=DEADLINE):
            for share in ray.get(references, timeout=DEADLINE):
                found |= share.by_key()
        return found

    def _ask(self, group: WorkerGroup, stage: str, batch: HeldBatch, **options: Any) -> Any:
        """What the first rank says: it has gathered what is to be known of all."""
        self._require_held(batch, stage)
        return group.call(stage, deadline=DEADLINE, **options)[0]

    def _require_held(self, batch: HeldBatch, stage: str) -> None:
        if batch.round_index != self._rounds:
            raise ValueError(f"{stage}: the samples of round {batch.round_index} have made room for others")

    def _send(self, name: str, source: WorkerGroup, target: WorkerGroup, batch: HeldBatch) -> None:
        """A column from those who have it to those who need it; a rank fetches from those who have its samples."""
        references = source.call_remote_ref("export_column", name, deadline=DEADLINE)
        theirs = batch.keys[source.share_count]
        needed = [
            [reference for reference, keys in zip(references, theirs, strict=True) if keys & own]
            for own in batch.keys[target.share_count]
        ]
        target.call("import_column", name, shares=needed, deadline=DEADLINE)

    def state_dict(self) -> dict[str, Any]:
        state = self._policy.call("state_dict", deadline=DEADLINE)[0]
        random = self._policy.call("random_state", deadline=DEADLINE)
        return state | {"random": self._policy.by_share(random)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """With another number of shares their generators begin anew."""
        self._rounds = state["rounds"]
        for group in (self._policy, self._critic):
            if group is not None:
                group.call("load_state_dict", state, deadline=DEADLINE)
        random = state.get("random", ())
        if len(random) == self._policy.share_count:
            self._policy.call("restore_random_state", shares=[(own,) for own in random], deadline=DEADLINE)


if TYPE_CHECKING:
    from openrlhf.learners.workers import Workers

    _: type[Workers] = RayWorkers

"""The workers that score and train, as the RL loop sees them: five methods over a batch that the workers hold.

In one process they are a `learners.rank.RankLearners`; on a cluster `cluster.learners.RayWorkers` with ranks behind it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from openrlhf.observability.metrics import Metrics
from openrlhf.types import Group, SampleKey, TrainingBatch


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

    def update(self, batch: Any, *, keep: bool = False) -> Metrics:
        """The round's optimizer steps. `keep`: what they see of each action token stays, for `columns`."""
        ...

    def columns(self, batch: Any, keys: Collection[SampleKey]) -> dict[SampleKey, dict[str, np.ndarray]]:
        """After the update: everything computed of these samples, one number per action token each, by the names of
        `observability.token_log.TRAINED_COLUMNS`. Keys that are of no sample of the batch are passed over."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Their state without the models: the number of rounds, the price of KL."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def sample_columns(batch: TrainingBatch, keys: Collection[SampleKey]) -> dict[SampleKey, dict[str, np.ndarray]]:
    """`Workers.columns` of a batch that lies here. A column that nothing needed is left out; NaN: not computed."""
    wanted = set(keys)
    indices = [i for i, sample in enumerate(batch.samples) if sample.key in wanted]
    columns = {
        "advantages": batch.advantages_A,
        "returns": batch.returns_A,
        "values": batch.values_A,
        "old_logprobs": batch.old_logprobs_A,
        "ref_logprobs": batch.reference_logprobs_A,
        "teacher_logprobs": batch.teacher_logprobs_A,
        **batch.seen_A,
    }
    known = {name: column.float().numpy() for name, column in columns.items() if column is not None}
    found = {}
    for i in indices:
        own = {name: column[batch.actions_of(i)].copy() for name, column in known.items()}
        if "old_logprobs" in own and not own["old_logprobs"].any() and _is_idle(batch, i):
            own["old_logprobs"][:] = np.nan  # it was not scored either
        found[batch.samples[i].key] = own | {"shaped_rewards": batch.samples[i].rewards_A.numpy().copy()}
    return found


def _is_idle(batch: TrainingBatch, index: int) -> bool:
    """Whether the update left the sample out, because nothing pulls at it."""
    new_A = batch.seen_A.get("new_logprobs")
    return new_A is not None and bool(new_A[batch.actions_of(index)].isnan().all())

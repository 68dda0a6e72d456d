"""A teacher that the policy is distilled from on its own samples: who is asked, and what it says of a batch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

from openrlhf.learners.scorer import Scorer
from openrlhf.types import TrainingBatch

TEACHER_REWARD = ("teacher_logprobs_A",)
TEACHER_LOSS = ("teacher_ids_AK", "teacher_logprobs_AK")
"""The columns that a teacher fills."""


class Teacher(Protocol):
    """Says of every sampled token, or of the tokens that it would have preferred there, how likely it finds them."""

    def tell(self, batch: TrainingBatch) -> None:
        """Fill `TEACHER_REWARD` or `TEACHER_LOSS`. Collective."""
        ...


class ModelTeacher:
    """A model of this run's ranks: one of its own, or the policy as it is before its update."""

    def __init__(self, scorer: Scorer, columns: tuple[str, ...]) -> None:
        """`columns`: those that the scorer gives."""
        self._scorer = scorer
        self._columns = columns

    def tell(self, batch: TrainingBatch) -> None:
        for name, column in zip(self._columns, self._scorer.columns(as_read(batch)), strict=True):
            setattr(batch, name, column)


def as_read(batch: TrainingBatch) -> TrainingBatch:
    """What a teacher reads: the same action tokens, in some samples after another prompt."""
    if all(sample.other_prompt is None for sample in batch.samples):
        return batch
    return TrainingBatch(
        samples=[
            sample
            if sample.other_prompt is None
            else dataclasses.replace(sample, segment=sample.segment.reading(sample.other_prompt))
            for sample in batch.samples
        ]
    )


if TYPE_CHECKING:
    _: type[Teacher] = ModelTeacher

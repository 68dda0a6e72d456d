"""A teacher that the policy is distilled from on its own samples: who is asked, and what it says of a batch."""

from __future__ import annotations

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
    """A frozen model of this run's ranks."""

    def __init__(self, scorer: Scorer, columns: tuple[str, ...]) -> None:
        """`columns`: those that the scorer gives."""
        self._scorer = scorer
        self._columns = columns

    def tell(self, batch: TrainingBatch) -> None:
        for name, column in zip(self._columns, self._scorer.columns(batch), strict=True):
            setattr(batch, name, column)


if TYPE_CHECKING:
    _: type[Teacher] = ModelTeacher

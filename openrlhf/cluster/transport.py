"""Samples and columns as Ray carries them: a few long arrays instead of thousands of short tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from openrlhf.types import (
    SEGMENT_COLUMNS,
    OtherPrompt,
    PlacedImage,
    SampleKey,
    Segment,
    Supports,
    TrainingBatch,
    TrainingSample,
)

TRAINED_COLUMNS = tuple(name for name in SEGMENT_COLUMNS if name != "turn_ends")
"""The columns that ranks need. Credit per turn is given before samples are sent, so `turn_ends` is not among them."""


class _Header(NamedTuple):
    """The fields of a sample that are not token columns."""

    key: SampleKey
    place: int
    """Of the sample in its round."""
    tokens: int
    actions: int
    has_logprobs: bool
    images: tuple[PlacedImage, ...]
    routes: np.ndarray | None
    supports: Supports | None
    other_prompt: OtherPrompt | None
    """Samples of one prompt have the same tuple, which pickle writes once."""


@dataclass(frozen=True, slots=True)
class PackedSamples:
    """`TrainingSample`s laid end to end."""

    headers: list[_Header]
    columns: dict[str, np.ndarray]
    """[T] each, named as in `Segment`."""
    rewards_A: np.ndarray
    compared_A: np.ndarray | None
    """None where samples are not compared."""

    @staticmethod
    def of(placed: Sequence[tuple[int, TrainingSample]]) -> PackedSamples:
        """Of samples with their places in the round."""
        samples = [sample for _, sample in placed]
        segments = [sample.segment for sample in samples]
        compared = [sample.compared_A for sample in samples if sample.compared_A is not None]
        return PackedSamples(
            headers=[
                _Header(
                    key=sample.key,
                    place=place,
                    tokens=len(sample),
                    actions=len(sample.rewards_A),
                    has_logprobs=sample.segment.rollout_logprobs is not None,
                    images=sample.segment.images,
                    routes=None if sample.segment.routes is None else sample.segment.routes.numpy(),
                    supports=sample.segment.supports,
                    other_prompt=sample.other_prompt,
                )
                for place, sample in placed
            ],
            columns={name: _end_to_end([_column(segment, name) for segment in segments]) for name in TRAINED_COLUMNS},
            rewards_A=_end_to_end([sample.rewards_A for sample in samples]),
            compared_A=_end_to_end(compared) if compared else None,
        )

    def samples(self) -> list[tuple[int, TrainingSample]]:
        """The samples with their places in the round, in memory of their own: Ray's must not be written to."""
        columns = {name: torch.from_numpy(column.copy()) for name, column in self.columns.items()}
        rewards_A = torch.from_numpy(self.rewards_A.copy())
        compared_A = None if self.compared_A is None else torch.from_numpy(self.compared_A.copy())
        result, token, action = [], 0, 0
        for header in self.headers:
            own: dict[str, Any] = {name: column[token : token + header.tokens] for name, column in columns.items()}
            if not header.has_logprobs:
                own["rollout_logprobs"] = None
            routes = None if header.routes is None else torch.from_numpy(header.routes.copy())
            sample = TrainingSample(
                key=header.key,
                segment=Segment(**own, images=header.images, routes=routes, supports=header.supports),
                rewards_A=rewards_A[action : action + header.actions],
                compared_A=None if compared_A is None else compared_A[action : action + header.actions],
                other_prompt=header.other_prompt,
            )
            result.append((header.place, sample))
            token += header.tokens
            action += header.actions
        return result


def packed_parts(
    samples: Sequence[TrainingSample], groups: Sequence[Sequence[Sequence[TrainingSample]]]
) -> dict[tuple[int, ...], PackedSamples]:
    """A round's samples, each packed once for all groups of ranks; `groups`: the share of every rank of each group.

    Groups of different sizes share samples out differently. A part is the samples that go to the same rank in every
    group, and its key says to which: a rank's share is the parts with its number.
    """
    ranks = [{sample.key: rank for rank, share in enumerate(shares) for sample in share} for shares in groups]
    parts: dict[tuple[int, ...], list[tuple[int, TrainingSample]]] = {}
    for place, sample in enumerate(samples):
        parts.setdefault(tuple(rank_of[sample.key] for rank_of in ranks), []).append((place, sample))
    return {owners: PackedSamples.of(part) for owners, part in parts.items()}


def unpacked(parts: Sequence[PackedSamples]) -> list[TrainingSample]:
    """The samples of a rank's parts, in the order of the round."""
    placed = [sample for part in parts for sample in part.samples()]
    return [sample for _, sample in sorted(placed, key=lambda one: one[0])]


def _column(segment: Segment, name: str) -> Tensor:
    column = getattr(segment, name)
    return torch.zeros(len(segment)) if column is None else column


def _end_to_end(columns: Sequence[Tensor]) -> np.ndarray:
    return torch.cat(list(columns)).numpy() if columns else np.zeros(0, dtype=np.float32)


class Column(NamedTuple):
    """A row for every action token of some samples, in the form in which ranks exchange it."""

    keys: list[SampleKey]
    values: list[np.ndarray]
    """For each sample its numbers, [A], or rows, [A, K]."""
    empty: np.ndarray
    """As many rows as a batch without samples has."""

    @staticmethod
    def of(batch: TrainingBatch, name: str) -> Column:
        column = getattr(batch, name).numpy()
        rows = [column[batch.actions_of(i)] for i in range(len(batch))]
        return Column([sample.key for sample in batch.samples], rows, column[:0])

    @staticmethod
    def for_batch(batch: TrainingBatch, parts: Sequence[Column]) -> Tensor:
        """The column of a batch, put together from parts that hold all of its samples."""
        known = {key: values for part in parts for key, values in zip(part.keys, part.values, strict=True)}
        empty = parts[0].empty if parts else np.zeros(0, np.float32)
        return torch.from_numpy(np.concatenate([empty, *(known[s.key] for s in batch.samples)]))


class SampleColumns(NamedTuple):
    """Several columns of some samples of a rank, on their way to the driver: one long array for each column."""

    keys: list[SampleKey]
    sizes: list[int]
    """The action tokens of each sample."""
    columns: dict[str, np.ndarray]

    @staticmethod
    def of(found: Mapping[SampleKey, Mapping[str, np.ndarray]]) -> SampleColumns:
        """Of samples that all have the same columns."""
        names = next(iter(found.values()), {})
        return SampleColumns(
            keys=list(found),
            sizes=[len(next(iter(own.values()))) for own in found.values()],
            columns={name: np.concatenate([own[name] for own in found.values()]) for name in names},
        )

    def by_key(self) -> dict[SampleKey, dict[str, np.ndarray]]:
        ends = np.cumsum(self.sizes)[:-1]
        cut = {name: np.split(column, ends) for name, column in self.columns.items()}
        return {key: {name: parts[i] for name, parts in cut.items()} for i, key in enumerate(self.keys)}

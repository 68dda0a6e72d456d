"""Metrics that carry their own reduction, so that a mean stays a mean however the work was cut.

A micro-batch of 10 tokens and one of 90 must not count alike. So nobody hands over an average: they hand over
(total, count), and the division happens once, after everything is merged:

    >>> a, b = Metrics(), Metrics()
    >>> a.mean("kl", 1.0, 10)
    >>> b.mean("kl", 2.0, 90)
    >>> a.merge(b)
    >>> a.values()
    {'kl': 0.03}

Merging is associative, and for all but `Last` the order does not matter either (up to rounding of sums).
Everything is plain Python, so `Metrics` pickles between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, Self


class Reduction(Protocol):
    """One metric on its way to a number."""

    def merge(self, later: Self) -> Self:
        """This reduction and a later one together."""
        ...

    @property
    def value(self) -> float | None:
        """The number, or None when there was nothing to reduce."""
        ...


@dataclass(frozen=True, slots=True)
class Mean:
    """total / count; no value over nothing."""

    total: float
    count: float

    def __post_init__(self) -> None:
        if not self.count >= 0:
            raise ValueError(f"the count of a mean must be >= 0, got {self.count}")

    def merge(self, later: Mean) -> Mean:
        return Mean(self.total + later.total, self.count + later.count)

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass(frozen=True, slots=True)
class Sum:
    """Σ x"""

    total: float

    def merge(self, later: Sum) -> Sum:
        return Sum(self.total + later.total)

    @property
    def value(self) -> float:
        return self.total


@dataclass(frozen=True, slots=True)
class Max:
    """max x; NaN wins, because a NaN that a comparison swallowed would be a silent failure."""

    value: float

    def merge(self, later: Max) -> Max:
        return self if math.isnan(self.value) or self.value >= later.value else later


@dataclass(frozen=True, slots=True)
class Min:
    """min x; NaN wins."""

    value: float

    def merge(self, later: Min) -> Min:
        return self if math.isnan(self.value) or self.value <= later.value else later


@dataclass(frozen=True, slots=True)
class Last:
    """The latest x, e.g. a learning rate. The only reduction whose order matters."""

    value: float

    def merge(self, later: Last) -> Last:
        return later


@dataclass(frozen=True, slots=True)
class Std:
    """Population standard deviation √(Σ(x - μ)² / n), merged by Chan's update so that it never cancels."""

    count: int
    mean: float
    squares: float
    """Σ(x - μ)²"""

    @staticmethod
    def of(values: Iterable[float]) -> Std:
        numbers = [float(value) for value in values]
        if not numbers:
            return Std(0, 0.0, 0.0)
        mean = math.fsum(numbers) / len(numbers)
        return Std(len(numbers), mean, math.fsum((x - mean) ** 2 for x in numbers))

    def merge(self, later: Std) -> Std:
        count = self.count + later.count
        if not count:
            return self
        gap = later.mean - self.mean
        mean = self.mean + gap * later.count / count
        return Std(count, mean, self.squares + later.squares + gap**2 * self.count * later.count / count)

    @property
    def value(self) -> float | None:
        return math.sqrt(self.squares / self.count) if self.count else None


@dataclass(slots=True)
class Metrics:
    """Named reductions. Writing a name again merges into what is there."""

    reductions: dict[str, Reduction] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """Notes about how these numbers came about: for example a step that was left out, and why."""

    def add(self, name: str, reduction: Reduction) -> None:
        known = self.reductions.get(name)
        if known is None:
            self.reductions[name] = reduction
        elif type(known) is not type(reduction):
            raise TypeError(
                f"metric {name!r} is a {type(known).__name__}, it cannot be merged with a {type(reduction).__name__}"
            )
        else:
            self.reductions[name] = known.merge(reduction)

    def mean(self, name: str, total: float, count: float) -> None:
        """`total` is the sum over `count` things; pass the sum, never an average."""
        self.add(name, Mean(float(total), float(count)))

    def mean_of(self, name: str, values: Iterable[float]) -> None:
        """The mean of things at hand."""
        numbers = [float(value) for value in values]
        self.add(name, Mean(math.fsum(numbers), float(len(numbers))))

    def std_of(self, name: str, values: Iterable[float]) -> None:
        self.add(name, Std.of(values))

    def sum(self, name: str, value: float) -> None:
        self.add(name, Sum(float(value)))

    def max(self, name: str, value: float) -> None:
        self.add(name, Max(float(value)))

    def min(self, name: str, value: float) -> None:
        self.add(name, Min(float(value)))

    def last(self, name: str, value: float) -> None:
        self.add(name, Last(float(value)))

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def merge(self, other: Metrics) -> None:
        """Take in `other`, which came later."""
        for text in other.notes:
            self.note(text)
        for name, reduction in other.reductions.items():
            self.add(name, reduction)

    @staticmethod
    def merged(parts: Iterable[Metrics]) -> Metrics:
        """All parts (ranks, micro-batches) as one; the parts stay as they are."""
        result = Metrics()
        for part in parts:
            result.merge(part)
        return result

    def values(self) -> dict[str, float]:
        """The numbers, in the order in which names were first written. A mean over nothing is left out."""
        return {name: r.value for name, r in self.reductions.items() if r.value is not None}

    def __iter__(self) -> Iterator[str]:
        return iter(self.reductions)

    def __len__(self) -> int:
        return len(self.reductions)


if TYPE_CHECKING:
    _: list[type[Reduction]] = [Mean, Sum, Max, Min, Last, Std]

"""Curves made ready for drawing: smoothed, thinned out, and with axis bounds people can read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Point(NamedTuple):
    """A tuple, because a page of a long run is made of half a million of them."""

    step: int
    value: float
    """As logged; NaN where the run reported a number that is not finite."""
    smooth: float
    """The trend there."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric over the steps of a run."""

    name: str
    points: tuple[Point, ...]

    @staticmethod
    def read(name: str, records: Iterable[Mapping[str, Any]], *, label: str = "", trend: bool = True) -> Curve:
        """The metric `name` of every record that has it. null stands for a number that was not finite.

        Without `trend` the values are their own trend: for numbers that are summed up and not drawn.
        """
        steps, values = [], []
        for record in records:
            value = record.get(name, "")
            if value is None or type(value) in (float, int):  # no bool, which is an int to isinstance
                steps.append(record["step"])
                values.append(float(value) if value is not None and math.isfinite(value) else math.nan)
        points = zip(steps, values, smoothed(values) if trend else values, strict=True)
        return Curve(label or name, tuple(map(Point._make, points)))

    @property
    def finite(self) -> list[Point]:
        return [point for point in self.points if math.isfinite(point.value)]

    @property
    def broken_steps(self) -> list[int]:
        """Steps that reported a number that was not finite."""
        return [point.step for point in self.points if not math.isfinite(point.value)]

    def thinned(self, most: int) -> Curve:
        """At most about `most` points: the lowest and the highest of each stretch, so that no spike is lost.

        Steps without a finite value are kept: one per stretch.
        """
        if len(self.points) <= most:
            return self
        stretches = max(1, most // 2)
        cuts = [len(self.points) * i // stretches for i in range(stretches + 1)]
        kept: list[Point] = [self.points[0]]
        for start, end in itertools.pairwise(cuts):
            stretch = self.points[start:end]
            finite = [point for point in stretch if math.isfinite(point.value)]
            chosen = {min(finite, key=lambda p: p.value), max(finite, key=lambda p: p.value)} if finite else set()
            chosen |= set(itertools.islice((p for p in stretch if not math.isfinite(p.value)), 1))
            kept.extend(sorted(chosen, key=lambda p: p.step))
        kept.append(self.points[-1])
        return Curve(self.name, tuple(dict.fromkeys(kept)))


def smoothed(values: Sequence[float]) -> list[float]:
    """The trend: Σ_j d^|i-j| x_j / Σ_j d^|i-j| over finite x_j, looking about n / 25 values either way.

    It looks both ways so that it does not lag. Spikes count only as far as the axis reaches (`visible_range`).
    Fewer than ten values are left as they are.
    """
    if len(values) < 10:
        return list(values)
    decay = 1 - 1 / max(2.0, len(values) / 25)
    low, high = visible_range(value for value in values if math.isfinite(value))
    near = [min(max(value, low), high) if math.isfinite(value) else None for value in values]
    left = _decayed_sums(near, decay)
    right = _decayed_sums(near[::-1], decay)[::-1]
    trend = []
    for value, (left_sum, left_weight), (right_sum, right_weight) in zip(near, left, right, strict=True):
        # Both sides count the value itself; once is enough.
        total = left_sum + right_sum - (value or 0.0)
        weight = left_weight + right_weight - (value is not None)
        trend.append(total / weight if weight > 1e-9 else math.nan)
    return trend


def _decayed_sums(values: Sequence[float | None], decay: float) -> list[tuple[float, float]]:
    """(Σ decay^(i-j) x_j, Σ decay^(i-j)) over the x_j that are there, j ≤ i."""
    total = weight = 0.0
    sums = []
    for value in values:
        total, weight = total * decay, weight * decay
        if value is not None:
            total, weight = total + value, weight + 1
        sums.append((total, weight))
    return sums


@dataclass(frozen=True, slots=True)
class Axis:
    low: float
    high: float
    ticks: tuple[float, ...]

    @staticmethod
    def over(low: float, high: float, *, ticks: int = 6, whole: bool = False) -> Axis:
        """Bounds and about `ticks` round numbers that cover [low, high]; `whole` keeps them integers."""
        if not (math.isfinite(low) and math.isfinite(high)):
            low, high = 0.0, 1.0
        size = max(abs(low), abs(high))
        if high - low <= max(1e-9 * size, 1e-290):
            room = 0.1 * size if size > 1e-280 else 0.5
            low, high = low - room, high + room
        step = _round_number((high - low) / max(1, ticks - 1))
        if whole:
            step = max(1.0, step)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        return Axis(first * step, last * step, tuple(i * step for i in range(first, last + 1)))


def _round_number(size: float) -> float:
    """The smallest of 1, 2, 2.5, 5, 10 × 10^k that is not below `size`.

    >>> _round_number(0.3), _round_number(18)
    (0.5, 20.0)
    """
    power = 10.0 ** math.floor(math.log10(size))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= size * (1 - 1e-9))


def visible_range(numbers: Iterable[float]) -> tuple[float, float]:
    """The range that an axis must cover: all of it, unless a few spikes would flatten the rest.

    Then (the middle 96% of at least 30 numbers fills less than a quarter) it is that middle, widened by half.
    """
    values = sorted(numbers)
    if not values:
        return (math.nan, math.nan)
    low, high = values[0], values[-1]
    if len(values) >= 30:
        rim = max(1, len(values) // 50)
        inner_low, inner_high = values[rim], values[-1 - rim]
        inner = inner_high - inner_low
        if 0 < inner < (high - low) / 4:
            low, high = max(low, inner_low - inner / 2), min(high, inner_high + inner / 2)
    return low, high


def bounds(curves: Sequence[Curve], *, zero: bool = False) -> tuple[float, float]:
    """The visible range of all curves together; `zero` takes 0 in."""
    ranges = [visible_range(point.value for point in curve.finite) for curve in curves if curve.finite]
    if not ranges:
        return (math.nan, math.nan)
    low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
    return (min(low, 0.0), max(high, 0.0)) if zero else (low, high)


def short_number(value: float) -> str:
    """Three or four digits, whatever the size.

    >>> [short_number(x) for x in (0, 0.5, 0.01234, 1234.5, 2_500_000, 1e-6, float("nan"))]
    ['0', '0.5', '0.0123', '1,234', '2.5M', '1e-06', '–']
    """
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-4:
        return f"{value:.2e}".replace(".00e", "e").replace("0e", "e")
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.4g}"
    return f"{float(f'{value:.3g}'):g}"

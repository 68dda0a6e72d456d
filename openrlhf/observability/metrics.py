"""Metrics that carry their own reduction, so that a mean stays a mean however the work was cut.

A micro-batch of 10 tokens and one of 90 must not count alike. So no part hands over an average: each hands
over (total, count), and the division happens once, after everything is merged:

    >>> a, b = Metrics(), Metrics()
    >>> a.mean("kl", 1.0, 10)
    >>> b.mean("kl", 2.0, 90)
    >>> a.merge(b)
    >>> a.values()
    {'kl': 0.03}

Merging is associative, and for all but `Last` the order does not matter either (up to rounding of sums).
Numbers may be given as tensors of one element, on whatever device. They are read when somebody asks for a result, all
at once: reading one from a GPU waits for everything that was launched there. `settle` reads them; what is left is plain
Python, so that `Metrics` pickles between ranks.
The clocks of a step's phases are here too.
"""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import numpy as np

from openrlhf.utils import waits

if TYPE_CHECKING:
    from torch import Tensor


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


_STEP = math.log(1.04)
_LEAST = 1e-9


@dataclass(frozen=True, slots=True)
class Quantile:
    """What a share of some numbers ≥ 0 does not exceed, to 2 %: they are counted between powers of 1.04, and counts can
    be merged. Numbers below 1e-9 count as 0; with one that is not finite the value is NaN."""

    share: float
    counts: dict[int, int]
    """By the power of 1.04 at the upper end."""
    finite: bool = True

    @staticmethod
    def of(values: Iterable[float], *, share: float) -> Quantile:
        numbers = np.fromiter(values, dtype=np.float64)
        finite = numbers[np.isfinite(numbers)]
        powers = np.ceil(np.log(np.maximum(finite, _LEAST)) / _STEP).astype(np.int64)
        ends, counts = np.unique(powers, return_counts=True)
        return Quantile(share, dict(zip(ends.tolist(), counts.tolist(), strict=True)), len(finite) == len(numbers))

    def merge(self, later: Quantile) -> Quantile:
        counts = Counter(self.counts)
        counts.update(later.counts)
        return Quantile(self.share, dict(counts), self.finite and later.finite)

    @property
    def value(self) -> float | None:
        if not self.finite:
            return math.nan
        left = self.share * sum(self.counts.values())
        for power in sorted(self.counts):
            left -= self.counts[power]
            if left <= 0:
                return math.exp((power - 0.5) * _STEP) if power * _STEP > math.log(_LEAST) + _STEP else 0.0
        return None


class Unread(NamedTuple):
    """A metric that was written with numbers on a device."""

    name: str
    reduction: Callable[..., Reduction]
    numbers: tuple[float | Iterable[float] | Tensor, ...]


def _known(number: Any, read: Iterator[float]) -> float | Iterable[float]:
    """The number itself, or as many as a tensor has of those that were read."""
    if hasattr(number, "detach"):
        return next(read) if number.dim() == 0 else list(itertools.islice(read, number.numel()))
    return number if isinstance(number, Iterable) else float(number)


class Metrics:
    """Named reductions. Writing a name again merges into what is there."""

    __slots__ = ("_reductions", "_unread", "notes")

    def __init__(self, reductions: dict[str, Reduction] | None = None, notes: list[str] | None = None) -> None:
        """`notes`: how these numbers came about: for example a step that was left out, and why."""
        self._reductions = {} if reductions is None else reductions
        self._unread: list[Unread] = []
        self.notes = [] if notes is None else notes

    @property
    def reductions(self) -> dict[str, Reduction]:
        self.settle()
        return self._reductions

    def settle(self) -> None:
        """Read what is on a device, with one wait for it."""
        if not self._unread:
            return
        import torch

        unread, self._unread = self._unread, []
        tensors = [number for one in unread for number in one.numbers if isinstance(number, torch.Tensor)]
        read = iter(torch.cat([tensor.double().flatten() for tensor in tensors]).tolist() if tensors else ())
        for name, reduction, numbers in unread:
            self.add(name, reduction(*(_known(number, read) for number in numbers)))

    def _write(
        self, name: str, reduction: Callable[..., Reduction], *numbers: float | Iterable[float] | Tensor
    ) -> None:
        # After one that is not read yet all others wait too: names keep the order in which they were written.
        if self._unread or any(hasattr(number, "detach") for number in numbers):
            kept = (number.detach() if hasattr(number, "detach") else number for number in numbers)
            self._unread.append(Unread(name, reduction, tuple(kept)))
        else:
            self.add(name, reduction(*(_known(number, iter(())) for number in numbers)))

    def _write_reduction(self, name: str, reduction: Reduction) -> None:
        if self._unread:
            self._unread.append(Unread(name, lambda: reduction, ()))
        else:
            self.add(name, reduction)

    def add(self, name: str, reduction: Reduction) -> None:
        self.settle()
        known = self._reductions.get(name)
        if known is None:
            self._reductions[name] = reduction
        elif type(known) is not type(reduction):
            raise TypeError(
                f"metric {name!r} is a {type(known).__name__}, it cannot be merged with a {type(reduction).__name__}"
            )
        else:
            self._reductions[name] = known.merge(reduction)

    def mean(self, name: str, total: float | Tensor, count: float | Tensor) -> None:
        """`total` is the sum over `count` things; pass the sum, never an average."""
        self._write(name, Mean, total, count)

    def mean_of(self, name: str, values: Iterable[float]) -> None:
        """The mean of things at hand."""
        numbers = [float(value) for value in values]
        self.add(name, Mean(math.fsum(numbers), float(len(numbers))))

    def std_of(self, name: str, values: Iterable[float]) -> None:
        self.add(name, Std.of(values))

    def quantile_of(self, name: str, values: Iterable[float] | Tensor, *, share: float) -> None:
        """The number that this share of things at hand does not exceed, to 2 %; all are at least 0."""
        self._write(name, partial(Quantile.of, share=share), values)

    def sum(self, name: str, value: float | Tensor) -> None:
        self._write(name, Sum, value)

    def max(self, name: str, value: float | Tensor) -> None:
        self._write(name, Max, value)

    def min(self, name: str, value: float | Tensor) -> None:
        self._write(name, Min, value)

    def last(self, name: str, value: float | Tensor) -> None:
        self._write(name, Last, value)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def merge(self, other: Metrics) -> None:
        """Take in `other`, which came later. What neither has read stays unread."""
        for text in other.notes:
            self.note(text)
        for name, reduction in other._reductions.items():
            self._write_reduction(name, reduction)
        self._unread += other._unread

    @staticmethod
    def merged(parts: Iterable[Metrics]) -> Metrics:
        """All parts (ranks, micro-batches) merged into one; the parts stay as they are."""
        result = Metrics()
        for part in parts:
            result.merge(part)
        return result

    def values(self) -> dict[str, float]:
        """The numbers, in the order in which names were first written. A mean over nothing is left out."""
        return {name: r.value for name, r in self.reductions.items() if r.value is not None}

    def __reduce__(self) -> tuple[object, ...]:
        return Metrics, (self.reductions, self.notes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Metrics) and (self.reductions, self.notes) == (other.reductions, other.notes)

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[str]:
        return iter(self.reductions)

    def __len__(self) -> int:
        return len(self.reductions)


if TYPE_CHECKING:
    _: list[type[Reduction]] = [Mean, Sum, Max, Min, Last, Std, Quantile]


class BusyClock:
    """Seconds in which anything was under way. One thread says what begins and ends; any may look."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._count = 0
        self._until_then: tuple[float, float | None] = (0.0, None)
        """Seconds in all before the present stretch, and when that began."""

    def begin(self) -> None:
        if self._count == 0:
            self._until_then = (self._until_then[0], self._now())
        self._count += 1

    def end(self) -> None:
        self._count -= 1
        if self._count == 0:
            self._until_then = (self.seconds, None)

    @property
    def seconds(self) -> float:
        before, since = self._until_then
        return before if since is None else before + self._now() - since


class PhaseClock:
    """Seconds per named phase since the last `take()`.

    A phase does not count the time of phases inside it, so phases never add up to more than `timing/step_total`:

        >>> clock = PhaseClock(on_phase=progress.phase)
        >>> with clock.phase("generation"): ...
        >>> with clock.phase("ppo_train"): ...
        >>> clock.take()
        {'timing/generation': 2.1, 'timing/ppo_train': 0.9, 'timing/step_total': 3.0}

    For one thread: the one that runs the loop.
    """

    def __init__(
        self,
        *,
        on_phase: Callable[[str], None] | None = None,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`on_phase` hears the name of every phase that begins or is returned to; "" when none is left."""
        self._on_phase = on_phase or (lambda name: None)
        self._now = now
        self._open: list[str] = []
        self._seconds: dict[str, float] = {}
        self._step_start = self._mark = now()

    @property
    def current(self) -> str:
        """The innermost phase, "" outside all of them."""
        return self._open[-1] if self._open else ""

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time the block as `name`, also when it raises."""
        self._charge()
        waits.mark_progress()
        self._open.append(name)
        self._seconds.setdefault(name, 0.0)
        self._on_phase(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()
            self._on_phase(self.current)

    def take(self) -> dict[str, float]:
        """`timing/<phase>` for every phase met and `timing/step_total`; the clock starts over."""
        self._charge()
        timings = {f"timing/{name}": seconds for name, seconds in self._seconds.items()}
        timings["timing/step_total"] = self._mark - self._step_start
        self._seconds = dict.fromkeys(self._open, 0.0)
        self._step_start = self._mark
        return timings

    def _charge(self) -> None:
        """Give the time since the last mark to the innermost phase."""
        now = self._now()
        if self._open:
            self._seconds[self.current] = self._seconds.get(self.current, 0.0) + now - self._mark
        self._mark = now

"""The clock of a step's phases."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from openrlhf.utils import waits


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

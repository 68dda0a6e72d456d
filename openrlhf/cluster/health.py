"""The health of engines: when an engine is given up, and how often it may be replaced. Knows nothing of Ray."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

MOST_REPLACEMENTS = 3
WITHIN_SECONDS = 3600.0
"""An engine that has been replaced 3 times within an hour is not replaced again: the next one would fail as well."""


class ReplacementBudget:
    """How often an engine may be replaced: `most` times within any period of `within` seconds."""

    def __init__(
        self,
        most: int = MOST_REPLACEMENTS,
        *,
        within: float = WITHIN_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.most = most
        self.within = within
        self._clock = clock
        self._times: defaultdict[int, deque[float]] = defaultdict(deque)

    def spend(self, engine: int) -> bool:
        """Count one more replacement of this engine; False: its budget is used up."""
        now, times = self._clock(), self._times[engine]
        while times and times[0] <= now - self.within:
            times.popleft()
        if len(times) == self.most:
            return False
        times.append(now)
        return True


@dataclass(slots=True)
class _Question:
    answer: Future[object]
    since: float


class HealthWatch:
    """Checks the health of the working engines now and then, and gives up one that has not answered in time.

    `at_work` returns the engines to be checked, each with the function that asks it. An engine that is missing there is
    forgotten: when it comes back, its time begins anew. The watch runs in a thread of its own between `start` and
    `stop`; `look` is one round of checks.
    """

    def __init__(
        self,
        at_work: Callable[[], Mapping[Hashable, Callable[[], Future[object]]]],
        *,
        timeout: float,
        give_up: Callable[[Hashable, BaseException], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`give_up` is called with the engine and the error that came instead of an answer, or a TimeoutError."""
        self._at_work = at_work
        self._timeout = timeout
        self._give_up = give_up
        self._clock = clock
        self._asked: dict[Hashable, _Question] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="engine-health", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread. No check is under way afterwards."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        now, at_work = self._clock(), self._at_work()
        self._asked = {engine: question for engine, question in self._asked.items() if engine in at_work}
        for engine, ask in at_work.items():
            question = self._asked.get(engine)
            if question is None:
                self._asked[engine] = _Question(ask(), now)
            elif question.answer.done():
                del self._asked[engine]
                if (error := question.answer.exception()) is not None:
                    self._give_up(engine, error)
            elif now - question.since > self._timeout:
                del self._asked[engine]
                self._give_up(engine, TimeoutError(f"it has not answered for {self._timeout:g} s"))

    def _run(self) -> None:
        while not self._stopped.wait(min(5.0, self._timeout / 4)):
            self.look()

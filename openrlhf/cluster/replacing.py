"""When an engine is given up, and how often another one takes its place. Knows nothing of Ray."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass

MOST_REPLACEMENTS = 3
WITHIN_SECONDS = 3600.0
"""An engine that has to be replaced more often than that, within so long, will not work the next time either."""


class ReplacementBudget:
    """How often an engine may be replaced: so many times within any stretch of so many seconds."""

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
        """One more replacement of this engine; False: it has had them all."""
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
    """Asks whoever is at work, now and then, whether he is well; gives up on who has not answered in time.

    `at_work` are those to be asked, each with what asks him. Who is no longer among them is forgotten: his time begins
    anew. Runs in a thread of its own between `start` and `stop`; `look` is one look.
    """

    def __init__(
        self,
        at_work: Callable[[], Mapping[Hashable, Callable[[], Future[object]]]],
        *,
        timeout: float,
        give_up: Callable[[Hashable, BaseException], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`give_up`: with what was raised instead of an answer, or a TimeoutError."""
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
        """No look is under way afterwards."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        now, at_work = self._clock(), self._at_work()
        self._asked = {who: question for who, question in self._asked.items() if who in at_work}
        for who, ask in at_work.items():
            question = self._asked.get(who)
            if question is None:
                self._asked[who] = _Question(ask(), now)
            elif question.answer.done():
                del self._asked[who]
                if (error := question.answer.exception()) is not None:
                    self._give_up(who, error)
            elif now - question.since > self._timeout:
                del self._asked[who]
                self._give_up(who, TimeoutError(f"it has not answered for {self._timeout:g} s"))

    def _run(self) -> None:
        while not self._stopped.wait(min(5.0, self._timeout / 4)):
            self.look()

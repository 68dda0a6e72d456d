"""Something that starts in a thread of its own while this one does other things."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from types import TracebackType
from typing import Generic, Protocol, Self, TypeVar

from openrlhf.utils import waits

LOOK_SECONDS = 0.2
GIVE_UP_SECONDS = 20.0
"""How long a start that is not wanted any more may take to end. What remains of it ends with this process."""


class Closable(Protocol):
    def close(self) -> None: ...


_T = TypeVar("_T", bound=Closable)


class NotStartedError(Exception):
    """The start has failed. `Starting` puts its own error in the place of this one.

    It is of no kind that the code in between, which loads models, would take for a failure of its own.
    """


class Starting(Generic[_T]):
    """While open, something starts, or has started; at the end it is closed.

    An error of the caller's ends a start that is under way. An error of the start's is raised where it is waited for,
    and leaves this block as it is.
    """

    def __init__(self, start: Callable[[], _T], *, what: str, give_up: Callable[[], None]) -> None:
        """`what` is waited for: "for the engine to start". `give_up` lets a start that is under way fail; it may be
        called many times."""
        self._start = start
        self._what = what
        self._give_up = give_up
        self._future: Future[_T] = Future()
        self.waited = 0.0
        """Seconds that the caller has waited for it."""

    def __enter__(self) -> Self:
        threading.Thread(target=self._run, name="starting", daemon=True).start()
        return self

    def _run(self) -> None:
        try:
            self._future.set_result(self._start())
        except BaseException as error:
            self._future.set_exception(error)

    def wait(self) -> None:
        """Until it has started. Raises NotStartedError."""
        began = time.monotonic()
        with waits.waiting(self._what) as wait:
            while not wait_for([self._future], timeout=LOOK_SECONDS).done:
                wait.check()
        self.waited += time.monotonic() - began
        if self._future.exception() is not None:
            raise NotStartedError

    def result(self) -> _T:
        self.wait()
        return self._future.result()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end = time.monotonic() + GIVE_UP_SECONDS
        while not self._future.done() and time.monotonic() < end:
            self._give_up()
            wait_for([self._future], timeout=LOOK_SECONDS)
        if not self._future.done():
            return
        failure = self._future.exception()
        if failure is None:
            self._future.result().close()
        elif isinstance(error, NotStartedError):
            raise failure

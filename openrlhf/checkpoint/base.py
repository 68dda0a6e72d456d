"""What a training loop asks of whoever keeps its checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol


class Checkpointer(Protocol):
    """Keeps the state of a run: what is trained, which it knows, and the loop's own, which it is given."""

    def save(self, step: int, state: dict[str, Any], *, best: bool = False) -> None:
        """`best`: no evaluation was better; kept until one is."""
        ...

    def keep_best(self, step: int) -> None:
        """The one that was saved last, after `step`, has turned out to be the best: it is kept until another is."""
        ...

    def load(self, take_up: Callable[[dict[str, Any]], None]) -> dict[str, Any] | None:
        """What is trained becomes as it was at the latest checkpoint, and `take_up` gets the loop's own state of then.

        Returns that state. None: there is no checkpoint, the run starts anew.
        """
        ...


class NoCheckpoints:
    """Keeps nothing."""

    def save(self, step: int, state: dict[str, Any], *, best: bool = False) -> None:
        pass

    def keep_best(self, step: int) -> None:
        pass

    def load(self, take_up: Callable[[dict[str, Any]], None]) -> None:
        return None


if TYPE_CHECKING:
    _: type[Checkpointer] = NoCheckpoints

"""The processes that train one model together, as one of them sees the others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, TypeVar

T = TypeVar("T")


class Ranks(Protocol):
    """Data-parallel ranks: each has its share of every step's samples. Methods are collective: all ranks call them."""

    @property
    def index(self) -> int:
        """Which share of the samples this process computes."""
        ...

    @property
    def count(self) -> int:
        """Shares there are."""
        ...

    @property
    def is_main(self) -> bool:
        """One process of all: it logs, and writes what is written once."""
        ...

    def gather(self, value: T) -> list[T]:
        """Every share's value, by index, on every rank."""
        ...

    def agree(self, value: T | None) -> T | None:
        """The first value that is one, of all processes, on every one of them."""
        ...

    def barrier(self, name: str) -> None:
        """Go on when all processes are here. `name` says what for, when one does not come."""
        ...

    def close(self) -> None:
        """The run is over."""
        ...


class Alone:
    """One process trains by itself."""

    index = 0
    count = 1
    is_main = True

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def agree(self, value: Any) -> Any:
        return value

    def barrier(self, name: str) -> None:
        pass

    def close(self) -> None:
        pass


ALONE = Alone()


if TYPE_CHECKING:
    _: type[Ranks] = Alone

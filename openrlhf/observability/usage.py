"""How busy this process's device is, and how full: a GPU, or the cores of the machine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

import torch

GIB = 2**30
PERIOD = 1.0
"""Seconds between two looks."""


class Usage(NamedTuple):
    """The use of a device since the last call."""

    busy: float
    """Mean share of the time, 0 to 1."""
    peak_gb: float
    """Most memory that all processes had on the device together, as far as was seen."""


class UsageMeter:
    """Looks at a device every second, in a thread of its own, until `close`."""

    def __init__(self, look: Callable[[], tuple[float, float]] | None = None, *, period: float = PERIOD) -> None:
        """`look`: share of the device that is busy now, and GiB of it that are used."""
        self._look = look or look_here()
        self._seen: list[tuple[float, float]] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._period = period
        threading.Thread(target=self._watch, name="usage", daemon=True).start()

    def take(self) -> Usage:
        """The use since the last call. It takes a sample itself, so that there is at least one."""
        self._note()
        with self._lock:
            seen, self._seen = self._seen, []
        return Usage(busy=sum(busy for busy, _ in seen) / len(seen), peak_gb=max(used for _, used in seen))

    def close(self) -> None:
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(self._period):
            self._note()

    def _note(self) -> None:
        found = self._look()
        with self._lock:
            self._seen.append(found)


def look_here() -> Callable[[], tuple[float, float]]:
    """A function that looks at the GPU of this process, or at the machine where it has none."""
    if not torch.cuda.is_available():
        import psutil

        return lambda: (psutil.cpu_percent() / 100, psutil.virtual_memory().used / GIB)

    def gpu() -> tuple[float, float]:
        free, total = torch.cuda.mem_get_info()
        try:
            busy = torch.cuda.utilization() / 100
        except (ImportError, RuntimeError):  # without NVIDIA's management library nobody knows
            busy = float("nan")
        return busy, (total - free) / GIB

    return gpu

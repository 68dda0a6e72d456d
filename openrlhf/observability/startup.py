"""The start of a run: the seconds from the command to the first sample, and what they went into.

Imports the standard library only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping


def process_began() -> float:
    """When this process was started, as `time.time` counts; where the system does not tell, now."""
    try:
        with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
            # The name of the program, in brackets, may have blanks in it.
            ticks = int(file.read().rpartition(")")[2].split()[19])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (AttributeError, OSError, ValueError, IndexError):
        age = 0.0
    return time.time() - max(0.0, age)


class StartUp:
    """Divides the time until the first sample into parts, one after the other.

    >>> start = StartUp(process_began())
    >>> start.mark("imports")
    >>> start.mark("data")
    >>> start.mark_all({"models": 3.1, "engine": 20.4, "engine graphs": 9.1})
    >>> start.end("first sample")
    >>> start.line()
    'start-up 34.2 s: imports 9.8, data 0.6, models 3.1, engine 20.4 (graphs 9.1), first sample 0.3'

    A part whose name begins with that of another ("engine graphs") is a part of it. Of an engine that starts beside the
    models only what was waited for is in `engine`; its own parts are as long as they were.
    """

    def __init__(self, began: float | None = None, *, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._began = self._last = now() if began is None else began
        self._seconds: dict[str, float] = {}
        self._ended = self._taken = self._used = False

    def again(self) -> StartUp:
        """This clock for the first attempt of a run; for a later one of the same process, another that begins now."""
        if self._used:
            return StartUp(now=self._now)
        self._used = True
        return self

    def mark(self, part: str) -> None:
        """What has gone by since the last mark was this part."""
        if self._ended:
            return
        now = self._now()
        self._seconds[part] = self._seconds.get(part, 0.0) + now - self._last
        self._last = now

    def mark_all(self, parts: Mapping[str, float]) -> None:
        """What has gone by since the last mark were these parts; what they leave belongs to the last that is whole."""
        if self._ended or not parts:
            return
        whole = [name for name in parts if " " not in name]
        rest = self._now() - self._last - sum(parts[name] for name in whole)
        for name, seconds in parts.items():
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
        self._seconds[whole[-1]] += max(0.0, rest)
        self._last = self._now()

    def end(self, part: str) -> None:
        """The last part. Marks that come later say nothing about the start."""
        self.mark(part)
        self._ended = True

    def take(self) -> dict[str, float]:
        """The seconds of a start that has ended, by part: once, then nothing."""
        if self._taken or not self._ended:
            return {}
        self._taken = True
        return {name.replace(" ", "_"): seconds for name, seconds in self._seconds.items()}

    @property
    def total(self) -> float:
        """Seconds up to the last mark."""
        return self._last - self._began

    def line(self) -> str:
        """The same for people."""
        words = []
        for name, seconds in self._seconds.items():
            whole, _, _ = name.partition(" ")
            if whole in self._seconds and whole != name:
                continue
            inside = {n.partition(" ")[2]: s for n, s in self._seconds.items() if n.startswith(f"{name} ")}
            of_it = ", ".join(f"{part} {length:.1f}" for part, length in inside.items())
            words.append(f"{name} {seconds:.1f}" + (f" ({of_it})" if of_it else ""))
        return f"start-up {self.total:.1f} s: {', '.join(words)}"

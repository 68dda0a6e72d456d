"""Where numbers go."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from openrlhf.observability.jsonl import JsonLinesWriter, read_json_lines

Kind = Literal["train", "eval"]


class Logger(Protocol):
    """Takes the numbers of a step."""

    def log(self, step: int, metrics: Mapping[str, float], *, kind: Kind = "train") -> None: ...

    def close(self) -> None: ...


class NullLogger:
    """Keeps nothing; for ranks and tests that have nothing to say."""

    def log(self, step: int, metrics: Mapping[str, float], *, kind: Kind = "train") -> None:
        pass

    def close(self) -> None:
        pass


class JsonlLogger:
    """metrics.jsonl: one object per line, `{"step": 3, "kind": "train", "time": 12.5, "reward": 0.4, …}`.

    `time` is seconds of running: a continued file goes on from where it stopped.
    """

    def __init__(self, path: Path, *, now: Callable[[], float] = time.monotonic) -> None:
        earlier = [r["time"] for r in read_json_lines(path) if isinstance(r.get("time"), int | float)]
        self._now = now
        self._start = now() - (earlier[-1] if earlier else 0.0)
        self._lines = JsonLinesWriter(path)

    def log(self, step: int, metrics: Mapping[str, float], *, kind: Kind = "train") -> None:
        seconds = round(self._now() - self._start, 3)
        self._lines.write({"step": step, "kind": kind, "time": seconds, **metrics})

    def close(self) -> None:
        self._lines.close()


class CompositeLogger:
    """Tells every one of several loggers."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = tuple(loggers)

    def log(self, step: int, metrics: Mapping[str, float], *, kind: Kind = "train") -> None:
        for logger in self._loggers:
            logger.log(step, metrics, kind=kind)

    def close(self) -> None:
        """Closes all of them, then raises what went wrong, if anything did."""
        errors = []
        for logger in self._loggers:
            try:
                logger.close()
            except Exception as error:
                errors.append(error)
        if errors:
            raise ExceptionGroup("some loggers did not close", errors)


def is_time(name: str) -> bool:
    """Whether a record's entry measures the machine rather than the training."""
    return name == "time" or name.startswith(("timing/", "perf/"))


def without_times(record: Mapping[str, Any]) -> dict[str, Any]:
    """What must be equal in two runs of the same configuration."""
    return {name: value for name, value in record.items() if not is_time(name)}


def score_names(names: Iterable[str]) -> list[str]:
    """Of an evaluation's metrics those that say how good the policy is: pass rates, or all if there are none."""
    measured = [n for n in names if n not in ("step", "kind", "global_step") and not is_time(n)]
    rates = [n for n in measured if re.search(r"pass\d+$", n)]
    return rates or [n for n in measured if not n.endswith(("num_samples", "failed"))]


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl as one history.

    A run that resumed from a checkpoint writes some steps a second time. A training step that is written again
    takes the place of its first record and of everything after that; an evaluation, of later evaluations.
    """
    history: list[dict[str, Any]] = []
    newest = {"train": -1, "eval": -1}
    for record in read_json_lines(path):
        step, kind = record.get("step"), record.get("kind")
        if not isinstance(step, int) or kind not in newest:
            continue
        if step <= newest[kind]:
            superseded = ("train", "eval") if kind == "train" else ("eval",)
            history = [r for r in history if r["step"] < step or r["kind"] not in superseded]
            for name in superseded:
                newest[name] = max((r["step"] for r in history if r["kind"] == name), default=-1)
        history.append(record)
        newest[kind] = step
    return history

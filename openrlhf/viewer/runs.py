"""The runs that the page shows: folders that are found, and what each holds, read again only where it has grown."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from openrlhf.observability.jsonl import LinesTail, parse_json_line
from openrlhf.observability.loggers import MetricsHistory
from openrlhf.observability.report import setting_text
from openrlhf.observability.run_directory import RunData, RunDirectory, read_config, read_notes
from openrlhf.observability.signs import read_warnings
from openrlhf.observability.token_log import ALL, steps
from openrlhf.viewer.index import RolloutIndex
from openrlhf.viewer.tokens import LoggedGroups, TokenFiles

DEEPEST = 3
"""How many folders below one that is named a run may be."""
MOST_RUNS = 500
QUICK_SECONDS, MOST_SHARE = 0.05, 0.05
"""A walk over folders that takes longer than this takes at most this share of the time."""
QUIET_SECONDS = 300.0
"""A run without an end that has written nothing for so long, and for three of its steps, is not called running."""
TAIL_BYTES = 1 << 18
"""The part of metrics.jsonl that a list of runs reads: the latest steps are in it."""
SILENT = "silent: it has written no end, and nothing new for some time"
NOT_MEASURED = ("step", "kind", "time", "global_step")
HEADLINES = ("reward", "rollout/reward_mean", "loss", "gpt_loss", "acc")
"""The first of these that a run logs stands beside its name."""


def holds_run(path: Path) -> bool:
    run = RunDirectory(path)
    return run.config.is_file() or run.metrics.is_file()


def find_runs(path: Path, *, deepest: int = DEEPEST) -> Iterator[Path]:
    """The folder itself where it holds a run, otherwise the runs in the folders below it, by name."""
    if holds_run(path):
        yield path
    elif deepest:
        try:
            inside = sorted(folder for folder in path.iterdir() if folder.is_dir() and not folder.name.startswith("."))
        except OSError:
            return
        for folder in inside:
            yield from find_runs(folder, deepest=deepest - 1)


class RunShelf:
    """All runs of the folders that were named. New ones are found as they appear; a name stays with its run."""

    def __init__(self, places: Sequence[Path]) -> None:
        self._places = tuple(places)
        self._runs: dict[str, Run] = {}
        self._names: dict[Path, str] = {}
        self._lock = threading.Lock()
        self._there: list[Run] = []
        self._next_look = -math.inf

    def runs(self) -> list[Run]:
        """Those that are there. A tree of folders that takes long to walk is not walked each time."""
        with self._lock:
            began = time.monotonic()
            if began >= self._next_look:
                found = ((place, path) for place in self._places for path in find_runs(place))
                runs = (self._run(place, path) for place, path in found)
                self._there = list(dict.fromkeys(itertools.islice(runs, MOST_RUNS)))
                took = time.monotonic() - began
                self._next_look = began + took / MOST_SHARE if took > QUICK_SECONDS else -math.inf
            return self._there

    def get(self, name: str) -> Run | None:
        """The run of that name among those that `runs` has found."""
        return self._runs.get(name)

    def _run(self, place: Path, path: Path) -> Run:
        resolved = path.resolve()
        if resolved not in self._names:
            below = path.relative_to(place).as_posix()
            wanted = resolved.name if below == "." else below
            name, number = wanted, 1
            while name in self._runs:
                number += 1
                name = f"{wanted} ({number})"
            self._names[resolved] = name
            self._runs[name] = Run(name, resolved)
        return self._runs[self._names[resolved]]


class Run:
    """One folder. Its methods may be called from several threads."""

    def __init__(self, name: str, path: Path) -> None:
        self.name = name
        self.directory = RunDirectory(path)
        self.tokens = TokenFiles(path)
        self._lock = threading.RLock()
        self._tail = LinesTail(self.directory.metrics)
        self._history = MetricsHistory()
        self._kept: dict[str, tuple[Any, Any]] = {}
        self._measured, self._measured_of = MeasuredEvents(), (-1, -1)
        self.lines = RolloutIndex(self.directory.rollouts)
        """The groups of rollouts.jsonl."""
        self._all: RolloutIndex | None = None

    @property
    def rollouts(self) -> RolloutIndex:
        """The groups that are listed: those of rollouts.jsonl, or all where the token log has all."""
        with self._lock:
            if self._data().config.get("logger.rollouts_per_step") != ALL or not steps(self.directory.path):
                return self.lines
            if self._all is None:
                self._all = RolloutIndex(self.directory.rollouts, LoggedGroups(self.directory.path))
            return self._all

    def summary(self) -> dict[str, Any]:
        """What a list of runs says of it."""
        with self._lock:
            run, latest = self._data(), self._latest()
            train = latest.get("train", {})
            headline = next((name for name in HEADLINES if isinstance(train.get(name), int | float)), None)
            score = latest.get("eval", {})
            rates = [name for name in score if name.endswith("pass1") and isinstance(score[name], int | float)]
            return {
                "name": self.name,
                "path": str(self.directory.path),
                "status": self._status(run, train),
                "step": train.get("step", 0),
                "seconds": train.get("time"),
                "step_seconds": train.get("timing/step_total"),
                "tokens_per_second": train.get("perf/tokens_per_second"),
                "gap": train.get("logprobs_diff"),
                "headline": [headline, train[headline]] if headline else None,
                "score": [rates[0], score[rates[0]]] if rates else None,
                "model": run.model,
                "estimator": run.estimator,
                "data": run.first("data.prompt_dataset", "data.dataset", "prompt_data", "dataset"),
                "written": self._written(),
                "has_rollouts": self.directory.rollouts.is_file() and self.directory.rollouts.stat().st_size > 0,
            }

    def new_metrics(self, since: str) -> dict[str, Any]:
        """The records after the cursor `since`, by column, and the next cursor. `whole`: the cursor is of another
        history (the run went back some steps, or the file is another), and everything is sent again."""
        with self._lock:
            self._read_metrics()
            history = self._history
            version = f"{self._tail.restarts}.{history.replacements}"
            given, _, count = since.partition(":")
            whole = given != version or not count.isdecimal() or int(count) > len(history.records)
            records = history.records[0 if whole else int(count) :]
            return {
                "cursor": f"{version}:{len(history.records)}",
                "whole": whole,
                "train": columns([record for record in records if record["kind"] == "train"]),
                "eval": columns([record for record in records if record["kind"] == "eval"]),
            }

    def events(self) -> dict[str, Any]:
        """What happened, by step, and a version that changes with it."""
        with self._lock:
            self._read_metrics()
            history = (self._tail.restarts, self._history.replacements)
            state = (
                history,
                len(self._history.records),
                *(_stamp(path) for path in (self.directory.notes, self.directory.warnings, self.directory.config)),
            )

            def read() -> dict[str, Any]:
                run, records = self._data(), self._history.records
                if self._measured_of != history:
                    self._measured_of, self._measured = history, MeasuredEvents()
                for record in records[self._measured.records :]:
                    self._measured.add(record)
                found = sorted(
                    (
                        *said_events(run.notes, read_warnings(self.directory.warnings)),
                        *self._measured.found,
                        *due_checkpoints(records, run.config.get("ckpt.save_steps")),
                    ),
                    key=lambda event: event["step"],
                )
                version = hashlib.sha1(json.dumps(found).encode(), usedforsecurity=False).hexdigest()[:12]
                return {"version": version, "events": found}

            return self._once("events", state, read)

    def settings(self) -> dict[str, Any]:
        """Settings by name: those that differ from the defaults, and all; with the text of config.yaml."""
        with self._lock:
            run = self._data()
            chosen = {name: setting_text(value) for name, value in run.settings_set().items()}
            every = {name: setting_text(value) for name, value in run.config.items()}
            return {"set": chosen, "all": every}

    def _read_metrics(self) -> None:
        restarts = self._tail.restarts
        for line in self._tail.read():
            if self._tail.restarts != restarts:
                restarts, self._history = self._tail.restarts, MetricsHistory()
            if (record := parse_json_line(line.content)) is not None:
                self._history.add(record)
        if self._tail.restarts != restarts:
            self._history = MetricsHistory()

    def _data(self) -> RunData:
        """Configuration and notes. The rest of the record is empty: metrics are read elsewhere, as they grow."""
        config = self.directory.config
        text, settings = self._once("config", _stamp(config), lambda: read_config(config))
        notes = self.directory.notes
        said = self._once("notes", _stamp(notes), lambda: read_notes(notes))
        return RunData(
            directory=self.directory,
            train=[],
            evaluations=[],
            config_text=text,
            config=settings,
            notes=said,
            warnings=[],
        )

    def _latest(self) -> dict[str, dict[str, Any]]:
        """The last training record and the last evaluation near the end of metrics.jsonl."""
        path = self.directory.metrics

        def read() -> dict[str, dict[str, Any]]:
            found: dict[str, dict[str, Any]] = {}
            try:
                with path.open("rb") as file:
                    size = file.seek(0, 2)
                    file.seek(max(0, size - TAIL_BYTES))
                    lines = file.read().splitlines()
            except OSError:
                return {}
            for line in reversed(lines):
                record = parse_json_line(line)
                if record is not None and record.get("kind") in ("train", "eval") and record["kind"] not in found:
                    found[record["kind"]] = record
                    if len(found) == 2:
                        break
            return found

        return self._once("latest", _stamp(path), read)

    def _status(self, run: RunData, latest: Mapping[str, Any]) -> str:
        if run.end is not None:
            return run.end
        seconds = latest.get("timing/step_total")
        patience = max(QUIET_SECONDS, 3 * seconds) if isinstance(seconds, int | float) else QUIET_SECONDS
        return "running" if time.time() - self._written() < patience else SILENT

    def _written(self) -> float:
        """When something was last written, in seconds since 1970."""
        paths = (self.directory.metrics, self.directory.notes, self.directory.rollouts, self.directory.config)
        return max((stamp[0] / 1e9 for path in paths if (stamp := _stamp(path)) is not None), default=0.0)

    def _once(self, what: str, state: Any, read: Any) -> Any:
        """What `read` returns, read again only when `state` differs from that of the last time."""
        if what not in self._kept or self._kept[what][0] != state:
            self._kept[what] = (state, read())
        return self._kept[what][1]


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size


def columns(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The numbers of records by name, null where a record has none, with their steps and times."""
    names = dict.fromkeys(name for record in records for name in record if name not in NOT_MEASURED)
    table = {name: _numbers([record.get(name) for record in records]) for name in names}
    return {
        "step": [record["step"] for record in records],
        "time": _numbers([record.get("time") for record in records]),
        "values": {name: values for name, values in table.items() if any(value is not None for value in values)},
    }


def _numbers(values: Sequence[Any]) -> list[float | None]:
    """Six digits of each: more cannot be seen, and they are most of what is sent. None for what is no finite number."""
    plain = [value if type(value) in (int, float) else math.nan for value in values]
    exact = np.array(plain, dtype=np.float64)
    with np.errstate(all="ignore"):
        scale = 10.0 ** (5 - np.floor(np.log10(np.abs(exact))))
        rounded = np.round(exact * scale) / scale
    known = np.isfinite(exact)
    shown = np.where(known & np.isfinite(rounded), rounded, exact).tolist()
    return [value if there else None for value, there in zip(shown, known.tolist(), strict=True)]


def _event(step: int, kind: str, text: str, clock: Any = None) -> dict[str, Any]:
    """A mark of the curves. Kinds: start, restart, end, warning, note, evaluation, checkpoint, engine, memory,
    numbers."""
    return {"step": step, "kind": kind, "text": text, "clock": clock}


def said_events(notes: Sequence[Mapping[str, Any]], warnings: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """What was said in notes.jsonl and warnings.jsonl."""
    starts = 0
    for note in notes:
        kind = note.get("kind")
        starts += kind == "start"
        if kind == "start" and starts > 1:
            kind = "restart"
        if kind in ("start", "restart", "end", "warning", "note"):
            yield _event(note["step"], kind, note["text"], note.get("clock"))
    for warning in warnings:
        yield _event(warning["step"], "warning", f"{warning.get('kind')}: {warning['text']}")


class MeasuredEvents:
    """What can be read off the metrics, record by record."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []
        self.records = 0
        self._tokens: float | None = None

    def add(self, record: Mapping[str, Any]) -> None:
        self.records += 1
        step = record["step"]
        if record["kind"] == "eval":
            self._add(step, "evaluation", "evaluation")
            return
        if replaced := record.get("rollout/engines_replaced"):
            self._add(step, "engine", f"engines that were lost and started again: {replaced:g}")
        limit = record.get("perf/max_tokens_per_gpu")
        if isinstance(limit, int | float) and limit != self._tokens:
            self._add(step, "memory", f"memory ran out: micro-batches have at most {limit:,.0f} tokens per device")
            self._tokens = limit
        for name in ("actor_skipped_steps", "critic_skipped_steps", "skipped_steps"):
            if skipped := record.get(name):
                self._add(step, "numbers", f"optimizer steps that were left out: {skipped:g} ({name})")
        if None in record.values():
            broken = [name for name, value in record.items() if value is None]
            self._add(step, "numbers", f"not finite: {', '.join(broken[:8])}{' …' if len(broken) > 8 else ''}")

    def _add(self, step: int, kind: str, text: str) -> None:
        self.found.append(_event(step, kind, text))


def due_checkpoints(records: Sequence[Mapping[str, Any]], every: Any) -> Iterator[dict[str, Any]]:
    """A mark at each step after which `--ckpt.save_steps` asks for a checkpoint."""
    if isinstance(every, int) and every > 0:
        for record in records:
            if record["kind"] == "train" and record["step"] % every == 0:
                yield _event(record["step"], "checkpoint", f"a checkpoint is due (--ckpt.save_steps {every})")

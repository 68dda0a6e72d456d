"""The runs that the page shows: folders that are found, and what each holds, read again only where it has grown."""

from __future__ import annotations

import hashlib
import json
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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
QUIET_SECONDS = 300.0
"""A run without an end that has written nothing for so long, and for three of its steps, is not called running."""
TAIL_BYTES = 1 << 18
"""The part of metrics.jsonl that a list of runs reads: the latest steps are in it."""
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

    def runs(self) -> list[Run]:
        with self._lock:
            there: list[Run] = []
            for place in self._places:
                for path in find_runs(place):
                    if len(there) < MOST_RUNS:
                        there.append(self._run(place, path))
            return list(dict.fromkeys(there))

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
            state = (
                self._tail.restarts,
                self._history.replacements,
                len(self._history.records),
                *(_stamp(path) for path in (self.directory.notes, self.directory.warnings, self.directory.config)),
            )

            def read() -> dict[str, Any]:
                run = self._data()
                found = run_events(
                    run.notes, read_warnings(self.directory.warnings), self._history.records, config=run.config
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
        return "running" if time.time() - self._written() < patience else "silent"

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
    table = {name: [_number(record.get(name)) for record in records] for name in names}
    return {
        "step": [record["step"] for record in records],
        "time": [_number(record.get("time")) for record in records],
        "values": {name: values for name, values in table.items() if any(value is not None for value in values)},
    }


def _number(value: Any) -> float | None:
    """Six digits: more cannot be seen, and they are most of what is sent."""
    if type(value) not in (int, float) or not math.isfinite(value):
        return None
    return value if type(value) is int else float(f"{value:.6g}")


def run_events(
    notes: Sequence[Mapping[str, Any]],
    warnings: Sequence[Mapping[str, Any]],
    records: Sequence[Mapping[str, Any]],
    *,
    config: Mapping[str, Any],
) -> list[dict[str, Any]]:
    """Marks for the curves, by step: `{"step", "kind", "text", "clock"}`.

    Kinds: start, restart, end, warning, note, evaluation, checkpoint, engine, memory, numbers.
    """
    found: list[dict[str, Any]] = []

    def add(step: int, kind: str, text: str, clock: Any = None) -> None:
        found.append({"step": step, "kind": kind, "text": text, "clock": clock})

    starts = 0
    for note in notes:
        kind = note.get("kind")
        if kind == "start":
            starts += 1
            # A resumed run writes its start before it knows from which step it goes on.
            add(note["step"], "restart" if starts > 1 else "start", note["text"], note.get("clock"))
        elif kind in ("end", "warning", "note"):
            add(note["step"], kind, note["text"], note.get("clock"))
    for warning in warnings:
        add(warning["step"], "warning", f"{warning.get('kind')}: {warning['text']}")
    every = config.get("ckpt.save_steps")
    tokens: float | None = None
    for record in records:
        step = record["step"]
        if record["kind"] == "eval":
            add(step, "evaluation", "evaluation")
            continue
        if isinstance(every, int) and every > 0 and step % every == 0:
            add(step, "checkpoint", f"a checkpoint is due (--ckpt.save_steps {every})")
        if replaced := record.get("rollout/engines_replaced"):
            add(step, "engine", f"engines that were lost and started again: {replaced:g}")
        limit = record.get("perf/max_tokens_per_gpu")
        if isinstance(limit, int | float) and limit != tokens:
            add(step, "memory", f"memory ran out: micro-batches have at most {limit:,.0f} tokens per device")
            tokens = limit
        for name, value in record.items():
            if name.endswith("skipped_steps") and value:
                add(step, "numbers", f"optimizer steps that were left out: {value:g} ({name})")
        broken = [name for name, value in record.items() if value is None]
        if broken:
            add(step, "numbers", f"not finite: {', '.join(broken[:8])}{' …' if len(broken) > 8 else ''}")
    return sorted(found, key=lambda event: event["step"])

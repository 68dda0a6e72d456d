"""The folder of a run: what is written there, its notes (warnings, and how the run ended), and reading it all again."""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

import yaml

from openrlhf.observability.jsonl import JsonLinesWriter, read_json_lines
from openrlhf.observability.loggers import read_metrics
from openrlhf.observability.signs import read_warnings


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Names of everything in a run's folder:

    config.yaml     the configuration, secrets already taken out
    metrics.jsonl   one line per training step and per evaluation
    rollouts.jsonl  the best, the worst and typical groups of every step, turn by turn
    rollout_images/ thumbnails of the images in them
    tokens/         the same groups token by token, one file per step (`token_log`)
    trained.jsonl   which samples every step was trained on (RL)
    warnings.jsonl  what was said about steps that went wrong; usually empty
    notes.jsonl     what else was said in words, and how the run ended
    model/          the trained model
    inputs/         functions and records that a program gave the run directly (`runs.given`)
    report.html     all of it as one page
    stacks-1.txt    what everybody did when nothing happened any more; usually there is none
    """

    path: Path

    @classmethod
    def create(cls, path: str | Path, config: Mapping[str, Any], *, reuse: bool = False) -> Self:
        """Make the folder and write config.yaml. `config` must already be free of secrets.

        A folder that holds another run is left alone: `runs/demo` becomes `runs/demo-2`, `runs/demo-3`, …;
        with `reuse` (a resumed run) it is continued.
        """
        wanted = Path(path).expanduser()
        if wanted.exists() and not wanted.is_dir():
            raise NotADirectoryError(f"run directory {wanted} is a file; choose another with --logger.run_dir")
        text = yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True, width=120)
        while True:
            run = cls(wanted if reuse else free_directory(wanted))
            run.path.mkdir(parents=True, exist_ok=True)
            try:
                # "x" decides, so two runs that start together cannot take the same folder.
                with run.config.open("w" if reuse else "x", encoding="utf-8") as file:
                    file.write(text)
            except FileExistsError:
                continue
            return run

    @property
    def config(self) -> Path:
        return self.path / "config.yaml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts.jsonl"

    @property
    def trained(self) -> Path:
        return self.path / "trained.jsonl"

    @property
    def warnings(self) -> Path:
        return self.path / "warnings.jsonl"

    @property
    def notes(self) -> Path:
        return self.path / "notes.jsonl"

    @property
    def model(self) -> Path:
        """The folder of the trained model. The code that saves the model makes it."""
        return self.path / "model"

    @property
    def report(self) -> Path:
        return self.path / "report.html"


def free_directory(wanted: Path) -> Path:
    """The first of wanted, wanted-2, wanted-3, … that holds no run yet."""
    for attempt in itertools.count(1):
        candidate = wanted if attempt == 1 else wanted.with_name(f"{wanted.name}-{attempt}")
        if not RunDirectory(candidate).config.exists():
            return candidate
    raise AssertionError("unreachable")


def _plain(value: Any) -> Any:
    """The same in types that every YAML reader knows."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(item) for item in (sorted(value) if isinstance(value, set | frozenset) else value)]
    if value is None or type(value) in (bool, int, float, str):
        return value
    return str(value)


NoteKind = Literal["start", "note", "warning", "end"]

MOST_NOTES = 1000
"""The most notes of one start of a run, so that a warning at every step does not fill the disk."""
MOST_CHARACTERS = 2000


class NoteLog:
    """notes.jsonl: `{"step": 3, "kind": "warning", "clock": 1763000000.0, "text": "…"}`, each text once.

    Every start of a run and every end is a line too: without an end it goes on, or was killed.
    """

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time) -> None:
        self._lines = JsonLinesWriter(path)
        self._now = now
        self._told: set[str] = set()
        self.step = 0
        """The latest that is finished; a note belongs to it."""

    def write(self, kind: NoteKind, text: str) -> None:
        if kind in ("note", "warning"):
            if text in self._told or len(self._told) >= MOST_NOTES:
                return
            self._told.add(text)
        record = {"step": self.step, "kind": kind, "clock": round(self._now(), 3), "text": text[:MOST_CHARACTERS]}
        with contextlib.suppress(OSError, ValueError):  # a full disk, a closed file: words must not end a run
            self._lines.write(record)

    def close(self) -> None:
        self._lines.close()

    @contextlib.contextmanager
    def hears_warnings(self) -> Iterator[None]:
        """Warnings that the parts of a run log meanwhile are notes as well."""
        handler = _Listener(self)
        logger = logging.getLogger("openrlhf")
        logger.addHandler(handler)
        try:
            yield
        finally:
            logger.removeHandler(handler)


class _Listener(logging.Handler):
    def __init__(self, notes: NoteLog) -> None:
        super().__init__(logging.WARNING)
        self._notes = notes

    def emit(self, record: logging.LogRecord) -> None:
        self._notes.write("warning", record.getMessage())


def read_notes(path: Path) -> list[dict[str, Any]]:
    """The whole lines of the file, in order; none where there is no file."""
    lines = read_json_lines(path)
    return [note for note in lines if isinstance(note.get("text"), str) and isinstance(note.get("step"), int)]


NAMES_OF_RUNS = ("logger.wandb.run_name", "logger.run_dir", "ckpt.output_dir", "ckpt.path")
"""Settings that say where a run is, not what it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunData:
    directory: RunDirectory
    train: list[dict[str, Any]]
    """Records of training steps."""
    evaluations: list[dict[str, Any]]
    config_text: str
    config: dict[str, Any]
    """The settings by dotted name."""
    notes: list[dict[str, Any]]
    """The records of notes.jsonl."""
    warnings: list[dict[str, Any]]
    """The warnings of both files, by step."""

    @property
    def name(self) -> str:
        return self.directory.path.resolve().name

    @property
    def model(self) -> str:
        """The model's name; of a long path, the end."""
        names = ("actor.model_name_or_path", "model.model_name_or_path", "model_name_or_path", "pretrain", "model")
        return "/".join(Path(self.first(*names)).parts[-2:])

    @property
    def estimator(self) -> str:
        return self.first("algo.advantage.estimator", "advantage_estimator", "estimator")

    @property
    def has_vllm(self) -> bool:
        """Whether vLLM sampled, rather than the policy's own process."""
        return self.config.get("vllm.num_engines") not in (None, 0)

    @property
    def seconds(self) -> float | None:
        """The seconds that the run has taken."""
        times = [r["time"] for r in (*self.train, *self.evaluations) if isinstance(r.get("time"), int | float)]
        return max(times, default=None)

    @property
    def end(self) -> str | None:
        """How the run ended, in words: `finished`, `interrupted`, `failed: …`; None when that was not written."""
        turning_points = [note for note in self.notes if note.get("kind") in ("start", "end")]
        if not turning_points or turning_points[-1]["kind"] == "start":
            return None
        return str(turning_points[-1]["text"])

    def first(self, *names: str) -> str:
        """The first of these settings that has a value."""
        return next((str(self.config[name]) for name in names if self.config.get(name)), "")

    @property
    def command(self) -> str | None:
        """The command whose settings these are; None when it is unknown."""
        from openrlhf.config.commands import ROOTS
        from openrlhf.config.schema import flags_of

        command = max(ROOTS, key=lambda name: len(flags_of(name).keys() & self.config.keys()) / len(flags_of(name)))
        return command if flags_of(command).keys() & self.config.keys() else None

    def settings_set(self) -> dict[str, Any]:
        """Settings with another value than the default of the command that they are of; empty when it is unknown."""
        from openrlhf.config.schema import flags_of

        if self.command is None:
            return {}
        flags = flags_of(self.command)
        return {
            name: value
            for name, value in self.config.items()
            if name not in NAMES_OF_RUNS and (name not in flags or _plain(flags[name].default) != value)
        }


def read_run(path: str | Path) -> RunData:
    """Reads what the folder holds; half-written files count up to their last whole line."""
    directory = RunDirectory(Path(path))
    history = read_metrics(directory.metrics)
    text, config = read_config(directory.config)
    notes = read_notes(directory.notes)
    logged = [note for note in notes if note.get("kind") == "warning"]
    warnings = [*logged, *read_warnings(directory.warnings)]
    return RunData(
        directory=directory,
        train=[record for record in history if record["kind"] == "train"],
        evaluations=[record for record in history if record["kind"] == "eval"],
        config_text=text,
        config=config,
        notes=notes,
        warnings=sorted(warnings, key=lambda note: note["step"]),
    )


def read_config(path: Path) -> tuple[str, dict[str, Any]]:
    """The text of config.yaml and its entries by dotted name; empty when it is missing or half-written."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", {}
    try:
        return text, dict(_dotted(yaml.safe_load(text)))
    except yaml.YAMLError:
        return text, {}


def _dotted(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, Mapping):
        return [(prefix.removesuffix("."), tree)] if prefix else []
    return [entry for key, value in tree.items() for entry in _dotted(value, f"{prefix}{key}.")]

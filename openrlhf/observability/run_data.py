"""A run's folder as its report needs it: what was set, measured and said, however little there is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from openrlhf.observability.loggers import read_metrics
from openrlhf.observability.notes import read_notes
from openrlhf.observability.run_directory import RunDirectory
from openrlhf.observability.signs import read_warnings

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
        """How long it has run."""
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

    def settings_set(self) -> dict[str, Any]:
        """Settings with another value than the default of the command that they are of; empty when it is unknown."""
        from openrlhf.config.commands import ROOTS
        from openrlhf.config.schema import flags_of

        command = max(ROOTS, key=lambda name: len(flags_of(name).keys() & self.config.keys()) / len(flags_of(name)))
        flags = flags_of(command)
        if not flags.keys() & self.config.keys():
            return {}
        return {
            name: value
            for name, value in self.config.items()
            if name not in NAMES_OF_RUNS and (name not in flags or _plain(flags[name].default) != value)
        }


def read_run(path: str | Path) -> RunData:
    """Whatever the folder holds; half-written files count as far as they go."""
    directory = RunDirectory(Path(path))
    history = read_metrics(directory.metrics)
    text, config = _read_config(directory.config)
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


def _read_config(path: Path) -> tuple[str, dict[str, Any]]:
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


def _plain(value: Any) -> Any:
    """As YAML gives it back."""
    return list(value) if isinstance(value, tuple) else value

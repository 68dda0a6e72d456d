"""The folder a run leaves behind."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import yaml


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Names of everything in a run's folder:

    config.yaml     the configuration, secrets already taken out
    metrics.jsonl   one line per training step and per evaluation
    rollouts.jsonl  the best, the worst and typical groups of every step, turn by turn
    trained.jsonl   which samples every step was trained on (RL)
    warnings.jsonl  what was said about steps that went wrong; usually empty
    notes.jsonl     what else was said in words, and how the run ended
    model/          the trained model
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

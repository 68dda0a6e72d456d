"""Loggers: the places that metrics are written to."""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from openrlhf.config.fields import ConfigError
from openrlhf.observability.jsonl import JsonLinesWriter, read_json_lines

if TYPE_CHECKING:
    from openrlhf.config.reporting import LoggerSection, WandbSection

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


class WandbLogger:
    """Weights & Biases: `train/<metric>` and `eval/<metric>` over `train/global_step` and `eval/global_step`."""

    def __init__(self, section: WandbSection, config: Mapping[str, Any], *, directory: Path) -> None:
        """`config` must already be free of secrets. W&B keeps its files under `directory`.

        Raises ConfigError when W&B refuses, for instance the key.
        """
        wandb = _required("wandb", flag="--logger.wandb.key")
        key = None if section.key is None or section.key.lower() == "true" else section.key
        try:
            self._run = wandb.init(
                entity=section.org,
                project=section.project,
                group=section.group,
                name=section.run_name,
                config=dict(config),
                dir=str(directory),
                # As a setting the key stays in this process; `wandb.login` writes it to ~/.netrc. What W&B calls
                # metadata holds the command line, in which keys are.
                settings=wandb.Settings(api_key=key, x_disable_meta=True),
            )
        except Exception as error:
            why = str(error) if key is None else str(error).replace(key, "<key>")
            raise ConfigError(f"--logger.wandb.key: W&B does not start: {why}") from None
        for kind in ("train", "eval"):
            self._run.define_metric(f"{kind}/global_step")
            self._run.define_metric(f"{kind}/*", step_metric=f"{kind}/global_step")

    def log(self, step: int, metrics: Mapping[str, float], *, kind: Kind = "train") -> None:
        self._run.log({f"{kind}/{name}": value for name, value in {**metrics, "global_step": step}.items()})

    def close(self) -> None:
        self._run.finish()


class TensorBoardLogger:
    """Event files with `train/<metric>` and `eval/<metric>`."""

    def __init__(self, directory: Path) -> None:
        _required("tensorboard", flag="--logger.tensorboard_dir")
        from torch.utils.tensorboard import SummaryWriter

        try:
            self._writer = SummaryWriter(str(directory))
        except OSError as error:
            raise ConfigError(f"--logger.tensorboard_dir {directory}: {error.strerror}") from error

    def log(self, step: int, metrics: Mapping[str, float], *, kind: Kind = "train") -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def require_loggers(section: LoggerSection) -> None:
    """Raises ConfigError for a logger that is asked for and not installed: better before anything is loaded."""
    if section.wandb.key is not None:
        _required("wandb", flag="--logger.wandb.key")
    if section.tensorboard_dir is not None:
        _required("tensorboard", flag="--logger.tensorboard_dir")


def remote_loggers(section: LoggerSection, config: Mapping[str, Any], *, directory: Path) -> CompositeLogger:
    """W&B and TensorBoard, as far as they are asked for. `config` must already be free of secrets."""
    loggers: list[Logger] = []
    if section.wandb.key is not None:
        loggers.append(WandbLogger(section.wandb, config, directory=directory))
    if section.tensorboard_dir is not None:
        loggers.append(TensorBoardLogger(Path(section.tensorboard_dir).expanduser() / section.folder_name))
    return CompositeLogger(loggers)


def _required(package: str, *, flag: str) -> Any:
    """Imported only when asked for: both cost seconds."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"{flag} needs {package}, which is not installed: pip install -e '.[{package}]' in the repository, or "
            "leave it out"
        ) from error


def is_time(name: str) -> bool:
    """Whether a record's entry measures the machine rather than the training."""
    return name == "time" or name.startswith(("timing/", "perf/", "startup/"))


def without_times(record: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a record that must be equal in two runs of the same configuration."""
    return {name: value for name, value in record.items() if not is_time(name)}


def score_names(names: Iterable[str]) -> list[str]:
    """The metrics of an evaluation that say how good the policy is: pass rates, or all metrics if there are none."""
    measured = [n for n in names if n not in ("step", "kind", "global_step") and not is_time(n)]
    rates = [n for n in measured if re.search(r"pass\d+$", n)]
    return rates or [n for n in measured if not n.endswith(("num_samples", "failed"))]


class MetricsHistory:
    """The records of metrics.jsonl as one history, taken one by one.

    A run that resumed from a checkpoint writes some steps a second time. A training step that is written again
    takes the place of its first record and of everything after that; an evaluation, of later evaluations.
    """

    def __init__(self) -> None:
        self.records: list[dict[str, Any]] = []
        self.replacements = 0
        """How often records were replaced: as long as it is the same, `records` only grows."""
        self._newest = {"train": -1, "eval": -1}

    def add(self, record: dict[str, Any]) -> None:
        """What is no record of a step is passed over."""
        step, kind = record.get("step"), record.get("kind")
        if not isinstance(step, int) or kind not in self._newest:
            return
        if step <= self._newest[kind]:
            superseded = ("train", "eval") if kind == "train" else ("eval",)
            self.records = [r for r in self.records if r["step"] < step or r["kind"] not in superseded]
            self.replacements += 1
            for name in superseded:
                self._newest[name] = max((r["step"] for r in self.records if r["kind"] == name), default=-1)
        self.records.append(record)
        self._newest[kind] = step


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The records of metrics.jsonl as one history; see `MetricsHistory`."""
    history = MetricsHistory()
    for record in read_json_lines(path):
        history.add(record)
    return history.records


if TYPE_CHECKING:
    _: list[type[Logger]] = [NullLogger, JsonlLogger, CompositeLogger, WandbLogger, TensorBoardLogger]

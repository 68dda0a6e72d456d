"""Training from Python: `train_rl`, `train_sft`, `train_rm` and `train_dpo`, in a program or in a notebook.

They take what the commands take, check it in the same way, and train in this process by the same code. Whatever ends a
run, this process gets its signal handlers, its logging and its event loop back. Imports no torch before a run begins.
"""

from __future__ import annotations

import base64
import contextlib
import gc
import html
import logging
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, cast

from openrlhf.config.commands import (
    SHORT_NAMES,
    DPOConfig,
    RLConfig,
    RMConfig,
    SFTConfig,
    TrainerConfig,
)
from openrlhf.config.fields import ConfigError
from openrlhf.config.parser import configure
from openrlhf.config.reporting import DEFAULT_OUTPUT
from openrlhf.config.schema import build, command_of, flags_of, value_at
from openrlhf.observability.charts import picture, telling_metrics, training_panel
from openrlhf.observability.jsonl import read_json_lines
from openrlhf.observability.loggers import read_metrics
from openrlhf.observability.progress import in_notebook
from openrlhf.observability.run_directory import RunDirectory, free_directory
from openrlhf.runs.given import FOLDER, write_code, write_records
from openrlhf.trainers.callbacks import Callback, Callbacks
from openrlhf.utils import interrupts
from openrlhf.utils.event_loops import own_loops
from openrlhf.utils.foreign_lines import start_logging

Reward = Callable[..., Any] | str | os.PathLike[str]
"""A function of (queries, prompts, labels), or a Python file or URL, as `--reward.remote_url` names it."""
Data = str | os.PathLike[str] | Iterable[Mapping[str, Any]]
"""Records, or a file, folder or Hub name, as `--data.prompt_dataset` names it."""
Section = Mapping[str, Any]
"""Settings of a section by name: `train={"batch_size": 8}` is `--train.batch_size 8`."""


class RunError(RuntimeError):
    """A run has failed, and its user can mend it. The text is the line that the command would end with."""


class BestEvaluation(NamedTuple):
    metric: str
    value: float
    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainResult:
    """What a run has left behind."""

    run_dir: Path
    """Its folder: metrics, rollouts, report, configuration."""
    model_dir: Path
    """The trained model, as `from_pretrained` loads it; of a run with LoRA, its adapter."""
    steps: int
    """Steps that are done, those of the run that this one continued among them."""
    metrics: Mapping[str, float] = field(repr=False)
    """The metrics of the last step that was logged."""
    evaluation: Mapping[str, float] = field(repr=False)
    """The last evaluation; empty if there was none."""
    best: BestEvaluation | None
    """The best evaluation: of the highest score in RL (`--ckpt.best_metric_key`), of the lowest loss otherwise."""
    ended_early: str | None
    """Why a callback ended the training; None: it went to its end."""

    def history(self, kind: str = "train") -> list[dict[str, Any]]:
        """The records of all steps (`train`) or evaluations (`eval`), each with its `step`."""
        records = read_metrics(RunDirectory(self.run_dir).metrics)
        return [record for record in records if record["kind"] == kind]

    def rollouts(self, step: int | None = None) -> list[dict[str, Any]]:
        """The episodes that rollouts.jsonl has, of all steps or of one; -1 is the last that has any. RL only."""
        records = list(read_json_lines(RunDirectory(self.run_dir).rollouts))
        if step == -1:
            step = max((record["step"] for record in records), default=None)
        return [record for record in records if step is None or record["step"] == step]

    def chart(self, *metrics: str) -> Chart:
        """Curves of these metrics, of steps and evaluations, one panel each, at most three. Notebooks show them."""
        records = read_metrics(RunDirectory(self.run_dir).metrics)
        wanted = metrics or telling_metrics(records)
        panels = [training_panel(name, records) for name in wanted[:3]]
        return Chart(picture({"title": self.run_dir.name, "panels": panels}))

    def _repr_html_(self) -> str:
        rows = {"model": self.model_dir, "run": self.run_dir, "steps": self.steps}
        if self.best is not None:
            rows["best"] = f"{self.best.metric} {self.best.value:.4g}, after step {self.best.step}"
        if self.ended_early is not None:
            rows["ended early"] = self.ended_early
        cells = "".join(f"<tr><th>{name}</th><td>{html.escape(str(value))}</td></tr>" for name, value in rows.items())
        return f"<table>{cells}</table>"


@dataclass(frozen=True, slots=True)
class Chart:
    """A picture of curves. A notebook shows it where it is the value of a cell."""

    svg: str = field(repr=False)

    def save(self, path: str | os.PathLike[str]) -> Path:
        Path(path).write_text(self.svg, encoding="utf-8")
        return Path(path)

    def _repr_html_(self) -> str:
        # As an image its styles stay its own.
        return f'<img src="data:image/svg+xml;base64,{base64.b64encode(self.svg.encode()).decode()}"/>'


def train_rl(
    config: RLConfig | Section | None = None,
    /,
    *,
    reward: Reward | Sequence[Reward] | Section | None = None,
    agent: type | str | os.PathLike[str] | None = None,
    data: Data | Section | None = None,
    eval: Data | Section | None = None,
    on_step: Callback | None = None,
    on_evaluation: Callback | None = None,
    **settings: Any,
) -> TrainResult:
    """Reinforcement learning, as `openrlhf rl`.

    >>> train_rl({"actor.model_name_or_path": "Qwen/Qwen3-0.6B", "rollout.batch_size": 32},
    ...          reward=lambda queries, prompts, labels: [float(label in q) for q, label in zip(queries, labels)],
    ...          data=[{"input": "What is 2 + 3?", "label": "5"}], train={"num_episodes": 4})

    Args:
        config: an `RLConfig`, or settings by name, dotted (`"train.batch_size"`) or nested (`{"train": {…}}`).
        reward: what judges samples: a function of (queries, prompts, labels), a file, a URL, or several of these. A
            function runs in a process of its own, with a copy of what it uses.
        agent: a class as agent files define it (`AgentExecutor`), or such a file; or a world by its name.
        data: prompts to train on: records, or what --data.prompt_dataset names.
        eval: prompts to measure on, likewise.
        on_step: called with (step, metrics) after every step. Returning False, or raising `StopTraining`, ends the
            training after a checkpoint, where the run saves any; the model is written all the same.
        on_evaluation: the same after every evaluation.
        settings: further settings by section, `train={"batch_size": 8}`, which win over `config`. `reward`, `data` and
            `eval` are sections too, and may be given as such.

    Raises `ConfigError` for settings that cannot be right, `RunError` for what else a user can mend, and
    KeyboardInterrupt, whose text says how to continue, when it is interrupted.
    """
    given = _Given("train_ppo_ray", "data.prompt_dataset", config, settings)
    given.take_section("reward", reward, given.rewards)
    given.agent(agent)
    given.take_section("data", data, given.data)
    given.take_section("eval", eval, given.evaluation)
    return _run(given, Callbacks(on_step, on_evaluation))


def train_sft(
    config: SFTConfig | Section | None = None,
    /,
    *,
    data: Data | Section | None = None,
    eval: Data | Section | None = None,
    on_step: Callback | None = None,
    on_evaluation: Callback | None = None,
    **settings: Any,
) -> TrainResult:
    """Supervised fine-tuning, as `openrlhf sft`. The arguments are those of `train_rl`."""
    return _train_supervised("train_sft", config, data, eval, Callbacks(on_step, on_evaluation), settings)


def train_rm(
    config: RMConfig | Section | None = None,
    /,
    *,
    data: Data | Section | None = None,
    eval: Data | Section | None = None,
    on_step: Callback | None = None,
    on_evaluation: Callback | None = None,
    **settings: Any,
) -> TrainResult:
    """A reward model from preference pairs, as `openrlhf rm`. The arguments are those of `train_rl`."""
    return _train_supervised("train_rm", config, data, eval, Callbacks(on_step, on_evaluation), settings)


def train_dpo(
    config: DPOConfig | Section | None = None,
    /,
    *,
    data: Data | Section | None = None,
    eval: Data | Section | None = None,
    on_step: Callback | None = None,
    on_evaluation: Callback | None = None,
    **settings: Any,
) -> TrainResult:
    """DPO, IPO, cDPO or KTO, as `openrlhf dpo`. The arguments are those of `train_rl`."""
    return _train_supervised("train_dpo", config, data, eval, Callbacks(on_step, on_evaluation), settings)


def _train_supervised(
    command: str, config: Any, data: Any, evaluation: Any, callbacks: Callbacks, settings: Mapping[str, Any]
) -> TrainResult:
    given = _Given(command, "data.dataset", config, settings)
    given.take_section("data", data, given.data)
    given.take_section("eval", evaluation, given.evaluation)
    return _run(given, callbacks)


# --------------------------------------------------------------------------------------- from arguments to a run


class _Given:
    """The arguments of a call: settings by name, and what has to be written to files first."""

    def __init__(self, command: str, data_flag: str, config: Any, settings: Mapping[str, Any]) -> None:
        self.command = command
        self._data_flag = data_flag
        self._base: TrainerConfig | None = None
        self._layers: list[Mapping[str, Any]] = []
        self._writers: dict[str, Callable[[Path], str]] = {}
        """By flag, what writes its files into a folder and gives the flag's value."""
        if isinstance(config, Mapping):
            self._layers.append(config)
        elif config is not None:
            try:
                found = command_of(config)
            except StopIteration:
                found = ""
            if found != command:
                wanted = {"train_ppo_ray": "RLConfig", "train_sft": "SFTConfig", "train_rm": "RMConfig"}
                raise ConfigError(
                    f"the first argument must be a {wanted.get(command, 'DPOConfig')} or settings by name, got "
                    f"{type(config).__name__}"
                )
            self._base = config
        self._layers.append(settings)

    def take_section(self, name: str, value: Any, take: Callable[[Any], None]) -> None:
        """A mapping is the section of that name; anything else is given to `take`."""
        if isinstance(value, Mapping):
            self._layers.append({name: value})
        elif value is not None:
            take(value)

    def rewards(self, value: Reward | Sequence[Reward]) -> None:
        items: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
        for item in items:
            if not callable(item) and not isinstance(item, str | os.PathLike):
                raise ConfigError(f"reward must be a function, a Python file or a URL, got {type(item).__name__}")

        def write(folder: Path) -> str:
            names: list[str] = []
            for item in items:
                if callable(item):
                    stems = [Path(name).stem for name in names]
                    item = write_code(item, folder, target="reward_func", given="reward", taken=stems)
                names.append(os.fspath(item))
            return ",".join(names)

        self._writers["reward.remote_url"] = write

    def agent(self, value: Any) -> None:
        if isinstance(value, str | os.PathLike):
            self._layers.append({"train.agent_func_path": os.fspath(value)})
        elif isinstance(value, type):
            self._writers["train.agent_func_path"] = lambda folder: str(
                write_code(value, folder, target="AgentExecutor", given="agent")
            )
        elif value is not None:
            raise ConfigError(f"agent must be a class or a Python file, got {type(value).__name__}")

    def data(self, value: Data) -> None:
        self._records(self._data_flag, value, name="train", given="data")

    def evaluation(self, value: Data) -> None:
        self._records("eval.dataset", value, name="eval", given="eval")

    def _records(self, flag: str, value: Data, *, name: str, given: str) -> None:
        if isinstance(value, str | os.PathLike):
            self._layers.append({flag: os.fspath(value)})
        elif isinstance(value, Iterable):
            self._writers[flag] = lambda folder: str(write_records(value, folder, name=name, given=given))
        else:
            raise ConfigError(f"{given} must be records, or name a file or folder, got {type(value).__name__}")

    def configured(self) -> TrainerConfig:
        """The checked configuration. Nothing is written before it is right; then the files are."""
        stand_ins = {"reward.remote_url": "function.py", "train.agent_func_path": "agent.py"}
        settings: dict[str, Any] = {}
        for layer in self._layers:
            _merge(settings, layer)
        for flag in self._writers:
            _merge(settings, {flag: stand_ins.get(flag, "records.jsonl")})
        name = f"openrlhf {SHORT_NAMES[self.command]}"
        config = cast(TrainerConfig, configure(self.command, settings, base=self._base, name=name))
        run_dir = _run_directory(config)
        changes: dict[str, Any] = {"logger.run_dir": str(run_dir)}
        if config.ckpt.output_dir == DEFAULT_OUTPUT and not config.ckpt.auto_resume:
            changes["ckpt.output_dir"] = str(run_dir / RunDirectory(run_dir).model.name)
        for flag, write in self._writers.items():
            changes[flag] = write((run_dir / FOLDER).resolve())
        values = {path: value_at(config, path) for path in flags_of(self.command)}
        return cast(TrainerConfig, build(self.command, values | changes))


def _merge(into: dict[str, Any], settings: Mapping[str, Any], prefix: str = "") -> None:
    """Later settings win over earlier ones, however each is nested."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            _merge(into, value, f"{prefix}{name}.")
        else:
            into[f"{prefix}{name}"] = value


def _run_directory(config: TrainerConfig) -> Path:
    """The folder of the run: a free one, or that of the run that this one continues."""
    wanted = Path(config.logger.directory).expanduser()
    if not config.ckpt.resumes:
        return free_directory(wanted)
    from openrlhf.checkpoint.folder import CheckpointFolder, Retention
    from openrlhf.checkpoint.manager import find_checkpoint
    from openrlhf.runs.resume import run_directory_of

    found = find_checkpoint(CheckpointFolder(Path(config.ckpt.folder).expanduser().resolve(), Retention()))
    directory, continued = run_directory_of(config.logger, found)
    return Path(directory).expanduser() if continued else free_directory(wanted)


def _run(given: _Given, callbacks: Callbacks) -> TrainResult:
    began = time.time()
    # Before anything else: checks and imports may print, and Ctrl-C may come at any time.
    with own_loops(), interrupts.handled(owns_process=False), _logging():
        config = given.configured()
        try:
            return _result(config, _train(config, callbacks, began=began), callbacks)
        finally:
            _free_memory()


def _train(config: TrainerConfig, callbacks: Callbacks, *, began: float) -> Any:
    from openrlhf.rollout.vllm.spare import prepared, wants_spare

    # A library among its imports keeps an exception for good, and with it the frames of whoever imports it first: in
    # the middle of a run these would hold the models.
    import_module("transformers.optimization")
    spare = isinstance(config, RLConfig) and wants_spare(config, os.environ)
    with prepared(spare), _one_line_errors():
        if isinstance(config, RLConfig):
            from openrlhf.runs import rl_assembly

            return rl_assembly.train(config, began=began, callbacks=callbacks)
        from openrlhf.runs import supervised_assembly

        return supervised_assembly.train(config, callbacks=callbacks)


@contextlib.contextmanager
def _one_line_errors() -> Iterator[None]:
    """Errors that users can mend become a RunError."""
    from openrlhf.cluster.workers import WorkerError
    from openrlhf.runs.process import USER_ERRORS

    try:
        yield
    except (*USER_ERRORS, WorkerError) as error:
        reason = error.reason if isinstance(error, WorkerError) else error
        if not isinstance(reason, (*USER_ERRORS, ConfigError)):
            raise
        raise RunError(" ".join(str(error).split())) from error


@contextlib.contextmanager
def _logging() -> Iterator[None]:
    """Log lines of a run go where its progress does, if this program has set up no logging of its own."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    start_logging(stream=sys.stdout if in_notebook() else None)
    try:
        yield
    finally:
        for handler in [handler for handler in root.handlers if handler not in handlers]:
            root.removeHandler(handler)
        root.setLevel(level)


def _free_memory() -> None:
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


# ------------------------------------------------------------------------------------------------- what is left


def _result(config: TrainerConfig, ran: Any, callbacks: Callbacks) -> TrainResult:
    run_dir = (ran.run_dir or Path(config.logger.directory)).resolve()
    records = read_metrics(RunDirectory(run_dir).metrics) if ran.run_dir else []
    last: dict[str, Any] = next((record for record in reversed(records) if record["kind"] == "train"), {})
    return TrainResult(
        run_dir=run_dir,
        model_dir=ran.model_dir,
        steps=last.get("step", 0),
        metrics=_numbers(last),
        evaluation=ran.evaluation,
        best=_best(config, [record for record in records if record["kind"] == "eval"]),
        ended_early=ran.ended_early,
    )


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in record.items() if name not in ("step", "kind", "time", "global_step")}


def _best(config: TrainerConfig, evaluations: Sequence[Mapping[str, Any]]) -> BestEvaluation | None:
    from openrlhf.trainers.evaluation import BestMetric

    if isinstance(config, RLConfig):
        best = BestMetric(config.ckpt.best_metric_key)
        for record in evaluations:
            best.update(record["step"], _numbers(record))
        if best.key is None or best.value is None or best.step is None:
            return None
        return BestEvaluation(best.key, best.value, best.step)
    losses = [
        BestEvaluation(name, value, record["step"])
        for record in evaluations
        for name, value in _numbers(record).items()
        if name.startswith("eval") and name.endswith("loss") and isinstance(value, float)
    ]
    return min(losses, key=lambda loss: loss.value, default=None)

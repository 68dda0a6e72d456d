"""What a run measures, writes and keeps: evaluation, checkpoints, loggers."""

import time
from dataclasses import dataclass, field
from typing import Annotated, TypeVar

from openrlhf.config.fields import Flag

DEFAULT_OUTPUT = "./ckpt"


@dataclass(frozen=True, kw_only=True)
class EvalSection:
    dataset: Annotated[str | None, Flag("evaluation data: comma list, as for training", flat="eval_dataset")] = None
    split: Annotated[str, Flag("split of the evaluation data", flat="eval_split", only_with=".dataset")] = "train"
    steps: Annotated[
        int,
        Flag(
            "steps between evaluations; -1 = each epoch (SFT, RM, DPO) or never (RL)",
            flat="eval_steps",
            only_with=".dataset",
        ),
    ] = -1

    @property
    def period(self) -> int | None:
        """`steps` where it is one, None for -1."""
        return self.steps if self.steps > 0 else None


@dataclass(frozen=True, kw_only=True)
class RMEvalSection(EvalSection):
    """Without evaluation data a reward model is measured on a part of the training data."""

    steps: Annotated[int, Flag("steps between evaluations; -1 = each epoch", flat="eval_steps")] = -1


@dataclass(frozen=True, kw_only=True)
class RLEvalSection(EvalSection):
    dataset: Annotated[
        str | None,
        Flag("evaluation data: comma list, as for training", flat="eval_dataset", only_with=".steps|.at_start"),
    ] = None
    temperature: Annotated[
        float, Flag("sampling temperature in evaluation", flat="eval_temperature", only_with=".dataset", at_least=0)
    ] = 0.6
    n_samples_per_prompt: Annotated[
        int, Flag("responses per evaluation prompt", flat="eval_n_samples_per_prompt", only_with=".dataset", above=0)
    ] = 4
    at_start: Annotated[bool, Flag("also evaluate before the first step and after the last", only_with=".dataset")] = (
        False
    )


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    output_dir: Annotated[str, Flag("folder of the final model", flat="save_path")] = DEFAULT_OUTPUT
    path: Annotated[str, Flag("folder of resumable checkpoints", flat="ckpt_path", only_with="ckpt.uses_folder")] = (
        f"{DEFAULT_OUTPUT}/checkpoints"
    )
    save_steps: Annotated[int, Flag("steps between checkpoints; -1 = none", flat="save_steps")] = -1
    save_hf: Annotated[
        bool, Flag("each checkpoint also as <tag>_hf", flat="save_hf_ckpt", only_with="ckpt.uses_folder")
    ] = False
    disable_ds: Annotated[
        bool, Flag("checkpoints without training state", flat="disable_ds_ckpt", only_with="ckpt.uses_folder")
    ] = False
    max_num: Annotated[
        int, Flag("checkpoints kept, best ones apart", flat="max_ckpt_num", only_with="ckpt.uses_folder", above=0)
    ] = 3
    load_enable: Annotated[bool, Flag("continue from ckpt.path if something is there", flat="load_checkpoint")] = False
    auto_resume: Annotated[
        bool,
        Flag("the same command again goes on: load_enable, and an unset ckpt.path is a folder in ckpt.output_dir"),
    ] = False
    signal_deadline: Annotated[
        float,
        Flag(
            "seconds that a step has to end, and be saved, after SIGTERM or SIGUSR1; 0 = end at once",
            only_with="ckpt.uses_folder",
            at_least=0,
        ),
    ] = 90.0

    @property
    def uses_folder(self) -> bool:
        """Whether a run has a folder of checkpoints: it saves some, or goes on from one."""
        return self.period is not None or self.resumes

    @property
    def resumes(self) -> bool:
        """Whether a run goes on from a checkpoint if there is one."""
        return self.load_enable or self.auto_resume

    @property
    def folder(self) -> str:
        """Of the checkpoints. Whoever asks for no more than `auto_resume` has them beside the model, so that the next
        run, with another `output_dir`, does not continue this one."""
        if self.auto_resume and self.path.startswith(f"{DEFAULT_OUTPUT}/checkpoints_"):
            return self.output_dir + self.path.removeprefix(DEFAULT_OUTPUT)
        return self.path

    @property
    def period(self) -> int | None:
        """`save_steps` where it is one, None for -1."""
        return self.save_steps if self.save_steps > 0 else None


@dataclass(frozen=True, kw_only=True)
class SupervisedCheckpointSection(CheckpointSection):
    max_mem: Annotated[
        int, Flag("GiB all checkpoints may take", flat="max_ckpt_mem", only_with="ckpt.uses_folder", above=0)
    ] = 100_000_000


@dataclass(frozen=True, kw_only=True)
class RLCheckpointSection(CheckpointSection):
    max_mem: Annotated[
        float,
        Flag(
            "GiB all checkpoints may take; inf = no limit",
            flat="max_ckpt_mem",
            unlimited=True,
            only_with="ckpt.uses_folder",
            above=0,
        ),
    ] = float("inf")
    best_metric_key: Annotated[
        str,
        Flag(
            'metric of the best checkpoint; "" = the first *_pass1, "none" = off',
            flat="best_metric_key",
            only_with="eval.dataset",
        ),
    ] = ""


@dataclass(frozen=True, kw_only=True)
class WandbSection:
    key: Annotated[
        str | None, Flag("W&B key, or True to use your login; turns W&B on", flat="use_wandb", secret=True)
    ] = field(default=None, repr=False)
    org: Annotated[str | None, Flag("W&B entity", flat="wandb_org", only_with=".key")] = None
    group: Annotated[str | None, Flag("W&B group", flat="wandb_group", only_with=".key")] = None
    project: Annotated[str, Flag("W&B project", flat="wandb_project", only_with=".key")] = "openrlhf"
    run_name: Annotated[
        str,
        Flag("name of the run, everywhere", flat="wandb_run_name", shown_default="<kind>_<month day T hour:minute>"),
    ] = "run"


@dataclass(frozen=True, kw_only=True)
class LoggerSection:
    logging_steps: Annotated[int, Flag("steps between log lines", flat="logging_steps", above=0)] = 1
    run_dir: Annotated[
        str | None, Flag("folder of this run's logs; unset: ./runs/<run_name>", shown_default="./runs/<run_name>")
    ] = None
    tensorboard_dir: Annotated[str | None, Flag("TensorBoard folder; turns it on", flat="use_tensorboard")] = None
    wandb: WandbSection = field(default=WandbSection())

    @property
    def directory(self) -> str:
        """Where this run writes its logs."""
        return self.run_dir or f"./runs/{self.folder_name}"

    @property
    def folder_name(self) -> str:
        """The run's name without characters that a folder's name should not have."""
        return self.wandb.run_name.replace("/", "_").replace(":", "")


@dataclass(frozen=True, kw_only=True)
class RLLoggerSection(LoggerSection):
    rollouts_per_step: Annotated[
        int,
        Flag(
            "groups of each step kept in rollouts.jsonl and, token by token, in tokens/: the best, the worst and "
            "typical ones; 0 = none, -1 = all of them in tokens/, which openrlhf replay needs",
            flat="logger.rollouts",
            at_least=-1,
        ),
    ] = 4

    @property
    def rollouts(self) -> int:
        """Groups of each step in rollouts.jsonl, which is for people: of all of them, as many as without the flag."""
        return self.rollouts_per_step if self.rollouts_per_step >= 0 else 4


S = TypeVar("S", bound=LoggerSection)


def logger_for(kind: str, *, project: str, section: type[S]) -> S:
    """Logger defaults of one trainer: the run is named after its kind and the time it is parsed."""
    return section(wandb=WandbSection(project=project, run_name=f"{kind}_{time.strftime('%m%dT%H:%M')}"))

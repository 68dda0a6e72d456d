"""Binds the supervised loop to models, data and the processes of a run: SFT, reward models, DPO, KTO."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from openrlhf.algorithms.preferences import PAIR_LOSSES, get_reward_loss
from openrlhf.backends.base import Backend, Distribution, start_backend
from openrlhf.backends.ranks import Ranks
from openrlhf.checkpoint.export import export_policy, export_value_model
from openrlhf.checkpoint.manager import Checkpointer, CheckpointManager, LocalCheckpointedModel
from openrlhf.checkpoint.universal import UniversalStart
from openrlhf.config.commands import DPOConfig, RMConfig, SFTConfig, SupervisedConfig
from openrlhf.config.effects import newly_without_effect
from openrlhf.config.rules import required
from openrlhf.data.examples import ExampleFormat, ExampleSet, TokenisedSet
from openrlhf.data.image_places import DataImages, listed_images
from openrlhf.data.preferences import JudgedFormat, JudgedSet, PairFormat, PairSet
from openrlhf.data.recognition import recognise
from openrlhf.data.schedule import Schedule
from openrlhf.data.sources import Records, load_records
from openrlhf.data.steps import StepFormat, StepSet
from openrlhf.data.templates import set_chat_template
from openrlhf.data.tokenisation import default_folder
from openrlhf.models.adapters import WithoutAdapter
from openrlhf.models.body import experts_per_token
from openrlhf.models.loading import LoadSettings, load_policy, load_tokenizer, load_value_model
from openrlhf.models.policy import Policy
from openrlhf.models.value import ValueModel
from openrlhf.observability.loggers import require_loggers
from openrlhf.observability.run_directory import RunDirectory
from openrlhf.observability.watchdog import Watchdog
from openrlhf.runs.local_copies import local_copies
from openrlhf.runs.preflight import (
    checked_model_dir,
    claimed_model_dir,
    create_run_directory,
    data_images,
    reading_model,
    warn_of_few_steps,
    warn_of_positions,
)
from openrlhf.runs.process import (
    RunResult,
    link_model,
    observed,
    prepare_process,
    user_errors_end_the_run,
    watchdog,
)
from openrlhf.runs.resume import Checkpoints, opened_checkpoints, recorded_settings, stoppable, weights_digest
from openrlhf.trainers.callbacks import Callbacks
from openrlhf.trainers.dpo import DPOObjective
from openrlhf.trainers.kto import KTOObjective
from openrlhf.trainers.moe_aux import BalancedObjective
from openrlhf.trainers.preferences import Reference
from openrlhf.trainers.process_reward import ProcessRewardObjective
from openrlhf.trainers.reward_model import RewardObjective, reward_statistics
from openrlhf.trainers.sft import SFTObjective
from openrlhf.trainers.supervised import Objective, Periods, SupervisedTrainer, state_after
from openrlhf.utils.interrupts import Stopped

logger = logging.getLogger(__name__)

MODEL_FLAG = "--model.model_name_or_path"
MODEL = "model"
"""The trained model's folder in a checkpoint."""


def run_supervised(config: SupervisedConfig) -> int:
    """Train as the configuration says; returns the process's exit status."""
    with user_errors_end_the_run() as ending:
        train(config)
    return ending.status


def train(config: SupervisedConfig, *, callbacks: Callbacks | None = None) -> RunResult:
    """Assemble, fit, export, and report. Whatever ends the run, its directory stays readable.

    `callbacks`: told of steps and evaluations, on the main rank.
    """
    local_copies(config)  # a download may take longer than ranks would wait for each other
    distribution = start_backend(config.train.backend, config.ds)
    ranks = distribution.ranks
    device = prepare_process(config.train, ranks)
    settled = dataclasses.replace(config, train=dataclasses.replace(config.train, backend=distribution.name))
    for line in newly_without_effect(config, settled):
        logger.info(line)
    require_loggers(config.logger)
    model_dir = checked_model_dir(config.ckpt.output_dir)
    with (
        watchdog(config.train, ranks) as watching,
        claimed_model_dir(model_dir, ranks),
        opened_checkpoints(
            config.ckpt, model=MODEL, universal_parts=[""] if config.ds.use_universal_ckpt else (), ranks=ranks
        ) as checkpoints,
    ):
        try:
            result = _train(
                config,
                checkpoints,
                Place(device, distribution),
                watching,
                model_dir=model_dir,
                callbacks=callbacks if callbacks is not None and ranks.is_main else Callbacks(),
            )
        except Stopped as stop:
            if stop.saved:
                # Launchers end all processes when one has ended: nobody leaves before the report is written.
                ranks.barrier("the end of a run that was stopped")
            raise
    ranks.close()
    return result


def _train(
    given: SupervisedConfig,
    checkpoints: Checkpoints,
    place: Place,
    watching: Watchdog,
    *,
    model_dir: Path,
    callbacks: Callbacks,
) -> RunResult:
    config, ranks = local_copies(given), place.distribution.ranks
    tokenizer, samples, held_out, schedule, parts, backend, objective = loop_parts(config, place)
    run_dir = create_run_directory(given, checkpoints.found) if ranks.is_main else None
    title = f"{Path(required(given.model.model_name_or_path)).name} · {_kind(config)}"
    kept = LocalCheckpointedModel(
        backend,
        lambda folder, state, weights: parts.export(tokenizer, folder, state["last_evaluation"], weights),
        ranks,
        parts.module,
    )
    checkpointer: Checkpointer | None = _checkpointer(
        config, checkpoints, kept, samples, run_dir, ranks, recorded_settings(given)
    )
    if checkpoints.universal and checkpoints.folder and checkpointer:
        steps = checkpoints.universal.steps
        # The order of samples is ours: what is known of the data is how many were taken.
        begun = state_after(steps, schedule=schedule.state_dict_after(steps), objective=objective)
        checkpointer = UniversalStart({checkpoints.folder.path: kept}, checkpointer, loop_state=lambda: begun)
    with (
        observed(config, run_dir, watching, steps=len(schedule), title=title) as seen,
        stoppable(config.ckpt, checkpoints) as stop,
    ):
        trainer = SupervisedTrainer(
            backend=backend,
            objective=objective,
            evaluation=None if held_out is None else parts.objective(held_out),
            schedule=schedule,
            periods=Periods(
                eval_every=config.eval.period, save_every=config.ckpt.period, log_every=config.logger.logging_steps
            ),
            tokens_per_forward=config.tokens_per_forward,
            logger=seen.logger,
            progress=seen.progress,
            warnings=seen.warnings,
            max_skipped=config.train.max_skipped_steps,
            ranks=ranks,
            checkpointer=checkpointer,
            stop=stop,
            callbacks=callbacks,
        )
        if origin := checkpoints.found or checkpoints.universal:
            seen.progress.note(f"continues from {origin.path}")
        evaluation = trainer.fit()
        seen.progress.phase("export")
        backend.require_finite()
        with backend.weights_to_save() as weights:
            if run_dir:
                parts.export(tokenizer, model_dir, evaluation, weights)
                link_model(run_dir, model_dir)
        seen.progress.note(f"model in {model_dir}")
    ranks.barrier("the export of the model")
    return RunResult(
        run_dir=run_dir.path if run_dir else None,
        model_dir=model_dir,
        evaluation=evaluation,
        ended_early=callbacks.ended,
    )


class LoopParts(NamedTuple):
    """The parts of the supervised loop."""

    tokenizer: Any
    samples: TokenisedSet[Any]
    held_out: Any
    """Evaluation data; None: there is none."""
    schedule: Schedule
    model: ModelParts
    backend: Backend
    objective: Objective


def loop_parts(config: SupervisedConfig, place: Place) -> LoopParts:
    """Data, schedule, model, backend and objective, before the first step."""
    ranks = place.distribution.ranks
    tokenizer = tokenizer_of(config)
    images = images_of(config, tokenizer)
    kind = OBJECTIVES[_kind(config)]
    samples = samples_of(config, tokenizer, images=images)
    if config.eval.dataset:
        held_out: Any = samples_of(config, tokenizer, evaluation=True, images=images)
    else:
        held_out = kind.stand_in(samples)
    schedule = Schedule(
        samples.lengths,
        batch_size=config.train.batch_size,
        epochs=config.train.max_epochs,
        total_steps=config.train.total_steps,
        seed=config.train.seed,
        rank=ranks.index,
        ranks=ranks.count,
        token_budget=config.tokens_per_forward,
    )
    warn_of_few_steps(config.train, len(schedule), remedy="--train.max_epochs")
    parts = kind.assemble(config, place)
    backend = place.distribution.train(parts.module, config, total_steps=len(schedule))
    objective = _balanced(config, parts, parts.objective(samples))
    return LoopParts(tokenizer, samples, held_out, schedule, parts, backend, objective)


def _checkpointer(
    config: SupervisedConfig,
    checkpoints: Checkpoints,
    kept: LocalCheckpointedModel,
    samples: TokenisedSet[Any],
    run_dir: RunDirectory | None,
    ranks: Ranks,
    settings: Mapping[str, Any],
) -> Checkpointer | None:
    if checkpoints.folder is None:
        return None
    identity = {
        "what is trained": _kind(config),
        "the digest of --data.dataset's tokens": samples.digest,
        # Of the model below an adapter nothing is in the checkpoint.
        f"the digest of {MODEL_FLAG}'s weights": weights_digest(required(config.model.model_name_or_path)),
    }
    if isinstance(config, DPOConfig):
        # What it said of the samples is in the checkpoint.
        identity["the digest of the reference model's weights"] = weights_digest(required(config.reference_path))
    return CheckpointManager(
        checkpoints.folder,
        {MODEL: kept},
        found=checkpoints.found,
        identity=identity,
        notes={"run_directory": str(run_dir.path.resolve())} if run_dir else {},
        settings=settings,
        resumable=not config.ckpt.disable_ds,
        ranks=ranks,
    )


# ------------------------------------------------------------------------------------------ what is trained


class Place(NamedTuple):
    """The device and the ranks on which models live."""

    device: torch.device
    distribution: Distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelParts:
    """A model to train, what it learns from some samples, and how it is written."""

    module: Policy | ValueModel
    objective: Callable[[Any], Objective]
    export: Callable[[Any, Path, Mapping[str, float], Mapping[str, Tensor] | None], object]
    """Given the tokenizer, the folder, the last evaluation, and the weights where the model does not hold them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """One of the things this loop trains."""

    samples: type[TokenisedSet[Any]]
    format: Callable[[Any], ExampleFormat | PairFormat | JudgedFormat | StepFormat]
    assemble: Callable[[Any, Place], ModelParts]
    stand_in: Callable[[TokenisedSet[Any]], _First | None] = lambda samples: None
    """The data to evaluate on where there is no evaluation data."""


def _kind(config: SupervisedConfig) -> str:
    match config:
        case SFTConfig():
            return "sft"
        case RMConfig():
            return "process reward model" if config.model.loss_type == "prm" else "reward model"
    return config.model.objective


def _sft(config: SFTConfig, place: Place) -> ModelParts:
    policy = _policy(config, place)
    return ModelParts(
        module=policy,
        objective=lambda examples: SFTObjective(examples, device=place.device),
        export=lambda tokenizer, folder, _, weights: export_policy(policy, tokenizer, folder, state_dict=weights),
    )


def _reward_model(config: RMConfig, place: Place) -> ModelParts:
    path, settings = required(config.model.model_name_or_path), _load_settings(config, place)
    with reading_model(path, flag=MODEL_FLAG), place.distribution.loading(settings.dtype):
        model = load_value_model(path, settings)
    warn_of_positions(model.model.config, max_len=config.data.max_len)
    loss = get_reward_loss(config.model.loss_type)
    return ModelParts(
        module=model,
        objective=lambda pairs: RewardObjective(
            pairs, loss=loss, margins=config.model.margin_loss_enable, device=place.device
        ),
        export=lambda tokenizer, folder, evaluation, weights: export_value_model(
            model, tokenizer, folder, statistics=reward_statistics(evaluation), state_dict=weights
        ),
    )


def _process_reward_model(config: RMConfig, place: Place) -> ModelParts:
    parts = _reward_model(config, place)
    model: Any = parts.module
    return dataclasses.replace(
        parts,
        objective=lambda answers: ProcessRewardObjective(answers, device=place.device),
        export=lambda tokenizer, folder, _, weights: export_value_model(
            model, tokenizer, folder, statistics=None, state_dict=weights
        ),
    )


def _dpo(config: DPOConfig, place: Place) -> ModelParts:
    policy = _policy(config, place)
    reference = _reference(config, policy, place)
    return ModelParts(
        module=policy,
        objective=lambda pairs: DPOObjective(
            pairs, config.model, reference=reference, device=place.device, ranks=place.distribution.ranks
        ),
        export=lambda tokenizer, folder, _, weights: export_policy(policy, tokenizer, folder, state_dict=weights),
    )


def _kto(config: DPOConfig, place: Place) -> ModelParts:
    policy = _policy(config, place)
    reference = _reference(config, policy, place)
    return ModelParts(
        module=policy,
        objective=lambda answers: KTOObjective(
            answers,
            beta=config.model.beta,
            reference=reference,
            max_len=config.data.max_len,
            tokens_per_forward=config.tokens_per_forward,
            seed=config.train.seed,
            device=place.device,
            ranks=place.distribution.ranks,
        ),
        export=lambda tokenizer, folder, _, weights: export_policy(policy, tokenizer, folder, state_dict=weights),
    )


def _balanced(config: SupervisedConfig, parts: ModelParts, objective: Objective) -> Objective:
    """The objective to train on; evaluations measure the objective alone."""
    coef = config.model.aux_loss_coef
    if not coef:
        return objective
    top_k = experts_per_token(parts.module.model, flag=f"--model.aux_loss_coef {coef:g}")
    return BalancedObjective(objective, coef=coef, top_k=top_k)


def _policy(config: SFTConfig | DPOConfig, place: Place) -> Policy:
    path, settings = required(config.model.model_name_or_path), _load_settings(config, place)
    with reading_model(path, flag=MODEL_FLAG), place.distribution.loading(settings.dtype):
        policy = load_policy(path, settings)
    warn_of_positions(policy.model.config, max_len=config.data.max_len)
    return policy


def _reference(config: DPOConfig, policy: Policy, place: Place) -> Reference:
    if config.reference_is_base:
        return Reference(WithoutAdapter(policy), device=place.device)
    flag = "--ref.model_name_or_path" if config.ref.model_name_or_path else MODEL_FLAG
    path, settings = required(config.reference_path), _load_settings(config, place, flag=flag, trains=False)
    with reading_model(path, flag=flag), place.distribution.loading(settings.dtype):
        model = load_policy(path, settings)
    frozen = place.distribution.freeze(model, offload=config.ref.offload)
    offload = config.ref.offload and not place.distribution.shards_weights
    return Reference(frozen, device=place.device, offload=offload)


def _load_settings(
    config: SupervisedConfig, place: Place, *, flag: str = MODEL_FLAG, trains: bool = True
) -> LoadSettings:
    return LoadSettings(
        device=place.device, ds=config.ds, model=config.model, trains=trains, seed=config.train.seed, flag=flag
    )


# --------------------------------------------------------------------------------------- what it is trained on


def tokenizer_of(config: SupervisedConfig) -> Any:
    """The tokenizer of the model that is trained, with the chat template of the run. Raises ModelLoadError."""
    path = required(config.model.model_name_or_path)
    with reading_model(path, flag=MODEL_FLAG):
        tokenizer = load_tokenizer(
            path,
            use_fast=not config.data.disable_fast_tokenizer,
            trust_remote_code=config.model.trust_remote_code,
            flag=MODEL_FLAG,
        )
    return set_chat_template(tokenizer, config.data.tokenizer_chat_template, config.data.template_arguments)


def images_of(config: SupervisedConfig, tokenizer: Any) -> DataImages | None:
    """How the images of records are found and processed; None for a run without. Raises ModelLoadError."""
    path, trusts = required(config.model.model_name_or_path), config.model.trust_remote_code
    return data_images(path, tokenizer, config.data, trust_remote_code=trusts, flag=MODEL_FLAG)


def samples_of(
    config: SupervisedConfig, tokenizer: Any, *, evaluation: bool = False, images: DataImages | None = None
) -> TokenisedSet[Any]:
    """Training or evaluation data, checked and tokenised. `images`: of `images_of`. Raises DataError."""
    kind = OBJECTIVES[_kind(config)]
    flag = "--eval.dataset" if evaluation else "--data.dataset"
    records = load_records(
        required(config.eval.dataset if evaluation else config.data.dataset),
        split=config.eval.split if evaluation else config.data.dataset_split,
        max_samples=config.data.max_samples,
        probs=None if evaluation else config.data.dataset_probs,
        seed=config.train.seed,
        trust_remote_code=config.data.trust_remote_code,
        flag=flag,
    )
    given = kind.format(config)
    if images is None:
        _warn_of_unread_images(records, config.data.image_key, flag=flag)
    else:
        given = dataclasses.replace(given, places=images.places)
    return kind.samples(
        records,
        recognise(records, given, flag=flag),
        tokenizer=tokenizer,
        image_processor=images.processor if images else None,
        max_len=config.data.max_len,
        workers=config.data.dataloader_num_workers or None,
        cache_dir=default_folder(),
        flag=flag,
    )


def _warn_of_unread_images(records: Records, key: str, *, flag: str, looked_at: int = 100) -> None:
    if any(listed_images(records[row].get(key)) for row in range(min(len(records), looked_at))):
        logger.warning(
            "%s: records have something under %r, which is not read: --data.max_images_per_prompt is 0", flag, key
        )


def _example_format(config: SFTConfig) -> ExampleFormat:
    data = config.data
    return ExampleFormat(
        input_key=data.input_key,
        output_key=data.output_key,
        input_template=data.prompt_template,
        apply_chat_template=data.apply_chat_template,
        multiturn=data.multiturn,
        pretrain=config.model.pretrain_mode_enable,
    )


def _pair_format(config: RMConfig | DPOConfig) -> PairFormat:
    data = config.data
    return PairFormat(
        prompt_key=data.prompt_key,
        chosen_key=data.chosen_key,
        rejected_key=data.rejected_key,
        input_template=data.prompt_template,
        apply_chat_template=data.apply_chat_template,
        answers_only=isinstance(config, DPOConfig),
    )


def _judged_format(config: DPOConfig) -> JudgedFormat:
    data = config.data
    return JudgedFormat(
        prompt_key=data.prompt_key or "prompt",
        response_key=data.response_key,
        label_key=data.label_key,
        input_template=data.prompt_template,
        apply_chat_template=data.apply_chat_template,
    )


def _step_format(config: RMConfig) -> StepFormat:
    data = config.data
    return StepFormat(
        prompt_key=data.prompt_key or "input",
        steps_key=data.steps_key,
        labels_key=data.labels_key,
        separator=data.separator,
        input_template=data.prompt_template,
        apply_chat_template=data.apply_chat_template,
    )


class _First(Sequence[Any]):
    """The first `count` samples of a data set."""

    def __init__(self, samples: TokenisedSet[Any], count: int) -> None:
        self._samples = samples
        self.lengths = samples.lengths[:count]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: Any) -> Any:
        return self._samples[range(len(self))[index]]


def _first_hundredth(samples: TokenisedSet[Any]) -> _First:
    """A reward model always has statistics of its rewards: of training data where nothing else is given."""
    count = max(1, len(samples) // 100)
    logger.info("no --eval.dataset: mean and std of the rewards are taken over the first %d training pairs", count)
    return _First(samples, count)


OBJECTIVES = {
    "sft": _Kind(samples=ExampleSet, format=_example_format, assemble=_sft),
    "reward model": _Kind(samples=PairSet, format=_pair_format, assemble=_reward_model, stand_in=_first_hundredth),
    "process reward model": _Kind(samples=StepSet, format=_step_format, assemble=_process_reward_model),
    **dict.fromkeys(PAIR_LOSSES, _Kind(samples=PairSet, format=_pair_format, assemble=_dpo)),
    "kto": _Kind(samples=JudgedSet, format=_judged_format, assemble=_kto),
}

"""From a configuration to a finished run: the RL loop and its parts, on whatever the launcher has bound them to."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from openrlhf.agents.episode_worker import EpisodeSettings
from openrlhf.agents.episodes import AgentEpisodes, Episodes, OwnEpisodes, hosts_for
from openrlhf.agents.host import kill_every_host
from openrlhf.agents.images import with_images
from openrlhf.agents.single_turn import SingleTurnAgentExecutor
from openrlhf.algorithms.advantages import ESTIMATORS
from openrlhf.checkpoint.folder import DEEPSPEED_PARTS, CheckpointError
from openrlhf.checkpoint.manager import CheckpointedModel, Checkpointer, CheckpointManager
from openrlhf.checkpoint.universal import UniversalCheckpoint, UniversalStart
from openrlhf.config.commands import RLConfig
from openrlhf.config.fields import ConfigError
from openrlhf.config.rules import required
from openrlhf.data.curricula import CURRICULA, Curriculum, CurriculumSettings
from openrlhf.data.image_places import DataImages
from openrlhf.data.prompts import PromptSet, PromptStream
from openrlhf.data.recognition import PromptFormat, recognise
from openrlhf.data.sources import load_records
from openrlhf.learners.workers import Workers
from openrlhf.observability.ledger import TrainedLedger
from openrlhf.observability.loggers import require_loggers
from openrlhf.observability.rollout_log import RolloutLog
from openrlhf.observability.run_directory import RunDirectory
from openrlhf.observability.startup import StartUp, process_began
from openrlhf.observability.token_log import TokenLog
from openrlhf.observability.watchdog import Watchdog
from openrlhf.rollout.async_collector import AsyncCollector
from openrlhf.rollout.base import ControlledEngine
from openrlhf.rollout.collector import SyncCollector
from openrlhf.rollout.filtering import ScoreFilter
from openrlhf.rollout.requests import RequestHandler
from openrlhf.rollout.runner import EpisodeRunner
from openrlhf.runs.launchers import LauncherFactory, RunParts, make_launcher, resolve_launcher
from openrlhf.runs.local_copies import local_copies
from openrlhf.runs.preflight import (
    check_teacher,
    checked_model_dir,
    claimed_model_dir,
    create_run_directory,
    policy_images,
    policy_tokenizer,
    warn_of_few_steps,
)
from openrlhf.runs.process import (
    RunResult,
    frozen_gc,
    link_model,
    observed,
    prepare_process,
    user_errors_end_the_run,
    watchdog,
)
from openrlhf.runs.resume import (
    Checkpoints,
    opened_checkpoints,
    recorded_settings,
    stoppable,
    weights_digest,
    with_restarts,
)
from openrlhf.runs.rl_models import ACTOR, CRITIC
from openrlhf.runs.worlds import require_worlds, world_plan, world_records
from openrlhf.trainers.callbacks import Callbacks
from openrlhf.trainers.evaluation import BackgroundEvaluation, BestMetric, PromptEvaluation, evaluation_names
from openrlhf.trainers.hybrid import DeviceUsage
from openrlhf.trainers.pipelines import Async, AsyncPartial, CarryOver, EngineParts, Pipeline, Sync
from openrlhf.trainers.rl import RLTrainer, RunPeriods, state_after
from openrlhf.types import SamplingParams
from openrlhf.utils import interrupts, waits
from openrlhf.utils.event_loops import BackgroundRunner, LoopRunner

logger = logging.getLogger(__name__)


def run_rl(config: RLConfig) -> int:
    """Train as the configuration says; returns the process's exit status."""
    with user_errors_end_the_run() as ending:
        train(config)
    return ending.status


def train(
    config: RLConfig,
    *,
    make_launcher: LauncherFactory = make_launcher,
    began: float | None = None,
    callbacks: Callbacks | None = None,
) -> RunResult:
    """Assemble, fit, export, and report. Whatever ends the run, its directory stays readable.

    `began`: when its start began, by `time.time`; None: with this process. `callbacks`: told of steps and evaluations.
    """
    start = StartUp(process_began() if began is None else began)
    start.mark("imports")
    prepare_process(config.train)
    config = resolve_launcher(config)
    require_loggers(config.logger)
    require_worlds(config)
    model_dir = checked_model_dir(config.ckpt.output_dir)
    local_copies(config)  # a download may take longer than a watchdog would wait
    with (
        watchdog(config.train) as watching,
        claimed_model_dir(model_dir),
        opened_checkpoints(
            config.ckpt,
            model=ACTOR,
            universal_parts=list(_universal_parts(config).values()) if config.ds.use_universal_ckpt else (),
        ) as checkpoints,
    ):
        return with_restarts(
            lambda now: _train(
                config,
                make_launcher,
                now,
                watching,
                model_dir=model_dir,
                start=start.again(),
                callbacks=callbacks or Callbacks(),
            ),
            checkpoints,
            config.ckpt,
            most=config.train.max_restarts,
        )


def _train(
    given: RLConfig,
    make_launcher: LauncherFactory,
    checkpoints: Checkpoints,
    watching: Watchdog,
    *,
    model_dir: Path,
    start: StartUp,
    callbacks: Callbacks,
) -> RunResult:
    config = local_copies(given)
    tokenizer = policy_tokenizer(config)
    images = policy_images(config, tokenizer)
    prompts = prompt_stream(config, tokenizer, images)
    held_out = prompts_of(config, tokenizer, evaluation=True, images=images) if config.eval.dataset else None
    best = BestMetric(config.ckpt.best_metric_key)
    if held_out and best.is_named:
        best.require(evaluation_names(held_out.datasources, k=config.eval.n_samples_per_prompt))
    start.mark("data")

    available = math.ceil(len(prompts) / config.rollout.batch_size)
    warn_of_few_steps(config.train, available, remedy="--train.num_episodes")
    rounds, total_steps = planned_length(config, prompts)
    with (
        event_loop(config) as loop,
        open_parts(
            given,
            make_launcher,
            tokenizer,
            images,
            loop,
            total_steps=total_steps,
            has_worked=bool(checkpoints.found or checkpoints.universal),
            start=start,
        ) as (bound, runner),
    ):
        schedule = RunPeriods(
            rounds=rounds,
            eval_every=config.eval.period,
            eval_at_ends=config.eval.at_start and held_out is not None,
            save_every=config.ckpt.period,
            log_every=config.logger.logging_steps,
            max_length=config.data.max_len,
            by_source=len(prompts.datasources) > 1,
        )
        evaluation = None
        if held_out is not None:
            evaluation = PromptEvaluation(
                prompts=held_out,
                runner=runner,
                loop=loop,
                samples_per_prompt=config.eval.n_samples_per_prompt,
                sampling_params=sampling_params(config, temperature=config.eval.temperature, evaluation=True),
            )
        pipeline = build_pipeline(config, bound, prompts=prompts, runner=runner, loop=loop, evaluation=evaluation)
        run_dir = create_run_directory(given, checkpoints.found)
        title = f"{Path(required(given.actor.model_name_or_path)).name} · {config.algo.advantage.estimator}"
        checkpointer: Checkpointer | None = rl_checkpointer(
            config, checkpoints, bound.kept, run_dir, recorded_settings(given), total_steps=total_steps
        )
        if checkpoints.universal and checkpoints.folder and checkpointer:
            parts = _universal_parts(config)
            checkpointer = UniversalStart(
                {checkpoints.folder.path / parts[name]: model for name, model in bound.kept.items()},
                checkpointer,
                loop_state=functools.partial(
                    _state_after, checkpoints.universal, config, prompts, pipeline, bound.workers, best
                ),
            )
        with (
            observed(config, run_dir, watching, steps=schedule.rounds, title=title) as seen,
            contextlib.closing(RolloutLog(run_dir.rollouts, tokenizer, groups=config.logger.rollouts)) as rollout_log,
            contextlib.closing(TokenLog(run_dir.path, tokenizer, groups=config.logger.rollouts_per_step)) as token_log,
            contextlib.closing(TrainedLedger(run_dir.trained)) as ledger,
            stoppable(config.ckpt, checkpoints) as stop,
        ):
            trainer = RLTrainer(
                pipeline=pipeline,
                workers=bound.workers,
                best=best,
                schedule=schedule,
                logger=seen.logger,
                rollout_log=rollout_log,
                token_log=token_log,
                ledger=ledger,
                progress=seen.progress,
                warnings=seen.warnings,
                checkpointer=checkpointer,
                stop=stop,
                start=start,
                callbacks=callbacks,
            )
            if origin := checkpoints.found or checkpoints.universal:
                seen.progress.note(f"continues from {origin.path}")
            with frozen_gc():
                measured = trainer.fit()
            seen.progress.phase("export")
            written = _export(config, bound.kept, model_dir)
            link_model(run_dir, model_dir)
            seen.progress.note(f"model in {', critic in '.join(map(str, written))}")
    return RunResult(run_dir=run_dir.path, model_dir=model_dir, evaluation=measured, ended_early=callbacks.ended)


@contextlib.contextmanager
def open_parts(
    given: RLConfig,
    make_launcher: LauncherFactory,
    tokenizer: Any,
    images: DataImages | None,
    loop: LoopRunner,
    *,
    total_steps: int,
    has_worked: bool = False,
    start: StartUp | None = None,
) -> Iterator[tuple[RunParts, EpisodeRunner]]:
    """Everything that samples, judges and trains, before anything is played: what a launcher binds, and who plays
    prompts on it. `images`: of `policy_images`. `total_steps`: optimizer steps of the run. `has_worked`: as that of
    `EpisodeRunner`."""
    config, start = local_copies(given), start or StartUp()
    check_teacher(config, tokenizer)
    with contextlib.ExitStack() as held:
        launcher = held.enter_context(make_launcher(given, tokenizer))
        start.mark("cluster")
        source = launcher.reward()
        reward = source and held.enter_context(started(source, loop, "the reward"))
        start.mark("reward")
        bound = held.enter_context(launcher.build(total_steps=total_steps, loop=loop))
        start.mark_all(bound.start)
        episodes = held.enter_context(
            started(build_episodes(config, bound.engine, tokenizer, images, requests=bound.requests), loop, "episodes")
        )
        greedy = ESTIMATORS[config.algo.advantage.estimator].greedy_baseline
        if greedy and episodes.plays_groups:
            raise ConfigError(
                f"--algo.advantage.estimator {config.algo.advantage.estimator} plays a greedy sample of each prompt by "
                "itself, and this agent plays the samples of a prompt together: choose another estimator"
            )
        yield (
            bound,
            EpisodeRunner(
                episodes=episodes,
                reward=reward,
                seed=config.train.seed,
                has_worked=has_worked,
                greedy_baseline=greedy,
                on_sample=lambda: start.end("first sample"),
            ),
        )


def build_pipeline(
    config: RLConfig,
    bound: RunParts,
    *,
    prompts: PromptStream,
    runner: EpisodeRunner,
    loop: LoopRunner,
    evaluation: PromptEvaluation | None = None,
) -> Pipeline:
    """The pipeline that the flags ask for."""
    parts = EngineParts(bound.engine, bound.weights, DeviceUsage(bound.usage), loop)
    shared: dict[str, Any] = {
        "prompts": prompts,
        "runner": runner,
        "loop": loop,
        "batch_size": config.rollout.batch_size,
        "samples_per_prompt": config.samples_per_prompt,
        "sampling_params": sampling_params(config, temperature=config.rollout.temperature),
        "logprobs_every": config.logprobs_every,
        "score_filter": _score_filter(config),
    }
    if not config.plays_across_rounds:
        collector = SyncCollector(**shared, generate_batch_size=config.generate_batch_size)
        return Sync(parts, collector, bound.turns, evaluation)
    assert isinstance(loop, BackgroundRunner), "episodes that outlive their round need a loop that never rests"
    lasting = functools.partial(AsyncCollector, **shared, engine=bound.engine, at_once=config.generate_batch_size)
    if not config.train.async_enable:
        return CarryOver(parts, lasting(ahead=False), bound.turns, evaluation)
    ahead = functools.partial(lasting, queue_size=config.train.async_queue_size)
    beside = None if evaluation is None else BackgroundEvaluation(evaluation, loop)
    if config.train.partial_rollout_enable:
        return AsyncPartial(parts, ahead(), beside)
    return Async(parts, lambda behind: ahead(behind=behind), beside)


def _score_filter(config: RLConfig) -> ScoreFilter | None:
    if not config.algo.dynamic_filtering_enable:
        return None
    low, high = config.algo.dynamic_filtering_range
    return ScoreFilter(
        low,
        high,
        warn_after=10 * config.rollout.batch_size,
        members=config.fewest_compared,
        greedy=ESTIMATORS[config.algo.advantage.estimator].greedy_baseline,
    )


def _export(config: RLConfig, kept: Mapping[str, CheckpointedModel], model_dir: Path) -> list[Path]:
    """Write the policy, and the critic beside it if it is to be saved; returns the folders."""
    folders = {ACTOR: model_dir}
    if config.critic.save_value_network:
        folders[CRITIC] = model_dir.with_name(f"{model_dir.name}_critic")
    written = {name: folder for name, folder in folders.items() if name in kept}
    for name, folder in written.items():
        kept[name].write(folder, {}, resumable=False)
    return list(written.values())


class PlannedLength(NamedTuple):
    """How long a run is to be."""

    rounds: int
    optimizer_steps: int
    """The length of the schedule of learning rates."""


def planned_length(config: RLConfig, prompts: PromptStream) -> PlannedLength:
    rounds = math.ceil(len(prompts) / config.rollout.batch_size)
    rounds = min(rounds, config.train.total_steps or rounds)
    played = min(len(prompts), rounds * config.rollout.batch_size)
    return PlannedLength(rounds, config.optimizer_steps(played))


def rl_checkpointer(
    config: RLConfig,
    checkpoints: Checkpoints,
    kept: Mapping[str, CheckpointedModel],
    run_dir: RunDirectory,
    settings: Mapping[str, Any],
    *,
    total_steps: int,
) -> CheckpointManager | None:
    """Writes and reads the checkpoints of a run of so many optimizer steps; None for a run that has none."""
    if checkpoints.folder is None:
        return None
    identity = {
        "what is trained": f"rl with {' and '.join(kept)}",
        "--rollout.batch_size": str(config.rollout.batch_size),
        "--rollout.n_samples_per_prompt": str(config.samples_per_prompt),
        "--train.batch_size": str(config.train.batch_size),
        # Neither the reference nor the model below an adapter is in the checkpoint.
        "the digest of --actor.model_name_or_path's weights": weights_digest(required(config.actor.model_name_or_path)),
    }
    return CheckpointManager(
        checkpoints.folder,
        kept,
        found=checkpoints.found,
        identity=identity,
        notes={"run_directory": str(run_dir.path.resolve()), "optimizer_steps": total_steps},
        settings=settings,
        resumable=not config.ckpt.disable_ds,
    )


def _universal_parts(config: RLConfig) -> dict[str, str]:
    """The folders of DeepSpeed's checkpoints below --ckpt.path, by what our checkpoints call each model."""
    actor, critic = DEEPSPEED_PARTS
    return {ACTOR: actor, CRITIC: critic} if config.uses_critic else {ACTOR: actor}


def _state_after(
    universal: UniversalCheckpoint,
    config: RLConfig,
    prompts: PromptStream,
    pipeline: Pipeline,
    workers: Workers,
    best: BestMetric,
) -> dict[str, Any]:
    """The loop's state where DeepSpeed's checkpoint of the actor ends. Raises CheckpointError."""
    if universal.rounds is None:
        raise CheckpointError(
            f"{universal.path} does not say how many rounds were done (global_step): it is not an actor's checkpoint. "
            "Start a new run from its model instead"
        )
    taken = universal.rounds * config.rollout.batch_size if universal.prompts is None else universal.prompts
    taken = min(taken, len(prompts))
    return state_after(universal.rounds, taken, pipeline=pipeline, workers=workers, best=best)


def prompt_stream(config: RLConfig, tokenizer: Any, images: DataImages | None) -> PromptStream:
    """The prompts of a run, in their order."""
    prompts = prompts_of(config, tokenizer, evaluation=False, images=images)
    return PromptStream(
        prompts,
        seed=config.train.seed,
        num_episodes=config.train.num_episodes,
        curriculum=curriculum_of(config, prompts),
    )


def curriculum_of(config: RLConfig, prompts: PromptSet) -> Curriculum | None:
    """What chooses the order of prompts by their results. Raises DataError for records without what it needs."""
    data = config.data
    if data.curriculum == "off":
        return None
    choice = CURRICULA[data.curriculum]
    settings = CurriculumSettings(
        seed=config.train.seed,
        half_life=data.curriculum_half_life or choice.half_life,
        explore=data.curriculum_explore,
        threshold=data.curriculum_threshold,
        score_range=data.curriculum_score_range,
    )
    needed = {"difficulty_N": prompts.difficulties(data.difficulty_key)} if choice.takes_difficulty else {}
    return choice.make(len(prompts), settings, **needed)


def prompts_of(config: RLConfig, tokenizer: Any, *, evaluation: bool, images: DataImages | None = None) -> PromptSet:
    """Training or evaluation prompts, rendered and checked. `images`: of `policy_images`."""
    flag = "--eval.dataset" if evaluation else "--data.prompt_dataset"
    records = load_records(
        required(config.eval.dataset if evaluation else config.prompt_dataset),
        split=config.eval.split if evaluation else config.data.prompt_split,
        max_samples=config.data.max_samples,
        probs=None if evaluation else config.data.prompt_probs,
        seed=config.train.seed,
        trust_remote_code=config.data.trust_remote_code,
        worlds=functools.partial(world_records, config, evaluation=evaluation),
        flag=flag,
    )
    data = config.data
    given = PromptFormat(
        input_key=data.input_key,
        label_key=config.label_key,
        image_key=data.image_key,
        apply_chat_template=data.apply_chat_template or config.plays_world,
    )
    found = recognise(records, given, flag=flag)
    return PromptSet(
        records,
        tokenizer=tokenizer,
        input_key=found.input_key,
        label_key=found.label_key,
        apply_chat_template=found.apply_chat_template,
        input_template=data.prompt_template,
        images=images and images.under(found.image_key),
        image_key=found.image_key,
        teacher_key=config.teacher.prompt_key if config.uses_teacher and not evaluation else None,
        # A prompt must leave room for the response; without a response limit, for one token.
        max_prompt_tokens=data.max_len - (config.rollout.max_new_tokens or 1),
        long_prompts=data.long_prompts,
        flag=flag,
    )


def build_episodes(
    config: RLConfig,
    engine: ControlledEngine,
    tokenizer: Any,
    images: DataImages | None,
    *,
    requests: RequestHandler | None = None,
) -> Episodes:
    """The player of episodes: a user's agent or a world in hosts, or our own single turn in this process. `images`: of
    `policy_images`. `requests`: of `RunParts`."""
    if not config.train.agent_func_path:
        if images is not None:
            tokenizer = with_images(tokenizer, images.processor, allow_urls=images.places.allow_urls)
        return OwnEpisodes(
            SingleTurnAgentExecutor(), engine=engine, tokenizer=tokenizer, max_length=config.data.max_len
        )
    settings = EpisodeSettings(
        agent_file=config.train.agent_func_path,
        tokenizer=required(config.actor.model_name_or_path),
        use_fast=not config.data.disable_fast_tokenizer,
        trust_remote_code=config.actor.trust_remote_code,
        max_length=config.data.max_len,
        max_steps=config.max_steps,
        max_model_len=engine.max_model_len,
        chat_template=config.data.tokenizer_chat_template,
        template_arguments=tuple(config.data.template_arguments.items()),
        images=images is not None,
        allow_image_urls=config.data.allow_image_urls,
        world=world_plan(config, config.train.agent_func_path) if config.plays_world else None,
    )
    at_once = config.generate_batch_size * config.samples_per_prompt
    return AgentEpisodes(
        settings,
        engine=engine,
        requests=requests,
        hosts=hosts_for(at_once, wanted=config.rollout.agent_hosts),
        step_timeout=config.rollout.step_timeout,
    )


class _Service(Protocol):
    async def start(self) -> None: ...

    async def close(self) -> None: ...


_S = TypeVar("_S", bound=_Service)


def event_loop(config: RLConfig) -> AbstractContextManager[LoopRunner]:
    """The event loop of episodes: it runs between the other phases of a round, or all the time."""
    return BackgroundRunner() if config.plays_across_rounds else asyncio.Runner()


@contextlib.contextmanager
def started(service: _S, loop: LoopRunner, name: str) -> Iterator[_S]:
    """A reward source or a player of episodes, from its start to its end."""
    loop.run(_begin_ticking())  # until everything is closed
    try:
        loop.run(_start(service, name))
        yield service
    except KeyboardInterrupt:
        interrupts.end_at_once_on_the_next(last=kill_every_host)
        raise
    finally:
        loop.run(_close(service))


async def _start(service: _Service, name: str) -> None:
    with waits.waiting(f"to start: {name}"):
        await service.start()


async def _begin_ticking() -> asyncio.Task[None]:
    return asyncio.create_task(_tick(), name="tick")


async def _tick() -> None:
    """Wakes the loop twice a second. A signal that comes just as the loop goes to sleep would wait for the next event,
    and a slow reward may be minutes away from one."""
    while True:
        await asyncio.sleep(0.5)


async def _close(service: _Service) -> None:
    """First what is still under way, which would otherwise see its rewards fail one by one."""
    unfinished = asyncio.all_tasks() - {asyncio.current_task()}
    for task in unfinished:
        task.cancel()
    await asyncio.gather(*unfinished, return_exceptions=True)
    await service.close()


def sampling_params(config: RLConfig, *, temperature: float, evaluation: bool = False) -> SamplingParams:
    """How the run samples."""
    return SamplingParams(
        temperature=temperature,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        max_tokens=config.rollout.max_new_tokens,
        stop=list(config.rollout.stop or ()),
        logprobs=None if evaluation and config.vllm.num_engines != 0 else True,
        supports=0 if evaluation else config.largest_support,
    )

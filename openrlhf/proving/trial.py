"""Trials: a run made small, built from the parts that the run itself is built from, and opened for proofs to look at.

RLTrial           policy, reference, critic, engine, reward or agent, and a round of groups that were really played
SupervisedTrial   model, data and objective of SFT, reward models, DPO and KTO

Weights are moved away from those of the files before anything else happens: a policy that equals its reference, or an
engine that has its weights from the files, would hide what the proofs look for.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from openrlhf.backends.base import Backend
from openrlhf.backends.ranks import ALONE
from openrlhf.backends.torch import Distribution
from openrlhf.config.commands import RLConfig
from openrlhf.config.rules import required
from openrlhf.data.prompts import PromptStream
from openrlhf.models.adapters import is_adapter
from openrlhf.observability.loggers import NullLogger
from openrlhf.observability.progress import Progress
from openrlhf.proving.reference import PlainModel
from openrlhf.runs.launchers import LauncherFactory, RunParts, make_launcher
from openrlhf.runs.preflight import policy_images, policy_tokenizer
from openrlhf.runs.process import process_device
from openrlhf.runs.rl_assembly import (
    build_pipeline,
    curriculum_of,
    event_loop,
    open_parts,
    prompts_of,
    sampling_params,
)
from openrlhf.runs.rl_models import RLModels, RLTraining
from openrlhf.runs.supervised_assembly import LoopParts, Place, loop_parts
from openrlhf.trainers.pipelines import Pipeline
from openrlhf.trainers.supervised import Periods, SupervisedTrainer, WholeSet
from openrlhf.types import (
    Generation,
    Group,
    Outcome,
    PlacedImage,
    Prompt,
    RewardPart,
    SampleKey,
    SamplingParams,
    Supports,
    TrainingBatch,
    Trajectory,
)
from openrlhf.utils.event_loops import LoopRunner

MOVED = 0.02
"""How far weights are moved from those of the files, as a part of their size."""
LEARNING_RATE = 1e-2
"""Of proofs in which the policy has to move."""


def move_weights(module: nn.Module, *, seed: int, by: float = MOVED) -> None:
    """Add noise to every trained parameter, in proportion to its size; to one that is 0, noise of that size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.requires_grad:
                size = float(parameter.detach().float().pow(2).mean().sqrt()) or 1.0
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_((by * size * noise).to(parameter))


class Weights:
    """The weights of a module as they are, to be put back."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._kept = {name: p.detach().clone() for name, p in module.named_parameters()}

    @torch.no_grad()
    def restore(self) -> None:
        for name, parameter in self.module.named_parameters():
            parameter.copy_(self._kept[name])


def optimizer_gradient(backend: Backend, *, beta: float) -> dict[str, Tensor]:
    """The gradient that the optimizer got in its first step, by parameter: AdamW's first moment is (1 − β₁) times it.

    It is what every backend and any number of ranks have in common, and nothing between the loss and the optimizer can
    be left out of it: micro-batches, sums over ranks, and the clip by the norm.
    """
    found = {}
    for name, tensor in backend.tensor_state():
        kind, _, parameter = name.partition("/")
        if kind == "exp_avg":
            found[parameter] = tensor.detach().float().cpu() / (1 - beta)
    return found


def unclipped(gradient: Mapping[str, Tensor], norm: float, *, max_norm: float) -> dict[str, Tensor]:
    """The gradient before the optimizer's clip by its norm, which was `norm`."""
    factor = min(1.0, max_norm / (norm + 1e-6)) if max_norm else 1.0
    return {name: tensor / factor for name, tensor in gradient.items()}


# --------------------------------------------------------------------------------------------------------- RL


class Call(NamedTuple):
    """One request that an engine has answered."""

    token_ids: tuple[int, ...]
    generation: Generation
    images: tuple[PlacedImage, ...]
    params: SamplingParams


class RecordedEngine:
    """An engine that remembers what it was asked and what it answered."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    async def generate(
        self, token_ids: Sequence[int], sampling_params: SamplingParams, images: Sequence[PlacedImage] = ()
    ) -> Generation:
        asked = tuple(token_ids)
        generation = await self._engine.generate(token_ids, sampling_params, images)
        self.calls.append(Call(asked, _copied(generation), tuple(images), sampling_params.copy()))
        return generation

    async def stream(
        self, token_ids: Sequence[int], sampling_params: SamplingParams, images: Sequence[PlacedImage] = ()
    ) -> Any:
        parts = []
        asked = tuple(token_ids)
        async with contextlib.aclosing(self._engine.stream(token_ids, sampling_params, images)) as stream:
            async for part in stream:
                parts.append(part)
                yield part
        whole = Generation(
            token_ids=[token for part in parts for token in part.token_ids],
            logprobs=None if parts[-1].logprobs is None else [x for part in parts for x in part.logprobs or ()],
            versions=[version for part in parts for version in part.versions],
            finish_reason=parts[-1].finish_reason,
            routes=parts[-1].routes,
            supports=Supports.joined([(part.supports, len(part.token_ids)) for part in parts]),
        )
        self.calls.append(Call(asked, whole, tuple(images), sampling_params.copy()))


def _copied(generation: Generation) -> Generation:
    return dataclasses.replace(
        generation,
        token_ids=list(generation.token_ids),
        logprobs=None if generation.logprobs is None else list(generation.logprobs),
        versions=list(generation.versions),
    )


def recording(make: LauncherFactory, record: Callable[[RunParts], RunParts]) -> LauncherFactory:
    """A launcher like another, whose parts `record` has seen."""

    @contextlib.contextmanager
    def opened(config: RLConfig, tokenizer: Any) -> Iterator[Any]:
        with make(config, tokenizer) as launcher:
            yield _Recording(launcher, record)

    return opened


@dataclass(frozen=True)
class _Recording:
    launcher: Any
    record: Callable[[RunParts], RunParts]

    def reward(self) -> Any:
        return self.launcher.reward()

    @contextlib.contextmanager
    def build(self, *, total_steps: int, loop: LoopRunner) -> Iterator[RunParts]:
        with self.launcher.build(total_steps=total_steps, loop=loop) as parts:
            yield self.record(parts)


class Updated(NamedTuple):
    """One round through the run's own learners."""

    batch: TrainingBatch
    metrics: dict[str, float]
    policy: dict[str, Tensor]
    """The gradient that the policy's optimizer got."""
    critic: dict[str, Tensor]


@dataclass
class RLTrial:
    """A small RL run, opened. Proofs leave it as they found it."""

    given: RLConfig
    """As the user gave it."""
    config: RLConfig
    """As it is tried."""
    folder: Path
    tokenizer: Any
    prompts: list[Prompt]
    num_prompts: int
    """Of the trial's data set."""
    loop: LoopRunner
    bound: RunParts
    engine: RecordedEngine
    pipeline: Pipeline
    training: RLTraining
    runner: Any
    make: LauncherFactory
    """Binds the trial, and the runs that proofs start."""
    files: list[Weights]
    """The weights of policy and critic as their files have them; empty where no proof asks for them."""
    several_ranks: bool
    kind: str = "rl"
    blocked: str | None = "nothing was played"
    """Why nothing can be proved; None: it can."""
    groups: list[Group] = field(default_factory=list)
    """Played by the user's agent or judged by the user's reward, with the moved weights."""
    version: int = 0
    _asleep: bool = False
    shown: list[str] = field(default_factory=list)
    """Lines that people should see, beside the table."""
    worked_out: Any = None
    """What definitions say of the samples (`plain_round.played`)."""

    @property
    def models(self) -> RLModels:
        return self.training.models

    @property
    def device(self) -> torch.device:
        return next(self.models.policy.parameters()).device

    @property
    def path(self) -> str:
        return required(self.config.actor.model_name_or_path)

    @property
    def trained(self) -> list[str]:
        return [name for name, p in self.models.policy.named_parameters() if p.requires_grad]

    @functools.cached_property
    def samples(self) -> list[Group]:
        """The played groups with made-up rewards, different ones within every group, and one failed member each.

        What a reward function gives to an untrained model is often all the same, and then there is no gradient.
        """
        return made_up(self.groups)

    @functools.cached_property
    def plain(self) -> PlainModel:
        """The policy as transformers computes it, with the moved weights."""
        kind = "images" if self.config.data.max_images_per_prompt > 0 else "text"
        plain = self._plain(self.path, kind)
        named = {name.removeprefix("model."): p for name, p in self.models.policy.named_parameters()}
        trained = [name.removeprefix("model.") for name in self.trained]
        plain.take_weights(named, trained, scaling=self.adapter_scaling)
        return plain

    @functools.cached_property
    def plain_reference(self) -> PlainModel:
        """The files' model."""
        kind = "images" if self.config.data.max_images_per_prompt > 0 else "text"
        return self._plain(self.path, kind)

    @functools.cached_property
    def plain_teacher(self) -> PlainModel:
        kind = "images" if self.config.data.max_images_per_prompt > 0 else "text"
        if self.config.teacher.policy == "current":
            return self.plain
        return self._plain(self.config.teacher_path or self.path, kind)

    @functools.cached_property
    def plain_critic(self) -> PlainModel:
        assert self.models.critic is not None
        plain = self._plain(required(self.config.critic_path), "body")
        named = {n.removeprefix("model."): p for n, p in self.models.critic.model.named_parameters()}
        trained = [name for name, p in self.models.critic.model.named_parameters() if p.requires_grad]
        plain.take_weights(named, trained, scaling=self.adapter_scaling)
        return plain

    @property
    def adapter_scaling(self) -> float:
        """α / r, from the flags."""
        lora = self.config.ds.lora
        return lora.alpha / lora.rank if lora.rank else 1.0

    def _plain(self, folder: str, kind: str) -> PlainModel:
        return PlainModel(folder, kind=kind, device=self.device, trust_remote_code=self.config.actor.trust_remote_code)

    # ---- what the run does

    def to_sampling(self) -> None:
        """The engine has the policy's present weights and samples."""
        if self._asleep:
            self.version += 1
            self.pipeline.finish_training(self.version)
            self._asleep = False

    def to_training(self) -> None:
        if not self._asleep:
            self.pipeline.begin_training()
            self._asleep = True

    def push(self) -> None:
        """Training ends: the engine gets the policy's weights."""
        self.to_training()
        self.to_sampling()

    def play(self, prompts: Sequence[Prompt] | None = None, *, samples: int | None = None) -> list[Group]:
        self.to_sampling()
        params = sampling_params(self.config, temperature=self.config.rollout.temperature)
        return self.loop.run(
            self.runner.play_all(
                self.prompts if prompts is None else prompts,
                n=samples or self.config.samples_per_prompt,
                sampling_params=params,
            )
        )

    def learners(self, config: RLConfig | None = None, *, distribution: Distribution | None = None) -> RLTraining:
        """Models and learners of the run anew, with empty optimizers."""
        return RLTraining(
            config or self.config, self.models, total_steps=1, device=self.device, distribution=distribution
        )

    def updated(
        self,
        groups: Sequence[Group] | None = None,
        *,
        config: RLConfig | None = None,
        edit: Callable[[TrainingBatch], None] = lambda batch: None,
    ) -> Updated:
        """One round through place, score, assign_advantages and update, as the loop does it; then all weights are put
        back. `edit` is called before the update."""
        self.to_training()
        config = config or self.config
        kept = [Weights(m) for m in (self.models.policy, self.models.critic) if m is not None]
        training = self.learners(config)
        try:
            batch, metrics = training.learners.place(self.samples if groups is None else groups)
            training.learners.score(batch)
            metrics.merge(training.learners.assign_advantages(batch))
            edit(batch)
            metrics.merge(training.learners.update(batch))
            values = metrics.values()
            policy, *critics = training.backends
            return Updated(
                batch,
                values,
                _read(policy, config.actor, values.get("actor_grad_norm", 0.0)),
                _read(critics[0], config.critic, values.get("critic_grad_norm", 0.0)) if critics else {},
            )
        finally:
            for weights in kept:
                weights.restore()


def _read(backend: Backend, optimizer: Any, norm: float) -> dict[str, Tensor]:
    gradient = optimizer_gradient(backend, beta=optimizer.adam.betas[0])
    return unclipped(gradient, norm, max_norm=optimizer.max_norm)


def made_up(groups: Sequence[Group]) -> list[Group]:
    """The same samples with rewards of our own on every turn, and a failed member in every group."""
    result = []
    for group in groups:
        members: list[Trajectory] = []
        for place, member in enumerate(t for t in group.trajectories if not t.failed):
            segments, total = [], 0.0
            for number, segment in enumerate(member.segments):
                rewards = torch.zeros_like(segment.turn_rewards)
                ends = segment.action_mask.nonzero().flatten()[segment.turn_ends_A]
                for turn, end in enumerate(ends.tolist()):
                    rewards[end] = 0.25 * ((3 * place + 5 * (turn + number) + group.prompt.ordinal) % 7) - 0.5
                total += float(rewards.sum())
                segments.append(dataclasses.replace(segment, turn_rewards=rewards))
            second = 0.25 * (place % 3)
            members.append(
                dataclasses.replace(
                    member,
                    segments=tuple(segments),
                    reward=total,
                    reward_size=None,
                    greedy_reward=0.25 * (group.prompt.ordinal % 3),
                    reward_parts=(RewardPart("first", total - 2 * second), RewardPart("second", second, 2.0)),
                    score=total,
                )
            )
        members.append(failed(group.prompt.ordinal, len(group.trajectories)))
        result.append(Group(prompt=group.prompt, trajectories=tuple(members)))
    return result


def failed(prompt: int, sample: int) -> Trajectory:
    return Trajectory(
        key=SampleKey(prompt, sample), segments=(), outcome=Outcome.FAILED, error="a failure that this trial made up"
    )


@contextlib.contextmanager
def open_rl(
    given: RLConfig,
    config: RLConfig,
    folder: Path,
    *,
    make: LauncherFactory = make_launcher,
    several_ranks: bool = False,
) -> Iterator[RLTrial]:
    """The small run `config` of the run `given`, before anything is played. `several_ranks`: the run has some."""
    tokenizer = policy_tokenizer(config)
    images = policy_images(config, tokenizer)
    usable = prompts_of(config, tokenizer, evaluation=False, images=images)
    stream = PromptStream(usable, seed=config.train.seed, num_episodes=None, curriculum=curriculum_of(config, usable))
    engines: list[RecordedEngine] = []

    def record(parts: RunParts) -> RunParts:
        engines.append(RecordedEngine(parts.engine))
        return parts._replace(engine=engines[-1])

    with (
        event_loop(config) as loop,
        open_parts(config, recording(make, record), tokenizer, images, loop, total_steps=1) as (bound, runner),
    ):
        assert bound.training is not None  # of a run in one process
        models = bound.training.models
        trained = [module for module in (models.policy, models.critic) if module is not None]
        files = [Weights(module) for module in trained] if several_ranks else []
        move_weights(models.policy, seed=1)
        if models.critic is not None:
            move_weights(models.critic, seed=2)
        pipeline = build_pipeline(config, bound, prompts=stream, runner=runner, loop=loop)
        pipeline.start(0)
        trial = RLTrial(
            given=given,
            config=config,
            folder=folder,
            tokenizer=tokenizer,
            prompts=stream.take(config.rollout.batch_size),
            num_prompts=len(usable),
            loop=loop,
            bound=bound,
            engine=engines[-1],
            pipeline=pipeline,
            training=bound.training,
            runner=runner,
            make=make,
            files=files,
            several_ranks=several_ranks,
        )
        yield trial


# ------------------------------------------------------------------------------------------------- supervised


class Stepped(NamedTuple):
    """One optimizer step of the supervised loop."""

    metrics: dict[str, float]
    gradient: dict[str, Tensor]


@dataclass
class SupervisedTrial:
    """A small supervised run, opened."""

    given: Any
    config: Any
    folder: Path
    kind: str
    parts: LoopParts
    place: Place
    count: int
    """Samples that are tried."""
    files: list[Weights]
    several_ranks: bool
    blocked: str | None = None
    shown: list[str] = field(default_factory=list)

    @property
    def tokenizer(self) -> Any:
        return self.parts.tokenizer

    @property
    def samples(self) -> list[Any]:
        return [self.parts.samples[i] for i in range(self.count)]

    @property
    def device(self) -> torch.device:
        return self.place.device

    @property
    def module(self) -> Any:
        return self.parts.model.module

    @property
    def adapter_scaling(self) -> float:
        lora = self.config.ds.lora
        return lora.alpha / lora.rank if lora.rank else 1.0

    @property
    def is_policy(self) -> bool:
        return self.kind != "reward model"

    @functools.cached_property
    def plain(self) -> PlainModel:
        kind = ("images" if self.config.data.max_images_per_prompt > 0 else "text") if self.is_policy else "body"
        plain = self._plain(required(self.config.model.model_name_or_path), kind)
        named = dict(self.module.model.named_parameters())
        plain.take_weights(named, [n for n, p in named.items() if p.requires_grad], scaling=self.adapter_scaling)
        return plain

    @functools.cached_property
    def plain_reference(self) -> PlainModel:
        kind = "images" if self.config.data.max_images_per_prompt > 0 else "text"
        return self._plain(required(self.config.reference_path), kind)

    def _plain(self, folder: str, kind: str) -> PlainModel:
        return PlainModel(folder, kind=kind, device=self.device, trust_remote_code=self.config.model.trust_remote_code)

    def step(self, micro_batches: Sequence[Sequence[int]]) -> Stepped:
        """One optimizer step of the run's own loop on these micro-batches; then the weights are put back."""
        kept = Weights(self.module)
        backend = self.place.distribution.train(self.module, self.config, total_steps=1)
        with Progress(1, "prove", stream=io.StringIO(), live=False) as progress:
            trainer = SupervisedTrainer(
                backend=backend,
                objective=self.parts.objective,
                evaluation=None,
                schedule=self.parts.schedule,
                periods=Periods(),
                tokens_per_forward=self.config.tokens_per_forward,
                logger=NullLogger(),
                progress=progress,
            )
            samples = [i for micro in micro_batches for i in micro]
            values = trainer.step(WholeSet(samples, micro_batches)).values()
        gradient = optimizer_gradient(backend, beta=self.config.adam.betas[0])
        kept.restore()
        return Stepped(values, unclipped(gradient, values.get("grad_norm", 0.0), max_norm=self.config.max_norm))


@contextlib.contextmanager
def open_supervised(
    given: Any, config: Any, folder: Path, *, kind: str, several_ranks: bool = False
) -> Iterator[SupervisedTrial]:
    place = Place(process_device(), Distribution(ALONE, config.ds))
    parts = loop_parts(config, place)
    files = [Weights(parts.model.module)] if several_ranks else []
    move_weights(parts.model.module, seed=1)
    yield SupervisedTrial(
        given=given,
        config=config,
        folder=folder,
        kind=kind,
        parts=parts,
        place=place,
        count=min(len(parts.samples), config.train.batch_size),
        files=files,
        several_ranks=several_ranks,
    )


def has_adapter(trial: RLTrial | SupervisedTrial) -> bool:
    module = trial.models.policy if isinstance(trial, RLTrial) else trial.module
    return any(is_adapter(name) for name, _ in module.named_parameters())

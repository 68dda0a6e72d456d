"""The models of a local run — policy, reference, critic — and the workers that score and train them."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.algorithms.advantages import Turns, get_estimator
from openrlhf.algorithms.distillation import get_divergence
from openrlhf.algorithms.kl import AdaptiveKL, FixedKL, KLController, get_kl_estimator
from openrlhf.algorithms.losses import LossSettings, get_policy_loss
from openrlhf.backends.base import Backend, Distribution
from openrlhf.backends.ranks import ALONE, Ranks
from openrlhf.backends.torch import Distribution as OneProcess
from openrlhf.checkpoint.export import export_policy, export_value_model
from openrlhf.checkpoint.manager import LocalCheckpointedModel
from openrlhf.config.commands import RLConfig
from openrlhf.config.fields import ConfigError
from openrlhf.config.rules import required
from openrlhf.learners.accumulation import MicroBatching
from openrlhf.learners.advantages import AdvantageSettings, RewardShaping, TeacherReward
from openrlhf.learners.critic import CriticLearner
from openrlhf.learners.policy import (
    BalanceSettings,
    CorrectionSettings,
    DistillationSettings,
    PolicyLearner,
    PolicySettings,
)
from openrlhf.learners.rank import CriticPart, KLTerm, RankLearners, TeacherTerm
from openrlhf.learners.scorer import ONE_NUMBER, Columns, Scorer, likeliest, logprobs, reference_logprobs, values
from openrlhf.learners.steps import StepSettings
from openrlhf.learners.teacher import TEACHER_LOSS, TEACHER_REWARD, ModelTeacher, Teacher
from openrlhf.models.adapters import WithoutAdapter
from openrlhf.models.body import NoRoutersError, experts_per_token
from openrlhf.models.loading import LoadSettings, load_config, load_policy, load_value_model, vocabulary_of
from openrlhf.models.policy import Policy
from openrlhf.models.value import ValueModel
from openrlhf.runs.preflight import reading_model, warn_of_positions
from openrlhf.types import PackedTokens

logger = logging.getLogger(__name__)

ACTOR = "actor"
CRITIC = "critic"
"""Folders in a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RLModels:
    """The models that a local run has loaded."""

    policy: Policy
    reference: nn.Module | None
    critic: ValueModel | None
    teacher: Policy | None = None


def load_models(
    config: RLConfig,
    device: torch.device,
    *,
    with_reference: bool = True,
    with_critic: bool = True,
    with_teacher: bool = True,
    device_ready: Callable[[], None] = lambda: None,
) -> RLModels:
    """Policy, and what the algorithm needs beside it: no reference at a KL coefficient of 0, no critic but for gae.

    Of a policy with an adapter the reference is the policy without it. `with_…` off: that model lives elsewhere.
    `device_ready` is called before the first tensor goes to the device, and may wait.
    """
    policy = _load_policy(config, device, trains=True, device_ready=device_ready)
    policy.replays = replays_routes(config, policy)
    warn_of_positions(policy.model.config, max_len=config.data.max_len)
    reference: nn.Module | None = None
    if config.reference_is_base:
        reference = WithoutAdapter(policy)
    elif config.uses_reference and with_reference:
        reference = load_reference(config, device)
    critic = load_critic(config, device) if with_critic else None
    teacher = load_teacher(config, device) if with_teacher and config.teacher_path else None
    return RLModels(policy=policy, reference=reference, critic=critic, teacher=teacher)


def replays_routes(config: RLConfig, policy: Policy) -> bool:
    """Whether the policy is trained through the experts that engines tell. Raises ConfigError where it cannot."""
    asked, routers = config.algo.router_replay, policy.routers
    why = "it is no mixture of experts" if routers is None else routers.problem
    if asked and why:
        family = policy.model.config.get_text_config().model_type
        raise ConfigError(f"--algo.router_replay: the routes of {family} cannot be replayed: {why}; leave the flag out")
    if routers is not None and why and asked is None:
        logger.info("The experts that engines choose are not those of the update (--algo.router_replay): %s", why)
    return not why and asked is not False


def load_teacher(config: RLConfig, device: torch.device) -> Policy:
    """Its own weights, whatever adapter the policy has, and none of it."""
    path, flag = required(config.teacher_path), config.teacher_flag
    settings = load_settings(config, device, flag=flag, trains=False)
    with reading_model(path, flag=flag):
        teacher = load_policy(path, settings).requires_grad_(False)
    warn_of_positions(teacher.model.config, max_len=config.data.max_len)
    return teacher


def load_reference(config: RLConfig, device: torch.device) -> Policy:
    return _load_policy(config, device, trains=False).requires_grad_(False)


def _load_policy(
    config: RLConfig, device: torch.device, *, trains: bool, device_ready: Callable[[], None] = lambda: None
) -> Policy:
    path = required(config.actor.model_name_or_path)
    settings = load_settings(config, device, flag="--actor.model_name_or_path", trains=trains)
    settings = dataclasses.replace(settings, device_ready=device_ready)
    with reading_model(path, flag=settings.flag):
        return load_policy(path, settings)


def load_critic(config: RLConfig, device: torch.device) -> ValueModel | None:
    path = config.critic_path
    if path is None:
        return None
    settings = load_settings(config, device, flag="--critic.model_name_or_path", trains=True)
    normalise = config.reward.normalize_enable and config.reward_source == "model"
    with reading_model(path, flag=settings.flag):
        return load_value_model(path, settings, normalise=normalise)


def load_settings(config: RLConfig, device: torch.device, *, flag: str, trains: bool) -> LoadSettings:
    return LoadSettings(
        device=device,
        ds=config.ds,
        model=config.actor,
        trains=trains,
        seed=config.train.seed,
        flag=flag,
        images=config.data.max_images_per_prompt > 0,
        exact=config.rollout.exact and flag == "--actor.model_name_or_path",
    )


class RLTraining:
    """Models, their backends and the workers, for a run of so many optimizer steps; on a rank, its part of them."""

    def __init__(
        self,
        config: RLConfig,
        models: RLModels,
        *,
        total_steps: int,
        device: torch.device,
        distribution: Distribution | None = None,
    ) -> None:
        """Without a `distribution` it is this process with plain torch."""
        distribution = distribution or OneProcess(ALONE, config.ds)
        self._config = config
        self.models = models
        self._distribution = distribution
        self._steps = step_settings(config)
        self.policy_backend = distribution.train(
            models.policy,
            config.actor,
            total_steps=total_steps,
            ema_beta=config.train.ema_beta if config.train.enable_ema else None,
        )
        self._critic_backend: Backend | None = None
        if models.critic is not None:
            self._critic_backend = distribution.train(models.critic, config.critic, total_steps=total_steps)
        self.learners = self._learners(device)

    @property
    def backends(self) -> list[Backend]:
        return [backend for backend in (self.policy_backend, self._critic_backend) if backend is not None]

    def checkpointed(self, tokenizer: Any) -> dict[str, LocalCheckpointedModel]:
        """The models that a checkpoint holds, by the names of its folders."""
        policy, critic, ranks = self.models.policy, self.models.critic, self._distribution.ranks
        trained = {
            ACTOR: LocalCheckpointedModel(
                self.policy_backend,
                lambda folder, _, weights: export_policy(policy, tokenizer, folder, state_dict=weights),
                ranks,
                policy,
            )
        }
        if critic is not None and self._critic_backend is not None:
            trained[CRITIC] = kept_critic(self._critic_backend, critic, tokenizer, ranks)
        return trained

    def _learners(self, device: torch.device) -> RankLearners:
        config, ranks = self._config, self._distribution.ranks
        scoring = scoring_batches(config)
        policy_logprobs = logprobs(config.rollout.temperature)
        teacher: Teacher | None = None
        vocabulary = vocabulary_of(self.models.policy.model.config)
        if config.teacher.remote_url is not None:
            teacher = remote_teacher(config, vocabulary=vocabulary)
        elif config.uses_teacher and config.teacher_path is None:
            own = WithoutAdapter(self.models.policy)
            teacher = policy_teacher(
                config,
                self.policy_backend.module if config.teacher.policy == "current" else own,
                self._distribution,
                vocabulary=vocabulary,
                device=device,
            )
        elif self.models.teacher is not None:
            teacher = model_teacher(
                config, self.models.teacher, self._distribution, vocabulary=vocabulary, device=device
            )
        routers = self.models.policy.routers
        critic = kl = None
        if self._critic_backend is not None:
            assert self.models.critic is not None
            critic = critic_part(config, self.models.critic, self._critic_backend, self._distribution, device=device)
        if config.uses_reference:
            reference = self.models.reference
            kl = KLTerm(
                estimator=get_kl_estimator(config.algo.kl.estimator),
                controller=kl_controller(config),
                as_loss=config.algo.kl.use_loss,
                reference=None
                if reference is None
                else reference_scorer(config, reference, self._distribution, device=device),
            )
        return RankLearners(
            policy=PolicyLearner(
                self.policy_backend,
                policy_settings(config, balance=balance_settings(config, self.models.policy)),
                device=device,
                ranks=ranks,
                max_skipped=config.train.max_skipped_steps,
                routers=None if routers is None or routers.problem else routers,
                replays=self.models.policy.replays,
            ),
            policy_scorer=Scorer(
                self.policy_backend.module,
                policy_logprobs,
                batching=scoring,
                device=device,
                forwards_together=self._distribution.computes_together,
                ranks=ranks,
            ),
            steps=self._steps,
            advantages=advantage_settings(config),
            critic=critic,
            freezing_steps=config.critic.freezing_steps if config.uses_critic else -1,
            kl=kl,
            teacher=TeacherTerm(teacher=teacher, reward=teacher_reward(config)) if config.uses_teacher else None,
            ranks=ranks,
        )


def kept_critic(backend: Backend, critic: ValueModel, tokenizer: Any, ranks: Ranks) -> LocalCheckpointedModel:
    """The part of the critic that a checkpoint holds."""
    return LocalCheckpointedModel(
        backend,
        lambda folder, _, weights: export_value_model(critic, tokenizer, folder, state_dict=weights),
        ranks,
        critic,
    )


def critic_part(
    config: RLConfig, critic: ValueModel, backend: Backend, distribution: Distribution, *, device: torch.device
) -> CriticPart:
    ranks = distribution.ranks
    return CriticPart(
        scorer=Scorer(
            backend.module,
            values,
            batching=scoring_batches(config),
            device=device,
            forwards_together=distribution.computes_together,
            ranks=ranks,
        ),
        learner=CriticLearner(
            backend,
            value_clip=config.critic.value_clip,
            device=device,
            balance=critic_balance(config, critic),
            ranks=ranks,
            max_skipped=config.train.max_skipped_steps,
        ),
    )


def reference_scorer(
    config: RLConfig, reference: nn.Module, distribution: Distribution, *, device: torch.device
) -> Scorer:
    offload = config.ref.offload and not config.reference_is_base
    return Scorer(
        reference if config.reference_is_base else distribution.freeze(reference, offload=offload),
        reference_logprobs(config.rollout.temperature),
        batching=scoring_batches(config),
        device=device,
        offload=offload and not distribution.shards_weights,
        forwards_together=distribution.computes_together,
        ranks=distribution.ranks,
    )


def policy_vocabulary(config: RLConfig) -> int:
    """Where the policy itself is elsewhere."""
    path, flag = required(config.actor.model_name_or_path), "--actor.model_name_or_path"
    with reading_model(path, flag=flag):
        return vocabulary_of(load_config(path, trust_remote_code=config.actor.trust_remote_code, flag=flag))


def model_teacher(
    config: RLConfig, teacher: Policy, distribution: Distribution, *, vocabulary: int, device: torch.device
) -> ModelTeacher:
    """`vocabulary`: the policy's. Models of one family are padded to different sizes: what both have counts."""
    offload = config.teacher.offload
    return _teacher_of(
        config,
        distribution.freeze(teacher, offload=offload),
        distribution,
        reference_logprobs(config.rollout.temperature),
        vocabulary=min(vocabulary, vocabulary_of(teacher.model.config)),
        device=device,
        offload=offload and not distribution.shards_weights,
    )


def policy_teacher(
    config: RLConfig, module: nn.Module, distribution: Distribution, *, vocabulary: int, device: torch.device
) -> ModelTeacher:
    """The policy itself, as its backend has it, or without its adapter."""
    own = logprobs if config.teacher.policy == "current" else reference_logprobs
    forward = own(config.rollout.temperature)
    return _teacher_of(config, module, distribution, forward, vocabulary=vocabulary, device=device, offload=False)


def remote_teacher(config: RLConfig, *, vocabulary: int) -> Teacher:
    from openrlhf.learners.remote_teacher import RemoteTeacher  # only runs with servers import aiohttp

    return RemoteTeacher(
        config.teacher.urls,
        top_k=0 if config.teacher_rewards else min(config.teacher.top_k, vocabulary),
        vocabulary=vocabulary,
        timeout=config.teacher.timeout,
        api_key=config.teacher.api_key,
    )


def _teacher_of(
    config: RLConfig,
    module: nn.Module,
    distribution: Distribution,
    forward: Callable[[nn.Module, PackedTokens], Columns],
    *,
    vocabulary: int,
    device: torch.device,
    offload: bool,
) -> ModelTeacher:
    """`forward`: for a teacher that rewards."""
    columns: tuple[str, ...] = TEACHER_REWARD
    empty: tuple[Tensor, ...] = ONE_NUMBER
    if not config.teacher_rewards:
        k = min(config.teacher.top_k, vocabulary)
        forward, columns = likeliest(config.rollout.temperature, k, vocabulary=vocabulary), TEACHER_LOSS
        empty = torch.zeros(0, k, dtype=torch.int32), torch.zeros(0, k)
    scorer = Scorer(
        module,
        forward,
        batching=scoring_batches(config),
        device=device,
        offload=offload,
        forwards_together=distribution.computes_together,
        ranks=distribution.ranks,
        columns=empty,
    )
    return ModelTeacher(scorer, columns)


def teacher_reward(config: RLConfig) -> TeacherReward | None:
    return TeacherReward(config.teacher.coef, config.teacher.gamma) if config.teacher_rewards else None


def scoring_batches(config: RLConfig) -> MicroBatching:
    cut = _batching(config, samples=config.rollout.micro_batch_size, tokens=config.scoring_tokens_per_gpu)
    return dataclasses.replace(cut, remedy=cut.remedy.replace("train.max", "rollout.max"))


def advantage_settings(config: RLConfig) -> AdvantageSettings:
    advantage = config.algo.advantage
    return AdvantageSettings(
        estimator=get_estimator(advantage.estimator).with_k(advantage.pass_k),
        shaping=reward_shaping(config),
        turns=Turns(advantage.turns or Turns.OUTCOME),
        gamma=config.gamma,
        lambd=advantage.lambd,
        divide_by_std=not advantage.no_std_norm,
    )


def step_settings(config: RLConfig) -> StepSettings:
    chosen = get_policy_loss(config.actor.policy_loss_type).chosen
    return StepSettings(
        epochs=config.train.max_epochs,
        batch_size=config.train.batch_size,
        batching=_batching(config, samples=config.train.micro_batch_size, tokens=config.train.max_tokens_per_gpu),
        aggregation=config.loss_aggregation,
        regulariser_aggregation=config.regulariser_aggregation,
        constant_length=config.response_limit,
        # Critic, KL term, teacher, entropy and the balance of experts want every sample, whatever its advantage, and so
        # does a loss that adds a term to chosen tokens.
        skip_idle=not config.uses_critic
        and chosen is None
        and config.actor.entropy_coef is None
        and not config.actor.aux_loss_coef
        and not (config.uses_reference and config.algo.kl.use_loss)
        and not config.uses_teacher,
        chosen=chosen,
        seed=config.train.seed,
    )


def balance_settings(config: RLConfig, policy: Policy) -> BalanceSettings | None:
    coef = config.actor.aux_loss_coef
    if not coef:
        return None
    return BalanceSettings(coef=coef, top_k=experts_per_token(policy.model, flag=f"--actor.aux_loss_coef {coef:g}"))


def critic_balance(config: RLConfig, critic: ValueModel) -> BalanceSettings | None:
    """The actor's coefficient, where the critic has experts too: it may have been started from another model."""
    coef = config.actor.aux_loss_coef
    if not coef:
        return None
    try:
        return BalanceSettings(coef=coef, top_k=experts_per_token(critic.model, flag="--actor.aux_loss_coef"))
    except NoRoutersError:
        logger.info("--actor.aux_loss_coef %g is for the actor alone: the critic has no experts", coef)
        return None


def policy_settings(config: RLConfig, *, balance: BalanceSettings | None = None) -> PolicySettings:
    low, high = config.actor.clip_range
    kl, advantage = config.algo.kl, config.algo.advantage
    correction = None
    if config.corrects_off_policy:
        bounds = advantage.is_correction_threshold
        correction = CorrectionSettings(name=advantage.is_correction_type, low=bounds[0], high=bounds[1])
    return PolicySettings(
        loss=get_policy_loss(config.actor.policy_loss_type),
        clip=LossSettings(clip_low=low, clip_high=high, dual_clip=config.actor.dual_clip),
        temperature=config.rollout.temperature,
        entropy_coef=config.actor.entropy_coef,
        kl_loss=get_kl_estimator(kl.estimator) if config.uses_reference and kl.use_loss else None,
        distillation=None
        if config.teacher.loss is None or not config.uses_teacher
        else DistillationSettings(divergence=get_divergence(config.teacher.loss), coef=config.teacher.coef),
        correction=correction,
        balance=balance,
    )


def kl_controller(config: RLConfig) -> KLController:
    kl = config.algo.kl
    if kl.target is None:
        return FixedKL(kl.init_coef)
    return AdaptiveKL(kl.init_coef, target=kl.target, horizon=kl.horizon)


def reward_shaping(config: RLConfig) -> RewardShaping:
    reward = config.reward
    return RewardShaping(
        overlong_buffer=reward.overlong_buffer_len,
        overlong_factor=reward.overlong_penalty_factor,
        response_limit=config.response_limit,
        stop_properly=reward.stop_properly_penalty_coef,
        clip_range=reward.clip_range,
    )


def _batching(config: RLConfig, *, samples: int, tokens: int) -> MicroBatching:
    return MicroBatching(
        samples=samples,
        tokens=tokens if config.train.dynamic_batch_enable else None,
        devices=config.ds.ranks_per_share,
    )

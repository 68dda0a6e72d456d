"""The policy update: one optimizer step after another on micro-batches that were cut before."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from openrlhf.algorithms.corrections import CorrectionInputs, get_correction
from openrlhf.algorithms.distillation import Divergence, top_k_divergence
from openrlhf.algorithms.kl import KLEstimator
from openrlhf.algorithms.losses import LossInputs, LossSettings, PolicyLoss, TokenLoss, load_balancing_loss
from openrlhf.backends.base import Backend
from openrlhf.backends.ranks import ALONE, Ranks
from openrlhf.learners.accumulation import MAX_SKIPPED, SkippedSteps, accumulate
from openrlhf.learners.steps import MicroBatch, Step, filler
from openrlhf.models.body import RouterLog
from openrlhf.models.routes import RouteCounts, RouteLog, Routers, without_route
from openrlhf.observability.metrics import Metrics
from openrlhf.types import PackedBatch, PackedTokens, moved


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionSettings:
    """Which off-policy correction, and its thresholds."""

    name: str
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceSettings:
    """The load-balancing loss of a mixture of experts."""

    coef: float
    top_k: int
    """Experts of a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillationSettings:
    """The divergence from a teacher as a loss term."""

    divergence: Divergence
    coef: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """The settings of the policy update."""

    loss: PolicyLoss
    clip: LossSettings
    temperature: float
    """That of sampling: log-probs are those of the distribution sampled from."""
    entropy_coef: float | None = None
    """None: entropy is not computed; 0: it is logged; else it is rewarded."""
    kl_loss: KLEstimator | None = None
    """KL to the reference as a loss term; None: no such term."""
    distillation: DistillationSettings | None = None
    """None: no teacher, or one whose word is in the advantages."""
    correction: CorrectionSettings | None = None
    balance: BalanceSettings | None = None
    """None: experts, if there are any, are left to themselves."""


class SeenColumns:
    """What an update sees of its action tokens, on the device until all of it is launched.

    Nothing is read before `columns`: a GPU would be waited for. A sample that an update passes several times has the
    numbers of the last pass.
    """

    def __init__(self) -> None:
        self._rows: list[Tensor] = []
        self._parts: list[dict[str, Tensor]] = []

    def add(self, rows: Tensor, **columns: Tensor | None) -> None:
        """`rows`: of the batch's `_A` columns (`PackedBatch.rows`)."""
        self._rows.append(rows)
        self._parts.append({name: column.detach() for name, column in columns.items() if column is not None})

    def columns(self, num_actions: int) -> dict[str, Tensor]:
        """float32 [A] each, on CPU; NaN for tokens that were in no micro-batch."""
        sizes = [len(rows) for rows in self._rows]
        result = {}
        for name in self._parts[0] if self._parts else ():
            seen = torch.cat([part[name] for part in self._parts]).float().cpu()
            result[name] = torch.full((num_actions,), math.nan)
            for rows, own in zip(self._rows, seen.split(sizes), strict=True):
                result[name][rows] = own
        return result


Inspector = Callable[[Step, Callable[[MicroBatch, Metrics], Tensor]], None]
"""Looks at an optimizer step before it is taken: it may add gradients of micro-batches with the function it is given,
which returns the micro-batch's share of the policy loss, and must drop them again."""


class PolicyLearner:
    """Updates the policy through its backend.

    L = Σ w·l_policy + c·Σ w'·KL + d·Σ w'·D − β·Σ w'·H over a step's action tokens; w and w' came with the
    micro-batches, and D is the divergence from a teacher. And of a mixture of experts + α·Σ_m (T_m / T)·B_m, the
    balancing loss of each micro-batch by its share of the tokens.
    """

    def __init__(
        self,
        backend: Backend,
        settings: PolicySettings,
        *,
        device: torch.device,
        ranks: Ranks = ALONE,
        max_skipped: int = MAX_SKIPPED,
        routers: Routers | None = None,
        replays: bool = False,
    ) -> None:
        """`max_skipped`: optimizer steps in a row that are left out until the run ends.

        `routers`: those of a mixture of experts, which are watched. `replays`: they take the engine's routes.
        """
        self._backend = backend
        self._skipped = SkippedSteps("actor_", most=max_skipped, ranks=ranks)
        self._settings = settings
        self._device = device
        self._ranks = ranks
        self._routers = routers
        self._replays = replays

    def update(
        self,
        steps: Sequence[Step],
        *,
        kl_coef: float = 0.0,
        seen: SeenColumns | None = None,
        inspect: Inspector | None = None,
    ) -> Metrics:
        """One optimizer step per `Step`. `kl_coef` is the price of KL where it is a loss. Metrics of this rank.

        `seen` gets what micro-batches compute of their tokens; None: nothing of it is kept. `inspect` is called before
        each optimizer step.
        """
        metrics = Metrics()
        watched = [] if self._routers is None else [RouteLog(self._routers.shape, self._device) for _ in steps]
        if self._replays and steps:
            self._compare_choices(steps, metrics)
        self._backend.module.train()
        for index, step in enumerate(steps):
            if self._settings.correction is not None and step.lacks("rollout_logprobs_A"):
                raise ValueError("this update needs rollout log-probs, and some samples of the batch have none")
            if inspect is not None:
                inspect(step, functools.partial(self._accumulate, kl_coef=kl_coef))
            routes = watched[index] if watched else None
            run = functools.partial(self._accumulate, kl_coef=kl_coef, routes=routes, seen=seen)
            loss, own, odd = accumulate(step, run, self._backend, ranks=self._ranks)
            rate, norm = self._backend.learning_rate, self._backend.step()
            metrics.last("actor_lr", rate)
            if self._skipped.after(self._backend.left_out, metrics, functools.partial(step.suspects, odd)):
                continue
            metrics.merge(own)
            metrics.mean("policy_loss", loss, 1 / self._ranks.count)  # the sum of all ranks' is the step's
            if self._backend.left_out is None:
                metrics.mean("actor_grad_norm", norm, 1)
        self._skipped.mended(self._backend.require_finite(), metrics)
        if watched:
            self._tell_routes([log.counts() for log in watched], metrics)
        return metrics

    def _tell_routes(self, own: Sequence[RouteCounts], metrics: Metrics) -> None:
        """`own`: this rank's counts in each step. Collective, and every rank says the same.

        In the first step the weights are those that the engine has had, or nearly: what differs there is rounding.
        """
        first = RouteCounts.added(self._ranks.gather_processes(own[0]))
        if (differing := first.differing_share()) is not None:
            metrics.last("experts/differ", differing)
        if (load := RouteCounts.added(self._ranks.gather_processes(RouteCounts.added(own))).load_range()) is not None:
            metrics.last("experts/load_min", load[0])
            metrics.last("experts/load_max", load[1])

    @torch.no_grad()
    def _compare_choices(self, steps: Sequence[Step], metrics: Metrics) -> None:
        """How far a sample of this rank is from what the engine said of it: through the engine's experts, and through
        those that the policy's own routers choose. Collective, where forwards are."""
        packed = [micro.packed for step in steps for micro in step.micro_batches() if not micro.is_filler]
        sample, told_A = _told_sample(packed) or (filler().tokens, torch.tensor([math.nan]))
        known_A, gaps = ~told_A.isnan(), []
        self._backend.module.eval()
        for tokens in (sample, sample.without_routes()):
            output = self._backend.module(tokens.to(self._device), temperature=self._settings.temperature)
            gaps.append(float((output.logprobs_A.float().cpu() - told_A)[known_A].abs().sum()))
        metrics.mean("experts/logprobs_diff", gaps[0], int(known_A.sum()))
        metrics.mean("experts/logprobs_diff_own", gaps[1], int(known_A.sum()))

    def _accumulate(
        self,
        micro: MicroBatch,
        metrics: Metrics,
        *,
        kl_coef: float,
        routes: RouteLog | None = None,
        seen: SeenColumns | None = None,
    ) -> Tensor:
        """Add one micro-batch's gradient; returns its share of the step's policy loss."""
        settings, metrics = self._settings, Metrics() if micro.is_filler else metrics
        packed = micro.packed.to(self._device)
        router_log = RouterLog() if settings.balance else None
        chosen: dict[str, Tensor] = {}
        if settings.distillation is not None:
            chosen["token_ids_AK"] = _needed(packed.teacher_ids_AK, "a teacher's tokens")
        output = self._backend.module(
            packed.tokens,
            temperature=settings.temperature,
            with_entropy=settings.entropy_coef is not None,
            router_log=router_log,
            **({} if routes is None or micro.is_filler else {"route_log": routes}),
            **chosen,
        )
        current_A = output.logprobs_A
        old_A = current_A.detach() if packed.old_logprobs_A is None else packed.old_logprobs_A
        if settings.loss.chosen is not None and micro.chosen_A is None and not micro.is_filler:
            raise ValueError("this policy loss needs tokens that were chosen over the whole step, and none were")
        chosen_A = None if micro.chosen_A is None else moved(micro.chosen_A, self._device)
        result, correction_A = self._policy_loss(packed, current_A, old_A, chosen_A, metrics)
        policy_A = result.loss_A if correction_A is None else correction_A * result.loss_A
        policy_loss = (micro.policy_weights_A.to(self._device) * policy_A).sum()
        loss = policy_loss
        weights_A = micro.regulariser_weights_A.to(self._device)
        count = packed.tokens.num_actions
        if settings.kl_loss is not None:
            kl_A = settings.kl_loss(current_A, _needed(packed.reference_logprobs_A, "reference log-probs"))
            loss = loss + kl_coef * (weights_A * kl_A).sum()
            metrics.mean("kl", kl_A.detach().sum(), count)
        if settings.distillation is not None:
            divergence_A = top_k_divergence(
                settings.distillation.divergence,
                output.chosen_AK,
                output.rest_A,
                _needed(packed.teacher_logprobs_AK, "a teacher's log-probs"),
            )
            loss = loss + settings.distillation.coef * (weights_A * divergence_A).sum()
            metrics.mean("teacher_kl", divergence_A.detach().sum(), count)
        if output.entropy_A is not None:
            if settings.entropy_coef:
                loss = loss - settings.entropy_coef * (weights_A * output.entropy_A).sum()
            metrics.mean("entropy_loss", output.entropy_A.detach().sum(), count)
        if settings.balance is not None and router_log is not None:
            tokens = packed.tokens.num_tokens
            balance = load_balancing_loss(router_log.logits, top_k=settings.balance.top_k)
            loss = loss + settings.balance.coef * micro.token_share * balance
            metrics.mean("aux_loss", balance.detach().double() * tokens, tokens)
        self._backend.backward(loss)
        if seen is not None and not micro.is_filler:
            seen.add(
                micro.packed.rows,
                new_logprobs=current_A,
                entropy=output.entropy_A,
                is_weights=correction_A,
                clipped=result.clipped_A,
                losses=policy_A,
            )
        if self._replays:
            metrics.mean("experts/missing", *without_route(micro.packed.tokens))
        metrics.mean("ppo_kl", (old_A - current_A.detach()).sum(), count)
        if packed.rollout_logprobs_A is not None and len(known := _told(micro.packed)):
            gap_A = (packed.rollout_logprobs_A - old_A).index_select(0, moved(known, self._device))
            metrics.mean("vllm_kl", gap_A.sum(), len(known))
            metrics.mean("logprobs_diff", gap_A.abs().sum(), len(known))
            metrics.quantile_of("logprobs_diff_p99", gap_A.abs(), share=0.99)
            metrics.max("logprobs_diff_max", gap_A.abs().max())
        return policy_loss

    def _policy_loss(
        self, packed: PackedBatch, current_A: Tensor, old_A: Tensor, chosen_A: Tensor | None, metrics: Metrics
    ) -> tuple[TokenLoss, Tensor | None]:
        """The loss of each token, and its factor where an off-policy correction has one."""
        settings, sequences_A = self._settings, packed.tokens.action_sequences()
        count = packed.tokens.num_actions
        correction = settings.correction
        base_A = old_A
        if correction and settings.loss.corrects_itself:
            base_A = _needed(packed.rollout_logprobs_A, "rollout log-probs")
        advantages_A = _needed(packed.advantages_A, "advantages")
        inputs = LossInputs(current_A, base_A, advantages_A, sequences_A, chosen_A)
        result = settings.loss.function(inputs, settings.clip)
        metrics.mean("ppo_clip_ratio", result.clipped_A.sum(), count)
        if correction is None or settings.loss.corrects_itself:
            return result, None
        rollout_A = _needed(packed.rollout_logprobs_A, "rollout log-probs")
        corrected = get_correction(correction.name)(
            CorrectionInputs(old_A, rollout_A, sequences_A), low=correction.low, high=correction.high
        )
        metrics.mean("is_weight", corrected.weights_A.sum(), count)
        metrics.mean("is_corrected", corrected.touched_A.sum(), count)
        return result, corrected.weights_A


_COMPARED_TOKENS = 2048
"""A longer sample is compared only where there is no shorter one."""


def _told_sample(several: Sequence[PackedBatch]) -> tuple[PackedTokens, Tensor] | None:
    """A sample that the engine said log-probs of, and these; None: there is none. The longest that takes no time."""

    def preferred(tokens: PackedTokens) -> int:
        return tokens.num_tokens if tokens.num_tokens <= _COMPARED_TOKENS else -tokens.num_tokens

    found: tuple[PackedTokens, Tensor] | None = None
    for packed in several:
        if packed.rollout_logprobs_A is None or bool(packed.rollout_logprobs_A.isnan().all()):
            continue
        sequences_A = packed.tokens.action_sequences()
        for index, tokens in enumerate(packed.tokens.split()):
            told_A = packed.rollout_logprobs_A[sequences_A == index]
            if not bool(told_A.isnan().all()) and (found is None or preferred(tokens) > preferred(found[0])):
                found = tokens, told_A
    return found


def _told(packed: PackedBatch) -> Tensor:
    """int64: the actions of which the engine told a log-prob. `packed` is not on a GPU, which would be waited for."""
    assert packed.rollout_logprobs_A is not None
    return torch.from_numpy(np.flatnonzero(~np.isnan(packed.rollout_logprobs_A.numpy())))


def _needed(column: Tensor | None, name: str) -> Tensor:
    if column is None:
        raise ValueError(f"this update needs {name}, and the batch has none")
    return column

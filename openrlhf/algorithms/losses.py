"""Losses of policy and critic, one number per action token (`reduction` sums them), and of routers.

At π = π_old every policy loss here has the gradient −A_t ∇log π(t) of the plain policy gradient (for losses of whole
sequences too, see there); they differ in what becomes of it as the ratio ρ_t = π(t) / π_old(t) moves away from 1.

Adding a policy loss is one entry in `POLICY_LOSSES`: the command line reads its choices there, which is why this file
imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from openrlhf.algorithms.columns import sequence_means, sequence_sums
from openrlhf.algorithms.covariance import TokenChoice
from openrlhf.algorithms.reduction import Aggregation

if TYPE_CHECKING:
    from torch import Tensor

SAPO_TEMPERATURE_POSITIVE = 1.0
SAPO_TEMPERATURE_NEGATIVE = 1.05
"""The paper's: tokens with negative advantages, whose gradients spread over the vocabulary, fade a little faster."""
DPPO_LARGEST_RATIO = 20.0
"""C of DPPO: section 5.4 of its paper bounds weights, and finds that a tight bound hurts."""
VESPO_POSITIVE = (2.0, 3.0)
VESPO_NEGATIVE = (3.0, 2.0)
"""(c1, c2) of VESPO's kernel by the sign of the advantage: the paper's."""


KL_COV_COEF = 1.0
"""What a unit of |log π − log π_old| costs a chosen token under kl_cov: the paper's."""


class LossInputs(NamedTuple):
    """The action tokens of one micro-batch; its samples are whole."""

    logprobs_A: Tensor
    """log π of the weights being trained, with gradient."""
    old_logprobs_A: Tensor
    """log π of the weights the ratio is taken against."""
    advantages_A: Tensor
    sequences_A: Tensor
    """int64 [A]: which sample each token belongs to, ascending."""
    chosen_A: Tensor | None = None
    """bool [A]: the tokens that `PolicyLoss.chosen` stands for; None: there are none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The parameters of the policy losses."""

    clip_low: float
    """ε_low: the ratio's lower bound is 1 − ε_low."""
    clip_high: float
    """ε_high: its upper bound is 1 + ε_high."""
    dual_clip: float | None = None
    """c of the dual clip; None: no such bound."""

    def __post_init__(self) -> None:
        if self.dual_clip is not None and self.dual_clip <= 1.0:
            raise ValueError(f"the dual clip bounds ratios above 1, so it must be > 1, got {self.dual_clip}")


class TokenLoss(NamedTuple):
    """A policy loss per token, and which tokens its clip has touched."""

    loss_A: Tensor
    clipped_A: Tensor
    """bool [A]: where the clip took the gradient away; under cispo, which loses none, where it bounded the weight."""


def ppo_loss(inputs: LossInputs, settings: LossSettings) -> TokenLoss:
    """l_t = −min(ρ_t A_t, clip(ρ_t, 1−ε_low, 1+ε_high) A_t),  ρ_t = exp(log π(t) − log π_old(t)).

    PPO (arXiv:1707.06347) with the two clip bounds set apart as in DAPO (arXiv:2503.14476). With a dual clip c > 1
    (arXiv:1912.09729), where A_t < 0: l_t = −max(min(…), c A_t), so that one token that became much likelier cannot
    own the step.
    """
    return _clipped(_ratio(inputs.logprobs_A - inputs.old_logprobs_A), inputs.advantages_A, settings)


def gspo_loss(inputs: LossInputs, settings: LossSettings) -> TokenLoss:
    """l_t = −min(s A_t, clip(s, 1−ε_low, 1+ε_high) A_t),  s = exp(mean over the sequence of log π(t) − log π_old(t)).

    GSPO (arXiv:2507.18071) in its token form: s_t = sg(s) · π(t) / sg(π(t)), where sg stops the gradient. Every
    s_t has the value of s, and ∇s_t = s ∇log π(t). If the tokens of a sequence share one advantage, the mean over
    them is −min(s A, clip(s) A) with the gradient −A s · (1/|o|) Σ_t ∇log π(t): exactly the sequence form. If they
    do not (credit per turn, KL as a reward, a critic), each token keeps its own credit, where the sequence form
    would give all of them the average.
    """
    logprobs_A = inputs.logprobs_A
    sequence_A = _ratio(sequence_means(logprobs_A - inputs.old_logprobs_A, inputs.sequences_A)).detach()
    return _clipped(sequence_A * (logprobs_A - logprobs_A.detach()).exp(), inputs.advantages_A, settings)


def cispo_loss(inputs: LossInputs, settings: LossSettings) -> TokenLoss:
    """l_t = −sg(clip(ρ_t, 1−ε_low, 1+ε_high)) A_t log π(t): the weight of a token is clipped, never its gradient.

    CISPO (MiniMax-M1, arXiv:2506.13585). The paper tunes ε_high alone; ε_low = 1 sets no lower bound.
    """
    ratio_A = _ratio(inputs.logprobs_A - inputs.old_logprobs_A).detach()
    weights_A = ratio_A.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high)
    return TokenLoss(-weights_A * inputs.advantages_A * inputs.logprobs_A, weights_A != ratio_A)


def sapo_loss(inputs: LossInputs, settings: LossSettings) -> TokenLoss:
    """l_t = −f(ρ_t) A_t,  f(ρ) = (4/τ) σ(τ (ρ − 1)),  τ = τ_pos where A_t > 0, else τ_neg.

    SAPO (arXiv:2511.20347): the clip as a soft gate. ∇f = 4 σ (1 − σ) ρ ∇log π: weight 1 at ρ = 1, fading smoothly
    away from it. Nothing is cut off, so `clipped_A` is False everywhere and ε is not used.
    """
    ratio_A = _ratio(inputs.logprobs_A - inputs.old_logprobs_A)
    temperature_A = ratio_A.new_full(ratio_A.shape, SAPO_TEMPERATURE_NEGATIVE)
    temperature_A = temperature_A.masked_fill(inputs.advantages_A > 0, SAPO_TEMPERATURE_POSITIVE)
    gate_A = 4.0 / temperature_A * (temperature_A * (ratio_A - 1.0)).sigmoid()
    return TokenLoss(-gate_A * inputs.advantages_A, ratio_A.new_zeros(ratio_A.shape).bool())


def gmpo_loss(inputs: LossInputs, settings: LossSettings) -> TokenLoss:
    """l_t = −A_t g,  g = exp(mean over the sequence of c_t),  c_t = d_t, but at most ε_high where A_t > 0, and at least
    −ε_low where A_t < 0;  d_t = log π(t) − log π_old(t).

    GMPO (arXiv:2507.20673): the geometric mean of the clipped ratios where GRPO takes the arithmetic one. The bounds
    are those of log ρ_t, as in the paper, where both are 0.4. In a token form, as `gspo_loss`: every token has the
    value of g and the gradient −A_t g ∇c_t, so that the mean over a sequence of one advantage is −A g with the
    gradient of that.
    """
    difference_A, advantages_A = inputs.logprobs_A - inputs.old_logprobs_A, inputs.advantages_A
    above_A = (advantages_A > 0) & (difference_A > settings.clip_high)
    below_A = (advantages_A < 0) & (difference_A < -settings.clip_low)
    held_A = difference_A.masked_fill(above_A, settings.clip_high).masked_fill(below_A, -settings.clip_low)
    mean_A = _ratio(sequence_means(held_A, inputs.sequences_A)).detach()
    return TokenLoss(-mean_A * (held_A - held_A.detach()).exp() * advantages_A, above_A | below_A)


def vespo_loss(inputs: LossInputs, settings: LossSettings) -> TokenLoss:
    """l_t = −sg(φ(W)) A_t log π(t),  φ(W) = W^c1 exp(c2 (1 − W)),  W = Π over the sequence of π(t) / π_old(t).

    VESPO (arXiv:2602.10693): the weight of a whole sequence, without its length taken out, through a kernel that is 1
    at W = 1, at most (c1/c2)^c1 exp(c2 − c1), and fades towards 0 on both sides; (c1, c2) is (2, 3) where A_t > 0,
    else (3, 2). No token is clipped, and ε is not used. log W is held within ±20.
    """
    import torch  # here, so that the registry imports without it

    sums_A = sequence_sums(inputs.logprobs_A - inputs.old_logprobs_A, inputs.sequences_A)
    log_weight_A = sums_A.detach().clamp(-20.0, 20.0)
    positive_A = inputs.advantages_A > 0
    c1_A, c2_A = (torch.where(positive_A, *both) for both in zip(VESPO_POSITIVE, VESPO_NEGATIVE, strict=True))
    kernel_A = (c1_A * log_weight_A + c2_A * (1.0 - log_weight_A.exp())).exp()
    return TokenLoss(-kernel_A * inputs.advantages_A * inputs.logprobs_A, positive_A.new_zeros(positive_A.shape))


def dppo_tv_loss(inputs: LossInputs, settings: LossSettings) -> TokenLoss:
    """l_t = −m_t sg(min(ρ_t, 20)) A_t log π(t),  m_t = 0 where D_t is above its bound and ρ_t is on the side that A_t
    pulls to (ρ_t > 1 with A_t > 0, ρ_t < 1 with A_t < 0), else 1;  D_t = |π(t) − π_old(t)|.

    DPPO (arXiv:2602.04879), total variation between "this token" and "any other", its binary approximation. The bound
    is ε_high where A_t > 0, else ε_low; the paper's is 0.15. Rare tokens, whose ratios are wild, stay in; likely ones,
    whose ratio hardly moves while the distribution does, are stopped.
    """
    current_A, old_A = (_probability(column_A) for column_A in (inputs.logprobs_A, inputs.old_logprobs_A))
    return _trusted(inputs, (current_A - old_A).abs(), settings)


def dppo_kl_loss(inputs: LossInputs, settings: LossSettings) -> TokenLoss:
    """As `dppo_tv_loss` with D_t = q log(q/p) + (1 − q) log((1 − q)/(1 − p)),  p = π(t), q = π_old(t).

    DPPO (arXiv:2602.04879), KL(π_old‖π) of the same two events; the paper's bound is 0.05.
    """
    return _trusted(inputs, binary_kl(inputs.old_logprobs_A, inputs.logprobs_A.detach()), settings)


def clip_cov_loss(inputs: LossInputs, settings: LossSettings) -> TokenLoss:
    """l_t of `ppo_loss`, and 0 for chosen tokens: 0.02 % of the step's, drawn among those with 1 < cov_t < 5.

    Clip-Cov (arXiv:2505.22617). A token that is chosen, and leaves the clip range later on, is not replaced by another.
    """
    result = ppo_loss(inputs, settings)
    if inputs.chosen_A is None:
        return result
    return TokenLoss(result.loss_A.masked_fill(inputs.chosen_A, 0.0), result.clipped_A | inputs.chosen_A)


def kl_cov_loss(inputs: LossInputs, settings: LossSettings) -> TokenLoss:
    """l_t = −ρ_t A_t, and + |log π(t) − log π_old(t)| for chosen tokens: the 0.02 % with the largest cov_t of the step.

    KL-Cov (arXiv:2505.22617), whose coefficient is 1 and whose estimate of the KL to π_old is that absolute value.
    Nothing is clipped, and ε is not used. At π = π_old the estimate has no gradient.
    """
    difference_A = inputs.logprobs_A - inputs.old_logprobs_A
    loss_A = -_ratio(difference_A) * inputs.advantages_A
    if inputs.chosen_A is not None:
        loss_A = loss_A + KL_COV_COEF * difference_A.abs().masked_fill(~inputs.chosen_A, 0.0)
    return TokenLoss(loss_A, difference_A.new_zeros(difference_A.shape).bool())


def binary_kl(logprobs_A: Tensor, other_logprobs_A: Tensor) -> Tensor:
    """KL(p‖q) = p log(p/q) + (1 − p) log((1 − p)/(1 − q)) of "this token" and "any other", from log p and log q.

    1 − p is held above 1e-8, as DPPO's authors do: a token that was certain has a finite divergence.
    """
    log_p_A, log_q_A = logprobs_A.clamp(max=0.0), other_logprobs_A.clamp(max=0.0)
    other_p_A, other_q_A = ((-column_A.expm1()).clamp(min=1e-8) for column_A in (log_p_A, log_q_A))
    return log_p_A.exp() * (log_p_A - log_q_A) + other_p_A * (other_p_A / other_q_A).log()


def _probability(logprobs_A: Tensor) -> Tensor:
    return logprobs_A.detach().clamp(max=0.0).exp()


def _trusted(inputs: LossInputs, divergence_A: Tensor, settings: LossSettings) -> TokenLoss:
    ratio_A = _ratio(inputs.logprobs_A - inputs.old_logprobs_A).detach()
    risen_A = (inputs.advantages_A > 0) & (ratio_A > 1.0) & (divergence_A > settings.clip_high)
    fallen_A = (inputs.advantages_A < 0) & (ratio_A < 1.0) & (divergence_A > settings.clip_low)
    weights_A = ratio_A.clamp(max=DPPO_LARGEST_RATIO).masked_fill(risen_A | fallen_A, 0.0)
    return TokenLoss(-weights_A * inputs.advantages_A * inputs.logprobs_A, risen_A | fallen_A)


def _ratio(log_ratio_A: Tensor) -> Tensor:
    """The exponent is held within ±20, so that no ratio overflows."""
    return log_ratio_A.clamp(-20.0, 20.0).exp()


def _clipped(ratio_A: Tensor, advantages_A: Tensor, settings: LossSettings) -> TokenLoss:
    free_A = ratio_A * advantages_A
    held_A = ratio_A.clamp(1.0 - settings.clip_low, 1.0 + settings.clip_high) * advantages_A
    gain_A = free_A.minimum(held_A)
    clipped_A = held_A < free_A
    if settings.dual_clip is not None:
        floor_A = settings.dual_clip * advantages_A
        below_A = (advantages_A < 0) & (gain_A < floor_A)
        gain_A = floor_A.where(below_A, gain_A)
        clipped_A = clipped_A | below_A
    return TokenLoss(-gain_A, clipped_A)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss:
    """One policy loss and what belongs to it."""

    function: Callable[[LossInputs, LossSettings], TokenLoss]
    aggregation: Aggregation
    """The mean that its paper takes of the token losses."""
    corrects_itself: bool = False
    """With off-policy correction on, its ratio is taken against the rollout's log-probs instead of the old ones,
    which covers the gap between engine and trainer: no weight of `corrections` is applied on top."""
    chosen: TokenChoice | None = None
    """The tokens that it treats differently, by numbers of the whole optimizer step. They are chosen from the log-probs
    before the update of every sample, whatever its advantage."""
    takes_dual_clip: bool = False
    clips: bool = True
    """Whether it reads ε_low and ε_high."""
    summary: str
    """For the help of --actor.policy_loss_type."""
    paper: str


POLICY_LOSSES: dict[str, PolicyLoss] = {
    "ppo": PolicyLoss(
        function=ppo_loss,
        aggregation=Aggregation.TOKEN,
        takes_dual_clip=True,
        summary="ratio clipped per token",
        paper="arXiv:1707.06347",
    ),
    "gspo": PolicyLoss(
        function=gspo_loss,
        aggregation=Aggregation.SEQUENCE,
        corrects_itself=True,
        summary="ratio clipped per sequence",
        paper="arXiv:2507.18071",
    ),
    "cispo": PolicyLoss(
        function=cispo_loss,
        aggregation=Aggregation.TOKEN,
        summary="the token's weight clipped, not its gradient",
        paper="arXiv:2506.13585",
    ),
    "sapo": PolicyLoss(
        function=sapo_loss,
        aggregation=Aggregation.SEQUENCE,
        clips=False,
        summary="a soft gate",
        paper="arXiv:2511.20347",
    ),
    "gmpo": PolicyLoss(
        function=gmpo_loss,
        aggregation=Aggregation.SEQUENCE,
        summary="geometric mean of clipped ratios, eps bounds log ratios",
        paper="arXiv:2507.20673",
    ),
    # GSPO whose samples weigh as many times as they have tokens: LUSPO is its loss without the 1/|o|.
    "luspo": PolicyLoss(
        function=gspo_loss,
        aggregation=Aggregation.TOKEN_SUM,
        corrects_itself=True,
        summary="gspo times the sample's length",
        paper="arXiv:2602.05261",
    ),
    "vespo": PolicyLoss(
        function=vespo_loss,
        aggregation=Aggregation.TOKEN,
        corrects_itself=True,
        clips=False,
        summary="a kernel of the whole sequence's weight",
        paper="arXiv:2602.10693",
    ),
    "dppo_tv": PolicyLoss(
        function=dppo_tv_loss,
        aggregation=Aggregation.TOKEN,
        corrects_itself=True,
        summary="tokens masked by total variation, eps bounds it",
        paper="arXiv:2602.04879",
    ),
    "dppo_kl": PolicyLoss(
        function=dppo_kl_loss,
        aggregation=Aggregation.TOKEN,
        corrects_itself=True,
        summary="tokens masked by KL, eps bounds it",
        paper="arXiv:2602.04879",
    ),
    "clip_cov": PolicyLoss(
        function=clip_cov_loss,
        aggregation=Aggregation.TOKEN,
        chosen=TokenChoice(share=2e-4, between=(1.0, 5.0)),
        summary="ppo without some tokens that lower the entropy",
        paper="arXiv:2505.22617",
    ),
    "kl_cov": PolicyLoss(
        function=kl_cov_loss,
        aggregation=Aggregation.TOKEN,
        chosen=TokenChoice(share=2e-4),
        clips=False,
        summary="no clip, a KL on the tokens that lower the entropy most",
        paper="arXiv:2505.22617",
    ),
}


def get_policy_loss(name: str) -> PolicyLoss:
    if name not in POLICY_LOSSES:
        raise ValueError(f"unknown policy loss {name!r}; known: {', '.join(POLICY_LOSSES)}")
    return POLICY_LOSSES[name]


class ValueLoss(NamedTuple):
    """The critic's loss per token, and which tokens its clip has touched."""

    loss_A: Tensor
    clipped_A: Tensor
    """bool [A]: where the clip took the gradient away."""


def value_loss(values_A: Tensor, old_values_A: Tensor, returns_A: Tensor, *, value_clip: float) -> ValueLoss:
    """l_t = ½ max((v_clip − R)², (v − R)²),  v_clip = v_old + clamp(v − v_old, −ε, ε).

    The value function's counterpart of PPO's clip (arXiv:2005.12729): once v has moved by more than ε towards R, it
    is not pulled further within this round; away from R the pull back is never cut.
    """
    held_A = old_values_A + (values_A - old_values_A).clamp(-value_clip, value_clip)
    free_error_A, held_error_A = (values_A - returns_A) ** 2, (held_A - returns_A) ** 2
    return ValueLoss(0.5 * free_error_A.maximum(held_error_A), (held_error_A > free_error_A).detach())


def load_balancing_loss(router_logits: Sequence[Tensor], *, top_k: int) -> Tensor:
    """E · Σ_e f_e P_e, where of all rows (tokens of all layers) f_e is the share that goes to expert e, and P_e the
    mean probability that the router gives it. f is a count: the gradient is that of P.

    Equally busy experts give top_k, as f_e = top_k / E and P_e = 1 / E; all rows to the same ones give up to E.

    Switch Transformers, equations 4–6 (https://arxiv.org/abs/2101.03961), for several experts a token as in Mixtral;
    the same as transformers' `load_balancing_loss_func`. A product of means: that of two halves is not the mean of
    theirs.

    Args:
        router_logits: [T, E] of each layer's router (or parts of it).
        top_k: experts of a token.
    """
    experts = router_logits[0].shape[-1]
    chosen_E = probability_E = router_logits[0].float().new_zeros(experts)
    rows = 0
    for logits_TE in router_logits:
        p_TE = logits_TE.float().softmax(-1)
        chosen_E = chosen_E + p_TE.topk(top_k, dim=-1).indices.flatten().bincount(minlength=experts)
        probability_E = probability_E + p_TE.sum(0)
        rows += len(p_TE)
    return experts * (chosen_E / rows * (probability_E / rows)).sum()

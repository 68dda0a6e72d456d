"""Losses of reward models and of preference training: one number per pair or per judged answer.

    reward model   r(x, y) from the head           compares rewards
    DPO, IPO       log π(y|x) − log π_ref(y|x)      compares log-ratios of a chosen and a rejected answer
    KTO            the same, one answer at a time   compares a log-ratio with a reference point

The trainer sums them: a mean over an optimizer step. Adding a loss is one entry in a registry:
the command line reads its choices there, which is why this file imports no torch.

Shapes: P pairs, N answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

    from openrlhf.config.models import DPOModelSection


class PairLogprobs(NamedTuple):
    """log π(y|x) of both answers: sums over an answer's tokens, float32 [P]."""

    chosen_P: Tensor
    rejected_P: Tensor


def preference_gap(policy: PairLogprobs, reference: PairLogprobs) -> Tensor:
    """h = (log π(y_c) − log π(y_r)) − (log π_ref(y_c) − log π_ref(y_r)): how much more the policy prefers y_c."""
    return (policy.chosen_P - policy.rejected_P) - (reference.chosen_P - reference.rejected_P)


def dpo_loss(gap_P: Tensor, *, beta: float, label_smoothing: float = 0.0) -> Tensor:
    """l = −(1 − ε) log σ(βh) − ε log σ(−βh),  h the `preference_gap`.

    DPO (arXiv:2305.18290); with ε > 0 conservative DPO, which takes a share ε of the labels for flipped
    (https://ericmitchell.ai/cdpo.pdf). Its minimum is at σ(βh) = 1 − ε; without smoothing it has none.

    dl/dh = −β ((1 − ε) σ(−βh) − ε σ(βh)).
    """
    scaled_P = beta * gap_P
    return (1.0 - label_smoothing) * _softplus(-scaled_P) + label_smoothing * _softplus(scaled_P)


def ipo_loss(gap_P: Tensor, *, beta: float) -> Tensor:
    """l = (h − 1 / (2β))²: a gap to reach, not one to widen for ever.

    IPO (arXiv:2310.12036, its τ is β here), on sums of log-probs as in the paper. dl/dh = 2 (h − 1 / (2β)).
    """
    return (gap_P - 1.0 / (2.0 * beta)) ** 2


def kto_reference_point(log_ratios_N: Tensor) -> Tensor:
    """z₀ = max(0, mean of log π(y'|x) − log π_ref(y'|x)) over mismatched pairs (x, y'); no gradient.

    The estimate of KL(π ‖ π_ref) of KTO (arXiv:2402.01306, section 4.1): each prompt with an answer to another one.
    """
    return log_ratios_N.detach().mean().clamp(min=0.0)


def kto_loss(
    log_ratios_N: Tensor,
    desirable_N: Tensor,
    reference_point: Tensor,
    *,
    beta: float,
) -> Tensor:
    """l = 1 − σ(β (r − z₀)) for a desirable answer, 1 − σ(β (z₀ − r)) for an undesirable one.

    KTO (arXiv:2402.01306) in the form λ_y − v(x, y) of its equation 8 with λ_y = 1,
    r = log π(y|x) − log π_ref(y|x), z₀ of `kto_reference_point`. With p = σ(β(r − z₀)):
    dl/dr = −β p (1 − p), or +β p (1 − p). Neither direction has a gradient far from z₀: answers that are
    already settled, and answers that contradict everything else.
    """
    value_N = beta * (log_ratios_N - reference_point)
    return (-value_N).sigmoid().where(desirable_N, value_N.sigmoid())


def mean_nll(logprobs_N: Tensor, lengths_N: Tensor) -> Tensor:
    """l = −log π(y|x) / |y|: an answer's own negative log-likelihood per token.

    Added to a preference loss it keeps the chosen answers likely, which the gap alone does not (arXiv:2404.19733).
    """
    return -logprobs_N / lengths_N


def sigmoid_reward_loss(chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor) -> Tensor:
    """l = −log σ(r_c − r_r − m): Bradley-Terry (arXiv:2203.02155), with a margin m as in Llama 2 (arXiv:2307.09288).

    dl/dr_c = −σ(−(r_c − r_r − m)) = −dl/dr_r.
    """
    return _softplus(-(chosen_P - rejected_P - margin_P))


def logexp_reward_loss(chosen_P: Tensor, rejected_P: Tensor, margin_P: Tensor) -> Tensor:
    """l = log(1 + exp(r_r − r_c)): the same without a margin, whatever the records say."""
    return _softplus(rejected_P - chosen_P)


def step_loss(values_P: Tensor, good_P: Tensor) -> Tensor:
    """l = −log σ(v) for a good step, −log σ(−v) for a bad one: binary cross-entropy, v the log-odds of a good step.

    The loss of process reward models (arXiv:2211.14275, arXiv:2312.08935). dl/dv = σ(v) − [the step is good].
    """
    return _softplus((-values_P).where(good_P, values_P))


def _softplus(x: Tensor) -> Tensor:
    """log(1 + eˣ) = −log σ(−x), for any x: eˣ is never formed."""
    return x.logaddexp(x.new_zeros(()))


PairLoss = Callable[["Tensor", "DPOModelSection"], "Tensor"]
"""(gap_P, the section with β and the like) → loss_P; the gap is `preference_gap`."""


def _dpo(gap_P: Tensor, model: DPOModelSection) -> Tensor:
    return dpo_loss(gap_P, beta=model.beta, label_smoothing=model.label_smoothing)


def _ipo(gap_P: Tensor, model: DPOModelSection) -> Tensor:
    return ipo_loss(gap_P, beta=model.beta)


PAIR_LOSSES: dict[str, PairLoss] = {"dpo": _dpo, "ipo": _ipo}
"""Losses of train_dpo that compare the two answers of a pair."""
ANSWER_LOSSES = ("kto",)
"""Losses of train_dpo that judge single answers, each with a label."""

RewardLoss = Callable[["Tensor", "Tensor", "Tensor"], "Tensor"]
"""(chosen_P, rejected_P, margin_P) → loss_P"""


def get_reward_loss(name: str) -> RewardLoss:
    """`sigmoid`; every other name is logexp, as users' documents have it."""
    return sigmoid_reward_loss if name == "sigmoid" else logexp_reward_loss

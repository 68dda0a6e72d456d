"""Off-policy correction: token weights for the gap between the engine that sampled and the weights that train.

Engine and trainer give the same token slightly different probabilities (kernels, precision, weights a round old).
With d_t = log π_old(t) − log π_rollout(t) the importance weight w_t = exp(d_t) makes up for it, but its tail ruins
the update; the corrections differ in what they do with weights outside [low, high]. Weights carry no gradient and
multiply the token's loss.

TIS:    Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
IcePop: Ling Team, Ring-1T, arXiv:2510.18855
KPop:   Guo et al. 2026, Ant Group, https://ringtech.notion.site/kpop
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from openrlhf.algorithms.columns import sequence_means
from openrlhf.algorithms.losses import binary_kl

if TYPE_CHECKING:
    from torch import Tensor


KPOP_BOUND = 0.1
"""φ of KPop: its authors'."""


class CorrectionInputs(NamedTuple):
    """The action tokens of one micro-batch; its samples are whole."""

    old_logprobs_A: Tensor
    """log π of the weights before the update, as the trainer computes it."""
    rollout_logprobs_A: Tensor
    """log π at sampling time, as the engine reported it."""
    sequences_A: Tensor
    """int64 [A]: which sample each token belongs to, ascending."""


class Correction(NamedTuple):
    """The factors of the token losses."""

    weights_A: Tensor
    touched_A: Tensor
    """bool [A]: tokens whose weight is not the plain ratio: clamped or dropped."""


class Corrector(Protocol):
    def __call__(self, inputs: CorrectionInputs, *, low: float, high: float) -> Correction: ...


def tis(inputs: CorrectionInputs, *, low: float, high: float) -> Correction:
    """Truncated importance sampling: w_t clamped to [low, high]. The paper truncates above only: low = 0."""
    ratio_A = _ratio(_gap(inputs))
    weights_A = ratio_A.clamp(low, high)
    return Correction(weights_A, weights_A != ratio_A)


def icepop(inputs: CorrectionInputs, *, low: float, high: float) -> Correction:
    """w_t where low <= w_t <= high, else 0: a token the two disagree about teaches nothing."""
    ratio_A = _ratio(_gap(inputs))
    outside_A = (ratio_A < low) | (ratio_A > high)
    return Correction(ratio_A.masked_fill(outside_A, 0.0), outside_A)


def seq_mask_tis(inputs: CorrectionInputs, *, low: float, high: float) -> Correction:
    """min(w_t, high) in sequences with low <= s <= high, 0 in all others; s = exp(mean over the sequence of d_t).

    s is the geometric mean of the sequence's weights: a whole sample is dropped when engine and trainer disagree
    about it as a whole, and single tokens of the others are truncated as in `tis`.
    """
    gap_A = _gap(inputs)
    ratio_A, sequence_A = _ratio(gap_A), _ratio(sequence_means(gap_A, inputs.sequences_A))
    dropped_A = (sequence_A < low) | (sequence_A > high)
    weights_A = ratio_A.clamp(max=high).masked_fill(dropped_A, 0.0)
    return Correction(weights_A, dropped_A | (ratio_A > high))


def kpop(inputs: CorrectionInputs, *, low: float, high: float) -> Correction:
    """w_t where D(p‖q) <= φ and D(q‖p) <= φ, else 0;  p = π_old(t), q = π_rollout(t), φ = 0.1.

    IcePop with another sense of "outside": D is the KL of the two events "this token" and "any other"
    (`losses.binary_kl`), so that a rare token may be off by a large factor, and a likely one by a small one. `low` and
    `high` are not used.
    """
    ratio_A, old_A, rollout_A = _ratio(_gap(inputs)), inputs.old_logprobs_A.detach(), inputs.rollout_logprobs_A
    outside_A = (binary_kl(old_A, rollout_A) > KPOP_BOUND) | (binary_kl(rollout_A, old_A) > KPOP_BOUND)
    return Correction(ratio_A.masked_fill(outside_A, 0.0), outside_A)


def _gap(inputs: CorrectionInputs) -> Tensor:
    return (inputs.old_logprobs_A - inputs.rollout_logprobs_A).detach()


def _ratio(gap_A: Tensor) -> Tensor:
    """The exponent is held within ±20, so that no ratio overflows."""
    return gap_A.clamp(-20.0, 20.0).exp()


class CorrectionEntry(NamedTuple):
    """One correction and what belongs to it."""

    corrector: Corrector
    summary: str
    """For the help of --algo.advantage.is_correction_type."""
    takes_bounds: bool = True
    """Whether it reads `low` and `high`."""


CORRECTIONS: dict[str, CorrectionEntry] = {
    "tis": CorrectionEntry(tis, summary="clamp"),
    "icepop": CorrectionEntry(icepop, summary="drop tokens"),
    "seq-mask-tis": CorrectionEntry(seq_mask_tis, summary="drop sequences"),
    "kpop": CorrectionEntry(kpop, summary="drop tokens by their KL", takes_bounds=False),
}


def get_correction(name: str) -> Corrector:
    if name not in CORRECTIONS:
        raise ValueError(f"unknown off-policy correction {name!r}; known: {', '.join(CORRECTIONS)}")
    return CORRECTIONS[name].corrector

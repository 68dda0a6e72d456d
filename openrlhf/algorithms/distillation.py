"""Distillation on the policy's own samples: how far the policy is from a teacher at the tokens that it sampled.

With π the policy, p the teacher, and s_t the tokens before t, sampled by the policy (on-policy distillation: GKD,
arXiv:2306.13649; MiniLLM, arXiv:2306.08543). The teacher teaches in one of two ways:

    reward   r_t = log p(t | s_t) − log π(t | s_t), an estimate of −KL(π‖p) from the one token that was sampled
    loss     D(π(· | s_t), p(· | s_t)), a divergence of the two distributions (`DIVERGENCES`): the same gradient for
             every token that may be sampled, at once

A loss looks at the k tokens that the teacher finds likeliest, K, and at all others as if they were one token:

    π_K = (π(v) for v ∈ K, 1 − Σ_{v ∈ K} π(v)),   and p_K in the same way

That is a divergence of two distributions again: it is 0 where they are equal, never negative, and by the
data-processing inequality never more than the divergence over the whole vocabulary, which it is for k = V. Unlike
distributions that are normalised over K, it sees what the policy does outside of K, and pulls it back.

Adding a divergence is one entry in `DIVERGENCES`: the command line reads its choices there, which is why this file
imports no torch at its head. Shapes: A action tokens, K likeliest tokens of the teacher, k = K and the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

LEAST_REST = 1e-8
"""What a teacher gives to all tokens that are not among its likeliest together, at least: a sum of probabilities in
fp32 is not known better, and 0 would make what the policy does there cost without end."""

Divergence = Callable[["Tensor", "Tensor"], "Tensor"]
"""(log π [A, k], log p [A, k]) → one number per token, with the gradient in log π. Each row is a distribution."""


def reverse_kl(logprobs_Ak: Tensor, teacher_Ak: Tensor) -> Tensor:
    """KL(π‖p) = Σ_v π(v) (log π(v) − log p(v)): the policy leaves what the teacher finds unlikely."""
    return (logprobs_Ak.exp() * (logprobs_Ak - teacher_Ak)).sum(-1)


def forward_kl(logprobs_Ak: Tensor, teacher_Ak: Tensor) -> Tensor:
    """KL(p‖π) = Σ_v p(v) (log p(v) − log π(v)): the policy covers all that the teacher finds likely."""
    return (teacher_Ak.exp() * (teacher_Ak - logprobs_Ak)).sum(-1)


def jensen_shannon(logprobs_Ak: Tensor, teacher_Ak: Tensor) -> Tensor:
    """½ KL(π‖m) + ½ KL(p‖m), m = (π + p) / 2: between the two, and never more than log 2."""
    import torch

    middle_Ak = torch.logaddexp(logprobs_Ak, teacher_Ak) - math.log(2.0)
    return 0.5 * (reverse_kl(logprobs_Ak, middle_Ak) + reverse_kl(teacher_Ak, middle_Ak))


class DivergenceEntry(NamedTuple):
    function: Divergence
    summary: str
    """For the help of --teacher.loss."""


DIVERGENCES: dict[str, DivergenceEntry] = {
    "reverse": DivergenceEntry(reverse_kl, "KL of policy from teacher"),
    "forward": DivergenceEntry(forward_kl, "KL of teacher from policy"),
    "js": DivergenceEntry(jensen_shannon, "Jensen–Shannon"),
}


def top_k_divergence(
    divergence: Divergence, logprobs_AK: Tensor, rest_A: Tensor | None, teacher_logprobs_AK: Tensor
) -> Tensor:
    """D(π_K, p_K), one number per token.

    Args:
        logprobs_AK: log π of the teacher's likeliest tokens, with gradient.
        rest_A: log of what π gives to all others together, with gradient. None: there are no others.
        teacher_logprobs_AK: log p of the same tokens.
    """
    import torch

    if rest_A is None:
        return divergence(logprobs_AK, teacher_logprobs_AK)
    left_A = (1.0 - teacher_logprobs_AK.double().exp().sum(-1)).clamp_min(LEAST_REST).log()
    teacher_rest_A = left_A.to(teacher_logprobs_AK.dtype)
    return divergence(
        torch.cat([logprobs_AK, rest_A[:, None]], dim=-1),
        torch.cat([teacher_logprobs_AK, teacher_rest_A[:, None]], dim=-1),
    )


def get_divergence(name: str) -> Divergence:
    if name not in DIVERGENCES:
        raise ValueError(f"unknown divergence {name!r}; known: {', '.join(DIVERGENCES)}")
    return DIVERGENCES[name].function

"""Keeping the experts of a mixture equally busy."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
    chosen_E = probability_E = router_logits[0].new_zeros(experts, dtype=torch.float32)
    rows = 0
    for logits_TE in router_logits:
        p_TE = logits_TE.float().softmax(-1)
        chosen_E = chosen_E + torch.bincount(p_TE.topk(top_k, dim=-1).indices.flatten(), minlength=experts)
        probability_E = probability_E + p_TE.sum(0)
        rows += len(p_TE)
    return experts * (chosen_E / rows * (probability_E / rows)).sum()

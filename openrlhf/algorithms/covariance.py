"""Which tokens of an optimizer step pull the entropy down: those that `clip_cov` and `kl_cov` treat differently.

Under a policy gradient the entropy falls by about the covariance of log π(t) and A_t, and few tokens make up most of it
(the entropy mechanism, arXiv:2505.22617). Token t's part is

    cov_t = (A_t − mean A) (log π_old(t) − mean log π_old),

with means over all tokens of the optimizer step. The authors' code takes them, and the share of tokens that is chosen,
over a micro-batch, with the log-probs of its forward. Here all of it is known before the step begins, and comes from
the whole step: from the log-probs before the round's updates, over all ranks. So the gradient does not depend on how
the step is cut. In the first step of a round both are the same but for the cut; in later ones a token keeps the
covariance that it had.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenChoice:
    """Which tokens of an optimizer step a loss treats differently."""

    share: float
    """As a part of the step's tokens; at least one is chosen, if one can be."""
    between: tuple[float, float] | None = None
    """They are drawn among those whose covariance lies strictly between these; None: they have the largest ones."""


def chosen_tokens(
    advantages_A: Tensor,
    logprobs_A: Tensor,
    draws_A: Tensor,
    choice: TokenChoice,
    *,
    gather: Callable[[Any], list[Any]] = lambda own: [own],
) -> Tensor:
    """bool [A]: the chosen ones among this rank's tokens of a step; n is max(1, ⌊share · tokens of all ranks⌋).

    Without `between` the n with the largest covariance, of equal ones those with the largest draws; with it, the n with
    the largest draws among those whose covariance is in between, or all of these if there are fewer.

    `draws_A`: a number for each token that says nothing of it, and that is the same however tokens are shared out.
    Tokens whose draws are equal too are chosen together.
    `gather`: every rank's value, on every rank; it is collective.
    """
    import torch  # here, so that the registry of losses imports without it

    advantages_A, logprobs_A = advantages_A.double(), logprobs_A.double()
    sums = (len(advantages_A), float(advantages_A.sum()), float(logprobs_A.sum()))
    tokens, advantages, logprobs = (sum(parts) for parts in zip(*gather(sums), strict=True))
    covariance_A = (advantages_A - advantages / max(tokens, 1)) * (logprobs_A - logprobs / max(tokens, 1))
    scores_A, able_A = covariance_A, torch.ones_like(covariance_A).bool()
    if choice.between is not None:
        scores_A, able_A = draws_A.double(), (covariance_A > choice.between[0]) & (covariance_A < choice.between[1])
    count = max(1, int(choice.share * tokens))

    def largest(values: Tensor, most: int) -> list[float]:
        """Of all ranks, in descending order. Collective."""
        parts = gather(values.topk(min(most, len(values))).values.tolist())
        return sorted(itertools.chain.from_iterable(parts), reverse=True)[:most]

    best = largest(scores_A[able_A], count)
    if not best:
        return able_A
    # Equal covariances are common: fp32 gives a token that was certain the log-prob 0, and samples share advantages.
    above_A, last_A = able_A & (scores_A > best[-1]), able_A & (scores_A == best[-1])
    least = largest(draws_A.double()[last_A], best.count(best[-1]))[-1]
    return above_A | (last_A & (draws_A.double() >= least))

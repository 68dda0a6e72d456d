"""The tokens that a distribution leaves after min-p, top-k and top-p, by the definition, beside those that were told."""

from __future__ import annotations

from torch import Tensor

from openrlhf.types import Generation, SamplingParams

NEAR = 1e-4
"""Engines round: what is so near to a bound may be on either side of it."""


def check_supports(logits_AV: Tensor, generation: Generation, params: SamplingParams, *, atol: float = 1e-4) -> None:
    """A generation's supports are those of the logits that its tokens were sampled by, and each log-prob is that of a
    softmax over them."""
    assert generation.supports is not None
    told = generation.supports.tolist()
    rows = zip(logits_AV.double() / params.temperature, generation.token_ids, told, strict=True)
    for place, (logits_V, token, support) in enumerate(rows):
        kept, doubtful = kept_by(logits_V.softmax(0), params)
        if support is None:
            assert len(kept | doubtful) > params.supports
            continue
        assert token in support
        assert len(support) <= params.supports
        assert kept ^ set(support) <= doubtful, (place, kept, support)
        if generation.logprobs is not None:
            own = float(logits_V[token] - logits_V[support].logsumexp(0))
            assert abs(generation.logprobs[place] - own) < atol


def kept_by(probs_V: Tensor, params: SamplingParams) -> tuple[set[int], set[int]]:
    """The tokens that are left, and those of which rounding decides."""
    order = probs_V.argsort(descending=True).tolist()
    probs = probs_V.tolist()
    least = params.min_p * probs[order[0]]
    doubtful = {v for v in order if params.min_p > 0 and abs(probs[v] - least) < NEAR * least}
    left = [v for v in order if probs[v] >= least]
    if params.top_k > 0:
        last = probs[left[min(params.top_k, len(left)) - 1]]
        doubtful |= {v for v in left if params.top_k < len(left) and abs(probs[v] - last) < NEAR * last}
        left = left[: params.top_k]
    total, before, kept = sum(probs[v] for v in left), 0.0, set()
    for v in left:
        if params.top_p < 1 and abs(before / total - params.top_p) < NEAR:
            doubtful.add(v)
        if params.top_p == 1 or before / total < params.top_p:
            kept.add(v)
        before += probs[v]
    return kept, doubtful - {order[0]} if len(kept) > 1 else doubtful

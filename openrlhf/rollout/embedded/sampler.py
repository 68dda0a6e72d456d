"""From logits to tokens. The token of a row depends on its own logits, parameters and random number only.

Token i of a request with seed s is drawn by inverse CDF with the random number `uniforms(s, i)`, a hash. There is no
generator whose state the order of requests could change, so retries, other requests in the batch, and their order do
not change what is sampled.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 64  # tokens per block of the two-level search
_CANDIDATES = 256  # most top-p nuclei are smaller; a full sort costs ten times as much


class Sampled(NamedTuple):
    """One token for every row."""

    token_ids: Tensor
    """int64 [B]"""
    logprobs: Tensor | None
    """float32 [B]; None when no row wants them."""
    supports: list[Sequence[int] | None] | None = None
    """For each row what its token was chosen among: nothing where that was everything, None where it was more than the
    row wants to be told (as `types.Supports.of` takes them). None when no row wants any."""


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64 (Steele, Lea and Flood, 2014): a bijection of 64-bit words, uint64 [B]."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _hash(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """uint64 [B]. Seeds are mixed before the counter is added: otherwise seeds s and s + golden would give the same
    sequence, shifted by one."""
    return _mix(_mix(seeds + _GOLDEN) + (counters.astype(np.uint64) + np.uint64(1)) * _GOLDEN)


def uniforms(seeds: np.ndarray, counters: np.ndarray) -> np.ndarray:
    """float64 [B] in [0, 1): a pure function of (seeds[b], counters[b]), uint64 and int64 [B].

    48 bits of the hash are used, so that u · total < total holds in float64 for every total.
    """
    return (_hash(seeds, counters) >> np.uint64(16)).astype(np.float64) * 2.0**-48


class Penalty(NamedTuple):
    """The penalties of one row for tokens that are in its prompt or its response."""

    row: int
    prompt_ids: np.ndarray
    response_ids: np.ndarray
    repetition: float
    presence: float
    frequency: float


def sample(
    logits: Tensor,
    *,
    uniform: np.ndarray,
    temperature: np.ndarray,
    top_p: np.ndarray,
    top_k: np.ndarray,
    min_p: np.ndarray,
    penalties: Sequence[Penalty] = (),
    forbidden: np.ndarray | None = None,
    unsampled: Tensor | None = None,
    want_logprobs: bool = True,
    most_support: np.ndarray | None = None,
) -> Sampled:
    """One token per row of `logits` [B, V], which is overwritten.

    Args:
        uniform: float64 [B] in [0, 1).
        temperature: float32 [B]; 0 means greedy.
        top_p: float32 [B]; 1 means all.
        top_k: int64 [B]; -1 means all. Applied before top-p, which then sees the renormalised rest.
        min_p: float32 [B]; 0 means all. Applied before top-k.
        forbidden: int64 [K, 2] pairs (row, token id) that must not be sampled.
        unsampled: int64 [K] token ids that no row ever samples, on the device of the logits. They are no part of the
            distribution: all below is as if the vocabulary had no such tokens.
        most_support: int64 [B]: the size of the largest support that is told; 0: none is. None: no row's.

    The log-prob of a sampled token is log q(token) with q the distribution it was drawn from: after penalties,
    forbidding, temperature, min-p, top-k and top-p. A greedy token is reported under the temperature-1 softmax
    (after penalties and forbidding), because under its own distribution every log-prob would be 0.
    """
    logits = logits.float()
    device = logits.device
    if unsampled is not None:
        logits.index_fill_(-1, unsampled, float("-inf"))
    for penalty in penalties:
        _penalise(logits[penalty.row], penalty)
    if forbidden is not None and len(forbidden):
        rows, token_ids = torch.from_numpy(forbidden).to(device).unbind(1)
        logits[rows, token_ids] = float("-inf")

    greedy = temperature == 0
    argmax = logits.argmax(-1) if greedy.any() else None
    if argmax is not None and greedy.all() and not want_logprobs:
        return Sampled(argmax, None)
    divisor = np.where(greedy, np.float32(1), temperature)
    if (divisor != 1).any():
        logits.div_(torch.from_numpy(divisor).to(device)[:, None])
    probs = torch.softmax(logits, dim=-1)

    if argmax is not None and greedy.all():
        token_ids = argmax
    else:
        if len(unlikely := np.flatnonzero(~greedy & (min_p > 0))):
            rows = torch.from_numpy(unlikely).to(device)
            probs[rows] = _drop_unlikely(probs[rows], min_p=min_p[unlikely])
        if len(truncated := np.flatnonzero(~greedy & ((top_p < 1) | (top_k > 0)))):
            rows = torch.from_numpy(truncated).to(device)
            probs[rows] = _truncate(probs[rows], top_p=top_p[truncated], top_k=top_k[truncated])
        token_ids = inverse_cdf(probs, torch.from_numpy(uniform).to(device))
        if argmax is not None:
            token_ids = torch.where(torch.from_numpy(greedy).to(device), argmax, token_ids)
    logprobs = probs.gather(-1, token_ids[:, None]).squeeze(-1).log_() if want_logprobs else None
    if most_support is None:
        return Sampled(token_ids, logprobs)
    return Sampled(token_ids, logprobs, _supports(probs, np.where(greedy, 0, most_support)))


def _supports(probs: Tensor, most: np.ndarray) -> list[Sequence[int] | None]:
    """The tokens of each row of `probs` [B, V] that have a probability, where it wants them and they are at most `most`
    [B]."""
    found: list[Sequence[int] | None] = [()] * len(most)
    wanted = np.flatnonzero(most > 0)
    if not len(wanted):
        return found
    kept = probs[torch.from_numpy(wanted).to(probs.device)] > 0
    counts = kept.sum(-1)
    told = counts <= torch.from_numpy(most[wanted]).to(counts)
    row_S, ids_S = (kept & told[:, None]).nonzero().cpu().unbind(1)
    ids = ids_S.split(torch.bincount(row_S, minlength=len(wanted)).tolist())
    for row, own, is_told in zip(wanted.tolist(), ids, told.tolist(), strict=True):
        found[row] = own.tolist() if is_told else None
    return found


def _penalise(logits_V: Tensor, penalty: Penalty) -> None:
    """In place. Repetition as in CTRL (Keskar et al., 2019): l/r where l > 0, l·r elsewhere, for tokens read or said;
    then l - frequency · count - presence for tokens said `count` > 0 times."""
    device = logits_V.device
    if penalty.repetition != 1:
        seen = torch.from_numpy(np.union1d(penalty.prompt_ids, penalty.response_ids)).to(device)
        values = logits_V[seen]
        logits_V[seen] = torch.where(values > 0, values / penalty.repetition, values * penalty.repetition)
    said, counts = np.unique(penalty.response_ids, return_counts=True)
    cost = torch.from_numpy(penalty.frequency * counts + penalty.presence).to(logits_V)
    logits_V[torch.from_numpy(said).to(device)] -= cost


def _drop_unlikely(probs: Tensor, *, min_p: np.ndarray) -> Tensor:
    """`probs` [B, V] without tokens below min_p · the largest of their row, renormalised."""
    least = probs.amax(-1, keepdim=True) * torch.from_numpy(min_p).to(probs)[:, None]
    probs = probs.masked_fill(probs < least, 0.0)
    return probs / probs.sum(-1, keepdim=True)


def inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """int64 [B]: the first token whose cumulative probability exceeds uniform · total. Never one of probability 0.

    `probs` float32 [B, V] (need not be normalised), `uniform` float64 [B]. Searches block sums first and one
    block after: a cumulative sum over the whole vocabulary costs more than the softmax.
    """
    V = probs.shape[-1]
    whole = V // _BLOCK * _BLOCK
    sums = probs[:, :whole].unflatten(-1, (-1, _BLOCK)).sum(-1)
    if whole < V:
        sums = torch.cat([sums, probs[:, whole:].sum(-1, keepdim=True)], dim=-1)
    block, rest = _search(sums.double().cumsum(-1), uniform, scale=True)
    inside = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=probs.device)
    members = probs.gather(-1, inside.clamp(max=V - 1)).double().masked_fill_(inside >= V, 0.0)
    offset, _ = _search(members.cumsum(-1), rest, scale=False)
    return block * _BLOCK + offset


def _search(cumulative: Tensor, target: Tensor, *, scale: bool) -> tuple[Tensor, Tensor]:
    """First index per row of `cumulative` [B, N] beyond the target, and how far the target lies into it.

    A target past the end (the block's sum was rounded in another order) is moved just inside, so that the index is one
    where the cumulative sum grows: a token with probability above 0.
    """
    total = cumulative[:, -1]
    if scale:
        target = target * total
    target = torch.minimum(target, total * (1 - 2.0**-48))
    index = (cumulative <= target[:, None]).sum(-1)
    before = torch.where(index > 0, cumulative.gather(-1, (index - 1).clamp(min=0)[:, None]).squeeze(-1), 0.0)
    return index, target - before


def _truncate(probs: Tensor, *, top_p: np.ndarray, top_k: np.ndarray) -> Tensor:
    """`probs` [B, V] with everything outside top-k and top-p set to 0, renormalised.

    Top-p keeps the most likely tokens until their sum reaches p, the one that crosses it included.
    """
    V = probs.shape[-1]
    k = np.where(top_k > 0, np.minimum(top_k, V), V)
    width = int(k.max())
    if width > _CANDIDATES:
        # A full ranking is needed only for a top-p nucleus of more than _CANDIDATES tokens, which is rare. So the first
        # candidates are tried, and the whole vocabulary is sorted only if they do not cover p.
        widest_k = int(k[top_k > 0].max(initial=0))
        width = min(V, max(_CANDIDATES, widest_k))
    values, token_ids = probs.topk(width, dim=-1)
    p_column = torch.from_numpy(top_p.astype(np.float32)).to(probs.device)[:, None]
    k_column = torch.from_numpy(k).to(probs.device)[:, None]
    covered = (values.sum(-1, keepdim=True) >= p_column) & (p_column < 1) | (k_column <= width)
    if not bool(covered.all()):
        values, token_ids = probs.sort(dim=-1, descending=True)
    values = values.masked_fill(torch.arange(values.shape[-1], device=probs.device) >= k_column, 0.0)
    cumulative = values.cumsum(-1)
    # Without top-k the total is that of the whole distribution, 1, and the candidates may hold less.
    total = torch.where(k_column < V, cumulative[:, -1:], torch.ones_like(cumulative[:, -1:]))
    values = values.masked_fill(cumulative - values >= p_column * total, 0.0)
    values[:, 0].clamp_(min=torch.finfo(values.dtype).tiny)
    return torch.zeros_like(probs).scatter_(-1, token_ids, values / values.sum(-1, keepdim=True))

"""Log-probs of several tokens at each position, from hidden states, without ever holding the logits of all tokens.

    top_logprobs       the k likeliest tokens and their log-probs (of a teacher: no gradient)
    chosen_logprobs    the log-probs of K given tokens, and of all others together (of a student: with gradient)

With z as in `models.logprobs`, I_a the K given tokens of row a, and ℓ_a = log Σ_v exp z_av:

    logprob_ak = z_a,I_ak − ℓ_a
    rest_a     = log Σ_{v ∉ I_a} exp z_av − ℓ_a

The vocabulary is cut into tiles as there. Given tokens are taken out of a tile before it is summed, so that what is
left is the rest to its last bit, also where it is 1e-6 of the whole and 1 − Σ_k would be rounding. With g_ak and r_a
the gradients of the two, and G_a = Σ_k g_ak + r_a:

    dz_av = g_ak − G_a · p_av                            v = I_ak
    dz_av = (r_a · e^(−rest_a) − G_a) · p_av             elsewhere

Shapes: A tokens, D hidden size, V vocabulary, K given tokens.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openrlhf.models import logprobs as head
from openrlhf.models.logprobs import IDENTITY, LogitTransform

_OUT = -1e30
"""Added to the logit of a token that is not to count: its exponential is 0."""
_LARGEST_EXPONENT = 80.0
"""e^80 is a float32. What is so much less likely than the whole has no gradient that a float32 could hold."""


class TopLogprobs(NamedTuple):
    token_ids_AK: Tensor
    """int32 [A, K]: the likeliest first."""
    logprobs_AK: Tensor
    """float32 [A, K]"""


class ChosenLogprobs(NamedTuple):
    logprobs_AK: Tensor
    """float32 [A, K]"""
    rest_A: Tensor | None
    """float32 [A]: of all other tokens together; None: there are no others."""


@torch.no_grad()
def top_logprobs(
    hidden_AD: Tensor,
    weight_VD: Tensor,
    k: int,
    *,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    transform: LogitTransform = IDENTITY,
    vocabulary: int | None = None,
    tile: tuple[int, int] | None = None,
) -> TopLogprobs:
    """The k likeliest tokens of each row. `vocabulary`: tokens from there on do not exist (None: all do)."""
    V = weight_VD.shape[0] if vocabulary is None else min(vocabulary, weight_VD.shape[0])
    if not 0 < k <= V:
        raise ValueError(f"there are no {k} likeliest of {V} tokens")
    shared = _Head(hidden_AD, weight_VD[:V], None if bias_V is None else bias_V[:V], temperature, transform, tile)
    A = len(hidden_AD)
    peak_A = shared.hidden_AD.new_full((A,), -torch.inf, dtype=torch.float32)
    total_A = torch.zeros_like(peak_A)
    best_AK = peak_A.new_full((A, k), -torch.inf)
    ids_AK = torch.zeros((A, k), dtype=torch.int64, device=peak_A.device)
    for cols, rows in shared.tiles():
        z, _ = shared.logits(rows, cols)
        found = z.topk(min(k, z.shape[1]), dim=1)
        values = torch.cat([best_AK[rows], found.values], dim=1)
        ids = torch.cat([ids_AK[rows], found.indices + cols.start], dim=1)
        best_AK[rows], order = values.topk(k, dim=1)
        ids_AK[rows] = ids.gather(1, order)
        peak = torch.maximum(peak_A[rows], best_AK[rows, 0])
        total_A[rows] = (peak_A[rows] - peak).exp() * total_A[rows] + z.sub_(peak[:, None]).exp_().sum(1)
        peak_A[rows] = peak
    return TopLogprobs(ids_AK.int(), best_AK - (peak_A + total_A.log())[:, None])


def chosen_logprobs(
    hidden_AD: Tensor,
    weight_VD: Tensor,
    token_ids_AK: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    transform: LogitTransform = IDENTITY,
    tile: tuple[int, int] | None = None,
) -> ChosenLogprobs:
    """Differentiable in hidden, weight and bias. The tokens of a row are different ones."""
    if hidden_AD.shape[0] != token_ids_AK.shape[0]:
        raise ValueError(f"{hidden_AD.shape[0]} hidden states for {token_ids_AK.shape[0]} rows of tokens")
    device = hidden_AD.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_VD.dtype
    with torch.autocast(device, enabled=False):
        logprobs_AK, rest_A = _ChosenLogprobs.apply(
            hidden_AD.to(dtype), weight_VD.to(dtype), bias_V, token_ids_AK.long(), temperature, transform, tile
        )
    return ChosenLogprobs(logprobs_AK, rest_A if token_ids_AK.shape[1] < weight_VD.shape[0] else None)


class _Head:
    """Tiles of logits of one pass."""

    def __init__(
        self,
        hidden_AD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        temperature: float,
        transform: LogitTransform,
        tile: tuple[int, int] | None,
    ) -> None:
        self.hidden_AD = hidden_AD.to(weight_VD.dtype)
        self.weight_VD = weight_VD
        self.bias_V = bias_V
        self.temperature = temperature or 1.0
        self.transform = transform
        self.rows_cols = tile or head._choose_tile(self.hidden_AD, weight_VD)

    def tiles(self) -> list[tuple[slice, slice]]:
        """(columns, rows) of each."""
        A, V = len(self.hidden_AD), len(self.weight_VD)
        return [
            (cols, rows) for cols in head._ranges(V, self.rows_cols[1]) for rows in head._ranges(A, self.rows_cols[0])
        ]

    def logits(self, rows: slice, cols: slice, *, with_slope: bool = False) -> tuple[Tensor, Tensor | None]:
        """z of one tile, fp32, and dz / d(product) where it is not the same for all (a soft-cap)."""
        z = head._product(self.hidden_AD[rows], self.weight_VD[cols].t())
        if self.bias_V is not None:
            z.add_(self.bias_V[cols])
        cap, slope = self.transform.softcap, None
        if cap is None:
            z.mul_(self.transform.scale / self.temperature)
        else:
            z.mul_(self.transform.scale / cap).tanh_()
            if with_slope:
                slope = z.square().neg_().add_(1.0).mul_(self.transform.scale / self.temperature)
            z.mul_(cap / self.temperature)
        return head._ban(z, cols, self.transform.banned), slope


class _ChosenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_AD: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        ids_AK: Tensor,
        temperature: float,
        transform: LogitTransform,
        tile: tuple[int, int] | None,
    ) -> tuple[Tensor, Tensor]:
        shared = _Head(hidden_AD, weight_VD, bias_V, temperature, transform, tile)
        A, K = ids_AK.shape
        chosen_AK = torch.zeros((A, K), dtype=torch.float32, device=hidden_AD.device)
        peak_A = chosen_AK.new_full((A,), _OUT)
        total_A = torch.zeros_like(peak_A)
        for cols, rows in shared.tiles():
            z, _ = shared.logits(rows, cols)
            inside, column = head._targets_in(ids_AK[rows], cols)
            chosen_AK[rows] = torch.where(inside, z.gather(1, column), chosen_AK[rows])
            z.scatter_add_(1, column, torch.where(inside, _OUT, 0.0))
            peak = torch.maximum(peak_A[rows], z.amax(1))
            total_A[rows] = (peak_A[rows] - peak).exp() * total_A[rows] + z.sub_(peak[:, None]).exp_().sum(1)
            peak_A[rows] = peak
        # Where nothing is left, the peak is as low as a logit that is out, and the sum counts those.
        others_A = torch.where(peak_A > 0.5 * _OUT, peak_A + total_A.log(), _OUT)
        lse_A = torch.logaddexp(chosen_AK.logsumexp(1), others_A)
        logprobs_AK = chosen_AK - lse_A[:, None]
        rest_A = others_A - lse_A
        ctx.save_for_backward(hidden_AD, weight_VD, bias_V, ids_AK, lse_A, logprobs_AK, rest_A)
        ctx.settings = temperature, transform, tile
        return logprobs_AK, rest_A

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g_AK: Tensor, r_A: Tensor) -> tuple[Tensor | None, ...]:
        hidden_AD, weight_VD, bias_V, ids_AK, lse_A, logprobs_AK, rest_A = ctx.saved_tensors
        temperature, transform, tile = ctx.settings
        shared = _Head(hidden_AD, weight_VD, bias_V, temperature, transform, tile)
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        whole_A = g_AK.sum(1) + r_A
        on_chosen_AK = g_AK - whole_A[:, None] * logprobs_AK.exp()
        elsewhere_A = r_A * (-rest_A).clamp_max(_LARGEST_EXPONENT).exp() - whole_A
        factor = 1.0 if transform.softcap is not None else transform.scale / shared.temperature
        grad_hidden = torch.zeros_like(hidden_AD, dtype=torch.float32) if wants_hidden else None
        grad_weight = torch.zeros_like(weight_VD) if wants_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if wants_bias else None
        for cols in head._ranges(len(weight_VD), shared.rows_cols[1]):
            # Summed in fp32 over the row blocks; a weight of lower precision is rounded once, at the end.
            partial = torch.zeros_like(weight_VD[cols], dtype=torch.float32) if wants_weight else None
            for rows in head._ranges(len(hidden_AD), shared.rows_cols[0]):
                z, slope = shared.logits(rows, cols, with_slope=True)
                inside, column = head._targets_in(ids_AK[rows], cols)
                z.sub_(lse_A[rows, None]).scatter_add_(1, column, torch.where(inside, _OUT, 0.0))
                dz = z.exp_().mul_(elsewhere_A[rows, None])
                dz.scatter_add_(1, column, torch.where(inside, on_chosen_AK[rows], 0.0))
                dz = dz.mul_(factor) if slope is None else dz.mul_(slope)
                if grad_bias is not None:
                    grad_bias[cols] += dz.sum(0)
                low = dz.to(hidden_AD.dtype)
                if grad_hidden is not None:
                    head._add_product(grad_hidden[rows], low, weight_VD[cols])
                if partial is not None:
                    head._add_product(partial, low.t(), hidden_AD[rows])
            if grad_weight is not None and partial is not None:
                grad_weight[cols] = partial
        return (
            None if grad_hidden is None else grad_hidden.to(hidden_AD.dtype),
            grad_weight,
            None if grad_bias is None else grad_bias.to(bias_V.dtype),
            None,
            None,
            None,
            None,
        )

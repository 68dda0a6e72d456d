"""Log-probs and entropies from hidden states, without ever holding the logits of all tokens.

For token a with hidden state h_a, and W the head's weight, s its scale, c its soft-cap, τ the temperature:

    z_av = softcap(s · h_a·W_v + s · bias_v) / τ            softcap(x) = c·tanh(x / c), or x without a cap
    (−∞ for a token v that is never sampled, and for one that a was not chosen among: `Supports`)
    logprob_a = z_a,target − log Σ_v exp z_av
    entropy_a = log Σ_v exp z_av − Σ_v p_av z_av            p = softmax(z)

The vocabulary is cut into tiles. A pass over them keeps, per token, the running maximum m, Σ exp(z−m) and
Σ (z−m)·exp(z−m); the backward pass recomputes each tile, turns it into dz in place, and finishes that tile's part of
the weight gradient at once. Memory beyond the results: one or two tiles. Where all tiles together are small, the
forward pass keeps them and the backward pass multiplies nothing twice.

Shapes: A tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from openrlhf.types import Supports, moved

_TILE_BYTES = {"cpu": 8 << 20, "cuda": 128 << 20}
"""fp32 logits held at once: what stays in a CPU's cache between two passes; what keeps a GPU busy."""
_TILE_ROWS = {"cpu": 2048, "cuda": 8192}
_KEPT_BYTES = {"cpu": 64 << 20, "cuda": 256 << 20}
"""Exponentials of all logits are kept for the backward pass up to this size: little beside a model's activations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitTransform:
    """What happens to `hidden @ weight.T + bias` before the softmax: scale, then soft-cap, then some tokens are out."""

    scale: float = 1.0
    softcap: float | None = None
    banned: tuple[int, ...] = ()
    """Tokens that are never sampled, and so have no share in the softmax: those that stand for images."""

    def scaled(self, logits: Tensor) -> Tensor:
        """Scale and soft-cap; nothing is banned."""
        logits = logits * self.scale if self.scale != 1.0 else logits
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


IDENTITY = LogitTransform()
_LOWEST = -1e30
"""The logit of a token that has no share: its exponential is 0. An infinite one would make 0 · ∞ in entropies."""


class Logprobs(NamedTuple):
    logprobs_A: Tensor
    """float32 [A]"""
    entropy_A: Tensor | None
    """float32 [A], None unless asked for."""


def chunked_logprobs(
    hidden_AD: Tensor,
    weight_VD: Tensor,
    targets_A: Tensor,
    *,
    bias_V: Tensor | None = None,
    temperature: float = 1.0,
    with_entropy: bool = False,
    transform: LogitTransform = IDENTITY,
    supports: Supports | None = None,
    tile: tuple[int, int] | None = None,
) -> Logprobs:
    """log π(targets) and, on request, the entropy of π, in fp32; differentiable in hidden, weight and bias.

    π is the distribution after temperature; temperature 0 (greedy sampling) is treated as 1. Where a token has a
    support, π is over that alone, and nothing outside it gets a gradient. `tile` is (rows, vocabulary entries) of
    logits held at once, chosen by device when None.
    """
    if hidden_AD.shape[0] != targets_A.shape[0]:
        raise ValueError(f"{hidden_AD.shape[0]} hidden states for {targets_A.shape[0]} targets")
    if supports is not None and len(supports) != len(targets_A):
        raise ValueError(f"{len(supports)} supports for {len(targets_A)} targets")
    if temperature < 0:
        raise ValueError(f"temperature must be >= 0, got {temperature}")
    device = hidden_AD.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight_VD.dtype
    hidden_AD, weight_VD = hidden_AD.to(dtype), weight_VD.to(dtype)
    fused = bias_V is None and transform.softcap is None and _has_kernels(hidden_AD)
    plan = _TilePlan(
        rows_cols=tile or _choose_tile(hidden_AD, weight_VD),
        scale=transform.scale,
        softcap=transform.softcap,
        banned=transform.banned,
        supports=None if supports is None else _Support(supports, hidden_AD.device),
        temperature=temperature or 1.0,
        with_entropy=with_entropy,
        keep=torch.is_grad_enabled()
        and not (with_entropy or fused)
        and transform.softcap is None
        and _fits(hidden_AD, weight_VD),
        fused=fused,
    )
    with torch.autocast(device, enabled=False):
        logprobs_A, entropy_A = _ChunkedLogprobs.apply(hidden_AD, weight_VD, bias_V, targets_A, plan)
    return Logprobs(logprobs_A, entropy_A if with_entropy else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _TilePlan:
    rows_cols: tuple[int, int]
    scale: float
    softcap: float | None
    banned: tuple[int, ...]
    supports: _Support | None
    temperature: float
    with_entropy: bool
    keep: bool
    """The backward pass gets the forward pass's tiles."""
    fused: bool = False
    """Kernels read each tile once (`models.logprobs_triton`); tiles are then not kept."""


class _KeptTile(NamedTuple):
    exponentials: Tensor
    """e^(z − m) [rows, cols]"""
    peak: Tensor
    """m [rows], the maximum when this tile was computed."""


def _fits(hidden_AD: Tensor, weight_VD: Tensor) -> bool:
    return 4 * hidden_AD.shape[0] * weight_VD.shape[0] <= _KEPT_BYTES[_device_kind(hidden_AD)]


def _has_kernels(hidden_AD: Tensor) -> bool:
    return hidden_AD.is_cuda and torch.version.hip is None and _has_triton()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def _device_kind(tensor: Tensor) -> str:
    return tensor.device.type if tensor.device.type in _TILE_BYTES else "cuda"


def _choose_tile(hidden_AD: Tensor, weight_VD: Tensor) -> tuple[int, int]:
    device = _device_kind(hidden_AD)
    rows = max(1, min(hidden_AD.shape[0], _TILE_ROWS[device]))
    cols = min(weight_VD.shape[0], max(128, _TILE_BYTES[device] // (4 * rows)))
    return rows, cols


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_AD: Tensor, weight_VD: Tensor, bias_V: Tensor | None, targets_A: Tensor, plan: _TilePlan
    ) -> tuple[Tensor, Tensor]:
        A, V = hidden_AD.shape[0], weight_VD.shape[0]
        peak_A = hidden_AD.new_full((A,), -torch.inf, dtype=torch.float32)
        total_A = torch.zeros_like(peak_A)
        moment_A = torch.zeros_like(peak_A)
        chosen_A = torch.zeros_like(peak_A)
        buffers = _Buffers(hidden_AD, plan)
        kept: list[_KeptTile] = []
        if plan.fused:
            from openrlhf.models.logprobs_triton import reduce_tile
        for cols in _ranges(V, plan.rows_cols[1]):
            for rows in _ranges(A, plan.rows_cols[0]):
                if plan.fused:
                    reduce_tile(
                        _limit(_product(hidden_AD[rows], weight_VD[cols].t()), rows, cols, plan),
                        targets_A[rows],
                        peak_A=peak_A[rows],
                        total_A=total_A[rows],
                        moment_A=moment_A[rows],
                        chosen_A=chosen_A[rows],
                        first=cols.start,
                        factor=plan.scale / plan.temperature,
                        with_entropy=plan.with_entropy,
                    )
                    continue
                z = buffers.logits(hidden_AD[rows], weight_VD[cols], None if bias_V is None else bias_V[cols])
                _limit(z, rows, cols, plan)
                inside, column = _targets_in(targets_A[rows], cols)
                chosen_A[rows] = torch.where(inside, z.gather(1, column[:, None]).squeeze(1), chosen_A[rows])
                peak = torch.maximum(peak_A[rows], z.amax(1))
                shift = peak_A[rows] - peak
                decay = shift.exp()
                z.sub_(peak[:, None])
                if plan.with_entropy:
                    e = torch.exp(z, out=buffers.second(z))
                    # Σ(z−m') e^(z−m') = e^(m−m') · (Σ(z−m) e^(z−m) + (m−m')·Σ e^(z−m)); nothing yet when m is −∞.
                    carried = moment_A[rows] + torch.where(shift.isfinite(), shift, 0.0) * total_A[rows]
                    moment_A[rows] = decay * carried + z.mul_(e).sum(1)
                else:
                    e = z.exp_()
                if plan.keep:
                    kept.append(_KeptTile(e, peak))
                    buffers.forget()
                total_A[rows] = decay * total_A[rows] + e.sum(1)
                peak_A[rows] = peak
        lse_A = peak_A + total_A.log()
        entropy_A = lse_A - peak_A - moment_A / total_A
        ctx.save_for_backward(hidden_AD, weight_VD, bias_V, targets_A, lse_A, entropy_A)
        ctx.plan = plan
        ctx.kept = kept
        ctx.set_materialize_grads(False)
        if not plan.with_entropy:
            ctx.mark_non_differentiable(entropy_A)
        return chosen_A - lse_A, entropy_A

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs_A: Tensor | None, grad_entropy_A: Tensor | None) -> tuple[Tensor | None, ...]:
        """dz_v = g·(1[v = target] − p_v) − k·p_v·(log p_v + H), with g and k the gradients of log-prob and entropy."""
        hidden_AD, weight_VD, bias_V, targets_A, lse_A, entropy_A = ctx.saved_tensors
        plan: _TilePlan = ctx.plan
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        if grad_logprobs_A is None and grad_entropy_A is None:
            return None, None, None, None, None
        g_A = torch.zeros_like(lse_A) if grad_logprobs_A is None else grad_logprobs_A.float()
        k_A = None if grad_entropy_A is None or not plan.with_entropy else grad_entropy_A.float()
        if plan.softcap is None:  # z is linear in the products, so the chain's last factor goes in front
            g_A = g_A * (plan.scale / plan.temperature)
            k_A = None if k_A is None else k_A * (plan.scale / plan.temperature)
        A, V = hidden_AD.shape[0], weight_VD.shape[0]
        grad_hidden = torch.zeros_like(hidden_AD, dtype=torch.float32) if wants_hidden else None
        # Every tile below is written whole; without a token there is none to write.
        grad_weight = (torch.empty_like if A else torch.zeros_like)(weight_VD) if wants_weight else None
        grad_bias = torch.zeros_like(bias_V, dtype=torch.float32) if wants_bias else None
        row_ranges = list(_ranges(A, plan.rows_cols[0]))
        buffers = _Buffers(hidden_AD, plan)
        kept = iter(ctx.kept)
        if plan.fused:
            from openrlhf.models.logprobs_triton import tile_gradient
        for cols in _ranges(V, plan.rows_cols[1]):
            weight_tile = weight_VD[cols]
            # Summed in fp32 over the row blocks; a weight of lower precision is rounded once, at the end.
            partial = None
            for rows in row_ranges:
                hidden = hidden_AD[rows]
                slope = None
                if plan.fused:
                    z = _limit(_product(hidden, weight_tile.t()), rows, cols, plan)
                    dz = tile_gradient(
                        z,
                        targets_A[rows],
                        lse_A=lse_A[rows],
                        entropy_A=entropy_A[rows],
                        g_A=g_A[rows],
                        k_A=None if k_A is None else k_A[rows],
                        first=cols.start,
                        factor=plan.scale / plan.temperature,
                        out=z if hidden.dtype == torch.float32 else z.new_empty(z.shape, dtype=hidden.dtype),
                    )
                elif plan.keep:  # p = e^(z − m) · e^(m − lse)
                    e, peak = next(kept)
                    scale = -g_A[rows] * (peak - lse_A[rows]).exp()
                    dz = torch.mul(e, scale[:, None], out=buffers.second(e))
                else:
                    z = buffers.logits(hidden, weight_tile, None if bias_V is None else bias_V[cols])
                    if plan.softcap is not None:  # d softcap(x) / dx = 1 − (softcap(x) / c)²
                        slope = (z * (plan.temperature / plan.softcap)).square_().neg_().add_(1.0)
                        slope.mul_(plan.scale / plan.temperature)
                    _limit(z, rows, cols, plan)
                    z.sub_(lse_A[rows][:, None])
                    if k_A is None:
                        dz = z.exp_().mul_(-g_A[rows][:, None])
                    else:
                        p = torch.exp(z, out=buffers.second(z))
                        k = k_A[rows][:, None]
                        lead = g_A[rows][:, None] + k * entropy_A[rows][:, None]
                        dz = torch.addcmul(-lead, k, z, value=-1.0, out=z).mul_(p)
                if not plan.fused:
                    inside, column = _targets_in(targets_A[rows], cols)
                    dz.scatter_add_(1, column[:, None], torch.where(inside, g_A[rows], 0.0)[:, None])
                if slope is not None:
                    dz.mul_(slope)
                dz_low = dz.to(hidden.dtype)
                if grad_bias is not None:
                    grad_bias[cols] += dz.sum(0)
                if grad_hidden is not None:
                    _add_product(grad_hidden[rows], dz_low, weight_tile)
                if grad_weight is not None and len(row_ranges) == 1:
                    torch.mm(dz_low.t(), hidden, out=grad_weight[cols])
                elif grad_weight is not None:
                    if partial is None:
                        partial = torch.zeros_like(weight_tile, dtype=torch.float32)
                    _add_product(partial, dz_low.t(), hidden)
            if grad_weight is not None and partial is not None:
                grad_weight[cols] = partial
        return (
            None if grad_hidden is None else grad_hidden.to(hidden_AD.dtype),
            grad_weight,
            None if grad_bias is None else grad_bias.to(bias_V.dtype),
            None,
            None,
        )


class _Buffers:
    """Two tiles of fp32 memory, used over and over."""

    def __init__(self, hidden_AD: Tensor, plan: _TilePlan) -> None:
        self._plan = plan
        self._like = hidden_AD
        self._first: Tensor | None = None
        self._second: Tensor | None = None

    def logits(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """z of one tile, after scale, soft-cap and temperature, fp32, in a buffer that the next call overwrites."""
        plan = self._plan
        if hidden.dtype == torch.float32:
            if self._first is None:
                self._first = self._new()
            z = torch.mm(hidden, weight.t(), out=_shaped(self._first, hidden.shape[0], weight.shape[0]))
        else:
            z = _product(hidden, weight.t())
        if bias is not None:
            z.add_(bias)
        factor = plan.scale if plan.softcap is not None else plan.scale / plan.temperature
        if factor != 1.0:
            z.mul_(factor)
        if plan.softcap is not None:
            z.div_(plan.softcap).tanh_().mul_(plan.softcap / plan.temperature)
        return z

    def forget(self) -> None:
        """What `logits` returned last belongs to the caller now."""
        self._first = None

    def second(self, like: Tensor) -> Tensor:
        if self._second is None:
            self._second = self._new()
        return _shaped(self._second, *like.shape)

    def _new(self) -> Tensor:
        rows, cols = self._plan.rows_cols
        return self._like.new_empty(rows * cols, dtype=torch.float32)


def _shaped(buffer: Tensor, rows: int, cols: int) -> Tensor:
    return buffer[: rows * cols].view(rows, cols)


def _ranges(total: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, total)) for start in range(0, total, size)]


def _ban(z: Tensor, cols: slice, banned: tuple[int, ...]) -> Tensor:
    """The tile, with its banned columns at the bottom."""
    for token in banned:
        if cols.start <= token < cols.stop:
            z[:, token - cols.start] = _LOWEST
    return z


def _limit(z: Tensor, rows: slice, cols: slice, plan: _TilePlan) -> Tensor:
    """The tile, with what has no share in the softmax at the bottom."""
    _ban(z, cols, plan.banned)
    return z if plan.supports is None else plan.supports.limit(z, rows, cols)


class _Support:
    """`Supports` in the form in which a tile asks for them."""

    def __init__(self, supports: Supports, device: torch.device) -> None:
        self._ends = supports.ends
        sizes_A = supports.sizes_A.clamp(min=0).long()
        self._cut_A = moved(sizes_A > 0, device)
        self._rows_S = moved(torch.arange(len(sizes_A)).repeat_interleave(sizes_A), device)
        self._ids_S = supports.token_ids.to(device=device, dtype=torch.int64)

    def limit(self, z: Tensor, rows: slice, cols: slice) -> Tensor:
        """In place."""
        own = slice(self._ends[rows.start], self._ends[rows.stop])
        if own.start == own.stop:
            return z
        # What lies in another tile goes to a column that is not there: nothing has to be counted on the device first.
        width = z.shape[1]
        column_S = self._ids_S[own] - cols.start
        column_S = torch.where((column_S >= 0) & (column_S < width), column_S, width)
        outside = self._cut_A[rows, None].repeat(1, width + 1)
        outside[self._rows_S[own] - rows.start, column_S] = False
        return z.masked_fill_(outside[:, :width], _LOWEST)


def _targets_in(targets: Tensor, cols: slice) -> tuple[Tensor, Tensor]:
    """Whether each row's target lies in this tile, and its column there (any column otherwise; no device sync)."""
    inside = (targets >= cols.start) & (targets < cols.stop)
    return inside, torch.where(inside, targets - cols.start, 0)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left @ right, in fp32."""
    if left.is_cuda and left.dtype != torch.float32:
        return torch.mm(left, right, out_dtype=torch.float32)
    # A CPU has no such product. Rounded to bf16, a logit of 20 would be off by up to 0.06.
    return torch.mm(left.float(), right.float())


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total += left @ right, `total` in fp32."""
    if left.dtype == torch.float32:
        total.addmm_(left, right)
    elif left.is_cuda:
        total += _product(left, right)
    else:  # a gradient is rounded to its parameter's dtype in any case
        total += torch.mm(left, right)

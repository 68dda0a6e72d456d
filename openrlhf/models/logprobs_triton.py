"""One pass over a tile of logits instead of several: the arithmetic of `models.logprobs` as two Triton kernels.

A tile is written once by a matrix product and read once here; everything else about it stays in registers. Memory is
what the head waits for: at 151,936 entries each further pass costs a tenth of the products themselves.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096


@triton.jit
def _reduce_kernel(  # type: ignore[no-untyped-def]  # a kernel's arguments are Triton's values
    z_ptr, target_ptr, peak_ptr, total_ptr, moment_ptr, chosen_ptr, row_stride, columns, first, factor,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Row r of the tile joins the running maximum m, Σ e^(z−m) and Σ (z−m) e^(z−m) of its token."""
    row = tl.program_id(0)
    target = tl.load(target_ptr + row) - first
    peak = tl.load(peak_ptr + row)
    total = tl.load(total_ptr + row)
    moment = tl.load(moment_ptr + row)
    base = z_ptr + row.to(tl.int64) * row_stride
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        z = tl.load(base + column, mask=column < columns, other=float("-inf")) * factor
        higher = tl.maximum(peak, tl.max(z, axis=0))
        shift = peak - higher
        decay = tl.exp(shift)
        e = tl.exp(z - higher)
        if ENTROPY:
            # Σ(z−m') e^(z−m') = e^(m−m') · (Σ(z−m) e^(z−m) + (m−m')·Σ e^(z−m)); nothing yet when m is −∞.
            carried = moment + tl.where(total > 0, shift, 0.0) * total
            moment = decay * carried + tl.sum(tl.where(column < columns, (z - higher) * e, 0.0), axis=0)
        total = decay * total + tl.sum(e, axis=0)
        peak = higher
    tl.store(peak_ptr + row, peak)
    tl.store(total_ptr + row, total)
    tl.store(moment_ptr + row, moment)
    if (target >= 0) & (target < columns):
        tl.store(chosen_ptr + row, tl.load(base + target) * factor)


@triton.jit
def _gradient_kernel(  # type: ignore[no-untyped-def]  # as above
    z_ptr, dz_ptr, target_ptr, lse_ptr, entropy_ptr, g_ptr, k_ptr, z_stride, dz_stride, columns, first, factor,
    ENTROPY: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """dz_v = g·(1[v = target] − p_v) − k·p_v·(log p_v + H)"""
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    target = tl.load(target_ptr + row) - first
    lse, g = tl.load(lse_ptr + row), tl.load(g_ptr + row)
    z = tl.load(z_ptr + row.to(tl.int64) * z_stride + column, mask=inside, other=float("-inf"))
    logp = z * factor - lse
    p = tl.exp(logp)
    dz = tl.where(column == target, g, 0.0) - g * p
    if ENTROPY:
        dz -= tl.load(k_ptr + row) * p * (tl.where(inside, logp, 0.0) + tl.load(entropy_ptr + row))
    tl.store(dz_ptr + row.to(tl.int64) * dz_stride + column, dz.to(dz_ptr.dtype.element_ty), mask=inside)


def reduce_tile(
    z: Tensor,
    targets_A: Tensor,
    *,
    peak_A: Tensor,
    total_A: Tensor,
    moment_A: Tensor,
    chosen_A: Tensor,
    first: int,
    factor: float,
    with_entropy: bool,
) -> None:
    """Take one tile, columns from `first` on, into the running sums of its rows, in place. `factor` scales logits."""
    rows, columns = z.shape
    _reduce_kernel[(rows,)](
        z, targets_A, peak_A, total_A, moment_A, chosen_A, z.stride(0), columns, first, factor,
        ENTROPY=with_entropy, BLOCK=min(_BLOCK, triton.next_power_of_2(columns)), num_warps=8,
    )  # fmt: skip


def tile_gradient(
    z: Tensor,
    targets_A: Tensor,
    *,
    lse_A: Tensor,
    entropy_A: Tensor,
    g_A: Tensor,
    k_A: Tensor | None,
    first: int,
    factor: float,
    out: Tensor,
) -> Tensor:
    """dz of one tile, in the dtype of `out`. g and k are given with the chain's last factor in front."""
    rows, columns = z.shape
    block = min(_BLOCK, triton.next_power_of_2(columns))
    _gradient_kernel[(rows, triton.cdiv(columns, block))](
        z, out, targets_A, lse_A, entropy_A, g_A, g_A if k_A is None else k_A, z.stride(0), out.stride(0), columns,
        first, factor, ENTROPY=k_A is not None, BLOCK=block, num_warps=8,
    )  # fmt: skip
    return out

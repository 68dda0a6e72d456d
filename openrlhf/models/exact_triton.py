"""The sums of `models.exact` on a GPU: kernels whose tiles have one size, whatever the batch is.

A row's sum is added up tile by tile, and within a tile by instructions that treat all rows alike. Shapes of the batch
are no constants of a kernel (`do_not_specialize`): with one row the same code runs as with a thousand.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

if TYPE_CHECKING:
    from openrlhf.models.exact import KeyPlaces

_PRODUCT = {"ROWS": 64, "COLUMNS": 128, "INNER": 64, "num_warps": 4, "num_stages": 3}
_ATTENTION = {"QUERIES": 16, "KEYS": 64, "num_warps": 4, "num_stages": 2}
_COLUMNS = 4096
"""Of a row of logits that are read at once."""


@triton.jit(do_not_specialize=["rows"])
def _linear_kernel(  # type: ignore[no-untyped-def]  # a kernel's arguments are Triton's values
    x_ptr, weight_ptr, bias_ptr, out_ptr, rows, columns, inner,
    BIAS: tl.constexpr, PRECISION: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """A tile of x W' + b; x [rows, inner], W [columns, inner], both contiguous."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, inner, INNER):
        place = start + tl.arange(0, INNER)
        x = tl.load(
            x_ptr + row[:, None] * inner + place[None, :],
            mask=(row[:, None] < rows) & (place[None, :] < inner),
            other=0.0,
        )
        weight = tl.load(
            weight_ptr + column[None, :] * inner + place[:, None],
            mask=(column[None, :] < columns) & (place[:, None] < inner),
            other=0.0,
        )
        total = tl.dot(x, weight, total, input_precision=PRECISION)
    if BIAS:
        total += tl.load(bias_ptr + column, mask=column < columns, other=0.0).to(tl.float32)[None, :]
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    tl.store(out_ptr + row[:, None] * columns + column[None, :], total.to(out_ptr.dtype.element_ty), mask=inside)


def linear(x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None, *, dtype: torch.dtype) -> Tensor:
    x_TD, weight_ND = x_TD.contiguous(), weight_ND.contiguous()
    (rows, inner), columns = x_TD.shape, len(weight_ND)
    out = x_TD.new_empty((rows, columns), dtype=dtype)
    if rows:
        grid = (triton.cdiv(rows, _PRODUCT["ROWS"]), triton.cdiv(columns, _PRODUCT["COLUMNS"]))
        _linear_kernel[grid](
            x_TD, weight_ND, weight_ND if bias_N is None else bias_N, out, rows, columns, inner,
            BIAS=bias_N is not None, PRECISION=_precision(x_TD), **_PRODUCT,
        )  # fmt: skip
    return out


def _precision(x: Tensor) -> str:
    """fp32 is multiplied as fp32; of 16-bit numbers there is one product."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


@triton.jit
def _norm_kernel(  # type: ignore[no-untyped-def]  # as above
    x_ptr, weight_ptr, out_ptr, size, eps, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * size + place, mask=place < size, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / size + eps)
    weight = tl.load(weight_ptr + place, mask=place < size, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + place, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=place < size)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.contiguous()
    out, size = torch.empty_like(x), x.shape[-1]
    if x.numel():
        _norm_kernel[(x.numel() // size,)](x, weight, out, size, eps, BLOCK=triton.next_power_of_2(size), num_warps=4)
    return out


@triton.jit
def _log_softmax_kernel(  # type: ignore[no-untyped-def]  # as above
    x_ptr, out_ptr, size, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    peak = float("-inf")
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * size + place, mask=place < size, other=float("-inf"))
        peak = tl.maximum(peak, tl.max(x, axis=0))
    total = 0.0
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * size + place, mask=place < size, other=float("-inf"))
        total += tl.sum(tl.exp(x - peak), axis=0)
    rest = tl.log(total)
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * size + place, mask=place < size, other=float("-inf"))
        tl.store(out_ptr + row * size + place, x - peak - rest, mask=place < size)


def log_softmax(logits_TV: Tensor) -> Tensor:
    logits_TV = logits_TV.contiguous()
    out = torch.empty_like(logits_TV)
    if len(logits_TV):
        _log_softmax_kernel[(len(logits_TV),)](logits_TV, out, logits_TV.shape[1], BLOCK=_COLUMNS, num_warps=8)
    return out


@triton.jit(do_not_specialize=["slots_stride"])
def _attention_kernel(  # type: ignore[no-untyped-def]  # as above
    q_ptr, k_ptr, v_ptr, out_ptr, starts_ptr, lengths_ptr, slots_ptr,
    slots_stride, k_stride, v_stride, heads, group, size, scaling,
    PRECISION: tl.constexpr, SIZE: tl.constexpr, QUERIES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """A tile of one sequence's queries, one head: softmax(q k' · scaling) v, keys in tiles from the first on."""
    sequence, tile, head = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    begin = tl.load(starts_ptr + sequence).to(tl.int64)
    queries = tl.load(starts_ptr + sequence + 1) - begin
    if tile * QUERIES < queries:
        length = tl.load(lengths_ptr + sequence)
        query = tile * QUERIES + tl.arange(0, QUERIES)
        position = length - queries + query
        place = tl.arange(0, SIZE)
        rows = (begin + query)[:, None] * heads * size + head * size + place[None, :]
        inside = (query[:, None] < queries) & (place[None, :] < size)
        q = tl.load(q_ptr + rows, mask=inside, other=0.0)
        peak = tl.full((QUERIES,), float("-inf"), dtype=tl.float32)
        total = tl.zeros((QUERIES,), dtype=tl.float32)
        out = tl.zeros((QUERIES, SIZE), dtype=tl.float32)
        column = (head // group) * size
        last = tl.minimum(length, length - queries + (tile + 1) * QUERIES)
        for start in range(0, last, KEYS):
            key = start + tl.arange(0, KEYS)
            slot = tl.load(slots_ptr + sequence * slots_stride + key, mask=key < length, other=0).to(tl.int64)
            k = tl.load(
                k_ptr + slot[None, :] * k_stride + column + place[:, None],
                mask=(key[None, :] < length) & (place[:, None] < size),
                other=0.0,
            )
            scores = tl.dot(q, k, input_precision=PRECISION) * scaling
            scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, axis=1))
            weights = tl.exp(scores - higher[:, None])
            decay = tl.exp(peak - higher)
            v = tl.load(
                v_ptr + slot[:, None] * v_stride + column + place[None, :],
                mask=(key[:, None] < length) & (place[None, :] < size),
                other=0.0,
            )
            total = total * decay + tl.sum(weights, axis=1)
            out = tl.dot(weights.to(v.dtype), v, out * decay[:, None], input_precision=PRECISION)
            peak = higher
        tl.store(out_ptr + rows, (out / total[:, None]).to(out_ptr.dtype.element_ty), mask=inside)


def attend(q_THE: Tensor, k_KHE: Tensor, v_KHE: Tensor, places: KeyPlaces, *, scaling: float) -> Tensor:
    """Keys and values may lie further apart than their size, as in an engine's cache; a key's heads are adjacent."""
    q_THE = q_THE.contiguous()
    heads, size = q_THE.shape[1:]
    for rows in (k_KHE, v_KHE):
        assert rows.stride()[1:] == (size, 1), "the heads of a key lie behind each other"
    out = torch.empty_like(q_THE)
    sequences = len(places.lengths)
    if sequences and places.most_queries:
        grid = (sequences, triton.cdiv(places.most_queries, _ATTENTION["QUERIES"]), heads)
        _attention_kernel[grid](
            q_THE, k_KHE, v_KHE, out, places.query_starts, places.lengths, places.slots_SL,
            places.slots_SL.stride(0), k_KHE.stride(0), v_KHE.stride(0), heads, heads // k_KHE.shape[1], size, scaling,
            PRECISION=_precision(q_THE), SIZE=triton.next_power_of_2(size), **_ATTENTION,
        )  # fmt: skip
    return out

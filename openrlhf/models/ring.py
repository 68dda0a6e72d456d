"""Attention over a stream whose tokens lie in stripes on several ranks: keys and values go around a ring.

    stream   a b c d e | f g h +          two sequences, and one more to fill up; 3 ranks
    rank 0   a   d   g      rank 1   b   e   h      rank 2   c   f   +

Queries stay where they are. At step s a rank has the keys and values of the rank s places before it, attends to them,
merges what it gets with what it has by their log-sum-exps, and passes the slice on. In the backward pass the gradients
of a slice travel with it, and come home after the last step.

What a query sees of a slice is always what kernels for sequences of different lengths know by themselves. Take the
queries of one sequence on this rank, and the keys of that sequence in the slice. After dropping a last key that lies
after the last query, the last query sees all keys, the one before it one key less, and so on, because there is one key
between two neighbouring queries. That is a causal mask whose lower right corners are aligned. Aligned query and key are
s tokens apart, so of a window of W tokens (itself included) a query sees its aligned key and (W - 1 - s) // N before
that; or none, if this is negative. The keys of a shared prefix stand before the sequence's own, and all is the same.

A shared prefix with a window takes calls of its own. A prefix lies anywhere in the stream, so the distance of its keys
to a query is another number of steps in every sequence. The first queries may see all of the prefix: that is a call
without a mask. From there on the window leaves one key of the prefix behind from one query to the next; read from the
end to the beginning this is a causal mask again. So these queries and keys are laid out backwards.

Shapes: N ranks, t tokens of a rank, Q queries and K keys of a call, H query heads, h key/value heads, G = H / h,
D head dimension of queries and keys, V of values, P parts of the stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from openrlhf.config.fields import ConfigError
from openrlhf.models.attention_kernels import flash_can
from openrlhf.models.exchange import Exchange
from openrlhf.models.packed import StreamAttention, StreamPart

_BLOCK = 256
"""Queries whose scores are held at a time, where there is no flash kernel."""


def check_head_stride(kv_heads: int, stride: int) -> None:
    """Raises `ConfigError` if the model's key/value heads cannot travel so many at a time."""
    if stride < 1 or kv_heads % stride:
        fitting = ", ".join(str(n) for n in range(1, kv_heads + 1) if kv_heads % n == 0)
        raise ConfigError(
            f"--ds.ring_attn_head_stride {stride}: so many key/value heads travel around the ring at a time, and the "
            f"model has {kv_heads}; take one of {fitting}"
        )


class RingAttention:
    """The plan of a rank that has a stripe of the stream, in place of the plan of the whole stream."""

    def __init__(
        self, whole: StreamAttention, exchange: Exchange, *, padded_length: int, head_stride: int, device: torch.device
    ) -> None:
        """`padded_length`: the tokens that the ranks share out, a multiple of their number."""
        self._exchange = exchange
        self._head_stride = head_stride
        # Once for all layers.
        self._layout = RingLayout(whole.parts(), padded_length, rank=exchange.rank, size=exchange.size, device=device)

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        dropout: float,
    ) -> Tensor:
        """query [1, H, t, D], key and value [1, h, t, D] → [1, t, H, V]."""
        if dropout:
            raise ConfigError(
                f"--ds.ring_attn_size {self._exchange.size}: the model drops attention weights ({dropout:g}), which a "
                f"ring cannot; set its attention dropout to 0, or take a size that divides its {query.shape[1]} heads"
            )
        q_tHD, k_thD, v_thV = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        out_tHV = ring_attention(
            q_tHD,
            k_thD,
            v_thV,
            self._layout,
            self._exchange,
            scaling=scaling,
            window=sliding_window,
            head_stride=self._head_stride,
        )
        return out_tHV.unsqueeze(0)


@torch.compiler.disable
def ring_attention(
    q_tHD: Tensor,
    k_thD: Tensor,
    v_thV: Tensor,
    layout: RingLayout,
    exchange: Exchange,
    *,
    scaling: float,
    window: int | None,
    head_stride: int,
) -> Tensor:
    """Own queries' attention to the keys of all ranks → [t, H, V]. All ranks call it together, backward too.

    `head_stride` key/value heads travel at a time: fewer need less memory for what is under way, and more rounds.
    Compiled layers leave it as it is: it consists of kernels and of messages between ranks.
    """
    check_head_stride(k_thD.shape[1], head_stride)
    with torch.autocast(q_tHD.device.type, enabled=False):
        out_tHV: Tensor = _Ring.apply(q_tHD, k_thD, v_thV, layout, exchange, scaling, window, head_stride)
    return out_tHV


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_tHD: Tensor,
        k_thD: Tensor,
        v_thV: Tensor,
        layout: RingLayout,
        exchange: Exchange,
        scaling: float,
        window: int | None,
        head_stride: int,
    ) -> Tensor:
        t, H = q_tHD.shape[:2]
        out_tHV = q_tHD.new_empty(t, H, v_thV.shape[-1])
        lse_Ht = q_tHD.new_empty(H, t, dtype=_wide(q_tHD.dtype))
        kernel = _kernel(q_tHD, v_thV, scaling)
        widths = [k_thD.shape[-1], v_thV.shape[-1]]
        for kv_heads, heads in _rounds(q_tHD, k_thD, head_stride):
            merged = _Merged()
            slice_thX = torch.cat([k_thD[:, kv_heads], v_thV[:, kv_heads]], dim=-1)  # keys and values travel together
            for step in range(exchange.size):
                next_slice = exchange.shift(slice_thX) if step + 1 < exchange.size else None
                for call in layout.calls(step, window):
                    k_KhD, v_KhV = call.of_keys(slice_thX).split(widths, dim=-1)
                    merged.add(call, *kernel.forward(call.of_queries(q_tHD[:, heads]), k_KhD, v_KhV, call))
                if next_slice is not None:
                    slice_thX = next_slice()
            out_tHV[:, heads], lse_Ht[heads] = merged.out_tHV, merged.lse_Ht
        ctx.save_for_backward(q_tHD, k_thD, v_thV, out_tHV, lse_Ht)
        ctx.options = (layout, exchange, scaling, window, head_stride)
        return out_tHV

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_tHV: Tensor) -> tuple[Tensor | None, ...]:
        """A slice's part of the gradient needs the softmax over all slices: its weights are exp(score - lse)."""
        q_tHD, k_thD, v_thV, out_tHV, lse_Ht = ctx.saved_tensors
        layout, exchange, scaling, window, head_stride = ctx.options
        dq_tHD, dk_thD, dv_thV = torch.empty_like(q_tHD), torch.empty_like(k_thD), torch.empty_like(v_thV)
        widths = [k_thD.shape[-1], v_thV.shape[-1]]
        grad_tHV = grad_tHV.contiguous()
        kernel = _kernel(q_tHD, v_thV, scaling)
        wide = _wide(q_tHD.dtype)
        for kv_heads, heads in _rounds(q_tHD, k_thD, head_stride):
            own = (q_tHD[:, heads], out_tHV[:, heads], grad_tHV[:, heads])
            dq_wide = torch.zeros_like(own[0], dtype=wide)
            slice_thX = torch.cat([k_thD[:, kv_heads], v_thV[:, kv_heads]], dim=-1)
            gradients = None
            for step in range(exchange.size):
                next_slice = exchange.shift(slice_thX) if step + 1 < exchange.size else None
                d_slice_thX = torch.zeros_like(slice_thX, dtype=wide)
                for call in layout.calls(step, window):
                    k_KhD, v_KhV = call.of_keys(slice_thX).split(widths, dim=-1)
                    q_QHD, out_QHV, grad_QHV = (call.of_queries(x) for x in own)
                    dq_QHD, dk_KhD, dv_KhV = kernel.backward(
                        q_QHD, k_KhD, v_KhV, out_QHV, call.of_queries(lse_Ht[heads], dim=1), grad_QHV, call
                    )
                    call.add_to_queries(dq_wide, dq_QHD)
                    call.add_to_keys(d_slice_thX, torch.cat([dk_KhD, dv_KhV], dim=-1))
                # The slice's gradient of the steps before has travelled while this one was computed.
                if gradients is not None:
                    d_slice_thX += gradients()
                gradients = exchange.shift(d_slice_thX)
                if next_slice is not None:
                    slice_thX = next_slice()
            assert gradients is not None  # a ring has a step
            dq_tHD[:, heads] = dq_wide
            dk_thD[:, kv_heads], dv_thV[:, kv_heads] = gradients().split(widths, dim=-1)
        return dq_tHD, dk_thD, dv_thV, None, None, None, None, None


def _rounds(q_tHD: Tensor, k_thD: Tensor, head_stride: int) -> Iterator[tuple[slice, slice]]:
    """The key/value heads of each round, and their query heads."""
    G = q_tHD.shape[1] // k_thD.shape[1]
    for first in range(0, k_thD.shape[1], head_stride):
        yield slice(first, first + head_stride), slice(first * G, (first + head_stride) * G)


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What sums over blocks are made in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class _Merged:
    """The attention of own queries to all keys so far, from that to each slice."""

    out_tHV: Tensor
    lse_Ht: Tensor

    def __init__(self) -> None:
        self._empty = True

    def add(self, call: _Call, out_QHV: Tensor, lse_HQ: Tensor) -> None:
        out_QHV = out_QHV.to(lse_HQ.dtype)
        if self._empty:  # the first call is of all own queries, and each sees itself
            self.out_tHV, self.lse_Ht, self._empty = out_QHV, lse_HQ, False
            return
        before_QHV, before_HQ = call.of_queries(self.out_tHV), call.of_queries(self.lse_Ht, dim=1)
        # Weights exp(lse) / (exp(lse) + exp(lse of before)), 0 where a query has seen nothing.
        share_QH1 = torch.sigmoid(lse_HQ - before_HQ).t().unsqueeze(-1)
        merged_QHV = before_QHV.lerp_(out_QHV, share_QH1)
        merged_HQ = torch.logaddexp(before_HQ, lse_HQ)
        if call.queries is None:
            self.lse_Ht = merged_HQ
        else:
            self.out_tHV.index_copy_(0, call.queries, merged_QHV)
            self.lse_Ht.index_copy_(1, call.queries, merged_HQ)


class RingLayout:
    """Which queries of one rank see which keys of the slices that come by. Worked out when it is first asked for."""

    def __init__(
        self, parts: list[StreamPart], padded_length: int, *, rank: int, size: int, device: torch.device
    ) -> None:
        """Ranks share out `padded_length` tokens: those of the parts, and one more part that fills up."""
        if padded_length % size:
            raise ValueError(f"{padded_length} tokens do not lie in {size} stripes of the same length")
        end = parts[-1].start + parts[-1].length
        if end < padded_length:
            parts = [*parts, StreamPart(end, padded_length - end)]
        self._rank, self._size, self._device = rank, size, device
        self._start_P, self._length_P, self._prefix_start_P, self._prefix_length_P = torch.tensor(parts).unbind(1)
        self._longest = max(part.prefix_length + part.length for part in parts)
        self._calls: dict[tuple[int, int | None], list[_Call]] = {}

    def calls(self, step: int, window: int | None) -> list[_Call]:
        """What this rank computes with the slice that it has at this step; the first call of step 0 has all queries."""
        if window is not None and window >= self._longest:
            window = None
        if (step, window) not in self._calls:
            calls = [self._of_parts(step, window)]
            if window is not None and self._prefix_length_P.any():
                calls += self._of_prefixes(step, window)
            self._calls[step, window] = [call for call in calls if call is not None]
        return self._calls[step, window]

    def _of_parts(self, step: int, window: int | None) -> _Call | None:
        """Each part's own keys; without a window those of its prefix too, before them."""
        slice_rank = (self._rank - step) % self._size
        left = None if window is None else (window - 1 - step) // self._size
        if left is not None and left < 0:
            return None
        first_query_P, queries_P = self._own_queries()
        last_position_P = (first_query_P + queries_P - 1) * self._size + self._rank
        first_key_P = self._place(self._start_P, slice_rank)
        keys_P = self._place(last_position_P + 1, slice_rank) - first_key_P
        prefix_key_P = self._place(self._prefix_start_P, slice_rank)
        prefix_keys_P = self._place(self._prefix_start_P + self._prefix_length_P, slice_rank) - prefix_key_P
        if window is not None:
            prefix_keys_P = torch.zeros_like(prefix_keys_P)  # see `_of_prefixes`
        has = queries_P > 0
        keys_K = _ranges(
            torch.stack([prefix_key_P, first_key_P], 1)[has].flatten(),
            torch.stack([prefix_keys_P, keys_P], 1)[has].flatten(),
        )
        return _Call.of(
            None, keys_K, queries_P[has], (prefix_keys_P + keys_P)[has], causal=True, left=left, device=self._device
        )

    def _of_prefixes(self, step: int, window: int) -> list[_Call | None]:
        """The keys of each part's prefix: for the queries that see all of it, and for those that see some."""
        slice_rank = (self._rank - step) % self._size
        first_query_P, queries_P = self._own_queries()
        first_position_P = first_query_P * self._size + self._rank
        # Where the window of the first query begins, if the part stood behind its prefix: maybe before that.
        reach_P = first_position_P - self._start_P + self._prefix_length_P - (window - 1)
        first_seen_P = self._place(self._prefix_start_P + reach_P, slice_rank)
        first_key_P = self._place(self._prefix_start_P, slice_rank)
        end_P = self._place(self._prefix_start_P + self._prefix_length_P, slice_rank)
        # Each query's window begins one key later than that of the query before.
        seeing_all_P = (first_key_P - first_seen_P).clamp(min=0).minimum(queries_P)
        has = (seeing_all_P > 0) & (end_P > first_key_P)
        n_queries, n_keys = seeing_all_P[has], (end_P - first_key_P)[has]
        all_of_it = _Call.of(
            _ranges(first_query_P[has], n_queries),
            _ranges(first_key_P[has], n_keys),
            n_queries,
            n_keys,
            causal=False,
            left=None,
            device=self._device,
        )
        first_key_P = first_key_P.maximum(first_seen_P)
        has = (queries_P > seeing_all_P) & (end_P > first_key_P)
        n_queries, n_keys = (queries_P - seeing_all_P)[has], (end_P - first_key_P)[has]
        some_of_it = _Call.of(
            _ranges((first_query_P + queries_P)[has] - 1, n_queries, direction=-1),
            _ranges(end_P[has] - 1, n_keys, direction=-1),
            n_queries,
            n_keys,
            causal=True,
            left=None,
            device=self._device,
        )
        return [all_of_it, some_of_it]

    def _own_queries(self) -> tuple[Tensor, Tensor]:
        """Each part's first token on this rank, and how many it has here."""
        first_P = self._place(self._start_P, self._rank)
        return first_P, self._place(self._start_P + self._length_P, self._rank) - first_P

    def _place(self, position_P: Tensor, rank: int) -> Tensor:
        """The number of the first token on that rank that is not before this position of the stream."""
        return (position_P - rank + self._size - 1) // self._size


def _ranges(first_M: Tensor, length_M: Tensor, direction: int = 1) -> Tensor:
    """M runs of neighbouring numbers, end to end: each begins with `first` and goes up, or down."""
    before_M = length_M.cumsum(0) - length_M
    index = torch.arange(int(length_M.sum()))
    return first_M.repeat_interleave(length_M) + direction * (index - before_M.repeat_interleave(length_M))


class _Rows(NamedTuple):
    """A block of queries, and the keys that it sees."""

    queries: slice
    keys: slice


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """A kernel's work at one step: attention within some sequences."""

    queries: Tensor | None
    """int64 [Q]: which of the rank's tokens; None: all of them, in their order."""
    keys: Tensor | slice
    """int64 [K]: which of the slice's tokens; a slice where these are neighbours."""
    cu_queries: Tensor
    cu_keys: Tensor
    longest_query: int
    longest_key: int
    causal: bool
    """Each sequence's last query and key are aligned, and no query sees more than its key; otherwise it sees all."""
    left: int | None
    """How many keys before its aligned one a query sees; None: all."""
    first_Q: Tensor
    last_Q: Tensor
    """The keys that a query sees, both included; none, if the last is before the first."""
    blind_Q: Tensor | None
    """bool [Q]: the query sees none; None: all see some."""
    blocks: tuple[_Rows, ...]

    @staticmethod
    def of(
        queries: Tensor | None,
        keys_K: Tensor,
        queries_P: Tensor,
        keys_P: Tensor,
        *,
        causal: bool,
        left: int | None,
        device: torch.device,
    ) -> _Call | None:
        """`queries_P`, `keys_P`: how many of each a sequence has. None, if there are no keys."""
        if not len(keys_K):
            return None
        end_P = keys_P.cumsum(0)
        first_Q = (end_P - keys_P).repeat_interleave(queries_P)
        last_Q = (end_P - 1).repeat_interleave(queries_P)
        if causal:  # the last query sees up to the last key, the query before it up to the key before, …
            last_Q = _ranges(end_P - queries_P, queries_P).maximum(first_Q - 1)
        blind_Q = last_Q < first_Q
        if left is not None:
            first_Q = first_Q.maximum(last_Q - left)
        blocks = []
        for start in range(0, len(first_Q), _BLOCK):
            end = min(start + _BLOCK, len(first_Q))  # neither bound ever goes back from one query to the next
            blocks.append(_Rows(slice(start, end), slice(int(first_Q[start]), int(last_Q[end - 1]) + 1)))
        neighbours = bool((keys_K.diff() == 1).all())
        zero = torch.zeros(1, dtype=torch.int64)
        return _Call(
            None if queries is None else queries.to(device),
            slice(int(keys_K[0]), int(keys_K[-1]) + 1) if neighbours else keys_K.to(device),
            torch.cat([zero, queries_P.cumsum(0)]).to(torch.int32).to(device),
            torch.cat([zero, end_P]).to(torch.int32).to(device),
            int(queries_P.max()),
            int(keys_P.max()),
            causal,
            left,
            first_Q.to(device),
            last_Q.to(device),
            blind_Q.to(device) if blind_Q.any() else None,
            tuple(blocks),
        )

    def of_queries(self, own: Tensor, dim: int = 0) -> Tensor:
        return own if self.queries is None else own.index_select(dim, self.queries)

    def of_keys(self, slice_thX: Tensor) -> Tensor:
        return slice_thX[self.keys] if isinstance(self.keys, slice) else slice_thX.index_select(0, self.keys)

    def add_to_queries(self, total_tHD: Tensor, gradient_QHD: Tensor) -> None:
        if self.queries is None:
            total_tHD += gradient_QHD
        else:
            total_tHD.index_add_(0, self.queries, gradient_QHD.to(total_tHD.dtype))

    def add_to_keys(self, total_thX: Tensor, gradient_KhX: Tensor) -> None:
        if isinstance(self.keys, slice):
            total_thX[self.keys] += gradient_KhX
        else:
            total_thX.index_add_(0, self.keys, gradient_KhX.to(total_thX.dtype))


class _Kernel(Protocol):
    def forward(self, q_QHD: Tensor, k_KhD: Tensor, v_KhV: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
        """→ out [Q, H, V], and log-sum-exp [H, Q], which is -inf where a query sees nothing."""
        ...

    def backward(
        self,
        q_QHD: Tensor,
        k_KhD: Tensor,
        v_KhV: Tensor,
        out_QHV: Tensor,
        lse_HQ: Tensor,
        grad_QHV: Tensor,
        call: _Call,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What these keys contribute to the gradients of q, and the gradients of k and v by these queries.

        `out_QHV` and `lse_HQ` are of all keys, not of these alone.
        """
        ...


def _kernel(q_tHD: Tensor, v_thV: Tensor, scaling: float) -> _Kernel:
    flash = flash_can(q_tHD, v_thV, dropout=0.0) and q_tHD.shape[-1] % 8 == 0
    return _Flash(scaling) if flash else _Exact(scaling)


class _Flash:
    """The kernel behind `varlen_attn`, which does not let its callers choose the log-sum-exp of the backward pass."""

    def __init__(self, scaling: float) -> None:
        self._scaling = scaling

    def forward(self, q_QHD: Tensor, k_KhD: Tensor, v_KhV: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
        mask = _FlashMask.of(call)
        out_QHV, lse_HQ, *_ = torch.ops.aten._flash_attention_forward(
            q_QHD,
            k_KhD,
            v_KhV,
            call.cu_queries,
            call.cu_keys,
            call.longest_query,
            call.longest_key,
            0.0,  # dropout
            mask.causal,
            False,  # debug mask
            scale=self._scaling,
            window_size_left=mask.left,
            window_size_right=mask.right,
        )
        if call.blind_Q is not None:  # the kernel writes +inf, and its successor -inf
            lse_HQ = lse_HQ.masked_fill(call.blind_Q, -torch.inf)
        return out_QHV, lse_HQ

    def backward(
        self,
        q_QHD: Tensor,
        k_KhD: Tensor,
        v_KhV: Tensor,
        out_QHV: Tensor,
        lse_HQ: Tensor,
        grad_QHV: Tensor,
        call: _Call,
    ) -> tuple[Tensor, Tensor, Tensor]:
        mask = _FlashMask.of(call)
        dq_QHD, dk_KhD, dv_KhV = torch.ops.aten._flash_attention_backward(
            grad_QHV,
            q_QHD,
            k_KhD,
            v_KhV,
            out_QHV,
            lse_HQ,
            call.cu_queries,
            call.cu_keys,
            call.longest_query,
            call.longest_key,
            0.0,  # dropout
            mask.causal,
            torch.zeros(2, dtype=torch.uint64, device=q_QHD.device),  # the generator's state, for dropout
            torch.empty(0, device=q_QHD.device),
            scale=self._scaling,
            window_size_left=mask.left,
            window_size_right=mask.right,
        )
        return dq_QHD, dk_KhD, dv_KhV


class _FlashMask(NamedTuple):
    causal: bool
    left: int
    right: int
    """How many keys before and after its aligned one a query sees; -1: all."""

    @staticmethod
    def of(call: _Call) -> _FlashMask:
        # A sequence's only query sees all its keys under a causal mask too. Without one the kernel would put its heads
        # in the place of queries, as for decoding.
        causal = call.causal or call.longest_query == 1
        return _FlashMask(causal and call.left is None, -1 if call.left is None else call.left, 0 if causal else -1)


class _Exact:
    """Plain matrix products, a block of queries at a time: any device, dtype and head dimension."""

    def __init__(self, scaling: float) -> None:
        self._scaling = scaling

    def forward(self, q_QHD: Tensor, k_KhD: Tensor, v_KhV: Tensor, call: _Call) -> tuple[Tensor, Tensor]:
        Q, H = q_QHD.shape[:2]
        h = k_KhD.shape[1]
        q_hGQD, k_hKD, v_hKV = _by_key_head(q_QHD, h), *(_by_head(x) for x in (k_KhD, v_KhV))
        out_hGQV = q_hGQD.new_empty(*q_hGQD.shape[:3], v_hKV.shape[-1])
        lse_hGQ = q_hGQD.new_empty(q_hGQD.shape[:3])
        for rows, keys in call.blocks:
            scores_hGqk = self._scores(q_hGQD, k_hKD, rows, keys, call)
            lse_hGq = scores_hGqk.logsumexp(-1)
            # A query that sees nothing has -inf everywhere; its weights are 0, not exp(-inf + inf).
            weights_hGqk = (scores_hGqk - lse_hGq.nan_to_num(neginf=0.0).unsqueeze(-1)).exp_()
            out_hGQV[:, :, rows] = _times(weights_hGqk, v_hKV[:, keys])
            lse_hGQ[:, :, rows] = lse_hGq
        return out_hGQV.permute(2, 0, 1, 3).reshape(Q, H, -1), lse_hGQ.reshape(H, Q)

    def backward(
        self,
        q_QHD: Tensor,
        k_KhD: Tensor,
        v_KhV: Tensor,
        out_QHV: Tensor,
        lse_HQ: Tensor,
        grad_QHV: Tensor,
        call: _Call,
    ) -> tuple[Tensor, Tensor, Tensor]:
        Q, H = q_QHD.shape[:2]
        h = k_KhD.shape[1]
        q_hGQD, out_hGQV, grad_hGQV = (_by_key_head(x, h) for x in (q_QHD, out_QHV, grad_QHV))
        k_hKD, v_hKV = _by_head(k_KhD), _by_head(v_KhV)
        lse_hGQ1 = lse_HQ.reshape(h, H // h, Q, 1)
        mean_hGQ1 = (out_hGQV * grad_hGQV).sum(-1, keepdim=True)
        dq_hGQD, dk_hKD, dv_hKV = torch.zeros_like(q_hGQD), torch.zeros_like(k_hKD), torch.zeros_like(v_hKV)
        for rows, keys in call.blocks:
            weights_hGqk = (self._scores(q_hGQD, k_hKD, rows, keys, call) - lse_hGQ1[:, :, rows]).exp_()
            grad_hGqV = grad_hGQV[:, :, rows]
            dv_hKV[:, keys] += _transposed_times(weights_hGqk, grad_hGqV)
            d_scores_hGqk = (
                weights_hGqk * (_times(grad_hGqV, v_hKV[:, keys].mT) - mean_hGQ1[:, :, rows]) * self._scaling
            )
            dq_hGQD[:, :, rows] = _times(d_scores_hGqk, k_hKD[:, keys])
            dk_hKD[:, keys] += _transposed_times(d_scores_hGqk, q_hGQD[:, :, rows])
        return dq_hGQD.permute(2, 0, 1, 3).reshape(Q, H, -1), dk_hKD.transpose(0, 1), dv_hKV.transpose(0, 1)

    def _scores(self, q_hGQD: Tensor, k_hKD: Tensor, rows: slice, keys: slice, call: _Call) -> Tensor:
        key_k = torch.arange(keys.start, keys.stop, device=k_hKD.device)
        unseen_qk = (key_k < call.first_Q[rows, None]) | (key_k > call.last_Q[rows, None])
        scores_hGqk = _times(q_hGQD[:, :, rows], k_hKD[:, keys].mT) * self._scaling
        return scores_hGqk.masked_fill_(unseen_qk, -torch.inf)


def _by_head(x_KhD: Tensor) -> Tensor:
    return x_KhD.transpose(0, 1).to(_wide(x_KhD.dtype))


def _by_key_head(x_QHD: Tensor, h: int) -> Tensor:
    """→ [h, G, Q, D]: the query heads of each key/value head."""
    return x_QHD.unflatten(1, (h, -1)).permute(1, 2, 0, 3).to(_wide(x_QHD.dtype))


def _times(a_hGqx: Tensor, b_hxy: Tensor) -> Tensor:
    return (a_hGqx.flatten(1, 2) @ b_hxy).unflatten(1, a_hGqx.shape[1:3])


def _transposed_times(a_hGqx: Tensor, b_hGqy: Tensor) -> Tensor:
    """Summed over the queries of all heads of a group → [h, x, y]."""
    return a_hGqx.flatten(1, 2).mT @ b_hGqy.flatten(1, 2)


if TYPE_CHECKING:
    from openrlhf.models.attention import AttentionPlan

    _: type[AttentionPlan] = RingAttention

"""Attention within each sequence of a packed stream: the plan of every training and scoring forward.

    tokens   a b c | d e | f g h          cu_seqlens 0 3 5 8
    c sees a b c, e sees d e, g sees f g: nothing crosses a bar, and no T×T mask says so.

On CUDA one call of FlashAttention does it, or one of cuDNN for each length where sequences are long
(`models.attention_kernels`). Elsewhere, and for what these kernels cannot do (fp32, dropout, heads wider than 256),
neighbours of equal length become the rows of one SDPA call: a reinforcement-learning micro-batch has hundreds of short
sequences and few distinct lengths. `length_order` makes neighbours of them, once per forward instead of once per layer;
how they group is worked out once per plan.

Shapes: T tokens, N sequences, n of them in a group, L their length, H heads, D head dimension.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from openrlhf.models import attention_kernels as kernels
from openrlhf.models.attention_kernels import KeptOutputs
from openrlhf.types import PackedTokens, moved

_MIN_BLOCK = 256
"""Fewest queries per masked SDPA call: shorter blocks cost more in calls than they save in scores."""
_MAX_BLOCK = 1024
"""Most queries per masked SDPA call without a window: the mask has this many rows."""


@dataclass(frozen=True, slots=True)
class _Group:
    """n neighbouring sequences of the same length."""

    count: int
    length: int

    @property
    def tokens(self) -> int:
        return self.count * self.length


class StreamPart(NamedTuple):
    """One sequence of a stream: it sees itself, and before that the keys of its prefix, which another part is."""

    start: int
    length: int
    prefix_start: int = 0
    prefix_length: int = 0
    """0: it has no prefix."""


class StreamAttention:
    """A plan over a packed stream: calls of flash or cuDNN where they can, grouped SDPA calls elsewhere."""

    longest: int
    """Tokens of the longest sequence: MLPs are computed in tiles where it is long (`models.tiles`)."""
    kept: KeptOutputs | None = None
    """Where outputs are kept for a second forward of the same layers; None: there is none, or they are too large."""

    def parts(self) -> list[StreamPart]:
        """The stream from its first token to its last, for ranks that hold a share of it (`models.ring`)."""
        raise NotImplementedError

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
        """query [1, Hq, T, D], key and value [1, Hkv, T, D] → [1, T, Hq, Dv]."""
        q_THD, k_THD, v_THD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        if kernels.flash_can(q_THD, v_THD, dropout=dropout):
            out_THD = self._on_gpu(module, q_THD, k_THD, v_THD, scaling=scaling, window=sliding_window)
        else:
            out_THD = self._grouped(
                module, q_THD, k_THD, v_THD, scaling=scaling, window=sliding_window, dropout=dropout
            )
        return out_THD.unsqueeze(0)

    def _on_gpu(
        self,
        module: nn.Module,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        *,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        raise NotImplementedError

    def _grouped(
        self,
        module: nn.Module,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        *,
        scaling: float,
        window: int | None,
        dropout: float,
    ) -> Tensor:
        raise NotImplementedError


class PackedAttention(StreamAttention):
    """Causal attention inside every sequence of the stream that `cu_seqlens` cuts. Holds no state between calls."""

    def __init__(self, cu_seqlens: Tensor, max_seqlen: int) -> None:
        """`cu_seqlens` int32 [N+1]; `max_seqlen` the longest of the N."""
        self.cu_seqlens = cu_seqlens
        self.longest = max_seqlen
        self._groups: list[_Group] | None = None
        self._on_device: Tensor | None = None

    def parts(self) -> list[StreamPart]:
        bounds = self.cu_seqlens.tolist()
        return [StreamPart(start, end - start) for start, end in itertools.pairwise(bounds)]

    def _on_gpu(
        self,
        module: nn.Module,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        *,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        sequences = len(self.cu_seqlens) - 1
        if len(q_THD) >= kernels.LONG * sequences and (window is None or window >= self.longest):
            output = self._by_length(module, q_THD, k_THD, v_THD, scaling=scaling)
            if output is not None:
                return output
        if self._on_device is None:
            self._on_device = moved(self.cu_seqlens, q_THD.device)
        return kernels.flash(
            q_THD,
            k_THD,
            v_THD,
            cu_queries=self._on_device,
            cu_keys=self._on_device,
            longest_query=self.longest,
            longest_key=self.longest,
            scaling=scaling,
            window=window,
            kept=self.kept,
            module=module,
        )

    def _by_length(
        self, module: nn.Module, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *, scaling: float
    ) -> Tensor | None:
        """By cuDNN, one call for each length; None where it cannot."""
        sizes, kernel = [group.tokens for group in self.groups], kernels.cudnn_kernel(scaling)
        rows: list[tuple[Tensor, Tensor, Tensor]] = []
        for group, *qkv in zip(self.groups, q_THD.split(sizes), k_THD.split(sizes), v_THD.split(sizes), strict=True):
            padded = kernels.rounded_up(group.length)
            q, k, v = (kernels.rows_of(x, count=group.count, length=group.length, padded=padded) for x in qkv)
            rows.append((q, k, v))
        if not all(kernels.cudnn_can(*qkv) for qkv in rows):  # before any: what is kept is of one kernel
            return None
        outputs = []
        for index, (group, (q, k, v)) in enumerate(zip(self.groups, rows, strict=True)):
            out_nHLD = kernels.attend(q, k, v, kernel, kept=self.kept, slot=(module, index))
            outputs.append(out_nHLD.transpose(1, 2)[:, : group.length].flatten(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    @property
    def groups(self) -> list[_Group]:
        if self._groups is None:
            self._groups = [
                _Group(len(list(run)), length) for length, run in itertools.groupby(_lengths(self.cu_seqlens))
            ]
        return self._groups

    def _grouped(
        self,
        module: nn.Module,
        q_THD: Tensor,
        k_THD: Tensor,
        v_THD: Tensor,
        *,
        scaling: float,
        window: int | None,
        dropout: float,
    ) -> Tensor:
        # split, not slices: its backward is one concatenation instead of a stream-sized zero tensor per group.
        sizes = [group.tokens for group in self.groups]
        outputs = []
        streams = zip(self.groups, q_THD.split(sizes), k_THD.split(sizes), v_THD.split(sizes), strict=True)
        for index, (group, *qkv) in enumerate(streams):
            rows = (x.unflatten(0, (group.count, group.length)).transpose(1, 2) for x in qkv)
            out_nHLD = attend_rows(
                *rows, scaling=scaling, window=window, dropout=dropout, kept=self.kept, slot=(module, index)
            )
            outputs.append(out_nHLD.transpose(1, 2).flatten(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class LengthOrder(NamedTuple):
    tokens: PackedTokens
    """The same sequences, shortest first."""
    back_T: Tensor
    """int64 [T]: `column_T[back_T]` puts a column of the sorted stream into the order of the given one."""


def length_order(tokens: PackedTokens) -> LengthOrder | None:
    """The stream with sequences of equal length side by side; None when they already are."""
    bounds, lengths = tokens.cu_seqlens.tolist(), _lengths(tokens.cu_seqlens)
    if sum(1 for _ in itertools.groupby(lengths)) == len(set(lengths)):
        return None
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    order_T = torch.cat([torch.arange(bounds[i], bounds[i + 1]) for i in order])
    back_T = torch.empty_like(order_T)
    back_T[order_T] = torch.arange(len(order_T))
    ends = torch.tensor([0, *(lengths[i] for i in order)]).cumsum(0)
    device = tokens.token_ids.device
    order_T, back_T = moved(order_T, device), moved(back_T, device)
    return LengthOrder(
        tokens.at(
            order_T,
            cu_seqlens=ends.to(torch.int32),
            action_positions=back_T[tokens.action_positions].sort().values,
        ),
        back_T,
    )


def _lengths(cu_seqlens: Tensor) -> list[int]:
    return cu_seqlens.diff().tolist()


def attend_rows(
    q_nHLD: Tensor,
    k_nHSD: Tensor,
    v_nHSD: Tensor,
    *,
    scaling: float,
    window: int | None,
    dropout: float,
    kept: KeptOutputs | None = None,
    slot: tuple[nn.Module, int] | None = None,
) -> Tensor:
    """Causal attention of n sequences → [n, Hq, L, Dv]. The L queries are the last L of the S positions with a key.

    `kept`, `slot`: as in `attention_kernels.attend`, where that kernel serves.
    """
    gqa = q_nHLD.shape[1] != k_nHSD.shape[1]
    L, S = q_nHLD.shape[2], k_nHSD.shape[2]
    if L == S and (window is None or window >= S):
        # With fewer key heads than query heads torch has no such kernel on a CPU.
        plain = not gqa and not q_nHLD.is_cuda and dropout == 0.0 and q_nHLD.shape[-1] == v_nHSD.shape[-1]
        if kept is not None and plain:
            return kernels.attend(q_nHLD, k_nHSD, v_nHSD, kernels.cpu_kernel(scaling), kept=kept, slot=slot)
        return F.scaled_dot_product_attention(
            q_nHLD, k_nHSD, v_nHSD, is_causal=True, scale=scaling, dropout_p=dropout, enable_gqa=gqa
        )
    # A block of queries sees its own keys and those before it, at most `window - 1` of them: the mask stays small, and
    # with a window the work grows with L × window, not L².
    reach = window or S
    block = min(max(reach, _MIN_BLOCK), _MAX_BLOCK) if window is None else max(reach, _MIN_BLOCK)
    outputs = []
    for start in range(0, L, block):
        end = min(start + block, L)
        first_key, last_key = max(0, S - L + start - reach + 1), S - L + end
        distance = (
            torch.arange(S - L + start, last_key, device=q_nHLD.device)[:, None]
            - torch.arange(first_key, last_key, device=q_nHLD.device)[None, :]
        )
        outputs.append(
            F.scaled_dot_product_attention(
                q_nHLD[:, :, start:end],
                k_nHSD[:, :, first_key:last_key],
                v_nHSD[:, :, first_key:last_key],
                attn_mask=(distance >= 0) & (distance < reach),
                scale=scaling,
                dropout_p=dropout,
                enable_gqa=gqa,
            )
        )
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)


if TYPE_CHECKING:
    from openrlhf.models.attention import AttentionPlan

    _: type[AttentionPlan] = StreamAttention

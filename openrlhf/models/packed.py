"""Attention within each sequence of a packed stream: the plan of every training and scoring forward.

    tokens   a b c | d e | f g h          cu_seqlens 0 3 5 8
    c sees a b c, e sees d e, g sees f g: nothing crosses a bar, and no T×T mask says so.

On CUDA one `varlen_attn` call does it. Elsewhere, and for what that kernel cannot do (fp32, dropout, heads wider
than 256), neighbours of equal length become the rows of one SDPA call: a reinforcement-learning micro-batch has
hundreds of short sequences and few distinct lengths. `length_order` makes neighbours of them, once per forward
instead of once per layer; how they group is worked out once per plan.

Shapes: T tokens, N sequences, n of them in a group, L their length, H heads, D head dimension.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from openrlhf.types import PackedTokens

_MAX_FLASH_HEAD_DIM = 256
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
    """A plan over a packed stream: one varlen call where that kernel can, grouped SDPA calls elsewhere."""

    longest: int
    """Tokens of the longest sequence: MLPs are computed in tiles where it is long (`models.tiles`)."""

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
        if varlen_can(q_THD, v_THD, dropout=dropout):
            out_THD = self._varlen(q_THD, k_THD, v_THD, scaling=scaling, window=sliding_window)
        else:
            out_THD = self._grouped(q_THD, k_THD, v_THD, scaling=scaling, window=sliding_window, dropout=dropout)
        return out_THD.unsqueeze(0)

    def _varlen(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *, scaling: float, window: int | None) -> Tensor:
        raise NotImplementedError

    def _grouped(
        self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *, scaling: float, window: int | None, dropout: float
    ) -> Tensor:
        raise NotImplementedError


class PackedAttention(StreamAttention):
    """Causal attention inside every sequence of the stream that `cu_seqlens` cuts. Holds no state between calls."""

    def __init__(self, cu_seqlens: Tensor, max_seqlen: int) -> None:
        """`cu_seqlens` int32 [N+1], on the device of the tokens; `max_seqlen` the longest of the N."""
        self.cu_seqlens = cu_seqlens
        self.longest = max_seqlen
        self._groups: list[_Group] | None = None
        self._options = grouped_heads_option() if cu_seqlens.is_cuda else GroupedHeads()

    def parts(self) -> list[StreamPart]:
        bounds = self.cu_seqlens.tolist()
        return [StreamPart(start, end - start) for start, end in itertools.pairwise(bounds)]

    def _varlen(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *, scaling: float, window: int | None) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        output = varlen_attn(
            q_THD,
            k_THD,
            v_THD,
            self.cu_seqlens,
            self.cu_seqlens,
            self.longest,
            self.longest,
            scale=scaling,
            # (left, right): how many tokens before and after itself a query sees; -1 is all of them.
            window_size=(-1 if window is None else window - 1, 0),
            **self._options,
        )
        assert isinstance(output, Tensor)  # a tuple where more is asked for
        return output

    def _grouped(
        self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *, scaling: float, window: int | None, dropout: float
    ) -> Tensor:
        if self._groups is None:
            self._groups = [
                _Group(len(list(run)), length) for length, run in itertools.groupby(_lengths(self.cu_seqlens))
            ]
        # split, not slices: its backward is one concatenation instead of a stream-sized zero tensor per group.
        sizes = [group.tokens for group in self._groups]
        outputs = []
        for group, q, k, v in zip(
            self._groups, q_THD.split(sizes), k_THD.split(sizes), v_THD.split(sizes), strict=True
        ):
            rows = (x.unflatten(0, (group.count, group.length)).transpose(1, 2) for x in (q, k, v))
            out_nHLD = attend_rows(*rows, scaling=scaling, window=window, dropout=dropout)
            outputs.append(out_nHLD.transpose(1, 2).flatten(0, 1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


class GroupedHeads(TypedDict, total=False):
    """An argument of `varlen_attn`."""

    enable_gqa: bool


@functools.cache
def grouped_heads_option() -> GroupedHeads:
    """torch 2.11 takes fewer key heads than query heads as they come; later versions want to be told."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def varlen_can(q_THD: Tensor, v_THD: Tensor, *, dropout: float) -> bool:
    return (
        q_THD.is_cuda
        and q_THD.dtype in (torch.bfloat16, torch.float16)
        and q_THD.shape[-1] == v_THD.shape[-1] <= _MAX_FLASH_HEAD_DIM
        and dropout == 0.0
    )


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
    order_T, back_T = order_T.to(device), back_T.to(device)
    return LengthOrder(
        tokens.at(
            order_T,
            cu_seqlens=ends.to(torch.int32).to(device),
            action_positions=back_T[tokens.action_positions].sort().values,
        ),
        back_T,
    )


def _lengths(cu_seqlens: Tensor) -> list[int]:
    return cu_seqlens.diff().tolist()


def attend_rows(
    q_nHLD: Tensor, k_nHSD: Tensor, v_nHSD: Tensor, *, scaling: float, window: int | None, dropout: float
) -> Tensor:
    """Causal attention of n sequences → [n, Hq, L, Dv]. The L queries are the last L of the S positions with a key."""
    gqa = q_nHLD.shape[1] != k_nHSD.shape[1]
    L, S = q_nHLD.shape[2], k_nHSD.shape[2]
    if L == S and (window is None or window >= S):
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

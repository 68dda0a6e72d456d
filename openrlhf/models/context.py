"""Context parallelism: several ranks share one packed stream, each with a stripe of its tokens.

    stream      a b c d e f g _           7 tokens, padded to a multiple of 2
    rank 0      a   c   e   g
    rank 1        b   d   f   _

All ranks of a group hold the same packed batch. Embeddings, norms, MLPs and the head are computed token by token, so
each rank computes them for its own tokens. Attention alone sees the whole stream, in one of two ways:

by heads   ranks exchange tokens for heads: each gets all tokens of H / N heads, attends by the plan of the whole
           stream, and exchanges back. It keeps every kernel, window and shared prefix (DeepSpeed-Ulysses, Jacobs et
           al. 2023, https://arxiv.org/abs/2309.14509). Key/value heads are repeated where N does not divide them.
by ring    where N does not divide the query heads: slices of keys and values travel around (`models.ring`).

Stripes give every rank the same work: as many tokens, as many of them actions, as many keys before them.

What the head makes of a rank's tokens — log-probs, entropies, values — is then given to all (`Share.whole`), so each
rank computes the same loss of the whole stream: nothing above the model knows that streams are shared. A rank's
gradient is the part of its own tokens, and the parts of all ranks add up, as those of other samples do.

Shapes: N ranks, U tokens of the stream, L the same padded, t = L / N, P positions, p of them this rank's, H heads,
D head dimension.
"""

from __future__ import annotations

import functools
import logging
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from openrlhf.config.fields import ConfigError
from openrlhf.models.attention import AttentionPlan
from openrlhf.models.exchange import Exchange
from openrlhf.models.packed import StreamAttention
from openrlhf.models.ring import RingAttention, check_head_stride
from openrlhf.types import PackedTokens

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """The ranks that share a stream, as one of them sees them."""

    exchange: Exchange
    head_stride: int = 1
    """Key/value heads that travel around the ring at a time."""
    always_ring: bool = False
    """Also where heads could be shared out."""
    tensor: int = 1
    """The ranks that share this rank's layers: each has so many times fewer heads."""

    @property
    def size(self) -> int:
        return self.exchange.size

    @property
    def rank(self) -> int:
        return self.exchange.rank

    def padded(self, length: int) -> int:
        """The length of a stream of so many tokens when every rank has as many."""
        return -(-length // self.size) * self.size

    def stripe(self, tokens: PackedTokens) -> PackedTokens:
        """This rank's tokens of a stream: their ids, positions, images and routes. Padding repeats the last token.

        Which sequences they are in is known to attention's plan, and only there.
        """
        length = tokens.num_tokens
        own_t = torch.arange(self.rank, self.padded(length), self.size, device=tokens.token_ids.device)
        own_t.clamp_(max=length - 1)
        return tokens.at(own_t, shared_prefixes=())

    def share(self, positions_P: Tensor) -> Share:
        """Which of these positions of the stream are this rank's."""
        return Share(self, positions_P)

    def whole_stream(self, own_tX: Tensor, length: int) -> Tensor:
        """What every token of a stream of this length has, [U, …], from what this rank's tokens have, [t, …].

        As for `Share.whole`, what follows has to be the same on all ranks.
        """
        return _Gather.apply(own_tX, self.exchange).transpose(0, 1).flatten(0, 1)[:length]


class Share:
    """A part of some positions of a stream: those whose tokens are this rank's; without a context, all of them."""

    def __init__(self, context: Context | None = None, positions_P: Tensor | None = None) -> None:
        self._context = context
        if context is None or positions_P is None:
            return
        owners_P = positions_P % context.size
        self._order_P = owners_P.argsort(stable=True)
        """The positions, rank by rank."""
        self._counts = torch.bincount(owners_P, minlength=context.size).tolist()
        start = sum(self._counts[: context.rank])
        self._own_p = self._order_P[start : start + self._counts[context.rank]]
        self.rows_p = positions_P[self._own_p] // context.size
        """Where this rank's positions are in its stripe."""

    def own(self, column_PX: Tensor) -> Tensor:
        """The entries of this rank's positions."""
        return column_PX if self._context is None else column_PX[self._own_p]

    def whole(self, column_pX: Tensor) -> Tensor:
        """The column of all positions, on every rank, from each rank's own.

        The gradient of a rank's own entries is what it is on this rank: the loss that follows is the same on all ranks
        of the group, and counts once.
        """
        if self._context is None:
            return column_pX
        most = max(self._counts)
        padded = F.pad(column_pX, (0, 0) * (column_pX.dim() - 1) + (0, most - len(column_pX)))
        parts = _Gather.apply(padded, self._context.exchange).unbind(0)
        by_rank = torch.cat([part[:count] for part, count in zip(parts, self._counts, strict=True)])
        return by_rank.new_empty(by_rank.shape).index_copy(0, self._order_P, by_rank)


class ContextAttention:
    """The plan of a rank's stripe, from the plan of the whole stream."""

    def __init__(self, context: Context, plan: StreamAttention, length: int) -> None:
        """`length`: U, the tokens that `plan` is for."""
        self._context = context
        self._plan = plan
        self._length = length
        self.longest = -(-plan.longest // context.size)
        """Tokens of the longest sequence that this rank has."""
        self._ring: RingAttention | None = None

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
        """query [1, Hq, t, D], key and value [1, Hkv, t, D] → [1, t, Hq, Dv]."""
        by_ring = self._context.always_ring or query.shape[1] % self._context.size
        plan = self._around(query.device) if by_ring else self._plan
        attend = functools.partial(plan, module, scaling=scaling, sliding_window=sliding_window, dropout=dropout)
        if by_ring:
            return attend(query, key, value)
        q_tHD, k_tHD, v_tHD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        return self._by_heads(q_tHD, k_tHD, v_tHD, attend).unsqueeze(0)

    def _around(self, device: torch.device) -> RingAttention:
        if self._ring is None:
            self._ring = RingAttention(
                self._plan,
                self._context.exchange,
                padded_length=self._context.padded(self._length),
                head_stride=self._context.head_stride,
                device=device,
            )
        return self._ring

    def _by_heads(self, q_tHD: Tensor, k_tHD: Tensor, v_tHD: Tensor, attend: Any) -> Tensor:
        N, U = self._context.size, self._length
        copies = math.lcm(k_tHD.shape[1], N) // k_tHD.shape[1]
        if copies > 1:
            k_tHD, v_tHD = (x.repeat_interleave(copies, dim=1) for x in (k_tHD, v_tHD))
        # All heads that go to one rank are one row, so that one exchange carries queries, keys and values.
        rows = [x.unflatten(1, (N, -1)) for x in (q_tHD, k_tHD, v_tHD)]  # [t, N, h, D]
        widths = [x.shape[2] * x.shape[3] for x in rows]
        sent_NtX = torch.cat([x.flatten(2) for x in rows], dim=2).transpose(0, 1)
        came_NtX = _Swap.apply(sent_NtX, self._context.exchange)
        stream_LX = came_NtX.transpose(0, 1).flatten(0, 1)
        heads = [
            x.unflatten(1, row.shape[2:]).transpose(0, 1).unsqueeze(0)  # [1, h, U, D]
            for x, row in zip(stream_LX[:U].split(widths, dim=1), rows, strict=True)
        ]
        out_UhD = attend(*heads).squeeze(0)
        out_LX = F.pad(out_UhD.flatten(1), (0, 0, 0, len(stream_LX) - U))
        back_NtX = _Swap.apply(out_LX.unflatten(0, (-1, N)).transpose(0, 1), self._context.exchange)
        return back_NtX.unflatten(2, out_UhD.shape[1:]).permute(1, 0, 2, 3).flatten(1, 2)


class _Swap(torch.autograd.Function):
    """Part i goes to rank i. So does its gradient, the other way, which is the same exchange."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        return exchange.all_to_all(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.exchange.all_to_all(grad), None


class _Gather(torch.autograd.Function):
    """Everybody's, by rank. Every rank goes on in the same way, so the gradient of its own part is all there is."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, exchange: Exchange) -> Tensor:
        ctx.rank = exchange.rank
        return exchange.all_gather(own)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad[ctx.rank], None


def share_streams(module: Any, context: Context | None) -> None:
    """A policy or value model computes its streams together with the other ranks of `context`. Raises ConfigError."""
    if context is not None:
        if not module.packed:
            raise ConfigError(
                f"--ds.ring_attn_size {context.size}: {type(module.model).__name__} cannot be computed as a packed "
                "stream, and so its sequences cannot be shared out; leave the flag out"
            )
        _check_heads(context, module.model.config.get_text_config())
    module.context = context


def _check_heads(context: Context, config: Any) -> None:
    """What attention would find out in the first forward, which in RL comes after a round of samples."""
    heads = getattr(config, "num_attention_heads", None)
    if heads is None:
        return
    key_value_heads = getattr(config, "num_key_value_heads", None) or heads
    heads, key_value_heads = (max(1, count // context.tensor) for count in (heads, key_value_heads))
    if context.always_ring or heads % context.size:
        check_head_stride(key_value_heads, context.head_stride)
    elif context.head_stride != 1:
        logger.info(
            "--ds.ring_attn_head_stride %d has no effect: %d ranks divide the %d heads between them, and no ring is "
            "needed",
            context.head_stride,
            context.size,
            heads,
        )


if TYPE_CHECKING:
    _: type[AttentionPlan] = ContextAttention

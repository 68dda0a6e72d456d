"""One attention entry for every forward: the caller passes a plan, and the plan attends.

Transformers models look their attention function up by name. We register one, `ATTENTION`, that hands query,
key and value to the `attention_plan` that came with the forward call:

    model(input_ids[None], position_ids=..., attention_plan=PackedAttention(cu_seqlens, max_seqlen), use_cache=False)

A packed training forward and a decoding step of the embedded engine are two plans over the same weights. The
plan travels as a keyword argument, so gradient checkpointing replays it. No attention mask is ever built.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

ATTENTION = "openrlhf"

_INEXPRESSIBLE = ("softcap", "s_aux", "position_bias", "alibi")
"""Arguments by which models ask for more than softmax(q·k) v; a plan would silently leave them out."""


class AttentionPlan(Protocol):
    """Attends within one forward call."""

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
        """query [1, Hq, T, D], key and value [1, Hkv, T, D] of the stream's tokens → [1, T, Hq, D]."""
        ...


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    attention_plan: AttentionPlan | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if attention_plan is None:
        raise RuntimeError(f"a model with attn_implementation={ATTENTION!r} needs attention_plan=… in its forward call")
    wanted = [name for name in _INEXPRESSIBLE if kwargs.get(name) is not None]
    if attention_mask is not None:
        wanted.append("attention_mask")
    if kwargs.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        wanted.append("is_causal=False")
    if wanted:
        raise NotImplementedError(f"{type(module).__name__} asks attention for {', '.join(wanted)}")
    output = attention_plan(
        module,
        query,
        key,
        value,
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        sliding_window=sliding_window,
        dropout=dropout,
    )
    return output, None


def hide_from_compiler() -> None:
    """Plans attend outside of compiled layers: torch.compile ends a piece before this function and begins another."""
    AttentionInterface.register(ATTENTION, torch.compiler.disable(_attend))


# No mask belongs to it: plans know which tokens see which, and a T×T mask would be the largest tensor of the run. With
# a function for masks, transformers would look in every forward whether positions are those of a packed stream, and
# wait for the GPU to read that.
AttentionInterface.register(ATTENTION, _attend)

"""A model's decoder body on a packed stream: token ids in, last hidden states out. Every head shares it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.models.attention import AttentionPlan
from openrlhf.models.packed import PackedAttention, length_order
from openrlhf.types import PackedTokens


def decoder_body(model: Any) -> nn.Module:
    """The part of a Hugging Face model below its head; looks through a PEFT wrapper."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    body = model.base_model
    return body if body is not model else model.get_decoder()  # a few classes name their body wrongly


def hidden_states(
    body: nn.Module, tokens: PackedTokens, *, packed: bool = True, plan: AttentionPlan | None = None
) -> Tensor:
    """Last hidden states [T, D] of the stream, no sequence seeing another.

    `packed`: the body's attention implementation is `ATTENTION`; one call, by `plan` (default `PackedAttention`).
    Otherwise it runs natively on one sequence after the other, for models that a plan cannot express (see
    `models.support`).
    """
    if not packed:
        return torch.cat([_run(body, sequence, **_unusual_positions(sequence)) for sequence in tokens.split()])
    # Off CUDA neighbours of equal length share an attention call, in every layer.
    sorted_ = None if plan or tokens.token_ids.is_cuda else length_order(tokens)
    stream = sorted_.tokens if sorted_ else tokens
    hidden_TD = _run(
        body,
        stream,
        attention_plan=plan or PackedAttention(stream.cu_seqlens, stream.max_seqlen),
        position_ids=stream.position_ids.unsqueeze(-2),  # [T] → [1, T]; several rows: [R, T] → [R, 1, T]
    )
    return hidden_TD[sorted_.back_T] if sorted_ else hidden_TD


def _run(body: nn.Module, tokens: PackedTokens, **kwargs: Any) -> Tensor:
    return body(input_ids=tokens.token_ids.unsqueeze(0), use_cache=False, **kwargs)[0].squeeze(0)


def _unusual_positions(sequence: PackedTokens) -> dict[str, Tensor]:
    """Positions 0 … L-1 are every model's default, and some, having none, do not take the argument."""
    if sequence.position_ids.dim() == 1:
        return {}
    return {"position_ids": sequence.position_ids.unsqueeze(-2)}

"""A model's decoder body on a packed stream: token ids in, last hidden states out. Every head shares it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from openrlhf.models.attention import AttentionPlan
from openrlhf.models.packed import PackedAttention, length_order
from openrlhf.models.prefixes import share_prefixes
from openrlhf.types import PackedTokens


def decoder_body(model: Any) -> nn.Module:
    """The part of a Hugging Face model below its head; looks through a PEFT wrapper."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    body = model.base_model
    return body if body is not model else model.get_decoder()  # a few classes name their body wrongly


def hidden_states(
    body: nn.Module,
    tokens: PackedTokens,
    *,
    positions: Tensor | None = None,
    packed: bool = True,
    plan: AttentionPlan | None = None,
) -> Tensor:
    """Last hidden states [P, D] at these stream positions (None: at all), no sequence seeing another.

    `packed`: the body's attention implementation is `ATTENTION`; one call, by `plan` (default: chosen by the stream).
    Otherwise it runs natively on one sequence after the other, for models that a plan cannot express (see
    `models.support`).
    """
    if not packed:
        hidden_TD = torch.cat([_run(body, sequence, **_unusual_positions(sequence)) for sequence in tokens.split()])
        return hidden_TD if positions is None else hidden_TD.index_select(0, positions)
    layout = _layout(tokens) if plan is None else _Layout(tokens, None, plan)
    hidden_TD = _run(
        body,
        layout.tokens,
        attention_plan=layout.plan,
        position_ids=layout.tokens.position_ids.unsqueeze(-2),  # [T] → [1, T]; several rows: [R, T] → [R, 1, T]
    )
    if layout.back_T is not None:
        positions = layout.back_T if positions is None else layout.back_T[positions]
    return hidden_TD if positions is None else hidden_TD.index_select(0, positions)


class _Layout(NamedTuple):
    """The stream that is really computed."""

    tokens: PackedTokens
    back_T: Tensor | None
    """Where each token of the given stream stands in it; None: where it stood."""
    plan: AttentionPlan


def _layout(tokens: PackedTokens) -> _Layout:
    if shared := share_prefixes(tokens):
        return _Layout(*shared)
    # Off CUDA neighbours of equal length share an attention call, in every layer.
    sorted_ = None if tokens.token_ids.is_cuda else length_order(tokens)
    stream, back_T = sorted_ or (tokens, None)
    return _Layout(stream, back_T, PackedAttention(stream.cu_seqlens, stream.max_seqlen))


def _run(body: nn.Module, tokens: PackedTokens, **kwargs: Any) -> Tensor:
    return body(input_ids=tokens.token_ids.unsqueeze(0), use_cache=False, **kwargs)[0].squeeze(0)


def _unusual_positions(sequence: PackedTokens) -> dict[str, Tensor]:
    """Positions 0 … L-1 are every model's default, and some, having none, do not take the argument."""
    if sequence.position_ids.dim() == 1:
        return {}
    return {"position_ids": sequence.position_ids.unsqueeze(-2)}

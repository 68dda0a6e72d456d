"""A model's decoder body on a packed stream: token ids in, last hidden states out. Every head shares it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from openrlhf.models.attention import AttentionPlan
from openrlhf.models.packed import PackedAttention, length_order
from openrlhf.models.prefixes import share_prefixes
from openrlhf.models.routing import RouterLog
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
    router_log: RouterLog | None = None,
) -> Tensor:
    """Last hidden states [P, D] at these stream positions (None: at all), no sequence seeing another.

    `packed`: the body's attention implementation is `ATTENTION`; one call, by `plan` (default: chosen by the stream).
    Otherwise it runs natively on one sequence after the other, for models that a plan cannot express (see
    `models.support`). `router_log` is filled, if there is one.
    """
    if not packed:
        hidden_TD = torch.cat(
            [_run(body, sequence, router_log, **_unusual_positions(sequence)) for sequence in tokens.split()]
        )
        return hidden_TD if positions is None else hidden_TD.index_select(0, positions)
    layout = _layout(tokens) if plan is None else _Layout(tokens, None, plan)
    computed = None if router_log is None else RouterLog()
    hidden_TD = _run(
        body,
        layout.tokens,
        computed,
        attention_plan=layout.plan,
        position_ids=layout.tokens.position_ids.unsqueeze(-2),  # [T] → [1, T]; several rows: [R, T] → [R, 1, T]
    )
    if router_log is not None and computed is not None:
        back_T = slice(None) if layout.back_T is None else layout.back_T
        router_log.logits += [logits_UE[back_T] for logits_UE in computed.logits]
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


def _run(body: nn.Module, tokens: PackedTokens, router_log: RouterLog | None = None, **kwargs: Any) -> Tensor:
    if router_log is not None:
        kwargs["output_router_logits"] = True
    output = body(input_ids=tokens.token_ids.unsqueeze(0), use_cache=False, **kwargs)
    if router_log is not None:
        router_log.logits += output.router_logits
    return output[0].squeeze(0)


def _unusual_positions(sequence: PackedTokens) -> dict[str, Tensor]:
    """Positions 0 … L-1 are every model's default, and some, having none, do not take the argument."""
    if sequence.position_ids.dim() == 1:
        return {}
    return {"position_ids": sequence.position_ids.unsqueeze(-2)}

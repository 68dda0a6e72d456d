"""A model's decoder body on a packed stream: token ids in, last hidden states out. Every head shares it."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from openrlhf.backends.base import whole_shape
from openrlhf.config.fields import ConfigError
from openrlhf.models import attention_kernels as kernels
from openrlhf.models.attention import AttentionPlan
from openrlhf.models.context import Context, ContextAttention, Share
from openrlhf.models.packed import PackedAttention, StreamAttention, length_order
from openrlhf.models.prefixes import share_prefixes
from openrlhf.models.routes import ROUTES, RouteLog, RouteShape, StreamRoutes, route_shape
from openrlhf.models.vision import (
    ImageFeatures,
    encode,
    language_model,
    merged_embeddings,
    packed_positions,
    reads_images,
)
from openrlhf.types import ImageInput, PackedImages, PackedTokens

logger = logging.getLogger(__name__)


class RouterLog:
    """Goes into a forward empty and comes out with the logits of its routers: tensors [T, E], one for each layer.

    Every token of the given stream has its row, also one that shares the forward of its prefix with others. No list,
    which wrappers around modules take apart.
    """

    def __init__(self) -> None:
        self.logits: list[Tensor] = []


class NoRoutersError(ConfigError):
    """The model has no experts, or does not show how it chooses them."""


def experts_per_token(model: Any, *, flag: str) -> int:
    """How many experts a token has, by a Hugging Face model's configuration, where the balancing loss is about its
    choice of them. Raises `NoRoutersError`."""
    text = model.config.get_text_config()
    top_k = getattr(text, "num_experts_per_tok", None)
    if not hasattr(text, "output_router_logits") or not isinstance(top_k, int):
        raise NoRoutersError(
            f"{flag}: {text.model_type} has no experts, or transformers does not show how it chooses them; leave it out"
        )
    shape = route_shape(model.config)
    tensors = itertools.chain.from_iterable((*block.parameters(), *block.buffers()) for block in expert_blocks(model))
    sizes = (getattr(tensor, "ds_numel", tensor.numel()) for tensor in tensors)
    biased = shape is not None and shape.experts in sizes
    if biased and not any(hasattr(text, name) for name in ("router_aux_loss_coef", "aux_loss_coef")):
        raise NoRoutersError(
            f"{flag}: {text.model_type} keeps its experts busy by biases on their scores, which this loss knows "
            "nothing of; leave it out"
        )
    return top_k


def decoder_body(model: Any) -> nn.Module:
    """The part of a Hugging Face model below its head; looks through a PEFT wrapper."""
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    body = model.base_model
    if body is not model or reads_images(body):
        return body
    return model.get_decoder()  # a few classes name their body wrongly


def decoder_layers(model: Any) -> nn.ModuleList | None:
    """The layers of a Hugging Face model's decoder; None for a class that has no list of them."""
    body = decoder_body(model)
    return getattr(language_model(body) or body, "layers", None)


def expert_blocks(model: Any) -> Iterator[nn.Module]:
    """The blocks of a Hugging Face model's decoder layers that have its experts, stacked or one by one."""
    shape = route_shape(model.config)
    if shape is None:
        return

    def has_experts(part: nn.Module) -> bool:
        own = [whole_shape(parameter) for parameter in part.parameters(recurse=False)]
        return _lists_experts(part, shape) or any(len(whole) == 3 and whole[0] == shape.experts for whole in own)

    for layer in decoder_layers(model) or ():
        yield from (block for block in layer.children() if any(map(has_experts, block.modules())))


def has_separate_experts(model: Any) -> bool:
    """Whether its experts are modules of their own, as some models have them that bring their own code."""
    shape = route_shape(model.config)
    return shape is not None and any(
        _lists_experts(part, shape) for block in expert_blocks(model) for part in block.modules()
    )


def _lists_experts(part: nn.Module, shape: RouteShape) -> bool:
    return isinstance(part, nn.ModuleList | nn.ModuleDict) and len(part) == shape.experts


class HiddenStates(NamedTuple):
    states_pD: Tensor
    """Last hidden states, a row for each of this rank's positions."""
    share: Share
    """Which positions are this rank's: all, unless ranks share the stream."""


def hidden_states(
    body: nn.Module,
    tokens: PackedTokens,
    *,
    positions: Tensor | None = None,
    packed: bool = True,
    plan: AttentionPlan | None = None,
    router_log: RouterLog | None = None,
    route_log: RouteLog | None = None,
    context: Context | None = None,
) -> HiddenStates:
    """Last hidden states at these stream positions (None: at all), no sequence seeing another.

    `packed`: the body's attention implementation is `ATTENTION`; one call, by `plan` (default: chosen by the stream).
    Otherwise it runs natively on one sequence after the other, for models that a plan cannot express (see
    `models.support`). `router_log` and `route_log` are filled, if there are any. `context`: the ranks that share the
    stream. Routes of the tokens, and `route_log`, are for models whose routers take them (`models.routes`).
    """
    features = None if tokens.images is None else encode(body, tokens.images.inputs)
    if (rows_RT := packed_positions(body, tokens)) is not None:
        tokens = dataclasses.replace(tokens, position_ids=rows_RT)
    if not packed:
        hidden_TD = torch.cat(
            [
                _run(body, sequence, features, router_log, _routes(sequence, route_log), **_unusual_positions(sequence))
                for sequence in tokens.split()
            ]
        )
        return HiddenStates(hidden_TD if positions is None else hidden_TD.index_select(0, positions), Share())
    layout = _layout(tokens) if plan is None else _Layout(tokens, None, plan)
    length, stream = layout.tokens.num_tokens, layout.tokens
    if isinstance(layout.plan, StreamAttention) and _computes_twice(body, layout.tokens):
        layout.plan.kept = kernels.KeptOutputs()
    attention: AttentionPlan = layout.plan
    counted = None
    if context is not None:
        assert isinstance(layout.plan, StreamAttention), "decoding has plans of its own, and is not shared"
        stream, attention = context.stripe(stream), ContextAttention(context, layout.plan, length)
        counted = len(range(context.rank, length, context.size))  # the rest is padding
    computed = None if router_log is None else RouterLog()
    hidden = _run(
        body,
        stream,
        features,
        computed,
        _routes(stream, route_log, counted=counted),
        attention_plan=attention,
        position_ids=stream.position_ids.unsqueeze(-2),  # [T] → [1, T]; several rows: [R, T] → [R, 1, T]
    )
    if router_log is not None and computed is not None:
        logits = computed.logits if context is None else [context.whole_stream(x, length) for x in computed.logits]
        back_T = slice(None) if layout.back_T is None else layout.back_T
        router_log.logits += [logits_UE[back_T] for logits_UE in logits]
    if layout.back_T is not None:
        positions = layout.back_T if positions is None else layout.back_T[positions]
    if context is not None:
        share = context.share(torch.arange(length, device=hidden.device) if positions is None else positions)
        return HiddenStates(hidden.index_select(0, share.rows_p), share)
    return HiddenStates(hidden if positions is None else hidden.index_select(0, positions), Share())


def with_any_image(tokens: PackedTokens, blank: ImageInput | None) -> PackedTokens:
    """The stream, which encodes `blank` if it has no image and there are other ranks.

    The ranks of a run gather weights, and add up gradients, at the same points of their forward and backward. One that
    left the vision tower out would wait for the others, and they for it.
    """
    several = distributed.is_initialized() and distributed.get_world_size() > 1
    if blank is None or tokens.images is not None or not several:
        return tokens
    rows_T = torch.full_like(tokens.token_ids, -1)
    images = PackedImages(inputs=(blank,), rows_T=rows_T).to(tokens.token_ids.device)
    return dataclasses.replace(tokens, images=images)


class _Layout(NamedTuple):
    """The stream that is really computed."""

    tokens: PackedTokens
    back_T: Tensor | None
    """The position of each token of the given stream in this one; None: unchanged."""
    plan: AttentionPlan


def _layout(tokens: PackedTokens) -> _Layout:
    if not _attends_faster_apart(tokens) and (shared := share_prefixes(tokens)):
        return _Layout(*shared)
    # Off CUDA neighbours of equal length share an attention call, in every layer.
    sorted_ = None if tokens.token_ids.is_cuda else length_order(tokens)
    stream, back_T = sorted_ or (tokens, None)
    return _Layout(stream, back_T, PackedAttention(stream.cu_seqlens, stream.max_seqlen))


def _attends_faster_apart(tokens: PackedTokens) -> bool:
    """Long sequences with little in common: the kernel for whole sequences gains more than sharing saves."""
    long = tokens.token_ids.is_cuda and tokens.num_tokens >= kernels.LONG * tokens.num_sequences
    return long and 8 * sum(tokens.shared_prefixes) < tokens.num_tokens


def _computes_twice(body: Any, tokens: PackedTokens) -> bool:
    """Whether layers are computed again in the backward pass, and what they attend to is little beside the device's
    memory."""
    layers = getattr(language_model(body) or body, "layers", None)
    if not (layers and body.training and torch.is_grad_enabled()):
        return False
    if not getattr(layers[0], "gradient_checkpointing", False):
        return False
    config, device = body.config.get_text_config(), tokens.token_ids.device
    heads = config.num_attention_heads
    return device.type != "cuda" or kernels.worth_keeping(
        tokens=tokens.num_tokens,
        heads=heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        layers=len(layers),
        element_bytes=body.dtype.itemsize,
        memory=torch.cuda.get_device_properties(device).total_memory,
    )


def _run(
    body: nn.Module,
    tokens: PackedTokens,
    features: ImageFeatures | None,
    router_log: RouterLog | None = None,
    routes: StreamRoutes | None = None,
    **kwargs: Any,
) -> Tensor:
    if router_log is not None:
        kwargs["output_router_logits"] = True
    if routes is not None:
        kwargs[ROUTES] = routes
    if features is None or tokens.images is None:
        output = body(input_ids=tokens.token_ids.unsqueeze(0), use_cache=False, **kwargs)
    else:
        embeddings, more = merged_embeddings(body, tokens.token_ids, tokens.images.rows_T, features)
        decoder = language_model(body)
        assert decoder is not None, "only an image-text model is given images"
        output = decoder(inputs_embeds=embeddings, use_cache=False, **more, **kwargs)
    if router_log is not None:
        router_log.logits += output.router_logits
    if routes is not None:
        routes.finish()
    return output[0].squeeze(0)


def _routes(tokens: PackedTokens, log: RouteLog | None, *, counted: int | None = None) -> StreamRoutes | None:
    if tokens.routes_TLK is None and log is None:
        return None
    return StreamRoutes(tokens.routes_TLK, log, counted=counted)


def _unusual_positions(sequence: PackedTokens) -> dict[str, Tensor]:
    """Positions 0 … L-1 are every model's default, and some, having none, do not take the argument."""
    if sequence.position_ids.dim() == 1:
        return {}
    return {"position_ids": sequence.position_ids.unsqueeze(-2)}


_TOLERANCE = 1e-5


def fuse_norms(model: nn.Module) -> int:
    """Run the model's RMS norms through torch's fused kernel, on a GPU; returns how many.

    A norm is what it computes, not what it is called: one that does anything else than x / rms(x) · weight, on numbers
    that would show it, keeps its own forward. So does one whose weight is shared out over ranks (ZeRO-3).
    """
    fused = 0
    for module in model.modules():
        weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
        if not (isinstance(eps, float) and isinstance(weight, Tensor) and type(module).__name__.endswith("RMSNorm")):
            continue
        if weight.is_cuda and weight.numel() and _is_rms_norm(module, weight, eps):
            module.forward = partial(_rms_norm, module)
            fused += 1
    return fused


def _rms_norm(module: Any, hidden: Tensor) -> Tensor:
    return F.rms_norm(hidden, (hidden.shape[-1],), module.weight, module.variance_epsilon)


@torch.no_grad()
def _is_rms_norm(module: nn.Module, weight: Tensor, eps: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(4, weight.shape[-1], generator=generator).to(weight.device) * torch.tensor(
        [[1e-4], [1.0], [30.0], [3.0]], device=weight.device
    )
    kept, module.weight.data = weight.data, weight.data.float()
    try:
        expected = module(probe)
    finally:
        module.weight.data = kept
    computed = F.rms_norm(probe, (probe.shape[-1],), weight.float(), eps)
    return expected.shape == computed.shape and torch.allclose(computed, expected, rtol=_TOLERANCE, atol=_TOLERANCE)

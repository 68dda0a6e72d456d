"""Which models a packed stream can be trusted with. Never wrong: what was not seen to agree runs one by one.

A model may do what an attention plan cannot express: cap its attention scores (Gemma 2), have sinks (gpt-oss), attend
in chunks (Llama 4), carry state through linear or state-space layers (Mamba, Qwen3-Next), or not look its attention up
by name at all. Two things are asked of a freshly loaded model: what its configuration says, and whether two tiny
random sequences give the same hidden states packed as they do one by one with the model's own attention.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from openrlhf.backends.base import is_sharded
from openrlhf.models.attention import ATTENTION
from openrlhf.models.body import decoder_body, hidden_states
from openrlhf.models.image_processor import unsampled_tokens
from openrlhf.models.logprobs import LogitTransform
from openrlhf.models.packed import PackedAttention
from openrlhf.models.policy import output_head
from openrlhf.models.routes import RouteLog, Routers
from openrlhf.types import ImageInput, PackedTokens, PlacedImage

logger = logging.getLogger(__name__)

_PROBE_LENGTHS = (7, 11)
_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 5e-2}
"""Relative error of a typical token's hidden state. Attending to the wrong tokens shows as far more."""
_ATTENTION_LAYERS = {"full_attention", "sliding_attention"}
_SEEN_PACKED = {
    "deepseek_v2",
    "deepseek_v3",
    "dots1",
    "ernie4_5_moe",
    "flex_olmo",
    "gemma",
    "gemma3_text",
    "glm4_moe",
    "granitemoe",
    "granitemoeshared",
    "hunyuan_v1_moe",
    "llama",
    "mistral",
    "mixtral",
    "olmoe",
    "qwen2",
    "qwen2_5_vl_text",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "qwen3_vl_text",
}
"""Model types that tests hold to the probe, for weights that are sharded as they load and cannot be probed."""
_SEEN_WITH_IMAGES = {"llava", "qwen2_5_vl", "qwen3_vl"}
"""The same, of models with images."""
_SEEN_REPLAYED = {"gpt_oss", "mixtral", "olmoe", "qwen2_moe", "qwen3_moe"}
"""The same, of models whose routers take routes."""


class UnsupportedModelError(ValueError):
    """The model's logits cannot be reproduced from its hidden states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """How a model is to be run."""

    packed: bool
    reason: str
    """Why it is not packed; empty when it is."""
    transform: LogitTransform


def examine(model: Any, *, native_attention: str, image: ImageInput | None = None) -> Support:
    """Decide how to run a causal language model, and leave its attention implementation set accordingly.

    Warns once when the model has to run one sequence at a time; raises `UnsupportedModelError` when even that would not
    give its log-probs. `image`: any image, for a model that will be given some.
    """
    transform = logit_transform(model.config)
    if not is_sharded(model):
        _set_attention(model, native_attention)
        _probe_head(model, transform)
    reason = examine_body(model, native_attention=native_attention, image=image)
    return Support(packed=not reason, reason=reason, transform=transform)


def examine_body(model: Any, *, native_attention: str, image: ImageInput | None = None) -> str:
    """Why the model's body cannot be packed; empty if it can. Leaves its attention implementation set accordingly.

    Asks nothing of a head. Warns when the model has to run one sequence at a time; raises `UnsupportedModelError` for
    one that does something else with images than `models.vision` does.
    """
    config = model.config.get_text_config()
    reason = _inexpressible(config)
    if not is_sharded(model):
        reason = reason or _probe_packing(model, native_attention=native_attention)
    elif not reason and config.model_type not in _SEEN_PACKED:
        reason = "its weights are sharded while loading, so the packed forward could not be compared with its own"
    if reason:
        logger.warning(
            "%s models run one sequence at a time, without packing: %s. Training is right but slower.",
            config.model_type,
            reason,
        )
    _set_attention(model, native_attention if reason else ATTENTION)
    if image is not None:
        _check_images(model, image, native_attention=native_attention, packed=not reason)
    return reason


@torch.no_grad()
def examine_replay(model: Any, routers: Routers, *, packed: bool) -> Routers:
    """The routers, and why routes cannot be replayed where a forward with random ones shows it.

    `packed`: as `examine` has found. What each router does with them is known already (`models.routes`).
    """
    if routers.problem:
        return routers
    if is_sharded(model):
        family = model.config.get_text_config().model_type
        problem = "its weights are sharded while loading, so that it could not be tried"
        return routers if family in _SEEN_REPLAYED else dataclasses.replace(routers, problem=problem)
    tokens, shape = _probe_tokens(model), routers.shape
    device = tokens.token_ids.device
    order_TLE = torch.rand(tokens.num_tokens, shape.layers, shape.experts, generator=torch.Generator().manual_seed(1))
    routes_TLK = order_TLE.argsort(-1)[..., : shape.per_token].to(device, torch.int16)
    log = RouteLog(shape, device)
    try:
        tokens = dataclasses.replace(tokens, routes_TLK=routes_TLK)
        hidden_TD = hidden_states(decoder_body(model), tokens, packed=packed, route_log=log).states_pD
    except Exception as error:  # anything a foreign model may raise means the same
        return dataclasses.replace(routers, problem=f"its forward with routes fails ({error})")
    wanted_LE = torch.zeros_like(log.chosen_LE)
    for layer in routers.layers:
        wanted_LE[layer] = routes_TLK[:, layer].flatten().long().bincount(minlength=shape.experts)
    if not torch.equal(log.chosen_LE, wanted_LE) or not bool(hidden_TD.isfinite().all()):
        return dataclasses.replace(routers, problem="its routers do not choose what they are given")
    return routers


def _set_attention(model: Any, name: str) -> None:
    """Let the decoder attend by this implementation. A vision tower keeps its own: its tokens see each other."""
    model.set_attn_implementation({"text_config": name} if hasattr(model.config, "text_config") else name)


def logit_transform(config: Any) -> LogitTransform:
    """The scale and soft-cap that a model's configuration names (Cohere, Granite, Falcon-H1; Gemma), and the tokens
    that it must not sample."""
    banned = unsampled_tokens(config)
    config = config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier"):
        scale *= getattr(config, name, None) or 1.0
    scale /= getattr(config, "logits_scaling", None) or 1.0
    return LogitTransform(scale=scale, softcap=getattr(config, "final_logit_softcapping", None), banned=banned)


def _inexpressible(config: Any) -> str:
    """Why the configuration rules packing out; empty if it does not.

    Here stands what two short sequences cannot show, such as limits of a reach longer than they are.
    """
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return f"it caps attention scores at {config.attn_logit_softcapping}"
    other = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if other:
        return f"it has layers of type {', '.join(sorted(other))}"
    if getattr(config, "attention_chunk_size", None):
        return f"it attends in chunks of {config.attention_chunk_size} tokens"
    if getattr(config, "alibi", False):
        return "it uses ALiBi position biases"
    return ""


class _Witness(PackedAttention):
    """A plan that remembers which window each layer asked for."""

    def __init__(self, cu_seqlens: Tensor, max_seqlen: int) -> None:
        super().__init__(cu_seqlens, max_seqlen)
        self.windows: list[int | None] = []

    def __call__(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> Tensor:
        self.windows.append(kwargs["sliding_window"])
        return super().__call__(module, query, key, value, **kwargs)


@torch.no_grad()
def _probe_packing(model: Any, *, native_attention: str) -> str:
    """Why a packed forward of the model differs from its own forwards; empty if it does not."""
    body, tokens = decoder_body(model), _probe_tokens(model)
    _set_attention(model, native_attention)
    expected_TD = hidden_states(body, tokens, packed=False).states_pD
    witness = _Witness(tokens.cu_seqlens, tokens.max_seqlen)
    try:
        _set_attention(model, ATTENTION)
        packed_TD = hidden_states(body, tokens, plan=witness).states_pD
    except Exception as error:  # anything a foreign model may raise means the same: not packable
        return f"its packed forward fails ({error})"
    config = model.config.get_text_config()
    if len(witness.windows) != config.num_hidden_layers:
        return f"{len(witness.windows)} of its {config.num_hidden_layers} layers attend by plan"
    expected_windows = _expected_windows(config)
    if witness.windows != expected_windows:
        return f"its layers ask for the windows {witness.windows}, its configuration for {expected_windows}"
    gap = _typical_error(packed_TD, expected_TD, tokens)
    if not gap <= _TOLERANCE.get(expected_TD.dtype, 1e-4):
        return f"its packed hidden states differ from its own by {gap:.1e}"
    return ""


def _check_images(model: Any, image: ImageInput, *, native_attention: str, packed: bool) -> None:
    """Raise `UnsupportedModelError` unless a sequence with an image gets the hidden states of the model's own forward.

    The image stands between texts: what comes before it shows whether the model lets tokens see later ones.
    """
    family = model.config.model_type
    if is_sharded(model):
        if family not in _SEEN_WITH_IMAGES:
            raise UnsupportedModelError(
                f"{family}: its weights are sharded while loading, so its forward with images could not be compared "
                "with its own. Choose ZeRO stage 2 or less, or another model."
            )
        return
    body = decoder_body(model)
    generator = torch.Generator().manual_seed(0)
    texts = torch.randint(min(image.token_ids), (2, 5), generator=generator).tolist()
    ids_T = torch.tensor([*texts[0], *image.token_ids, *texts[1]])
    start = len(texts[0])
    mask_T = torch.zeros(len(ids_T), dtype=torch.bool)
    tokens = PackedTokens.from_sequences([ids_T], [mask_T], images=[[PlacedImage(start, image)]])
    tokens = tokens.to(model.get_input_embeddings().weight.device)
    kinds = torch.zeros_like(tokens.token_ids)
    kinds[start : start + len(image)] = image.is_feature.to(kinds)
    assert tokens.images is not None
    own = dict(tokens.images.inputs[0].tensors) | dict.fromkeys(("mm_token_type_ids", "token_type_ids"), kinds[None])
    known = inspect.signature(body.forward).parameters
    dtype = model.get_input_embeddings().weight.dtype
    own = {n: t.to(dtype) if t.is_floating_point() else t for n, t in own.items() if n in known}
    try:
        with torch.no_grad():
            computed_TD = hidden_states(body, tokens, packed=packed).states_pD
            _set_attention(model, native_attention)
            expected_TD = body(input_ids=tokens.token_ids[None], use_cache=False, **own)[0].squeeze(0)
    except Exception as error:  # anything a foreign model may raise means the same
        raise UnsupportedModelError(f"images for {family} are not built: its forward fails ({error})") from error
    finally:
        _set_attention(model, ATTENTION if packed else native_attention)
    gap = _typical_error(computed_TD, expected_TD, tokens)
    if not gap <= _TOLERANCE.get(expected_TD.dtype, 1e-4):
        raise UnsupportedModelError(
            f"images for {family} are not built: it does more with an image than to put its features in the place of "
            f"tokens (its hidden states differ by {gap:.1e}). Choose another model, such as Qwen3-VL."
        )


def _expected_windows(config: Any) -> list[int | None]:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    return [window if kind == "sliding_attention" else None for kind in kinds]


@torch.no_grad()
def _probe_head(model: Any, transform: LogitTransform) -> None:
    """Check that scale and soft-cap of the head's product are all that stands between hidden states and logits."""
    tokens = next(_probe_tokens(model).split())
    expected = model(input_ids=tokens.token_ids[None], use_cache=False).logits.float()
    head = output_head(model)
    z = transform.scaled(head(hidden_states(decoder_body(model), tokens, packed=False).states_pD).float())
    error = ((z - expected).norm() / expected.norm()).item()
    if not error <= _TOLERANCE.get(head.weight.dtype, 1e-4):
        raise UnsupportedModelError(
            f"{model.config.model_type} does something to its logits that log-probs from hidden states leave out "
            f"(relative error {error:.1e}). Choose another model."
        )


def _probe_tokens(model: Any) -> PackedTokens:
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.get_input_embeddings().num_embeddings
    sequences = [torch.randint(vocabulary, (n,), generator=generator) for n in _PROBE_LENGTHS]
    masks = [torch.zeros(n, dtype=torch.bool) for n in _PROBE_LENGTHS]
    return PackedTokens.from_sequences(sequences, masks).to(model.get_input_embeddings().weight.device)


def _typical_error(actual_TD: Tensor, expected_TD: Tensor, tokens: PackedTokens) -> float:
    """Relative error of the median token, in the sequence where that is largest.

    The median, because in low precision a router may send single tokens to another expert.
    """
    error_T = (actual_TD - expected_TD).float().norm(dim=-1) / expected_TD.float().norm(dim=-1)
    bounds = tokens.cu_seqlens.tolist()
    return max(error_T[a:b].median().item() for a, b in itertools.pairwise(bounds))

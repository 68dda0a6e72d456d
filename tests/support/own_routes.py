"""What a mixture of experts itself chooses for each token of a sequence, and where an engine's routes are others."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch


@torch.no_grad()
def router_logits(model: Any, token_ids: Sequence[int]) -> dict[int, np.ndarray]:
    """[T, E] of each layer with experts, from one plain forward of transformers. Such a layer has a `mlp.gate`."""
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    layers = [number for number, layer in enumerate(plain.model.layers) if hasattr(layer.mlp, "gate")]
    tokens = torch.tensor([list(token_ids)], device=plain.device)
    found = plain(input_ids=tokens, output_router_logits=True, use_cache=False).router_logits
    return {layer: logits.float().cpu().numpy() for layer, logits in zip(layers, found, strict=True)}


def differing(routes_RLK: np.ndarray, logits: dict[int, np.ndarray]) -> np.ndarray:
    """bool [R, routed layers]: the engine's experts are not those with the largest logits."""
    top_k = routes_RLK.shape[-1]
    return np.stack(
        [
            (np.sort(routes_RLK[:, layer]) != np.sort(np.argsort(-own[: len(routes_RLK)], axis=-1)[:, :top_k])).any(-1)
            for layer, own in logits.items()
        ],
        axis=1,
    )


def check_routes(
    routes: np.ndarray | None, model: Any, token_ids: Sequence[int], *, tie: float = 1e-3, deep: bool = True
) -> None:
    """`routes` are the model's own choice for all tokens but the last. Only two experts whose logits differ by less
    than `tie` may be swapped, which rounding decides; deeper layers then see another token. Not `deep`: only the first
    layer with experts is looked at, which is enough to see whose routes they are; where many are swapped, later tokens
    attend to others in all layers behind it."""
    assert routes is not None
    logits = router_logits(model, token_ids)
    assert len(routes) == len(token_ids) - 1
    assert not np.delete(routes, list(logits), axis=1).any()
    others = differing(routes, logits)
    for token in np.flatnonzero(others.any(1)):
        first = int(others[token].argmax())
        if first and not deep:
            continue
        layer = list(logits)[first]
        chosen = np.isin(np.arange(logits[layer].shape[-1]), routes[token, layer])
        own = logits[layer][token]
        assert own[~chosen].max() - own[chosen].min() < tie, f"token {token} of {len(routes)}, layer {layer}"

"""Routes of a mixture of experts: which experts computed each token of a stream.

Shapes: L decoder layers, E experts of a layer, K experts of a token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class RouteShape(NamedTuple):
    """The figures of a mixture's routes."""

    layers: int
    """All decoder layers; those without experts count too."""
    experts: int
    per_token: int

    @property
    def dtype(self) -> torch.dtype:
        """The smallest that holds every expert's number."""
        return torch.uint8 if self.experts <= 256 else torch.int16


def route_shape(model_config: Any) -> RouteShape | None:
    """From a Hugging Face configuration; None for a model without experts."""
    text = model_config.get_text_config()
    # Families agree on no name.
    per_token = _first(text, "num_experts_per_tok", "top_k_experts", "moe_topk")
    experts = _first(text, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    if not 0 < per_token <= experts or experts == 1:
        return None
    return RouteShape(layers=text.num_hidden_layers, experts=experts, per_token=per_token)


def _first(config: Any, *names: str) -> int:
    return next((number for name in names if isinstance(number := getattr(config, name, None), int)), 0)

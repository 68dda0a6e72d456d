"""The experts that a mixture's routers choose in a forward of the engine, read where they are chosen.

Shapes: T tokens of a forward, M decoder layers, K experts of a token.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from openrlhf.models.body import decoder_layers
from openrlhf.models.routes import route_shape


def tells_routes(model: Any) -> bool:
    """Whether the model has routers whose choice of experts can be read."""
    return route_shape(model.config) is not None and bool(_routers(model))


class RouteReader:
    """Reads along with the routers of one model. A training forward of the same model is not read."""

    def __init__(self, model: Any) -> None:
        """Raises ValueError for a model without routers."""
        shape = route_shape(model.config)
        if shape is None or not tells_routes(model):
            raise ValueError(f"{type(model).__name__} has no routers whose choice of experts can be read")
        self.shape = shape
        self._routers = _routers(model)
        self._chosen: dict[int, Tensor] = {}

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """One forward."""
        self._chosen.clear()
        hooks = [router.register_forward_hook(self._note(layer)) for layer, router in self._routers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def take(self) -> Tensor:
        """[T, M·K]: the experts of the tokens of the last forward, on the device where they were chosen."""
        layers, chosen = zip(*sorted(self._chosen.items()), strict=True)
        self._chosen.clear()
        routes_TlK = torch.stack(chosen, dim=1).to(self.shape.dtype)
        if len(layers) < self.shape.layers:
            routes_TMK = routes_TlK.new_zeros(len(routes_TlK), self.shape.layers, self.shape.per_token)
            routes_TMK[:, list(layers)] = routes_TlK
            routes_TlK = routes_TMK
        return routes_TlK.flatten(1)

    def _note(self, layer: int) -> Any:
        def note(router: Any, arguments: Any, output: tuple[Tensor, ...]) -> None:
            # Routers return logits, weights and indices, not all of them in this order.
            self._chosen[layer] = next(x for x in output if not x.is_floating_point()).flatten(0, -2)

        return note


def _routers(model: Any) -> list[tuple[int, Any]]:
    return [
        (layer, module)
        for layer, block in enumerate(decoder_layers(model) or ())
        for module in block.modules()
        if hasattr(module, "top_k") and hasattr(module, "num_experts") and hasattr(module, "weight")
    ]

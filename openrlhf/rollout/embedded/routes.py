"""The experts that a mixture's routers choose in a forward of the engine.

Shapes: T tokens of a forward, M decoder layers, l of them with experts, K experts of a token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from openrlhf.models.routes import ROUTES, Router, StreamRoutes, route_shape


class RouteReader:
    """Reads along in forwards that are given its argument. Training forwards of the same model are not read."""

    def __init__(self, model: Any) -> None:
        """Raises ValueError for a model whose routers do not take routes (`models.routes`): they do not tell either."""
        shape = route_shape(model.config)
        if shape is None or not any(isinstance(module, Router) for module in model.modules()):
            raise ValueError(f"{type(model).__name__} has no routers that tell which experts they choose")
        self.shape = shape
        self._stream = StreamRoutes(None)

    def argument(self) -> dict[str, Any]:
        """An argument for one forward."""
        self._stream = StreamRoutes(None, seen={})
        return {ROUTES: self._stream}

    def take(self) -> Tensor:
        """[T, M·K]: the experts of the tokens of that forward, on the device where they were chosen."""
        self._stream.finish()
        assert self._stream.seen is not None, "the forward was given the argument"
        layers, chosen = zip(*sorted(self._stream.seen.items()), strict=True)
        self._stream = StreamRoutes(None)
        routes_TlK = torch.stack(chosen, dim=1).to(self.shape.dtype)
        if len(layers) == self.shape.layers:
            return routes_TlK.flatten(1)
        routes_TMK = routes_TlK.new_zeros(len(routes_TlK), self.shape.layers, self.shape.per_token)
        routes_TMK[:, list(layers)] = routes_TlK
        return routes_TMK.flatten(1)

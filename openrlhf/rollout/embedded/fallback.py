"""Decoding with the model's own cache, one row at a time: slow, but correct for every causal model."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from openrlhf.rollout.embedded.decoder import Prefill, StepLogits
from openrlhf.rollout.embedded.images import ImageReader
from openrlhf.rollout.embedded.kv_store import Tokens
from openrlhf.rollout.embedded.routes import RouteReader
from openrlhf.types import PackedImages, PlacedImage


class CachedDecoder:
    """`Decoder` for models that no attention plan can express (soft-cap, sinks, state-space layers)."""

    def __init__(self, model: Any, images: ImageReader | None = None, routes: RouteReader | None = None) -> None:
        """`images`: None for a model of text. `routes`: None: experts are not read."""
        self.model = model
        self._images = images
        self._routes = routes
        self._device = next(model.parameters()).device
        self._caches: dict[int, Any] = {}
        self._next: dict[int, int] = {}
        """By row: the position of its next token."""
        self._chosen: dict[int, list[Tensor]] = {}
        """By row: the experts of its tokens, [P, M·K] of each forward."""

    def step(self, last_tokens: np.ndarray, prefills: Sequence[Prefill]) -> StepLogits:
        rows = list(self._caches)
        logits = [self._forward(row, last_tokens[row : row + 1], np.array([self._next[row]])) for row in rows]
        for prefill in prefills:
            # The layout of a model's own cache is unknown, so it cannot be copied: siblings read the prompt themselves.
            for row in (prefill.row, *prefill.siblings):
                logits.append(self._forward(row, prefill.token_ids, prefill.positions, prefill.images))
                rows.append(row)
        return StepLogits(np.array(rows, dtype=np.int64), torch.stack(logits))

    def fork(self, source: int, target: int, *, length: int) -> bool:
        return False

    def remove(self, rows: Sequence[int]) -> None:
        for row in rows:
            del self._caches[row], self._next[row]
            self._chosen.pop(row, None)

    def keep(self, histories: Mapping[int, Tokens], *, wanted: Container[int]) -> None:
        """Keeps nothing: a cache that may hold a recurrent state cannot be cut back to a common beginning."""

    def recall(self, prompt: Tokens, *, most: int) -> None:
        return None

    def forget(self) -> None:
        """No histories are kept, features of images are."""
        if self._images is not None:
            self._images.forget()

    def clear(self) -> None:
        self._caches.clear()
        self._next.clear()
        self._chosen.clear()
        if self._images is not None:
            self._images.clear()

    def routes(self, rows: Sequence[int]) -> list[np.ndarray]:
        assert self._routes is not None, "a decoder that reads no routes is not asked for them"
        shape = self._routes.shape.layers, self._routes.shape.per_token
        return [torch.cat(self._chosen[row]).cpu().numpy().reshape(-1, *shape) for row in rows]

    def _forward(
        self, row: int, token_ids: np.ndarray, positions: np.ndarray, images: Sequence[PlacedImage] = ()
    ) -> Tensor:
        """The logits [V] after the row's new tokens, whose positions are [P] or [R, P]."""
        if self._routes is None:
            return self._logits(row, token_ids, positions, images)
        logits = self._logits(row, token_ids, positions, images, **self._routes.argument())
        self._chosen.setdefault(row, []).append(self._routes.take())
        return logits

    def _logits(
        self, row: int, token_ids: np.ndarray, positions: np.ndarray, images: Sequence[PlacedImage], **more: Any
    ) -> Tensor:
        """`more`: arguments of the layers."""
        token_ids_T = torch.from_numpy(token_ids).to(self._device)
        arguments: dict[str, Any] = {
            "position_ids": torch.from_numpy(positions).to(self._device).unsqueeze(-2),
            "past_key_values": self._caches.get(row),
            "use_cache": True,
            **more,
        }
        placed = PackedImages.of([images], [len(token_ids)])
        if placed is None:
            output = self.model(input_ids=token_ids_T[None], logits_to_keep=1, **arguments)
            logits, cache = output.logits[0, -1], getattr(output, "past_key_values", None)
        else:
            assert self._images is not None, "a model of text gets no images"
            (logits,), cache = self._images.forward(token_ids_T, placed, keep=None, **arguments)
        if cache is None:
            raise ValueError(f"the embedded engine cannot decode {type(self.model).__name__}: it returns no cache")
        self._caches[row] = cache
        self._next[row] = int(positions.max()) + 1
        return logits


if TYPE_CHECKING:
    from openrlhf.rollout.embedded.decoder import Decoder

    _: type[Decoder] = CachedDecoder

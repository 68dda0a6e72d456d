"""Decoding with the model's own cache, one row at a time: slow, but correct for every causal model."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from openrlhf.rollout.embedded.decoder import Prefill, StepLogits


class CachedDecoder:
    """`Decoder` for models that no attention plan can express (soft-cap, sinks, state-space layers)."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._device = next(model.parameters()).device
        self._caches: dict[int, Any] = {}
        self._lengths: dict[int, int] = {}

    def step(self, last_tokens: np.ndarray, prefills: Sequence[Prefill]) -> StepLogits:
        work = [(row, last_tokens[row : row + 1]) for row in self._caches]
        for prefill in prefills:
            # The layout of a model's own cache is unknown, so it cannot be copied: siblings read the prompt themselves.
            work += [(row, prefill.token_ids) for row in (prefill.row, *prefill.siblings)]
        logits = [self._forward(row, token_ids) for row, token_ids in work]
        return StepLogits(np.array([row for row, _ in work], dtype=np.int64), torch.stack(logits))

    def fork(self, source: int, target: int, *, length: int) -> bool:
        return False

    def remove(self, rows: Sequence[int]) -> None:
        for row in rows:
            del self._caches[row], self._lengths[row]

    def keep(self, histories: Mapping[int, tuple[int, ...]], *, wanted: Container[int]) -> None:
        """Keeps nothing: a cache that may hold a recurrent state cannot be cut back to a common beginning."""

    def recall(self, prompt: tuple[int, ...]) -> None:
        return None

    def forget(self) -> None:
        """Does nothing, since nothing is kept."""

    def clear(self) -> None:
        self._caches.clear()
        self._lengths.clear()

    def _forward(self, row: int, token_ids: np.ndarray) -> Tensor:
        """The logits [V] after the row's new tokens."""
        seen = self._lengths.get(row, 0)
        output = self.model(
            input_ids=torch.from_numpy(token_ids).to(self._device)[None],
            position_ids=torch.arange(seen, seen + len(token_ids), device=self._device)[None],
            past_key_values=self._caches.get(row),
            use_cache=True,
            logits_to_keep=1,
        )
        if getattr(output, "past_key_values", None) is None:
            raise ValueError(f"the embedded engine cannot decode {type(self.model).__name__}: it returns no cache")
        self._caches[row] = output.past_key_values
        self._lengths[row] = seen + len(token_ids)
        return output.logits[0, -1]


if TYPE_CHECKING:
    from openrlhf.rollout.embedded.decoder import Decoder

    _: type[Decoder] = CachedDecoder

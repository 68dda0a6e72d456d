"""One step of every running row in one packed forward.

    stream   d d d d d d | p p p p p | p p p        d: the last token of a decoding row, p: tokens of a new prompt
    logits             *           *       *        at each sequence's last token only

The plan stores the new keys and values and attends: decoding rows to their own history, pool by pool of the
store; prompts to themselves, causally, as in a training forward.

Shapes: T stream tokens, n rows of a pool, H key-value heads, G query heads per key-value head, D head
dimension, L the longest history of the pool, R sequences, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from openrlhf.models.packed import PackedAttention
from openrlhf.rollout.embedded.kv_store import KVStore, Pool


class Prefill(NamedTuple):
    """A prompt to be read in this step."""

    row: int
    token_ids: np.ndarray
    """int64 [P]"""
    siblings: tuple[int, ...] = ()
    """Rows with the same prompt: they get a copy of what it leaves."""


class StepLogits(NamedTuple):
    """What a step predicts, in the decoder's own order of rows."""

    rows: np.ndarray
    """int64 [R]: the row each line belongs to; every running row once."""
    logits: Tensor
    """[R, V]"""


class Decoder(Protocol):
    """Keeps the history of every row and predicts its next token."""

    def step(self, last_tokens: np.ndarray, prefills: Sequence[Prefill]) -> StepLogits:
        """Feed `last_tokens[row]` to every row that is already running, and their prompts to the new rows."""
        ...

    def fork(self, source: int, target: int, *, length: int) -> bool:
        """Start row `target` with the first `length` tokens of row `source`; False when it cannot."""
        ...

    def remove(self, rows: Sequence[int]) -> None:
        """Forget these rows."""
        ...

    def clear(self) -> None:
        """Forget every row and give the memory back."""
        ...


class PackedDecoder:
    """`Decoder` for models whose attention implementation is `openrlhf.models.attention.ATTENTION`."""

    def __init__(self, model: Any, store: KVStore) -> None:
        self.model = model
        self.store = store

    def step(self, last_tokens: np.ndarray, prefills: Sequence[Prefill]) -> StepLogits:
        store = self.store
        store.make_room()
        pools = [pool for pool in store.pools if pool.rows]
        # Pools gain the new rows below; what decodes now is what is there before.
        decoding = [np.array(pool.rows) for pool in pools]
        # Equal lengths side by side: their attention is one call, their keys land in neighbouring slots.
        prefills = sorted(prefills, key=lambda prefill: len(prefill.token_ids))
        for prefill in prefills:
            store.place([prefill.row], length=len(prefill.token_ids))
        for prefill in prefills:
            store.place(prefill.siblings, length=len(prefill.token_ids))

        rows = np.concatenate([*decoding, np.empty(0, np.int64)])
        prompts = [prefill.token_ids for prefill in prefills]
        plan = DecodePlan(store, pools=pools, decoding=decoding, prompts=prefills)
        ends = len(rows) + np.cumsum([len(p) for p in prompts], dtype=np.int64)
        logits = self._forward(
            token_ids=np.concatenate([last_tokens[rows], *prompts]),
            position_ids=np.concatenate([store.lengths[rows], *(np.arange(len(p)) for p in prompts)]),
            keep=np.concatenate([np.arange(len(rows)), ends - 1]) if prompts else None,
            plan=plan,
        )
        store.lengths[rows] += 1
        return self._with_siblings(rows, prefills, logits)

    def fork(self, source: int, target: int, *, length: int) -> bool:
        self.store.place([target], length=length)
        self.store.copy(source, [target], length=length)
        return True

    def remove(self, rows: Sequence[int]) -> None:
        self.store.remove(rows)

    def clear(self) -> None:
        self.store.clear()

    def _forward(
        self, *, token_ids: np.ndarray, position_ids: np.ndarray, keep: np.ndarray | None, plan: DecodePlan
    ) -> Tensor:
        device = self.store.device
        output = self.model(
            input_ids=torch.from_numpy(token_ids).to(device)[None],
            position_ids=torch.from_numpy(position_ids).to(device)[None],
            attention_plan=plan,
            use_cache=False,
            logits_to_keep=0 if keep is None else torch.from_numpy(keep).to(device),
        )
        logits = output.logits[0]
        # Models that do not know `logits_to_keep` predict at every position.
        return logits if keep is None or len(logits) == len(keep) else logits[keep]

    def _with_siblings(self, rows: np.ndarray, prefills: Sequence[Prefill], logits: Tensor) -> StepLogits:
        order = [*range(len(rows) + len(prefills))]
        all_rows = [*rows.tolist(), *(prefill.row for prefill in prefills)]
        for index, prefill in enumerate(prefills, start=len(rows)):
            if prefill.siblings:
                self.store.copy(prefill.row, prefill.siblings, length=len(prefill.token_ids))
                order += [index] * len(prefill.siblings)
                all_rows += prefill.siblings
        if len(order) > len(logits):
            logits = logits[torch.tensor(order, device=logits.device)]
        return StepLogits(np.array(all_rows, dtype=np.int64), logits)


class DecodePlan:
    """The attention of one step. Made for one forward call; knows where each stream token's keys belong."""

    def __init__(
        self, store: KVStore, *, pools: Sequence[Pool], decoding: Sequence[np.ndarray], prompts: Sequence[Prefill]
    ) -> None:
        self._parts: list[_PoolPart] = []
        start = 0
        for pool, rows in zip(pools, decoding, strict=True):
            self._parts.append(_PoolPart(pool, store.lengths[rows], start=start, device=store.device))
            start += len(rows)
        self._prompt_start = start
        self._prompt_slots: list[tuple[Pool, int, int, int]] = []
        """(pool, first slot, prompts, length) of neighbours that share pool and length."""
        for prefill in prompts:
            pool, slot = store.slot(prefill.row)
            length = len(prefill.token_ids)
            if self._prompt_slots:
                previous, first, count, same = self._prompt_slots[-1]
                if previous is pool and same == length and first + count == slot:
                    self._prompt_slots[-1] = (pool, first, count + 1, length)
                    continue
            self._prompt_slots.append((pool, slot, 1, length))
        self._packed: PackedAttention | None = None
        if prompts:
            lengths = [len(prefill.token_ids) for prefill in prompts]
            bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(store.device)
            self._packed = PackedAttention(bounds, max(lengths))

    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        sliding_window: int | None,
        dropout: float,
    ) -> Tensor:
        """query [1, Hq, T, D], key and value [1, Hkv, T, D] → [1, T, Hq, D]."""
        layer = module.layer_idx
        q_THD, k_THD, v_THD = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))
        outputs = [
            part.attend(layer, q_THD, k_THD, v_THD, scaling=scaling, window=sliding_window) for part in self._parts
        ]
        if self._packed is not None:
            start = self._prompt_start
            self._store_prompts(layer, k_THD[start:], v_THD[start:])
            prompts = self._packed(
                module,
                query[:, :, start:],
                key[:, :, start:],
                value[:, :, start:],
                scaling=scaling,
                sliding_window=sliding_window,
                dropout=0.0,
            )
            outputs.append(prompts.squeeze(0))
        return (outputs[0] if len(outputs) == 1 else torch.cat(outputs)).unsqueeze(0)

    def _store_prompts(self, layer: int, k_THD: Tensor, v_THD: Tensor) -> None:
        start = 0
        for pool, slot, count, length in self._prompt_slots:
            end = start + count * length
            for cache, new_THD in ((pool.keys, k_THD), (pool.values, v_THD)):
                cache[layer][slot : slot + count, :, :length] = (
                    new_THD[start:end].unflatten(0, (count, length)).transpose(1, 2)
                )
            start = end


class _PoolPart:
    """The decoding rows of one pool: stream tokens start … start+n-1 are slots 0 … n-1."""

    def __init__(self, pool: Pool, lengths: np.ndarray, *, start: int, device: torch.device) -> None:
        self._pool = pool
        self._stream = slice(start, start + len(lengths))
        self._slots = torch.arange(len(lengths), device=device)
        self._positions = torch.from_numpy(lengths).to(device)
        self._longest = int(lengths.max()) + 1
        self._even = bool((lengths == lengths[0]).all())
        if device.type == "cuda" and not self._even:
            # CUDA's masked attention copies a mask whose rows are not aligned. Capacities are, or nearly so.
            self._longest = min(pool.capacity, -(-self._longest // 16) * 16)
        self._masks: dict[int | None, Tensor | None] = {}

    def attend(
        self, layer: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *, scaling: float, window: int | None
    ) -> Tensor:
        """Store this token's key and value, then attend to the whole history → [n, Hq, D]."""
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        keys[self._slots, :, self._positions] = k_THD[self._stream]
        values[self._slots, :, self._positions] = v_THD[self._stream]
        n, L, H = len(self._slots), self._longest, keys.shape[1]
        # The G query heads of a key-value head stand where SDPA expects queries: keys are read once, not G times.
        q_nHGD = q_THD[self._stream].unflatten(1, (H, -1))
        out_nHGD = F.scaled_dot_product_attention(
            q_nHGD, keys[:n, :, :L], values[:n, :, :L], attn_mask=self._mask(window, q_THD.dtype), scale=scaling
        )
        return out_nHGD.flatten(1, 2)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """[n, 1, 1, L]: 0 where a row may look, -inf elsewhere; None when every row looks everywhere."""
        if window not in self._masks:
            mask = None
            if not self._even or (window is not None and window < self._longest):
                position = torch.arange(self._longest, device=self._positions.device)
                hidden = position > self._positions[:, None]
                if window is not None:
                    hidden |= position <= self._positions[:, None] - window
                mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device)
                mask = mask.masked_fill_(hidden, float("-inf"))[:, None, None, :]
            self._masks[window] = mask
        return self._masks[window]

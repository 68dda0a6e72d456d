"""Keys and values of the running rows, in pools of doubling capacity.

A row lives in the smallest pool that holds it: pool c has slots of `MIN_CAPACITY · 2^c` tokens, each row one
slot, slots 0 … n-1 in use without holes. Attention runs pool by pool over contiguous memory, to the longest
row of the pool, so a long row does not slow the short ones down and no row wastes more than half its slot.
A row that outgrows its slot moves to the next pool; when one leaves, the last row of the pool takes its slot.

What finished rows have stored can be kept beside the pools, in at most as much memory, and is the first thing to go
when memory is short.

Shapes: S slots, H key-value heads, C capacity, D head dimension.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from openrlhf.rollout.embedded.kept import History, KeptHistories, Known

MIN_CAPACITY = 64
_GIB = 2**30


class LayerShape(NamedTuple):
    """What one attention layer stores for one token."""

    heads: int
    key_dim: int
    value_dim: int


@dataclass(slots=True)
class Pool:
    """Slots of one capacity."""

    capacity: int
    keys: dict[int, Tensor]
    """[S, H, C, D] by layer index."""
    values: dict[int, Tensor]
    rows: list[int]
    """Which row holds slot i."""
    slots: int = 0
    """S: how many are allocated."""


class KVStore:
    """Where each row's keys and values are. Rows are numbered 0 … max_rows-1 by the caller."""

    def __init__(
        self,
        layers: dict[int, LayerShape],
        *,
        max_rows: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layers = layers
        self.max_rows = max_rows
        self.dtype = dtype
        self.device = device
        self.lengths = np.zeros(max_rows, dtype=np.int64)
        """Tokens stored for each row."""
        capacities = [MIN_CAPACITY]
        while capacities[-1] < max_length:
            capacities.append(capacities[-1] * 2)
        capacities[-1] = min(capacities[-1], max(max_length, MIN_CAPACITY))
        self.pools = [Pool(capacity, {}, {}, []) for capacity in capacities]
        self._pool_of: dict[int, int] = {}
        self._slot_of: dict[int, int] = {}
        self.kept = KeptHistories()

    @property
    def bytes_per_token(self) -> int:
        return sum(s.heads * (s.key_dim + s.value_dim) for s in self.layers.values()) * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """Allocated for rows now."""
        return sum(pool.slots * pool.capacity for pool in self.pools) * self.bytes_per_token

    def slot(self, row: int) -> tuple[Pool, int]:
        return self.pools[self._pool_of[row]], self._slot_of[row]

    def place(self, rows: Sequence[int], *, length: int) -> None:
        """Give each row the next free slot that holds `length` tokens and one more. Nothing is stored yet."""
        index = self.pool_index(length)
        pool = self.pools[index]
        self._reserve(pool, len(pool.rows) + len(rows))
        for row in rows:
            self._pool_of[row], self._slot_of[row] = index, len(pool.rows)
            self.lengths[row] = length
            pool.rows.append(row)

    def remove(self, rows: Sequence[int]) -> None:
        """Free the rows' slots; the last rows of their pools move into the holes."""
        by_pool: dict[int, list[int]] = {}
        for row in rows:
            by_pool.setdefault(self._pool_of.pop(row), []).append(self._slot_of.pop(row))
        for index, freed in by_pool.items():
            pool = self.pools[index]
            left = len(pool.rows) - len(freed)
            gone = set(freed)
            holes = [slot for slot in freed if slot < left]
            movers = [slot for slot in range(left, len(pool.rows)) if slot not in gone]
            for hole, mover in zip(holes, movers, strict=True):
                row = pool.rows[mover]
                pool.rows[hole], self._slot_of[row] = row, hole
            del pool.rows[left:]
            if holes:
                length = int(self.lengths[[pool.rows[hole] for hole in holes]].max())
                self._copy_slots(pool, movers, pool, holes, length=length)

    def copy(self, source: int, targets: Sequence[int], *, length: int) -> None:
        """The first `length` tokens of `source` become those of `targets`, neighbours in a pool without a history."""
        pool, slot = self.slot(source)
        target_pool, first = self.slot(targets[0])
        for caches in ((pool.keys, target_pool.keys), (pool.values, target_pool.values)):
            for layer, tensor in caches[0].items():
                caches[1][layer][first : first + len(targets), :, :length] = tensor[slot, :, :length]

    def keep(self, histories: Mapping[int, tuple[int, ...]], *, wanted: Container[int] = ()) -> None:
        """Keep what these rows have stored, under the tokens it was stored for, where memory and `wanted` allow it."""
        spare = _spare_bytes(self.device)
        for row, token_ids in histories.items():
            if len(token_ids) != self.lengths[row]:
                raise ValueError(f"row {row} has {self.lengths[row]} tokens stored, not {len(token_ids)}")
            num_bytes = len(token_ids) * self.bytes_per_token
            budget = min(self.num_bytes, self.kept.num_bytes + spare // 2)
            if not self.kept.make_room(token_ids, num_bytes, budget=budget, wanted=wanted):
                continue
            pool, slot = self.slot(row)
            try:
                keys, values = (
                    {layer: cache[slot, :, : len(token_ids)].clone() for layer, cache in caches.items()}
                    for caches in (pool.keys, pool.values)
                )
            except RuntimeError:  # no memory after all, and nothing that is worth an error
                self.kept.clear()
                return
            self.kept.add(History(token_ids, keys, values, num_bytes))
            spare -= num_bytes

    def restore(self, known: Known, row: int) -> None:
        """The known beginning of a history becomes that of `row`, which has been placed."""
        pool, slot = self.slot(row)
        for caches in ((known.history.keys, pool.keys), (known.history.values, pool.values)):
            for layer, tensor in caches[0].items():
                caches[1][layer][slot, :, : known.length] = tensor[:, : known.length]

    def make_room(self) -> None:
        """Move every row whose slot is full to the next pool: after this each row can take one more token."""
        for index, pool in enumerate(self.pools[:-1]):
            if not pool.rows:
                continue
            rows = np.array(pool.rows)
            full = rows[self.lengths[rows] >= pool.capacity].tolist()
            if not full:
                continue
            larger = self.pools[index + 1]
            self._reserve(larger, len(larger.rows) + len(full))
            targets = list(range(len(larger.rows), len(larger.rows) + len(full)))
            slots = [self._slot_of[row] for row in full]
            self._copy_slots(pool, slots, larger, targets, length=pool.capacity)
            self.remove(full)
            larger.rows.extend(full)
            for row, slot in zip(full, targets, strict=True):
                self._pool_of[row], self._slot_of[row] = index + 1, slot

    def _copy_slots(
        self, source: Pool, slots: Sequence[int], target: Pool, targets: Sequence[int], *, length: int
    ) -> None:
        """Slot by slot on CPU, where each copy runs at memory speed; at once on a GPU, where each would be a launch."""
        if self.device.type == "cpu":
            pairs = [(int(a), int(b)) for a, b in zip(slots, targets, strict=True)]
        else:
            pairs = [(torch.tensor(slots, device=self.device), torch.tensor(targets, device=self.device))]
        for caches in ((source.keys, target.keys), (source.values, target.values)):
            for layer, tensor in caches[0].items():
                for a, b in pairs:
                    caches[1][layer][b, :, :length] = tensor[a, :, :length]

    def clear(self) -> None:
        """Forget every row and every kept history, and give the memory back."""
        self.kept.clear()
        self._pool_of.clear()
        self._slot_of.clear()
        for pool in self.pools:
            pool.keys, pool.values, pool.rows, pool.slots = {}, {}, [], 0

    def pool_index(self, length: int) -> int:
        """The pool in which a row of `length` tokens and one more is placed."""
        for index, pool in enumerate(self.pools):
            if length < pool.capacity:
                return index
        return len(self.pools) - 1

    def _reserve(self, pool: Pool, slots: int) -> None:
        if slots <= pool.slots:
            return
        slots = min(self.max_rows, max(slots, 2 * pool.slots, 8))
        wanted = slots * pool.capacity * self.bytes_per_token
        free = _free_bytes(self.device)
        if free is not None and wanted > free:
            free += self.kept.num_bytes  # what the process frees it can use again, even before the system knows
            self.kept.clear()
            if wanted > free:
                raise MemoryError(self._does_not_fit(wanted, slots, pool.capacity, f"{free / _GIB:.2f} GiB are free"))
        try:
            self._allocate(pool, slots)
        except RuntimeError as error:  # torch.OutOfMemoryError on CUDA, a plain one from the CPU allocator
            if not self.kept:
                raise MemoryError(self._does_not_fit(wanted, slots, pool.capacity, str(error))) from error
            self.kept.clear()
            self._reserve(pool, slots)

    def _allocate(self, pool: Pool, slots: int) -> None:
        for layer, shape in self.layers.items():
            for cache, dim in ((pool.keys, shape.key_dim), (pool.values, shape.value_dim)):
                # Zeros, not empty: masked positions still meet the softmax's zeros, and 0 · NaN is NaN.
                grown = torch.zeros((slots, shape.heads, pool.capacity, dim), dtype=self.dtype, device=self.device)
                if pool.slots:
                    grown[: pool.slots] = cache[layer][: pool.slots]
                cache[layer] = grown
        pool.slots = slots

    def _does_not_fit(self, wanted: int, slots: int, capacity: int, why: str) -> str:
        return (
            f"the embedded engine's key-value store does not fit: {slots} sequences of up to {capacity} tokens need "
            f"{wanted / _GIB:.2f} GiB on {self.device} beside the {self.num_bytes / _GIB:.2f} GiB it has ({why}); "
            f"lower max_batch_size (now {self.max_rows}) or max_model_len"
        )


def _free_bytes(device: torch.device) -> int | None:
    """Memory that an allocation may use, where it can be told. Linux hands out more than it has, then kills."""
    if device.type != "cpu":
        return None
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _spare_bytes(device: torch.device) -> int:
    """Memory that nobody would miss now; none where it cannot be told."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return _free_bytes(device) or 0

"""Keys and values of the running rows, in pools of doubling capacity.

A row lives in the smallest pool that holds it: pool c has slots of `MIN_CAPACITY · 2^c` tokens, each row one
slot, slots 0 … n-1 in use without holes. Attention runs pool by pool over contiguous memory, to the longest
row of the pool, so a long row does not slow the short ones down and no row wastes more than half its slot.
A row that outgrows its slot moves to the next pool; when one leaves, the last row of the pool takes its slot.

Of a mixture the experts of every token can be stored with its keys and values. They go wherever those go: to siblings,
into kept histories and out of them.

The keys and values of finished rows can be kept beside the pools (`KeptHistories`), in at most as much memory, because
the next turn of an episode begins with all that the episode has read and written so far. They are dropped first when
memory is short.

A kept history is found by its blocks of BLOCK tokens. Each block has a hash of itself and of everything before it, so
the last block of a prompt with a known hash names the history with the longest common beginning, in time linear in the
prompt. The tokens themselves are compared before a history is used, because two hashes may collide.

Two images of one size have the same token ids. Histories and prompts are therefore compared as `Tokens`, in which the
first token of each image is the image's digest. Equal digests mean equal tokens, so what two sequences have in common
never ends inside an image that both of them have whole.

Shapes: S slots, H key-value heads, C capacity, D head dimension, L tokens of a history. Of routes: M decoder layers, K
experts of a token.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from openrlhf.models.routes import RouteShape
from openrlhf.types import PlacedImage

MIN_CAPACITY = 64
_GIB = 2**30
Tokens = tuple[int | str, ...]
"""Token ids, with the digest of each image in the place of the image's first token: what may be compared."""


def comparable(token_ids: tuple[int, ...], images: Sequence[PlacedImage]) -> Tokens:
    if not images:
        return token_ids
    tokens: list[int | str] = [*token_ids]
    for start, image in images:
        tokens[start] = image.digest
    return tuple(tokens)


class LayerShape(NamedTuple):
    """The shape of what one attention layer stores for one token."""

    heads: int
    key_dim: int
    value_dim: int


@dataclass(slots=True)
class SlotPool:
    """Slots of one capacity."""

    capacity: int
    keys: dict[int, Tensor] = field(default_factory=dict)
    """[S, H, C, D] by layer index."""
    values: dict[int, Tensor] = field(default_factory=dict)
    routes: dict[int, Tensor] = field(default_factory=dict)
    """[S, 1, C, M·K] under 0, if routes are stored. Shaped like the keys of one head: the same code moves both."""
    rows: list[int] = field(default_factory=list)
    """The row in slot i."""
    slots: int = 0
    """S: the number of slots that are allocated."""

    @property
    def caches(self) -> tuple[dict[int, Tensor], ...]:
        """All that is stored of a token: tensors whose dimensions 0 and 2 are the slot and the place in it."""
        return self.keys, self.values, self.routes


class KVStore:
    """The keys and values of all rows. The caller numbers rows 0 … max_rows-1."""

    def __init__(
        self,
        layers: dict[int, LayerShape],
        *,
        max_rows: int,
        max_length: int,
        dtype: torch.dtype,
        device: torch.device,
        routes: RouteShape | None = None,
    ) -> None:
        """`routes`: None: no experts are stored."""
        self.layers = layers
        self.route_shape = routes
        self.max_rows = max_rows
        self.dtype = dtype
        self.device = device
        self.lengths = np.zeros(max_rows, dtype=np.int64)
        """The number of tokens stored for each row."""
        capacities = [MIN_CAPACITY]
        while capacities[-1] < max_length:
            capacities.append(capacities[-1] * 2)
        capacities[-1] = min(capacities[-1], max(max_length, MIN_CAPACITY))
        self.pools = [SlotPool(capacity) for capacity in capacities]
        self._pool_of: dict[int, int] = {}
        self._slot_of: dict[int, int] = {}
        self.kept = KeptHistories()

    @property
    def bytes_per_token(self) -> int:
        keys_and_values = sum(s.heads * (s.key_dim + s.value_dim) for s in self.layers.values()) * self.dtype.itemsize
        if (routes := self.route_shape) is None:
            return keys_and_values
        return keys_and_values + routes.layers * routes.per_token * routes.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        """The bytes that are allocated for rows now."""
        return sum(pool.slots * pool.capacity for pool in self.pools) * self.bytes_per_token

    def slot(self, row: int) -> tuple[SlotPool, int]:
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
        """Copy the first `length` tokens of `source` to `targets` (in adjacent slots, without tokens yet)."""
        pool, slot = self.slot(source)
        target_pool, first = self.slot(targets[0])
        for here, there in zip(pool.caches, target_pool.caches, strict=True):
            for layer, tensor in here.items():
                there[layer][first : first + len(targets), :, :length] = tensor[slot, :, :length]

    def keep(self, histories: Mapping[int, Tokens], *, wanted: Container[int] = ()) -> None:
        """Keep the keys and values of these rows under their tokens, as far as memory and `wanted` histories allow."""
        spare = _spare_bytes(self.device)
        for row, tokens in histories.items():
            if len(tokens) != self.lengths[row]:
                raise ValueError(f"row {row} has {self.lengths[row]} tokens stored, not {len(tokens)}")
            num_bytes = len(tokens) * self.bytes_per_token
            budget = min(self.num_bytes, self.kept.num_bytes + spare // 2)
            if not self.kept.make_room(tokens, num_bytes, budget=budget, wanted=wanted):
                continue
            pool, slot = self.slot(row)
            try:
                caches = tuple(
                    {layer: cache[slot, :, : len(tokens)].clone() for layer, cache in caches.items()}
                    for caches in pool.caches
                )
            except RuntimeError:  # out of memory after all; keeping histories only saves time, so this is no error
                self.kept.clear()
                return
            self.kept.add(StoredHistory(tokens, caches, num_bytes))
            spare -= num_bytes

    def restore(self, known: KnownPrefix, row: int) -> None:
        """Copy the known beginning of a history into `row`, which has a slot already."""
        pool, slot = self.slot(row)
        for kept, cache in zip(known.history.caches, pool.caches, strict=True):
            for layer, tensor in kept.items():
                cache[layer][slot, :, : known.length] = tensor[:, : known.length]

    def routes(self, rows: Sequence[int]) -> list[np.ndarray]:
        """[L, M, K] of each row: the experts of its tokens. One copy to the host for all of them."""
        assert self.route_shape is not None, "a store without routes is not asked for them"
        found = []
        for row in rows:
            pool, slot = self.slot(row)
            found.append(pool.routes[0][slot, 0, : self.lengths[row]])
        if not found:
            return []
        together = torch.cat(found).cpu().numpy().reshape(-1, self.route_shape.layers, self.route_shape.per_token)
        parts = np.split(together, np.cumsum([len(part) for part in found])[:-1])
        # A part of an array would keep the memory of the whole.
        return [together] if len(parts) == 1 else [part.copy() for part in parts]

    def make_room(self) -> None:
        """Move every row whose slot is full to the next pool. Afterwards each row can take one more token."""
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
        self, source: SlotPool, slots: Sequence[int], target: SlotPool, targets: Sequence[int], *, length: int
    ) -> None:
        """Copies one slot at a time on a CPU, where a copy runs at memory speed; on a GPU all at once, because there
        each copy would be a kernel launch."""
        pairs: list[tuple[Any, Any]]
        if self.device.type == "cpu":
            pairs = [(int(a), int(b)) for a, b in zip(slots, targets, strict=True)]
        else:
            pairs = [(torch.tensor(slots, device=self.device), torch.tensor(targets, device=self.device))]
        for here, there in zip(source.caches, target.caches, strict=True):
            for layer, tensor in here.items():
                for a, b in pairs:
                    there[layer][b, :, :length] = tensor[a, :, :length]

    def clear(self) -> None:
        """Forget every row and every kept history, and give the memory back."""
        self.kept.clear()
        self._pool_of.clear()
        self._slot_of.clear()
        for pool in self.pools:
            pool.keys, pool.values, pool.routes, pool.rows, pool.slots = {}, {}, {}, [], 0

    def pool_index(self, length: int) -> int:
        """The pool in which a row of `length` tokens and one more is placed."""
        for index, pool in enumerate(self.pools):
            if length < pool.capacity:
                return index
        return len(self.pools) - 1

    def _reserve(self, pool: SlotPool, slots: int) -> None:
        if slots <= pool.slots:
            return
        slots = min(self.max_rows, max(slots, 2 * pool.slots, 8))
        wanted = slots * pool.capacity * self.bytes_per_token
        free = _free_bytes(self.device)
        if free is not None and wanted > free:
            free += self.kept.num_bytes  # memory that this process frees can be used at once, before the system sees it
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

    def _allocate(self, pool: SlotPool, slots: int) -> None:
        for layer, shape in self.layers.items():
            self._grow(pool, pool.keys, layer, slots, (shape.heads, shape.key_dim), self.dtype)
            self._grow(pool, pool.values, layer, slots, (shape.heads, shape.value_dim), self.dtype)
        if (routes := self.route_shape) is not None:
            self._grow(pool, pool.routes, 0, slots, (1, routes.layers * routes.per_token), routes.dtype)
        pool.slots = slots

    def _grow(
        self,
        pool: SlotPool,
        cache: dict[int, Tensor],
        layer: int,
        slots: int,
        shape: tuple[int, int],
        dtype: torch.dtype,
    ) -> None:
        """`shape`: heads and dimension."""
        # Zeros, not empty: masked positions still meet the softmax's zeros, and 0 · NaN is NaN.
        grown = torch.zeros((slots, shape[0], pool.capacity, shape[1]), dtype=dtype, device=self.device)
        if pool.slots:
            grown[: pool.slots] = cache[layer][: pool.slots]
        cache[layer] = grown

    def _does_not_fit(self, wanted: int, slots: int, capacity: int, why: str) -> str:
        return (
            f"the embedded engine's key-value store does not fit: {slots} sequences of up to {capacity} tokens need "
            f"{wanted / _GIB:.2f} GiB on {self.device} beside the {self.num_bytes / _GIB:.2f} GiB it has ({why}); "
            f"lower max_batch_size (now {self.max_rows}) or max_model_len"
        )


def _free_bytes(device: torch.device) -> int | None:
    """The memory that an allocation may use; None: not known. Linux would grant more than it has, and kill later."""
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
    """The memory that is free now; 0 where that is not known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return _free_bytes(device) or 0


BLOCK = 8
"""Common beginnings shorter than this are not looked for."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredHistory:
    """Tokens, and their keys and values in all layers."""

    tokens: Tokens
    caches: tuple[dict[int, Tensor], ...]
    """[H, L, D] by layer index: those of `SlotPool.caches`, of these tokens."""
    num_bytes: int


class KnownPrefix(NamedTuple):
    """The beginning of a prompt whose keys and values are kept, so that it need not be read again."""

    history: StoredHistory
    length: int
    """The number of first tokens that the history and the prompt have in common."""
    number: int
    """The number of the history, for `make_room`."""


class KeptHistories:
    """The most recently used histories, up to a number of bytes. No two are equal. One that goes on where another ends
    takes its place, unless a third has their blocks in common with both and was found in its stead."""

    def __init__(self) -> None:
        self._histories: OrderedDict[int, StoredHistory] = OrderedDict()
        """By number of arrival; the most recently used one is at the end."""
        self._by_block: dict[int, int] = {}
        self._by_tokens: dict[Tokens, int] = {}
        self._arrivals = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._histories)

    def find(self, tokens: Tokens) -> KnownPrefix | None:
        """The history that has the longest beginning in common with `tokens`, if it is at least one block."""
        found = None
        for end, block in _blocks(tokens):
            if block in self._by_block:
                found = self._by_block[block], end
        if found is None:
            return None
        number, length = found
        history = self._histories[number]
        if history.tokens[:length] != tokens[:length]:
            return None
        longest = min(len(history.tokens), len(tokens))
        while length < longest and history.tokens[length] == tokens[length]:
            length += 1
        self._histories.move_to_end(number)
        return KnownPrefix(history, length, number)

    def make_room(self, tokens: Tokens, num_bytes: int, *, budget: int, wanted: Container[int] = ()) -> bool:
        """Drop histories until one of these tokens fits. False: it does not fit, or is not worth keeping.

        The least recently used ones go first, but none that is `wanted`: where more conversations take turns than fit,
        plain LRU would drop each of them just before its turn, and would never find one.
        """
        if num_bytes > budget or len(tokens) < BLOCK:
            return False
        if (equal := self._by_tokens.get(tokens)) is not None:
            self._histories.move_to_end(equal)
            return False
        known = self.find(tokens)
        if known is not None and known.length == len(tokens):
            return False
        if known is not None and known.length == len(known.history.tokens):
            self._remove(known.number)
        for number in [number for number in self._histories if number not in wanted]:
            if self.num_bytes + num_bytes <= budget:
                break
            self._remove(number)
        return self.num_bytes + num_bytes <= budget

    def add(self, history: StoredHistory) -> None:
        self._histories[self._arrivals] = history
        self._by_tokens[history.tokens] = self._arrivals
        self._by_block.update((block, self._arrivals) for _, block in _blocks(history.tokens))
        self._arrivals += 1
        self.num_bytes += history.num_bytes

    def clear(self) -> None:
        self._histories.clear()
        self._by_block.clear()
        self._by_tokens.clear()
        self.num_bytes = 0

    def _remove(self, number: int) -> None:
        history = self._histories.pop(number)
        self.num_bytes -= history.num_bytes
        del self._by_tokens[history.tokens]
        for _, block in _blocks(history.tokens):
            if self._by_block.get(block) == number:
                del self._by_block[block]


def _blocks(tokens: Tokens) -> Iterator[tuple[int, int]]:
    """For each whole block: where it ends, and the hash of everything up to there."""
    before = 0
    for end in range(BLOCK, len(tokens) + 1, BLOCK):
        before = hash((before, tokens[end - BLOCK : end]))
        yield end, before

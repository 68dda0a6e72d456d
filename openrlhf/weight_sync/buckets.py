"""Weights cut into buckets: many tensors laid end to end in one block of bytes, so that a push is a few messages."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 16
"""Every tensor begins at a multiple of the largest element."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor's place in a bucket."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    """Byte in the bucket."""


@dataclass(frozen=True, slots=True)
class Bucket:
    entries: tuple[Entry, ...]
    payload: bytearray | memoryview

    def checksum(self) -> int:
        return zlib.crc32(self.payload)

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Views of the payload, by name; they keep it alive."""
        return [(entry.name, _view(self.payload, entry)) for entry in self.entries]


def cut_into_buckets(named: Iterable[tuple[str, Tensor]], *, max_bytes: int) -> Iterator[Bucket]:
    """Lay tensors end to end, in order, in buckets of at most `max_bytes`; a larger tensor has one to itself.

    One tensor at a time is asked for, and copied before the next: what gathers them may let them go at once.
    """
    entries: list[Entry] = []
    block, used = np.empty(0, dtype=np.uint8), 0
    for name, tensor in named:
        start = _aligned(used)
        size = tensor.numel() * tensor.element_size()
        if entries and start + size > max_bytes:
            yield Bucket(tuple(entries), memoryview(block)[:used])
            entries = []
        if not entries:
            # A new block each time: whoever got the last one may still read it. Empty, because filling a whole one
            # with zeros takes longer than a small model's push.
            block, start = np.empty(max(max_bytes, size), dtype=np.uint8), 0
        entry = Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start)
        _view(block, entry).copy_(tensor.detach())
        entries.append(entry)
        used = start + size
    if entries:
        yield Bucket(tuple(entries), memoryview(block)[:used])


def _aligned(position: int) -> int:
    return -(-position // _ALIGNMENT) * _ALIGNMENT


def _view(payload: Any, entry: Entry) -> Tensor:
    dtype = getattr(torch, entry.dtype)
    count = math.prod(entry.shape)
    if not count:
        return torch.empty(entry.shape, dtype=dtype)
    return torch.frombuffer(payload, dtype=dtype, count=count, offset=entry.start).view(entry.shape)

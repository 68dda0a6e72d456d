"""Weights packed into blocks on their device, and handles by which another process on that device reads a block.

vLLM has packed transfers of this kind too. Its handles need pickles allowed in every worker; and those of 0.26 export a
block once and release it with every read, so that its memory never comes back to the trainer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor
from torch.storage import TypedStorage

_DEVICE = 6
_IMPLIED = {0: torch.Tensor, 4: TypedStorage, 5: torch.uint8}
"""Of the arguments of torch's `rebuild_cuda_tensor`, those that are classes: the same for every block."""


@dataclass(frozen=True, slots=True)
class DeviceBlock:
    """Tensors of one dtype end to end: every one begins at a whole element."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    payload: Tensor
    """uint8; what is behind the last tensor means nothing."""

    @property
    def used(self) -> Tensor:
        """The bytes that mean something."""
        return self.payload[: sum(map(math.prod, self.shapes)) * getattr(torch, self.dtype).itemsize]

    def tensors(self) -> list[tuple[str, Tensor]]:
        """By name, in memory of their own: a reader may keep them when the block is gone."""
        return self._cut(self.used.clone())

    def views(self) -> list[tuple[str, Tensor]]:
        """By name, in the block's memory, which they keep."""
        return self._cut(self.used)

    def _cut(self, used: Tensor) -> list[tuple[str, Tensor]]:
        elements = used.view(getattr(torch, self.dtype)).split([math.prod(shape) for shape in self.shapes])
        parts = zip(self.names, self.shapes, elements, strict=True)
        return [(name, part.view(shape)) for name, shape, part in parts]


def pack_on_device(
    named: Iterable[tuple[str, Tensor]], *, max_bytes: int, device: torch.device | str
) -> Iterator[DeviceBlock]:
    """Lay tensors end to end, in order, in blocks of at most `max_bytes`; a larger tensor has one to itself.

    One tensor at a time is asked for, and copied before the next: what gathers them may let them go at once. Every
    block is new: a handle to an old one would count its readers wrong.
    """
    held: list[tuple[str, tuple[int, ...]]] = []
    payload, used, dtype = torch.empty(0, dtype=torch.uint8, device=device), 0, torch.uint8

    def block() -> DeviceBlock:
        names, shapes = zip(*held, strict=True)
        return DeviceBlock(names, shapes, str(dtype).removeprefix("torch."), payload)

    for name, tensor in named:
        size = tensor.numel() * tensor.element_size()
        if held and (used + size > max_bytes or tensor.dtype != dtype):
            yield block()
            held.clear()
        if not held:
            payload, used = torch.empty(max(max_bytes, size), dtype=torch.uint8, device=device), 0
            dtype = tensor.dtype
        payload[used : used + size].view(dtype).view(tensor.shape).copy_(tensor.detach())
        held.append((name, tuple(tensor.shape)))
        used += size
    if held:
        yield block()


def handle_of(payload: Tensor) -> list[Any]:
    """What another process needs to read a block of this device, as plain values. For one reader, once."""
    _, arguments = reduce_tensor(payload)
    return plain_arguments(arguments)


def payload_of(handle: Sequence[Any], *, device: torch.device) -> Tensor:
    """The block itself, in the other process, which may number its devices otherwise."""
    arguments = list(rebuild_arguments(handle))
    arguments[_DEVICE] = device.index
    return rebuild_cuda_tensor(*arguments)


def plain_arguments(arguments: Sequence[Any]) -> list[Any]:
    """Without the classes, which vLLM carries only as pickles."""
    for place, expected in _IMPLIED.items():
        if arguments[place] is not expected:
            raise TypeError(f"a block is a plain tensor of bytes, not {arguments[place]}")
    return [
        None if place in _IMPLIED else list(value) if isinstance(value, tuple) else value
        for place, value in enumerate(arguments)
    ]


def rebuild_arguments(plain: Sequence[Any]) -> tuple[Any, ...]:
    """The arguments of `rebuild_cuda_tensor` again."""
    return tuple(
        _IMPLIED.get(place, tuple(value) if isinstance(value, list) else value) for place, value in enumerate(plain)
    )

"""Weights on their way: many tensors laid end to end in one block, so that a push is a few messages."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class WeightSyncError(RuntimeError):
    """The engine does not have the policy's weights, and must not go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec:
    """The adapter that blocks belong to. Their tensors have the names that PEFT's files give them, below their prefix:
    `model.layers.0.self_attn.q_proj.lora_A.weight`."""

    name: str = "policy"
    number: int = 1
    """What an engine calls it. Several adapters in one engine have several numbers."""
    config: Mapping[str, Any]
    """What PEFT's adapter_config.json says: r, lora_alpha, rank_pattern, alpha_pattern, use_rslora …"""
    modules: tuple[str, ...]
    """The modules that it changes, all of them, by their names in the model's files: `model.layers.0.self_attn.q_proj`.
    An engine in which it would reach others, or not all of these, refuses it."""

    def scaling(self, module: str) -> float:
        """What PEFT multiplies B A of this module with. A pattern is the end of a name, the first that fits counts."""
        config = self.config
        rank = _of_pattern(config.get("rank_pattern"), module) or config["r"]
        alpha = _of_pattern(config.get("alpha_pattern"), module)
        alpha = config["lora_alpha"] if alpha is None else alpha
        return alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank

    def difference(self, reached: Collection[str]) -> str | None:
        """How the modules that an engine's adapter reaches differ from those that it is to change; None: in nothing."""
        if missing := [module for module in self.modules if module not in reached]:
            return f"of the {len(self.modules)} modules that are trained it leaves {_some(missing)} unchanged"
        if others := sorted(set(reached).difference(self.modules)):
            return f"it reaches {_some(others)}, and the adapter has nothing for it"
        return None


def _of_pattern(patterns: Mapping[str, Any] | None, module: str) -> Any:
    found = (value for end, value in (patterns or {}).items() if re.match(rf"(.*\.)?({end})$", module))
    return next(found, None)


def _some(names: Collection[str]) -> str:
    first, *others = names
    return f"{first} and {len(others)} more" if others else first


@dataclass(frozen=True, slots=True)
class WeightBlock:
    """Tensors of one dtype, end to end: every one begins at a whole element.

    A block is also the message that an engine gets. Each transport puts into `payload` what its receivers need.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    """As torch names it, without `torch.`."""
    payload: Any
    """The bytes themselves (a tensor of uint8, or anything with a buffer), or where the receiver finds them: see
    `weight_sync.transports`."""
    checksum: int | None = None
    """CRC-32 of the bytes; None: the receiver does not compare."""

    @property
    def num_bytes(self) -> int:
        return sum(map(math.prod, self.shapes)) * getattr(torch, self.dtype).itemsize

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Views of the bytes, by name; they keep the payload alive. The payload must be the bytes themselves.

        Raises ValueError if they are not those that were sent.
        """
        if not self.names:
            return []
        payload = self.payload
        data = payload if isinstance(payload, Tensor) else torch.frombuffer(payload, dtype=torch.uint8)
        if self.checksum is not None and (found := checksum_of(data)) != self.checksum:
            names = f"{self.names[0]} … {self.names[-1]}"
            raise ValueError(f"weights {names} arrived damaged: checksum {found}, sent {self.checksum}")
        elements = data.view(getattr(torch, self.dtype)).split([math.prod(shape) for shape in self.shapes])
        return [(name, part.view(shape)) for name, shape, part in zip(self.names, self.shapes, elements, strict=True)]


def pack(
    named: Iterable[tuple[str, Tensor]], *, max_bytes: int, device: torch.device | str = "cpu"
) -> Iterator[WeightBlock]:
    """Lay tensors end to end, in order, in blocks of at most `max_bytes`; a larger tensor has one to itself.

    One tensor at a time is asked for, and copied before the next: what gathers them may let them go at once. Every
    block has new memory: a reader in another process may still have the last one, and CUDA counts the readers of each.
    """
    held: list[tuple[str, tuple[int, ...]]] = []
    payload, used, dtype = torch.empty(0, dtype=torch.uint8, device=device), 0, torch.uint8

    def block() -> WeightBlock:
        names, shapes = zip(*held, strict=True)
        return WeightBlock(names, shapes, str(dtype).removeprefix("torch."), payload[:used])

    for name, tensor in named:
        size = tensor.numel() * tensor.element_size()
        if held and (used + size > max_bytes or tensor.dtype != dtype):
            yield block()
            held.clear()
        if not held:
            # Not filled with zeros: that would take longer than a small model's push.
            payload, used = torch.empty(max(max_bytes, size), dtype=torch.uint8, device=device), 0
            dtype = tensor.dtype
        payload[used : used + size].view(dtype).view(tensor.shape).copy_(tensor.detach())
        held.append((name, tuple(tensor.shape)))
        used += size
    if held:
        yield block()


def checksum_of(payload: Tensor) -> int:
    return zlib.crc32(payload.cpu().numpy().data)

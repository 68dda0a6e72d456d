"""Tensors that wait in CPU memory while something else needs the device."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor, nn


class Parking:
    """Moves the data of tensors to pinned CPU memory and back. References to the tensors stay valid.

    The pinned memory is kept from one time to the next, because allocating it is slow.
    """

    def __init__(self) -> None:
        self._places: dict[Tensor, Tensor] = {}
        self._parked: dict[Tensor, torch.device] = {}

    def park(self, tensors: Iterable[Tensor]) -> None:
        """Move the tensors that are on a device to CPU memory."""
        for tensor in tensors:
            if not tensor.is_cuda:
                continue
            place = self._places.get(tensor)
            if place is None or place.shape != tensor.shape or place.dtype != tensor.dtype:
                place = torch.empty_like(tensor, device="cpu", pin_memory=True, requires_grad=False)
                self._places[tensor] = place
            place.copy_(tensor.detach(), non_blocking=True)
            self._parked[tensor] = tensor.device
        if self._parked:
            torch.cuda.synchronize()
        for tensor in self._parked:
            tensor.data = self._places[tensor]

    def fetch(self) -> None:
        """All come back to where they were."""
        for tensor, device in self._parked.items():
            tensor.data = self._places[tensor].to(device, non_blocking=True)
        self._parked.clear()


@contextlib.contextmanager
def on_device(module: nn.Module, device: torch.device, *, offload: bool) -> Iterator[None]:
    """A frozen module on its device. With `offload` it is there only while this is open, and otherwise on the CPU."""
    if not offload:
        yield
        return
    module.to(device)
    try:
        yield
    finally:
        module.to("cpu")

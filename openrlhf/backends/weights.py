"""A module's weights as whoever wants them whole gets them: tensor by tensor, or announced without any values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from openrlhf.backends.base import GATHERED_BYTES
from openrlhf.backends.finite import not_finite


class ModuleWeights:
    """Of a module that this process has whole."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def whole_weights(self, *, max_bytes: int = GATHERED_BYTES) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._module.named_parameters():
            yield name, parameter.detach()
        yield from saved_buffers(self._module)

    def weights_not_finite(self) -> list[str]:
        return not_finite(dict(self._module.named_parameters()))

    def outlines(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, outline(tensor.shape, tensor.dtype)) for name, tensor in self.whole_weights())


def saved_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Those that its files have: what is trained is not all that a model needs."""
    saved = module.state_dict()
    return ((name, buffer) for name, buffer in module.named_buffers() if name in saved)


def outline(shape: torch.Size, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


if TYPE_CHECKING:
    from openrlhf.backends.base import Weights

    _: type[Weights] = ModuleWeights

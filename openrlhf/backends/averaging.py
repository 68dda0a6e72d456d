"""An exponential moving average of the weights, kept beside training and saved in their place."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn


class WeightAverage:
    """ema ← β·ema + (1 − β)·θ after every optimizer step, starting from θ₀; in fp32, one copy on θ's device.

    Averaging along the path of SGD: Polyak and Juditsky 1992 (https://doi.org/10.1137/0330046).
    """

    def __init__(self, masters: Mapping[str, nn.Parameter], *, beta: float) -> None:
        """`masters`: the fp32 tensors that the optimizer updates."""
        self._masters = dict(masters)
        self._beta = beta
        self._average = {name: master.detach().clone() for name, master in masters.items()}

    @torch.no_grad()
    def update(self) -> None:
        torch._foreach_lerp_(list(self._average.values()), list(self._masters.values()), 1.0 - self._beta)

    @contextlib.contextmanager
    def swapped_into(self, parameters: Mapping[str, nn.Parameter]) -> Iterator[None]:
        """While open, `parameters` hold the average, in their dtype; then the very tensors they held before.

        Nothing is copied but what changes dtype. No optimizer step may happen meanwhile.
        """
        live = {name: parameter.data for name, parameter in parameters.items()}
        try:
            for name, parameter in parameters.items():
                parameter.data = self._average[name].to(parameter.dtype)
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.data = live[name]

    def of(self, name: str) -> Tensor:
        """The average of one parameter: to be read, or to be written when a run continues."""
        return self._average[name]

"""A policy's weights as vLLM's transfer engines ask for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource

from openrlhf.models.adapters import has_adapter


class ModelWeights(WeightSource):
    """A Hugging Face model's weights, whole and in this process, by the names they have in its files; tied ones once.

    A model with an adapter is refused: what it computes with is in no one parameter.
    """

    def __init__(self, model: Any) -> None:
        if has_adapter(model):
            raise ValueError("the weights of a policy with an adapter must be merged before they are pushed")
        self._model = model

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self._model.named_parameters():
            yield name, parameter.detach()

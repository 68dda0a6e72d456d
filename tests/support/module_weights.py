"""The wire of vLLM's weight transfers, without a vLLM: a module's parameters at one end, messages as they arrive."""

from collections.abc import Iterator
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder


class Parameters(WeightSource):
    """Of a module, as they are."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module

    def metadata(self) -> list[ParamMeta]:
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in self]

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._module.named_parameters():
            yield name, parameter.detach()


def sent(message: Any) -> Any:
    """What arrives of a message."""
    return MsgpackDecoder().decode(MsgpackEncoder().encode(message))


def mixed_model() -> torch.nn.ModuleDict:
    """fp32 and bf16 side by side, and in blocks of 4,096 bytes a tensor that is larger than one."""
    torch.manual_seed(0)
    parts = {"a": torch.nn.Linear(30, 20), "b": torch.nn.Linear(7, 3).bfloat16(), "c": torch.nn.Embedding(40, 33)}
    return torch.nn.ModuleDict(parts | {"d": torch.nn.LayerNorm(5)})

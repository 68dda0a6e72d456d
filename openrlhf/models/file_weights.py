"""A policy's weights as its model's files would hold them: 4 bits made whole, the files' names, adapters merged.

Or apart: the weights that an adapter is trained beside, and the adapter as files would hold it.

The tensors pass through one at a time, because some callers gather them from many ranks. On the meta device everything
here computes shapes alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from openrlhf.models.adapters import (
    AdaptedWeight,
    AdapterError,
    adapted_weights,
    is_adapter,
    merged,
    without_adapter,
)
from openrlhf.models.policy import Policy


def file_weights(
    policy: Policy, named: Iterable[tuple[str, Tensor]], *, merge: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """`named`: every parameter of the policy (and buffers that are saved), whole, by its name there; in its order.

    `merge`: an adapter is added to the weights; otherwise it is left out, and they are those that it is trained beside.
    Neither they nor the policy change. Raises `AdapterError` for an adapter that cannot be merged, and ValueError for a
    model whose files hold in one tensor what it computes with in several.
    """
    _check_conversions(policy.model)
    own = ((name.removeprefix("model."), tensor) for name, tensor in named)
    whole = _dequantised(policy.model, own)
    for name, tensor in merged(policy.model, whole) if merge else without_adapter(whole):
        yield from _as_in_files(policy.model, name, tensor)


class _Part(NamedTuple):
    """What one module of the model's files gets of an adapter's two factors."""

    module: str
    expert: int
    rows: Tensor | None
    """Of the expert's outputs, those that are this module's; None: all."""


class FileAdapter:
    """A policy's adapter for a model as its files hold it: two matrices for each module, A [rank, inputs] and B
    [outputs, rank], and one scale for all of them.

    PEFT adapts experts as transformers stacks them: A has theirs one below the other, B's columns take turns, and where
    the files have two matrices, gate and up, the stack has one, of twice the rank. Here each expert has its own, and
    smaller ranks are padded with zeros, which changes nothing.
    """

    def __init__(self, policy: Policy) -> None:
        """Raises AdapterError for an adapter that is not of this kind."""
        model, adapted = policy.model, adapted_weights(policy.model)
        self.rank = max(weight.rank for weight in adapted.values())
        scales = sorted({weight.scaling for weight in adapted.values()})
        if len(scales) > 1:
            raise AdapterError(f"its layers have different scales: {', '.join(f'{scale:g}' for scale in scales)}")
        self._parts = {name: _file_modules(model, name, weight) for name, weight in adapted.items()}
        self._factors = {
            factor: (name, weight, side)
            for name, weight in adapted.items()
            for factor, side in zip(weight.factors, "AB", strict=True)
        }
        trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad or is_adapter(name)]
        if others := [name for name in trained if name not in self._factors]:
            raise AdapterError(f"{others[0]} is trained, and is none of an adapter's two matrices")
        self.modules = tuple(part.module for parts in self._parts.values() for part in parts)
        self.config = {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": scales[0] * self.rank,
            "target_modules": sorted({module.rpartition(".")[2] for module in self.modules}),
            "bias": "none",
        }
        """As PEFT's adapter_config.json, for these matrices."""

    def tensors(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """`named`: the adapter's parameters, whole, by their names in the policy. They come by the names that PEFT's
        files give them below their prefix: `model.layers.0.self_attn.q_proj.lora_A.weight`."""
        for name, tensor in named:
            weight, adapted, side = self._factors[name.removeprefix("model.")]
            for part in self._parts[weight]:
                yield f"{part.module}.lora_{side}.weight", self._matrix(tensor, side, adapted, part)

    def _matrix(self, tensor: Tensor, side: str, adapted: AdaptedWeight, part: _Part) -> Tensor:
        if side == "A":
            matrix = tensor.view(adapted.experts, adapted.rank, -1)[part.expert]
            return nn.functional.pad(matrix, (0, 0, 0, self.rank - adapted.rank))
        matrix = tensor.view(-1, adapted.rank, adapted.experts)[:, :, part.expert]
        if part.rows is not None:
            matrix = matrix[part.rows.to(matrix.device)]
        return nn.functional.pad(matrix, (0, self.rank - adapted.rank))


def _file_modules(model: Any, name: str, weight: AdaptedWeight) -> list[_Part]:
    """The modules of the files that hold this weight of the model."""
    own = name.replace(".base_layer", "")
    named: list[tuple[str, int, Tensor | None]] = []
    if weight.experts == 1:
        named += [(file_name, 0, None) for file_name, _ in _as_in_files(model, own, torch.empty(1, 1, device="meta"))]
    else:
        # A stack whose outputs are numbered shows where each goes.
        numbers = torch.arange(weight.experts * weight.outputs).view(weight.experts, weight.outputs, 1)
        for file_name, found in _as_in_files(model, own, numbers):
            first, rows = int(found.flatten()[0]) // weight.outputs, found.flatten() % weight.outputs
            named.append((file_name, first, None if len(rows) == weight.outputs else rows))
    if any(not file_name.endswith(".weight") for file_name, _, _ in named):
        raise AdapterError(f"the model's files hold the experts of {own} in one tensor")
    return [_Part(file_name.removesuffix(".weight"), expert, rows) for file_name, expert, rows in named]


def _dequantised(model: Any, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Weights of 4 bits in the dtype they were quantised from, as every forward makes them."""
    states = {name: state for name, p in model.named_parameters() if (state := getattr(p, "quant_state", None))}
    for name, tensor in named:
        state = states.get(name)
        if state is None:
            yield name, tensor
        elif tensor.is_meta:
            yield name, torch.empty(state.shape, dtype=state.dtype, device="meta")
        else:
            from bitsandbytes.functional import dequantize_4bit

            yield name, dequantize_4bit(tensor, state)


def _as_in_files(model: Any, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Transformers stacks experts when it loads a mixture, and renames some tensors; saving takes that back."""
    from transformers.core_model_loading import revert_weight_conversion

    yield from revert_weight_conversion(model, {name: tensor}).items()


def _check_conversions(model: Any) -> None:
    """One tensor at a time can be cut into several, but not several put together into one."""
    from transformers.core_model_loading import WeightConverter

    for conversion in getattr(model, "_weight_conversions", None) or ():
        if isinstance(conversion, WeightConverter) and len(conversion.target_patterns) > 1:
            raise ValueError(
                f"the files of {type(model).__name__} hold {', '.join(conversion.target_patterns)} in one tensor: "
                "its weights cannot be sent one by one"
            )

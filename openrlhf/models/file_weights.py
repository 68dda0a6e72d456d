"""A policy's weights as its model's files would hold them: adapters merged, 4 bits made whole, the files' names.

The tensors pass through one at a time, because some callers gather them from many ranks. On the meta device everything
here computes shapes alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from openrlhf.models.adapters import merged
from openrlhf.models.policy import Policy


def file_weights(policy: Policy, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """`named`: every parameter of the policy (and buffers that are saved), whole, by its name there; in its order.

    Neither they nor the policy change. Raises `AdapterError` for an adapter that cannot be merged, and ValueError for a
    model whose files hold in one tensor what it computes with in several.
    """
    _check_conversions(policy.model)
    own = ((name.removeprefix("model."), tensor) for name, tensor in named)
    for name, tensor in merged(policy.model, _dequantised(policy.model, own)):
        yield from _as_in_files(policy.model, name, tensor)


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

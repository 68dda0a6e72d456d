"""Torch's attention kernels for packed streams, and outputs that gradient checkpointing does not compute twice.

flash    FlashAttention 2, which torch brings along: sequences of any lengths in one call.
cudnn    A call for sequences of one length. On an H200 it is 1.7 times as fast as flash, forward and backward, but it
         makes a plan for each length that it meets, in 0.1 s. So lengths are rounded up, and short ones left out.
cpu      Torch's fused kernel for CPUs, for sequences of one length and as many key heads as query heads.

Under gradient checkpointing a layer is computed a second time in the backward pass. Attention is the part of it that
grows with the square of a sequence, and its output the smallest thing from which the rest follows: it is kept, with
what its gradient needs (`KeptOutputs`), and the second forward takes it from there.

Shapes: T tokens of a stream, n sequences of length L, H heads, D head dimension.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LONG = 8192
"""From this mean length on the sequences of a stream are attended to by cuDNN."""
_STEP = 1024
"""Lengths are rounded up to a multiple of this: at most an eighth is added, and few plans are made."""
_MAX_FLASH_HEAD_DIM = 256
_KEPT_SHARE = 0.1
"""Outputs are kept if those of all layers take no more than this share of the device's memory."""


class Kernel(NamedTuple):
    """An attention kernel, and that of its gradient."""

    forward: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, ...]]
    """query, key, value → output, and what its gradient needs beside it."""
    backward: Callable[..., tuple[Tensor, ...]]
    """The gradient of the output, then query, key, value and all that `forward` gave → the gradients of the three."""


class KeptOutputs:
    """The attention outputs of one forward, until its layers are computed again."""

    def __init__(self) -> None:
        self._found: dict[tuple[nn.Module, int], tuple[Tensor, ...]] = {}

    def take(self, slot: tuple[nn.Module, int]) -> tuple[Tensor, ...] | None:
        return self._found.pop(slot, None)

    def put(self, slot: tuple[nn.Module, int], outputs: tuple[Tensor, ...]) -> None:
        self._found[slot] = tuple(output.detach() for output in outputs)


def worth_keeping(*, tokens: int, heads: int, head_dim: int, layers: int, element_bytes: int, memory: int) -> bool:
    """Whether the outputs of all layers are little beside the device's memory, in bytes."""
    return layers * tokens * heads * (head_dim * element_bytes + 4) <= _KEPT_SHARE * memory


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    kernel: Kernel,
    *,
    kept: KeptOutputs | None = None,
    slot: tuple[nn.Module, int] | None = None,
) -> Tensor:
    """The kernel's output. `kept`: it may have been computed before, by the call of this forward that `slot` names."""
    return _Attend.apply(q, k, v, kernel, kept, slot)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, kept: Any, slot: Any) -> Tensor:
        outputs = None if kept is None else kept.take(slot)
        if outputs is None:
            outputs = kernel.forward(q, k, v)
            if kept is not None:
                kept.put(slot, outputs)
        ctx.kernel = kernel
        ctx.save_for_backward(q, k, v, *outputs)
        return outputs[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.kernel.backward(grad, *ctx.saved_tensors), None, None, None


def flash_can(q_THD: Tensor, v_THD: Tensor, *, dropout: float) -> bool:
    return (
        q_THD.is_cuda
        and q_THD.dtype in (torch.bfloat16, torch.float16)
        and q_THD.shape[-1] == v_THD.shape[-1] <= _MAX_FLASH_HEAD_DIM
        and dropout == 0.0
    )


def flash(
    q_THD: Tensor,
    k_KHD: Tensor,
    v_KHD: Tensor,
    *,
    cu_queries: Tensor,
    cu_keys: Tensor,
    longest_query: int,
    longest_key: int,
    scaling: float,
    window: int | None,
    kept: KeptOutputs | None = None,
    module: nn.Module | None = None,
) -> Tensor:
    """Causal attention of each sequence of queries to its keys, whose ends are aligned."""
    # (left, right): how many tokens before and after itself a query sees; -1 is all of them.
    sides = (-1 if window is None else window - 1, 0)
    lengths = (cu_queries, cu_keys, longest_query, longest_key)
    if kept is None or module is None:
        from torch.nn.attention.varlen import varlen_attn

        output = varlen_attn(q_THD, k_KHD, v_KHD, *lengths, scale=scaling, window_size=sides, **grouped_heads_option())
        assert isinstance(output, Tensor)  # a tuple where more is asked for
        return output
    causal = sides == (-1, 0)
    options: dict[str, Any] = {"scale": scaling, "window_size_left": sides[0], "window_size_right": sides[1]}

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        found = torch.ops.aten._flash_attention_forward(q, k, v, *lengths, 0.0, causal, False, **options)
        return found[:4]

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        lse, *random = more
        return torch.ops.aten._flash_attention_backward(
            grad.contiguous(), q, k, v, out, lse, *lengths, 0.0, causal, *random, **options
        )

    return attend(q_THD, k_KHD, v_KHD, Kernel(forward, backward), kept=kept, slot=(module, 0))


class GroupedHeads(TypedDict, total=False):
    """An argument of `varlen_attn`."""

    enable_gqa: bool


@functools.cache
def grouped_heads_option() -> GroupedHeads:
    """torch 2.11 takes fewer key heads than query heads as they come; later versions want to be told."""
    from torch.nn.attention.varlen import varlen_attn

    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}


def cudnn_can(q_nHLD: Tensor, k_nHLD: Tensor, v_nHLD: Tensor) -> bool:
    """Whether cuDNN attends to these. Its gradient is another in the last bits from run to run."""
    if torch.are_deterministic_algorithms_enabled():
        return False
    params = torch.backends.cuda.SDPAParams(q_nHLD, k_nHLD, v_nHLD, None, 0.0, True, q_nHLD.shape[1] != k_nHLD.shape[1])
    return torch.backends.cuda.can_use_cudnn_attention(params)


def rounded_up(length: int) -> int:
    return -(-length // _STEP) * _STEP


def rows_of(x_THD: Tensor, *, count: int, length: int, padded: int) -> Tensor:
    """[n·L, H, D] → [n, H, padded, D]; what is added at the end of a sequence is seen by none of its tokens."""
    x_nLHD = x_THD.unflatten(0, (count, length))
    return F.pad(x_nLHD, (0, 0, 0, 0, 0, padded - length)).transpose(1, 2)


def cudnn_kernel(scaling: float) -> Kernel:
    """Causal attention of n sequences, all of length L: [n, H, L, D] each."""

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        found = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True, False, scale=scaling)
        return found[0], found[1], found[6], found[7]

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *more: Tensor) -> tuple[Tensor, ...]:
        none = (None, None, None, q.shape[2], k.shape[2], 0.0, True)
        return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            grad, q, k, v, out, *more, *none, scale=scaling
        )

    return Kernel(forward, backward)


def cpu_kernel(scaling: float) -> Kernel:
    """Causal attention of n sequences, all of length L, with as many key heads as query heads: [n, H, L, D] each."""
    options: dict[str, Any] = {"attn_mask": None, "scale": scaling}

    def forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, **options)

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *found: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, *found, 0.0, True, **options
        )

    return Kernel(forward, backward)

"""Fewer passes over activations: memory, not arithmetic, is what norms and activations of a layer wait for."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from openrlhf.models.body import decoder_body

logger = logging.getLogger(__name__)

_TOLERANCE = 1e-5


def fuse_norms(model: nn.Module) -> int:
    """Run the model's RMS norms through torch's fused kernel, on a GPU; returns how many.

    A norm is what it computes, not what it is called: one that does anything else than x / rms(x) · weight, on numbers
    that would show it, keeps its own forward. So does one whose weight is shared out over ranks (ZeRO-3).
    """
    fused = 0
    for module in model.modules():
        weight, eps = getattr(module, "weight", None), getattr(module, "variance_epsilon", None)
        if not (isinstance(eps, float) and isinstance(weight, Tensor) and type(module).__name__.endswith("RMSNorm")):
            continue
        if weight.is_cuda and weight.numel() and _is_rms_norm(module, weight, eps):
            module.forward = partial(_rms_norm, module)
            fused += 1
    return fused


def _rms_norm(module: Any, hidden: Tensor) -> Tensor:
    return F.rms_norm(hidden, (hidden.shape[-1],), module.weight, module.variance_epsilon)


@torch.no_grad()
def _is_rms_norm(module: nn.Module, weight: Tensor, eps: float) -> bool:
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(4, weight.shape[-1], generator=generator).to(weight.device) * torch.tensor(
        [[1e-4], [1.0], [30.0], [3.0]], device=weight.device
    )
    kept, module.weight.data = weight.data, weight.data.float()
    try:
        expected = module(probe)
    finally:
        module.weight.data = kept
    computed = F.rms_norm(probe, (probe.shape[-1],), weight.float(), eps)
    return expected.shape == computed.shape and torch.allclose(computed, expected, rtol=_TOLERANCE, atol=_TOLERANCE)


def compile_layers(model: Any) -> None:
    """Compile each decoder layer, in place, for streams of any length; the first step takes some seconds longer.

    All layers share one compiled code, so none may have a forward of its own: norms are fused by the compiler.
    """
    layers = getattr(decoder_body(model), "layers", None)
    if layers is None:
        raise ValueError(f"--ds.deepcompile: {type(model).__name__} has no list of layers to compile; leave it out")
    for layer in layers:
        layer.compile(dynamic=True)

"""Weights of 8 bits where no kernel multiplies with them: vLLM's own rounding of them, and a product in plain torch.

vLLM rounds weights when they are loaded and lets a kernel multiply. On a CPU its kernels need instructions (AMX) that
most machines lack. `Extension` is the extension of our workers with another kernel; both of its classes tell what a
worker holds.
"""

from __future__ import annotations

import zlib
from typing import Any

import torch

from openrlhf.rollout.vllm.worker import WorkerExtension

EXTENSION, TELLING = "eight_bits.Extension", "eight_bits.TellingExtension"
LARGEST = torch.finfo(torch.float8_e4m3fn).max


class PlainProduct:
    """Weights are [inputs, outputs], scales [outputs, 1]; inputs stay as they are."""

    def process_weights_after_loading(self, layer: Any) -> None: ...

    def input_quant_key(self) -> None: ...

    def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        weight = layer.weight.t().to(torch.float32) * layer.weight_scale
        return torch.nn.functional.linear(x, weight.to(x.dtype), bias)


class TellingExtension(WorkerExtension):
    def held(self) -> dict[str, tuple[str, int, int]]:
        """Of every parameter: its dtype, where it is, and a checksum of its bits."""
        parameters = dict(self.model_runner.get_model().named_parameters())  # type: ignore[attr-defined]
        return {
            name: (
                str(p.dtype),
                p.data_ptr(),
                zlib.crc32(p.data.contiguous().view(torch.uint8).cpu().numpy().tobytes()),
            )
            for name, p in parameters.items()
        }


class Extension(TellingExtension):
    def __new__(cls, *arguments: Any, **options: Any) -> Any:
        from vllm.model_executor.layers.quantization.online import fp8

        fp8.init_fp8_linear_kernel = lambda **_: PlainProduct()
        return super().__new__(cls, *arguments, **options)


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """What is left of a matrix [outputs, inputs] in 8 bits, with one scale per output."""
    scale = weight.float().abs().amax(dim=1, keepdim=True) / LARGEST
    return ((weight.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(weight.dtype)

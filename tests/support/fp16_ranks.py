"""The same gradients to DeepSpeed on every rank and to plain torch, in fp16, among them some that overflow.

    torchrun --nproc-per-node 2 fp16_ranks.py FILE

FILE then has, per ZeRO stage, what each step reported, and the states after them, of both and of a third that was
loaded from DeepSpeed's.
"""

import json
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from small_sections import optimizer
from torch import nn

from openrlhf.backends.base import Backend
from openrlhf.backends.deepspeed import DeepSpeedBackend, require_deepspeed
from openrlhf.backends.torch import TorchBackend
from openrlhf.config.backend import BackendSection

GRADIENTS = (0.25, 2.0, 2.0, 2.0, 0.5)
"""2 · 2^16 and 2 · 2^15 are beyond fp16's 65504, 2 · 2^14 is not: the second and third step are left out."""
SETTINGS = optimizer(lr=0.1, scheduler="linear")


def module() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2).half()


def push(backend: Backend, gradient: float) -> list[float]:
    """Every rank brings its share of the gradient; returns norm and the rate of the next step."""
    share = gradient / (dist.get_world_size() if isinstance(backend, DeepSpeedBackend) else 1)
    output = backend.module(torch.ones(1, 3, dtype=torch.float16)).float()
    backend.backward((output * share).sum())
    norm = backend.step()
    return [norm if math.isfinite(norm) else -1.0, backend.learning_rate]


def report(backend: Backend, steps: list[list[float]]) -> dict:
    return {
        "steps": steps,
        "numbers": backend.scalar_state(),
        "tensors": {n: t.tolist() for n, t in backend.tensor_state()},
    }


def main(file: Path) -> None:
    # Slow kernels, which is why DeepSpeed asks, but right ones.
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported = lambda self: True
    dist.init_process_group("gloo")
    result = {}
    for stage in range(4):
        plain = TorchBackend(module(), SETTINGS, total_steps=8)
        ours = DeepSpeedBackend(module(), SETTINGS, BackendSection(zero_stage=stage), total_steps=8)
        third = DeepSpeedBackend(module(), SETTINGS, BackendSection(zero_stage=stage), total_steps=8)
        expected = report(plain, [push(plain, gradient) for gradient in GRADIENTS])
        measured = report(ours, [push(ours, gradient) for gradient in GRADIENTS])
        third.load(ours.scalar_state(), {name: tensor.clone() for name, tensor in ours.tensor_state()})
        result[stage] = {"torch": expected, "deepspeed": measured, "loaded": report(third, measured["steps"])}
    if dist.get_rank() == 0:
        file.write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    require_deepspeed()
    main(Path(sys.argv[1]))

"""Sums of gradients over micro-batches on two DeepSpeed ranks, by ZeRO stage, dtype of the weights and of the sums.

    torchrun --nproc-per-node 2 sum_ranks.py FILE

FILE then has, per case, what 256 + 1 + 1 came to, what 1 + 1 came to after a sum that was dropped (null where sums cannot
be dropped), and what was said.
"""

import json
import logging
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from small_sections import optimizer
from torch import nn

from openrlhf.backends.deepspeed import DeepSpeedBackend, require_deepspeed
from openrlhf.config.backend import BackendSection

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
STAGES = range(4)
CASES = [
    *((stage, False, "bf16", sums) for stage in STAGES for sums in ("fp32", "bf16")),
    *((stage, True, "bf16", sums) for stage in (1, 2, 3) for sums in ("fp32", "bf16")),
    *((stage, False, "fp32", "bf16") for stage in (0, 2)),
    *((stage, False, "fp16", "fp16") for stage in STAGES),
]


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def push(backend: DeepSpeedBackend, gradient: float) -> None:
    """Every parameter gets this gradient, each rank a share of it."""
    given = torch.ones(1, 3, dtype=next(backend.module.parameters()).dtype)
    backend.backward(backend.module(given).float().sum() * gradient / dist.get_world_size())


def run(stage: int, offload: bool, weights: str, sums: str) -> dict:
    said = Said()
    logger = logging.getLogger("openrlhf")
    logger.addHandler(said)
    logger.setLevel(logging.INFO)
    torch.manual_seed(0)
    module = nn.Linear(3, 2).to(DTYPES[weights])
    zero = BackendSection(zero_stage=stage, adam_offload=offload, param_dtype=weights, grad_accum_dtype=sums)
    backend = DeepSpeedBackend(module, optimizer(lr=0.0, max_norm=0), zero)
    logger.removeHandler(said)
    if weights == "fp16":  # 2^16 · 256 would not fit
        backend.load(
            {"steps": 0, "loss_scale": 16.0, "good_steps": 0}, {n: t.clone() for n, t in backend.tensor_state()}
        )
    for gradient in (256.0, 1.0, 1.0):
        push(backend, gradient)
    total = backend.step()
    after = None
    if backend.retry_blocker() is None:
        push(backend, 256.0)
        backend.drop_gradients()
        push(backend, 1.0)
        push(backend, 1.0)
        after = backend.step()
    each = math.sqrt(sum(p.numel() for p in nn.Linear(3, 2).parameters()))
    return {"sum": round(total / each, 3), "after a drop": after and round(after / each, 3), "said": said.lines}


def main(file: Path) -> None:
    # Slow kernels, which is why DeepSpeed asks, but right ones.
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

    CPU_Accelerator.is_fp16_supported = lambda self: True
    dist.init_process_group("gloo")
    result = {}
    for case in CASES:
        stage, offload, weights, sums = case
        result[f"zero {stage}{' offload' if offload else ''} {weights}, {sums} sums"] = run(*case)
    if dist.get_rank() == 0:
        file.write_text(json.dumps(result, indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    require_deepspeed()
    main(Path(sys.argv[1]))

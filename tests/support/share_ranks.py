"""How four ranks are numbered that share samples in pairs of pairs, and which of them share layers.

    torchrun --nproc-per-node 4 share_ranks.py FILE

FILE then has, for each way of sharing, what every rank says of itself and of the others.
"""

import json
import sys
from pathlib import Path

import torch.distributed as dist
from small_sections import optimizer
from tensor_ranks import make_models

from openrlhf.backends.deepspeed import DeepSpeedBackend, Distribution, require_deepspeed
from openrlhf.backends.tensor_parallel import tensor_group
from openrlhf.config.backend import BackendSection

SIZES = {"tensor": (2, 1), "context": (1, 2), "both": (2, 2), "neither": (1, 1)}
"""Tensor parallelism, context parallelism."""


def main(file: Path) -> None:
    result = {}
    for name, (tensor, context) in SIZES.items():
        ds = BackendSection(zero_stage=1, tensor_parallel_size=tensor, ring_attn_size=context)
        ranks = Distribution.start(ds).ranks
        own = dist.get_rank()
        result[name] = {
            "count": ranks.count,
            "index": ranks.gather_processes(ranks.index),
            "gathered": ranks.gather_processes(ranks.gather(own // (tensor * context) * 10)),
            "main": ranks.gather_processes(ranks.is_main),
            "agreed": ranks.gather_processes(ranks.agree(own if own == 3 else None)),
        }
        if name == "both":  # DeepSpeed makes its groups once in a process
            DeepSpeedBackend(make_models("ppo").policy, optimizer(lr=0.1), ds)
            result["layers"] = ranks.gather_processes(dist.get_process_group_ranks(tensor_group(ds)))
    if dist.get_rank() == 0:
        file.write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    require_deepspeed()
    main(Path(sys.argv[1]))

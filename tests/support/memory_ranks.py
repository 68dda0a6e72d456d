"""Rounds of RL on two DeepSpeed ranks, one of which has little memory, beside the same rounds with room for all.

    torchrun --nproc-per-node 2 memory_ranks.py FILE

FILE then has, per ZeRO stage and place where memory runs out, the metrics of both, the largest gap between their
weights, and what did not fit; and why there is no other try where ranks cannot begin a step again.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from small_memory import SmallMemory
from small_rl import make_groups, make_models, play_share, training
from small_sections import optimizer
from torch import nn

from openrlhf.backends.deepspeed import DeepSpeedBackend, Distribution, require_deepspeed
from openrlhf.backends.ranks import join
from openrlhf.config.backend import BackendSection

FLAGS = {"advantage_estimator": "reinforce", "rollout_batch_size": 4, "train_batch_size": 16, "max_tokens_per_gpu": 12}
LIMIT = 10
"""Every rank has micro-batches of 11, 11, 7 and 7 tokens. One does not get through its second."""


def run(stage: int, *, limit: int | None, where: str) -> tuple[list[dict[str, float]], torch.Tensor, list[int]]:
    """Two rounds of one optimizer step each."""
    ranks = join()
    trained, own = training(
        make_models(), distribution=Distribution(ranks, BackendSection(zero_stage=stage)), **FLAGS, zero_stage=stage
    )
    memory = SmallMemory(own.policy, limit=limit if ranks.index == 1 else None, where=where, spared=1)
    said = play_share(trained, [*make_groups(), *make_groups(first=2)], rounds=2, ranks=ranks)
    weights = torch.cat([tensor.detach().float().flatten() for _, tensor in trained.policy_backend.whole_weights()])
    return said, weights, [tokens for overflows in ranks.gather(memory.overflows) for tokens in overflows]


def main(file: Path) -> None:
    dist.init_process_group("gloo")
    result = {}
    for stage in (0, 1, 2):
        roomy, expected, _ = run(stage, limit=None, where="forward")
        for where in ("forward", "backward"):
            tight, weights, overflows = run(stage, limit=LIMIT, where=where)
            gap = float((weights - expected).abs().max())
            result[f"zero {stage} {where}"] = {"roomy": roomy, "tight": tight, "gap": gap, "overflows": overflows}
    refused = {"zero 3": BackendSection(zero_stage=3), "offload": BackendSection(zero_stage=2, adam_offload=True)}
    for name, zero in refused.items():
        backend = DeepSpeedBackend(nn.Linear(2, 2), optimizer(lr=0.1), zero)
        result[name] = backend.retry_blocker()
    if dist.get_rank() == 0:
        file.write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    require_deepspeed()
    main(Path(sys.argv[1]))

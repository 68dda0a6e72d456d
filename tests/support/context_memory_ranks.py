"""A round of RL by two ranks that share streams, the second of which has little memory: it cannot go on.

    torchrun --nproc-per-node 2 context_memory_ranks.py score|forward|backward

Memory runs out in a forward that is only scored, or in the forward or the backward of the update.
"""

import sys

import torch.distributed as dist
from context_ranks import ALGORITHMS, FLAGS, Case, distribution_of, make_groups, make_models
from small_memory import SmallMemory
from small_rl import play, training

from openrlhf.backends.deepspeed import require_deepspeed


def main(where: str) -> None:
    dist.init_process_group("gloo")
    # KL in the reward is measured before the update; as a loss it is not.
    case = Case("8/2 heads", "ppo" if where == "score" else "kl loss", zero=1, degree=2)
    flags = FLAGS | ALGORITHMS[case.algorithm]
    trained, own = training(make_models(case.model), distribution=distribution_of(case), **flags)
    SmallMemory(
        own.policy, limit=30 if dist.get_rank() == 1 else None, where="backward" if where == "backward" else "forward"
    )
    play(trained.learners, make_groups())


if __name__ == "__main__":
    require_deepspeed()
    main(sys.argv[1])

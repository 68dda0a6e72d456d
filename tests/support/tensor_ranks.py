"""Rounds of RL on two ranks that share every layer, beside the same rounds of one process.

    torchrun --nproc-per-node 2 tensor_ranks.py FILE

FILE then has, per case, what was measured in each round by both, the largest gap between their weights, and how many
parameters were cut; of one case also what another layout made of its checkpoint.
"""

import copy
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from small_rl import make_groups, play, play_share, training
from torch import Tensor
from transformers import Qwen2Config, Qwen3Config, Qwen3ForCausalLM, Qwen3Model
from transformers import Qwen2ForCausalLM as Qwen2

from openrlhf.backends.deepspeed import Distribution, require_deepspeed
from openrlhf.backends.tensor_parallel import cut_dimensions
from openrlhf.config.backend import BackendSection, LoraSection
from openrlhf.models.adapters import add_adapter
from openrlhf.models.attention import ATTENTION
from openrlhf.models.policy import Policy
from openrlhf.models.value import ScalarHead, ValueModel
from openrlhf.runs.rl_models import RLModels, RLTraining

SIZES = {
    "vocab_size": 13,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
}
ROUNDS = 3
PPO = {"advantage_estimator": "gae", "init_kl_coef": 0.1, "entropy_loss_coef": 0.01, "ref_reward_offload": True}
KL_LOSS = {"advantage_estimator": "rloo", "init_kl_coef": 0.1, "use_kl_loss": True, "kl_estimator": "k2"}
CASES = {
    "ppo zero 0": (PPO, 0),
    "ppo zero 1": (PPO, 1),
    "ppo zero 2": (PPO, 2),
    "ppo zero 3": (PPO, 3),
    "kl loss": (KL_LOSS | {"train_batch_size": 4, "max_epochs": 2}, 2),
    "tied": (KL_LOSS, 1),
    "lora zero 0": (PPO, 0),
    "lora zero 3": (PPO, 3),
}


def make_models(case: str) -> RLModels:
    """Qwen3, whose norms act on single heads; one case with tied embeddings, and biases in attention."""
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES)
    if case == "tied":
        policy = Policy(
            Qwen2._from_config(Qwen2Config(**SIZES, tie_word_embeddings=True), attn_implementation=ATTENTION)
        )
    else:
        policy = Policy(Qwen3ForCausalLM._from_config(config, attn_implementation=ATTENTION))
    reference = copy.deepcopy(policy)
    with torch.no_grad():  # the policy has moved away from it
        for parameter in reference.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    critic = ValueModel(
        Qwen3Model._from_config(config, attn_implementation=ATTENTION), ScalarHead(SIZES["hidden_size"])
    )
    if case.startswith("lora"):
        for module in (policy, critic):
            add_adapter(module.model, LoraSection(rank=4, alpha=8, dropout=0.0), dtype=torch.float32)
            for name, parameter in module.named_parameters():
                if "lora_B" in name:  # it would begin with 0, and A then have no gradient
                    torch.nn.init.normal_(parameter.data, std=0.1)
    return RLModels(policy=policy, reference=reference, critic=critic)


def weights(trained: RLTraining) -> dict[str, Tensor]:
    return {
        f"{number} {name}": tensor.detach().clone()
        for number, backend in enumerate(trained.backends)
        for name, tensor in backend.whole_weights()
    }


def gap(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


def cut(stage: int) -> Distribution:
    return Distribution.start(BackendSection(zero_stage=stage, tensor_parallel_size=2))


def continued(models: RLModels, groups: list, *, expected: Mapping[str, Tensor]) -> dict[str, float]:
    """Two rounds on two ranks; the third by one process, and by two ranks that do not shard as those did."""
    begun, _ = training(models, distribution=cut(1), **PPO)
    play_share(begun, groups, rounds=ROUNDS - 1, ranks=begun._distribution.ranks)
    kept = [
        (backend.scalar_state(), {name: tensor.clone() for name, tensor in backend.tensor_state()})
        for backend in begun.backends
    ]
    found = {}
    for name, options in {"one process": {}, "zero 3": {"distribution": cut(3)}}.items():
        trained, _ = training(models, **options, **PPO)
        for backend, (numbers, tensors) in zip(trained.backends, kept, strict=True):
            backend.load(numbers, tensors)
        trained.learners.load_state_dict(begun.learners.state_dict())
        play(trained.learners, groups)
        found[name] = gap(weights(trained), expected)
    return found


def main(file: Path) -> None:
    groups, result = make_groups(), {}
    for case, (flags, stage) in CASES.items():
        models = make_models(case)
        alone, _ = training(models, **flags)
        expected = [play(alone.learners, groups) for _ in range(ROUNDS)]
        distribution = cut(stage)
        trained, own = training(models, distribution=distribution, **flags)
        found = play_share(trained, groups, rounds=ROUNDS, ranks=distribution.ranks)
        reference = own.reference
        result[case] = {
            "expected": expected,
            "found": found,
            "gap": gap(weights(trained), weights(alone)),
            "cut": [
                len(cut_dimensions(module)) for module in (own.policy, own.critic, reference) if module is not None
            ],
        }
        if case == "ppo zero 1":
            result["continued"] = continued(models, groups, expected=weights(alone))
    if dist.get_rank() == 0:
        file.write_text(json.dumps(result))
    dist.destroy_process_group()


if __name__ == "__main__":
    require_deepspeed()
    main(Path(sys.argv[1]))

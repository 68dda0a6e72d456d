"""Rounds of RL by ranks that share streams: what they compute, and what they keep.

    torchrun --nproc-per-node 2|4 context_ranks.py FOLDER

FOLDER then has `rounds.pt` with what `play` gives for each case of as many ranks, and a folder per rank with what it
wrote of a checkpoint. `play` without ranks is what one process makes of the same rounds.
"""

import copy
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import transformers as hf
from small_rl import training

from openrlhf.backends.base import Backend
from openrlhf.backends.deepspeed import Distribution, require_deepspeed
from openrlhf.backends.ranks import join
from openrlhf.backends.torch import ONE_PROCESS
from openrlhf.checkpoint.manager import LocalCheckpointedModel
from openrlhf.config.backend import BackendSection
from openrlhf.learners.steps import assign_to_ranks
from openrlhf.models.attention import ATTENTION
from openrlhf.models.body import decoder_layers
from openrlhf.models.policy import Policy
from openrlhf.models.routes import install_routers
from openrlhf.models.value import ScalarHead, ValueModel
from openrlhf.runs.rl_models import RLModels, step_settings
from openrlhf.types import COLUMNS, Group, Outcome, Prompt, SampleKey, Segment, TrainingBatch, Trajectory

VOCAB = 29
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # large enough that attending to a wrong token changes the log-probs visibly
}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
MODELS = {
    "8/2 heads": lambda: hf.Qwen3Config(**SMALL, **HEADS),
    "window": lambda: hf.MistralConfig(**SMALL, **HEADS, sliding_window=5),
    "experts": lambda: hf.Qwen3MoeConfig(
        **SMALL, **HEADS, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
    ),
    "3 heads": lambda: hf.Qwen3Config(**SMALL, num_attention_heads=3, num_key_value_heads=1),
    "6/3 heads": lambda: hf.Qwen3Config(**SMALL, num_attention_heads=6, num_key_value_heads=3),
}
ROUNDS = 2

FLAGS = {
    "rollout_batch_size": 4,
    "n_samples_per_prompt": 4,
    "train_batch_size": 16,
    "max_len": 64,
    "max_new_tokens": 32,
    "max_tokens_per_gpu": 90,  # three or four micro-batches of a round
    "actor.max_norm": 0,
    "critic.max_norm": 0,
    "actor.adam.eps": 1e-3,  # signs of tiny gradients do not decide
    "critic.adam.eps": 1e-3,
}
ALGORITHMS: dict[str, dict[str, Any]] = {
    "ppo": {"advantage_estimator": "gae", "init_kl_coef": 0.1, "entropy_loss_coef": 0.01},
    "kl loss": {"advantage_estimator": "rloo", "init_kl_coef": 0.1, "use_kl_loss": True, "kl_estimator": "k2"},
    "whitened": {
        "advantage_estimator": "reinforce",
        "enable_vllm_is_correction": True,
        "vllm_is_correction_type": "seq-mask-tis",
    },
    "gspo": {
        "advantage_estimator": "group_norm",
        "policy_loss_type": "gspo",
        "train_batch_size": 6,  # several steps of a round: from the second on ratios are not 1
        "eps_clip": 0.01,
    },
    "balanced": {"advantage_estimator": "gae", "actor.aux_loss_coef": 0.1, "entropy_loss_coef": 0},
    "replayed": {
        "advantage_estimator": "group_norm",
        "train_batch_size": 6,
        "init_kl_coef": 0.1,
        "use_kl_loss": True,
        "kl_estimator": "k2",
    },
    "sample by sample": {
        "advantage_estimator": "gae",
        "init_kl_coef": 0.1,
        "use_dynamic_batch": None,
        "micro_train_batch_size": 1,
        "micro_rollout_batch_size": 1,
    },
}


class Case(NamedTuple):
    """A model trained by an algorithm, and how ranks share them."""

    model: str
    algorithm: str
    zero: int
    degree: int
    ring: bool = False
    """Also where the degree divides the heads."""
    tensor: int = 1
    """Ranks that share every layer."""

    def __str__(self) -> str:
        if self.degree * self.tensor == 1:
            return f"{self.model}, {self.algorithm}, ZeRO {self.zero}, samples shared out"
        way = "by ring" if self.ring or "3 heads" in self.model else "by heads"
        layers = f", layers of {self.tensor} ranks" if self.tensor > 1 else ""
        return f"{self.model}, {self.algorithm}, ZeRO {self.zero}, {self.degree} ranks {way}{layers}"


CASES = {
    2: [
        Case("8/2 heads", "ppo", 0, 2),
        Case("window", "kl loss", 1, 2),
        Case("8/2 heads", "gspo", 2, 2),
        Case("8/2 heads", "whitened", 3, 2),
        Case("experts", "balanced", 3, 2),
        Case("experts", "balanced", 1, 2),
        Case("experts", "replayed", 3, 2),
        Case("experts", "replayed", 2, 1),
        Case("experts", "replayed", 3, 1),
        Case("8/2 heads", "sample by sample", 3, 2),
        Case("8/2 heads", "ppo", 3, 2, ring=True),
        Case("window", "kl loss", 2, 2, ring=True),
        Case("3 heads", "gspo", 0, 2),
        Case("3 heads", "whitened", 1, 2),
        Case("experts", "balanced", 2, 2, ring=True),
        Case("8/2 heads", "sample by sample", 0, 2, ring=True),
    ],
    4: [
        Case("8/2 heads", "ppo", 3, 4),
        Case("window", "kl loss", 2, 4),
        Case("8/2 heads", "whitened", 0, 4),
        Case("experts", "balanced", 2, 4),
        Case("8/2 heads", "sample by sample", 3, 4),
        Case("6/3 heads", "gspo", 1, 4),
        Case("6/3 heads", "sample by sample", 2, 4),
        Case("window", "ppo", 0, 4, ring=True),
        Case("8/2 heads", "ppo", 1, 2),
        Case("8/2 heads", "kl loss", 3, 2),
        Case("8/2 heads", "whitened", 2, 2),
        Case("8/2 heads", "gspo", 0, 2),
        Case("window", "whitened", 3, 2, ring=True),
        Case("8/2 heads", "kl loss", 3, 2, tensor=2),
        Case("8/2 heads", "ppo", 1, 2, tensor=2),
    ],
}
"""By the number of ranks. Those that share layers are last: DeepSpeed makes its groups once in a process."""


def make_models(family: str) -> RLModels:
    torch.manual_seed(0)
    config = MODELS[family]()
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION)
    policy = Policy(model, routers=install_routers(model, decoder_layers(model), replay=True))
    reference = copy.deepcopy(policy)
    with torch.no_grad():  # the policy has moved away from it
        for parameter in reference.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    critic = ValueModel(
        hf.AutoModel.from_config(config, attn_implementation=ATTENTION), ScalarHead(SMALL["hidden_size"])
    )
    return RLModels(policy=policy, reference=reference, critic=critic)


def make_groups(*, routes: bool = False) -> list[Group]:
    """Four prompts of four samples, which share their prompt. Lengths are random; one prompt is a single token with a
    response of one token; one sample is a single action at the end of many tokens; one has two turns.

    `routes`: any experts of "experts", the same for the tokens of a prompt; one sample has none.
    """
    chosen = torch.rand(4, 4, 40, 2, 4, generator=torch.Generator().manual_seed(4)).argsort(-1)[..., :2]
    generator = torch.Generator().manual_seed(3)

    def number(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=generator))

    result = []
    for prompt in range(4):
        asked = torch.randint(VOCAB, (1 if prompt == 3 else number(3, 14),), generator=generator)
        members = []
        for index in range(4):
            answer = torch.randint(VOCAB, (1 if (prompt, index) == (3, 0) else number(2, 18),), generator=generator)
            ids = torch.cat([asked, answer])
            mask = torch.arange(len(ids)) >= len(asked)
            if (prompt, index) == (1, 2):
                mask = torch.arange(len(ids)) == len(ids) - 1
            elif index == 3:  # the environment spoke in between
                mask[len(asked) + 1] = False
                mask[-1] = True
            rewards = torch.zeros(len(ids))
            rewards[-1] = number(0, 4) / 4
            told = chosen[prompt, index, : len(ids) - 1].to(torch.uint8)
            told[: len(asked)] = chosen[prompt, 0, : len(asked)][: len(told)].to(torch.uint8)
            sampled = -3.2 + 0.8 * torch.randn(len(ids), generator=generator)
            members.append(
                Trajectory(
                    key=SampleKey(prompt, index),
                    segments=(
                        Segment(
                            token_ids=ids,
                            action_mask=mask,
                            rollout_logprobs=torch.where(mask, sampled, 0.0),
                            versions=torch.where(mask, 0, -1).int(),
                            turn_rewards=rewards,
                            routes=told if routes and (prompt, index) != (2, 1) else None,
                        ),
                    ),
                    outcome=Outcome.FINISHED,
                    reward=float(rewards.sum()),
                    score=1.0,
                )
            )
        result.append(Group(prompt=Prompt(ordinal=prompt, text="x"), trajectories=tuple(members)))
    return result


def named(backends: list[Backend], kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of one kind of what backends keep, whole. Collective."""
    for who, backend in zip(("policy", "critic"), backends, strict=False):
        for name, tensor in backend.tensor_state():
            if name.startswith(f"{kind}/"):
                yield f"{who} {name}", tensor.detach().clone()


def play(case: Case, distribution: Any = ONE_PROCESS) -> dict[str, Any]:
    """Two rounds. Columns are by sample. Gradients are those of the first round: what Adam remembers after one step."""
    flags = FLAGS | ALGORITHMS[case.algorithm]
    trained, _ = training(make_models(case.model), distribution=distribution, **flags)
    ranks, settings, groups = (
        distribution.ranks,
        step_settings(trained._config),
        make_groups(routes=case.algorithm == "replayed"),
    )
    said: dict[str, Any] = {"columns": [], "metrics": []}
    for number in range(1, ROUNDS + 1):
        whole, metrics = trained.learners.place(groups)
        share = assign_to_ranks(whole.samples, settings, round_index=number, ranks=ranks.count)[ranks.index]
        batch = TrainingBatch(samples=share)
        trained.learners.score(batch)
        metrics.merge(trained.learners.assign_advantages(batch))
        own = {
            (sample.key, name): getattr(batch, name)[batch.actions_of(i)].clone()
            for i, sample in enumerate(batch.samples)
            for name in COLUMNS
            if getattr(batch, name) is not None
        }
        said["columns"].append({key: column for part in ranks.gather(own) for key, column in part.items()})
        metrics.merge(trained.learners.update(batch))
        said["metrics"].append(ranks.gather_processes(metrics.values()))
        if number == 1:
            said["gradients"] = {name: tensor * 10 for name, tensor in named(trained.backends, "exp_avg")}
    said["weights"] = dict(named(trained.backends, "parameters"))
    said["training"] = trained
    return said


def distribution_of(case: Case) -> Distribution:
    ds = BackendSection(zero_stage=case.zero, ring_attn_size=case.degree, tensor_parallel_size=case.tensor)
    distribution = Distribution(join(ranks_per_share=ds.ranks_per_share), ds)
    if case.ring:
        assert distribution._context is not None
        distribution._context = dataclasses.replace(distribution._context, always_ring=True)
    return distribution


def main(folder: Path) -> None:
    dist.init_process_group("gloo")
    result = {}
    for case in CASES[dist.get_world_size()]:
        distribution = distribution_of(case)
        result[str(case)] = said = play(case, distribution)
        trained = said.pop("training")
    # Every rank is given a folder of its own to write the last one's policy to.
    own = folder / f"rank {dist.get_rank()}"
    own.mkdir()
    LocalCheckpointedModel(
        trained.policy_backend, lambda path, _, weights: (path / "exported").touch(), distribution.ranks
    ).write(own, {}, resumable=True)
    if dist.get_rank() == 0:
        torch.save(result, folder / "rounds.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    require_deepspeed()
    main(Path(sys.argv[1]))

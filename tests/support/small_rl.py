"""A policy, a reference and a critic of a few hundred weights, fixed trajectories, and a training made of flags."""

import copy

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Model

from openrlhf.backends.base import Distribution
from openrlhf.backends.ranks import Ranks
from openrlhf.config import parse
from openrlhf.learners.steps import assign_to_ranks
from openrlhf.models.attention import ATTENTION
from openrlhf.models.body import decoder_layers
from openrlhf.models.policy import Policy
from openrlhf.models.routes import install_routers
from openrlhf.models.value import ScalarHead, ValueModel
from openrlhf.runs.rl_models import RLModels, RLTraining, step_settings
from openrlhf.types import Group, Outcome, Prompt, RewardPart, SampleKey, Segment, TrainingBatch, Trajectory

CPU = torch.device("cpu")
CONFIG = Qwen2Config(
    vocab_size=13,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
)
FLAGS = {
    "init_kl_coef": 0,
    "rollout_batch_size": 2,
    "train_batch_size": 8,
    "n_samples_per_prompt": 4,
    "max_new_tokens": 8,
    "max_len": 16,
    "actor_learning_rate": 1e-2,
    "critic_learning_rate": 1e-2,
    "lr_scheduler": "constant",
    "use_dynamic_batch": True,
    "max_tokens_per_gpu": 1000,
}
"""One optimizer step per round, no KL, no penalties."""


def make_models() -> RLModels:
    torch.manual_seed(0)
    policy = Policy(Qwen2ForCausalLM._from_config(CONFIG, attn_implementation=ATTENTION))
    reference = copy.deepcopy(policy)
    with torch.no_grad():  # the policy has moved away from it
        for parameter in reference.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    critic = ValueModel(Qwen2Model._from_config(CONFIG, attn_implementation=ATTENTION), ScalarHead(8))
    return RLModels(policy=policy, reference=reference, critic=critic, teacher=make_teacher())


def make_teacher() -> Policy:
    """A larger model whose vocabulary is padded to more tokens."""
    generator = torch.Generator().manual_seed(5)
    larger = Qwen2Config(**{**CONFIG.to_dict(), "hidden_size": 12, "intermediate_size": 20, "vocab_size": 16})
    with torch.random.fork_rng():
        torch.manual_seed(3)
        teacher = Policy(Qwen2ForCausalLM._from_config(larger, attn_implementation=ATTENTION))
    with torch.no_grad():  # with something to say
        for parameter in teacher.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return teacher.requires_grad_(False)


def make_groups(*, first: int = 0) -> list[Group]:
    """Two prompts, three samples each: single turns and a two-turn episode, one truncated, one failed."""
    generator = torch.Generator().manual_seed(first)
    result = []
    for prompt in range(first, first + 2):
        members = []
        for index in range(3):
            T = 5 + index
            mask = torch.arange(T) >= 2
            rewards = torch.zeros(T)
            rewards[-1] = [1.0, 0.0, 0.5][index]
            if index == 2:  # an environment token after the first turn, which earned something too
                mask[4] = False
                rewards[3] = 0.25
            segment = Segment(
                token_ids=torch.randint(13, (T,), generator=generator),
                action_mask=mask,
                rollout_logprobs=torch.where(mask, -2.5 + torch.rand(T, generator=generator), 0.0),
                versions=torch.where(mask, 0, -1).int(),
                turn_rewards=rewards,
            )
            members.append(
                Trajectory(
                    key=SampleKey(prompt, index),
                    segments=(segment,),
                    outcome=Outcome.TRUNCATED if index == 1 else Outcome.FINISHED,
                    reward=float(rewards.sum()),
                    greedy_reward=0.25,
                    reward_parts=(
                        RewardPart("right", float(rewards.sum()) - 0.5 * index),
                        RewardPart("long", 0.5 * index),
                    ),
                    score=1.0,
                )
            )
        members.append(Trajectory(key=SampleKey(prompt, 3), segments=(), outcome=Outcome.FAILED, error="boom"))
        result.append(Group(prompt=Prompt(ordinal=prompt, text="x"), trajectories=tuple(members)))
    return result


def training(
    models: RLModels, *, distribution: Distribution | None = None, **flags: object
) -> tuple[RLTraining, RLModels]:
    """A training of copies of the models, with these flags over `FLAGS`; True for a switch, None to leave one out."""
    words = []
    for name, value in {**FLAGS, **flags}.items():
        if value is not None:
            words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    config = parse("train_ppo_ray", words)
    own = RLModels(
        policy=copy.deepcopy(models.policy),
        reference=copy.deepcopy(models.reference) if config.uses_reference else None,
        critic=copy.deepcopy(models.critic) if config.uses_critic else None,
        teacher=copy.deepcopy(models.teacher) if config.uses_teacher else None,
    )
    if own.policy.routers is not None:  # a copy has no calls of its layers
        install_routers(own.policy.model, decoder_layers(own.policy.model), replay=True)
    total = config.optimizer_steps(2 * config.rollout.batch_size)
    return RLTraining(config, own, total_steps=total, device=CPU, distribution=distribution), own


def play(workers, groups) -> dict[str, float]:
    batch, metrics = workers.place(groups)
    workers.score(batch)
    metrics.merge(workers.assign_advantages(batch))
    metrics.merge(workers.update(batch))
    return metrics.values()


def play_share(training: RLTraining, groups: list[Group], *, rounds: int, ranks: Ranks) -> list[dict[str, float]]:
    """So many rounds, as one of several ranks: what it says after each. Collective."""
    settings, said = step_settings(training._config), []
    for number in range(1, rounds + 1):
        whole, metrics = training.learners.place(groups)
        share = assign_to_ranks(whole.samples, settings, round_index=number, ranks=ranks.count)[ranks.index]
        batch = TrainingBatch(samples=share)
        training.learners.score(batch)
        metrics.merge(training.learners.assign_advantages(batch))
        metrics.merge(training.learners.update(batch))
        said.append(metrics.values())
    return said


def equal_rewards(groups: list[Group]) -> list[Group]:
    """The same samples, all worth 1: no advantage anywhere under a group estimator."""
    return [
        Group(prompt=g.prompt, trajectories=tuple(t.with_reward(1.0, score=None, extra_logs={}) for t in g.scored))
        for g in groups
    ]

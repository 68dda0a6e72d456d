"""Training: optimizers and schedules, batching, seeds, epochs; for RL also shared devices and async training."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from openrlhf.backends import BACKENDS
from openrlhf.config.fields import Flag

SCHEDULES = (
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
)
"""Every schedule of transformers that depends on the step alone."""
MEASURING_SCHEDULES = ("reduce_lr_on_plateau", "greedy")
"""The others, which follow a loss as it is measured."""


@dataclass(frozen=True, kw_only=True)
class AdamSection:
    lr: Annotated[
        float, Flag("AdamW learning rate (also of what muon leaves out)", flat="{owner}learning_rate", at_least=0)
    ] = 1e-6
    betas: Annotated[tuple[float, float], Flag("AdamW betas", flat="adam_betas", at_least=0, below=1)] = (0.9, 0.95)
    eps: Annotated[float, Flag("AdamW epsilon", at_least=0)] = 1e-8
    weight_decay: Annotated[
        float, Flag("weight decay, muon's too; biases and norms are exempt", flat="l2", at_least=0)
    ] = 0.0


@dataclass(frozen=True, kw_only=True)
class MuonSection:
    lr: Annotated[float, Flag("learning rate of the matrices that muon updates", at_least=0)] = 0.02
    momentum: Annotated[float, Flag("muon momentum", at_least=0, below=1)] = 0.95
    ns_steps: Annotated[int, Flag("Newton-Schulz steps", within=(1, 99))] = 5
    nesterov: Annotated[bool, Flag("Nesterov momentum (no_nesterov switches it off)")] = True


@dataclass(frozen=True, kw_only=True)
class OptimizerSection:
    """Everything an optimizer and its schedule are built from."""

    optim: Annotated[
        Literal["adam", "muon"],
        Flag("optimizer; muon leaves vectors, embeddings, the head and stacked experts to AdamW"),
    ] = "adam"
    muon: MuonSection = field(default=MuonSection(), metadata={"only_with": ".optim=muon"})
    adam: AdamSection = field(default=AdamSection())
    lr_scheduler: Annotated[
        str, Flag(f"schedule, by its Hugging Face name: {', '.join(SCHEDULES)}", flat="lr_scheduler")
    ] = "cosine_with_min_lr"
    lr_warmup_ratio: Annotated[
        float,
        Flag(
            "share of the schedule spent warming up",
            flat="lr_warmup_ratio",
            only_with=".lr_scheduler!=constant",
            within=(0, 1),
        ),
    ] = 0.03
    min_lr_ratio: Annotated[
        float,
        Flag(
            "final over peak learning rate, for the *_with_min_lr schedules",
            flat="min_lr_ratio",
            only_with=f".lr_scheduler={','.join(name for name in SCHEDULES if name.endswith('with_min_lr'))}",
            within=(0, 1),
        ),
    ] = 0.1
    max_norm: Annotated[
        float,
        Flag(
            "gradients are scaled down to this norm; 0 = never (muon's steps hardly change)",
            flat="max_norm",
            unlimited=True,
            at_least=0,
        ),
    ] = 1.0


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    batch_size: Annotated[
        int,
        Flag(
            "samples of an optimizer step, over all workers; an RL round has as few such steps as its samples need",
            flat="train_batch_size",
            above=0,
        ),
    ] = 128
    micro_batch_size: Annotated[
        int,
        Flag(
            "samples per forward and worker; SFT, RM, DPO: as many as fit into the tokens of so many longest ones",
            flat="micro_train_batch_size",
            only_with="!train.dynamic_batch_enable",
            above=0,
        ),
    ] = 1
    max_epochs: Annotated[
        int, Flag("passes over the data (SFT, RM, DPO) or over each rollout (RL)", flat="max_epochs", above=0)
    ] = 1
    total_steps: Annotated[
        int | None,
        Flag(
            "the run ends after so many steps (RL: rounds), if the data lasts; unset: when the data is through", above=0
        ),
    ] = None
    seed: Annotated[int, Flag("fixes everything that is random, prompt order included", flat="seed")] = 42
    full_determinism_enable: Annotated[
        bool, Flag("slower kernels that give the same bits every time", flat="full_determinism")
    ] = False
    max_skipped_steps: Annotated[
        int,
        Flag(
            "optimizer steps in a row that are left out, because something in them is not finite, until the run ends "
            "with an error",
            above=0,
        ),
    ] = 5
    stall_timeout: Annotated[
        float,
        Flag(
            "seconds in which nothing at all gets done before the run ends with everybody's stacks; 0 = never",
            unlimited=True,
            at_least=0,
        ),
    ] = 1800.0


@dataclass(frozen=True, kw_only=True)
class SupervisedTrainSection(TrainSection):
    backend: Annotated[
        str,
        Flag(
            "what trains; auto: DeepSpeed for several processes or what only it can do, otherwise plain torch",
            choices=("auto", *BACKENDS),
        ),
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class RLTrainSection(TrainSection):
    num_episodes: Annotated[int, Flag("passes over the prompts", flat="num_episodes", above=0)] = 1
    dynamic_batch_enable: Annotated[
        bool, Flag("micro-batches are cut by tokens, not by samples", flat="use_dynamic_batch")
    ] = False
    max_tokens_per_gpu: Annotated[
        int,
        Flag(
            "token budget of such a micro-batch, × ds.ring_attn_size × ds.tensor_parallel_size",
            flat="train_max_tokens_per_gpu max_tokens_per_gpu",
            only_with=".dynamic_batch_enable|uses_reward_model",
            above=0,
        ),
    ] = 16192
    agent_func_path: Annotated[
        str | None,
        Flag(
            "what plays episodes: a Python file with class AgentExecutor, or a world (openrlhf.worlds.NAME, or a file "
            "with class World)",
            flat="agent_func_path",
        ),
    ] = None
    launcher: Annotated[
        Literal["auto", "local", "ray"], Flag("one process (local) or a Ray cluster; auto picks what the run needs")
    ] = "auto"
    colocate_all: Annotated[
        bool, Flag("all models, and engines unless async, share the actor's devices", flat="colocate_all_models")
    ] = False
    colocate_actor_ref: Annotated[
        bool, Flag("actor and reference share devices", flat="colocate_actor_ref", only_with="uses_reference")
    ] = False
    colocate_critic_reward: Annotated[
        bool,
        Flag(
            "critic and reward model share devices",
            flat="colocate_critic_reward",
            only_with="uses_critic uses_reward_model",
        ),
    ] = False
    async_enable: Annotated[bool, Flag("generate the next rollouts while training", flat="async_train")] = False
    async_queue_size: Annotated[
        int,
        Flag("rollout batches generation may be ahead", flat="async_queue_size", only_with=".async_enable", above=0),
    ] = 1
    async_share_device: Annotated[
        bool, Flag("let async generation and training share a single device", only_with=".async_enable")
    ] = False
    partial_rollout_enable: Annotated[
        bool, Flag("async: weights change in the middle of responses", flat="partial_rollout")
    ] = False
    max_restarts: Annotated[
        int,
        Flag(
            "Ray: how often a run that lost a worker or a node goes on from its last checkpoint by itself",
            only_with=".launcher=ray",
            at_least=0,
        ),
    ] = 3
    enable_ema: Annotated[
        bool, Flag("average the actor's weights and save the average; sampling uses the live ones", flat="enable_ema")
    ] = False
    ema_beta: Annotated[
        float,
        Flag(
            "decay β of that average, per optimizer step", flat="ema_beta", only_with=".enable_ema", at_least=0, below=1
        ),
    ] = 0.992

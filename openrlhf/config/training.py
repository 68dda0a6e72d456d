"""Batching, seeds, epochs; for RL also who shares devices and whether generation and training overlap."""

from dataclasses import dataclass
from typing import Annotated, Literal

from openrlhf.config.fields import Flag


@dataclass(frozen=True, kw_only=True)
class TrainSection:
    batch_size: Annotated[
        int,
        Flag(
            "samples of an optimizer step, over all workers; an RL round has as few such steps as its samples need",
            flat="train_batch_size",
        ),
    ] = 128
    micro_batch_size: Annotated[
        int,
        Flag(
            "samples per forward and worker; SFT, RM, DPO: as many as fit into the tokens of so many longest ones",
            flat="micro_train_batch_size",
            only_with="!train.dynamic_batch_enable",
        ),
    ] = 1
    max_epochs: Annotated[
        int, Flag("passes over the data (SFT, RM, DPO) or over each rollout (RL)", flat="max_epochs")
    ] = 1
    total_steps: Annotated[
        int | None,
        Flag("the run ends after so many steps (RL: rounds), if the data lasts; unset: when the data is through"),
    ] = None
    seed: Annotated[int, Flag("fixes everything that is random, prompt order included", flat="seed")] = 42
    full_determinism_enable: Annotated[
        bool, Flag("slower kernels that give the same bits every time", flat="full_determinism")
    ] = False
    max_skipped_steps: Annotated[
        int,
        Flag(
            "optimizer steps in a row that are left out, because something in them is not finite, until the run ends "
            "with an error"
        ),
    ] = 5
    stall_timeout: Annotated[
        float,
        Flag(
            "seconds in which nothing at all gets done before the run ends with everybody's stacks; 0 = never",
            unlimited=True,
        ),
    ] = 1800.0


@dataclass(frozen=True, kw_only=True)
class SupervisedTrainSection(TrainSection):
    backend: Annotated[
        Literal["auto", "torch", "deepspeed"],
        Flag("what trains; auto: DeepSpeed for several processes or what only it can do, otherwise plain torch"),
    ] = "auto"


@dataclass(frozen=True, kw_only=True)
class RLTrainSection(TrainSection):
    num_episodes: Annotated[int, Flag("passes over the prompts", flat="num_episodes")] = 1
    dynamic_batch_enable: Annotated[
        bool, Flag("micro-batches are cut by tokens, not by samples", flat="use_dynamic_batch")
    ] = False
    max_tokens_per_gpu: Annotated[
        int,
        Flag(
            "token budget of such a micro-batch",
            flat="train_max_tokens_per_gpu max_tokens_per_gpu",
            only_with=".dynamic_batch_enable|uses_reward_model",
        ),
    ] = 16192
    agent_func_path: Annotated[str | None, Flag("Python file with class AgentExecutor", flat="agent_func_path")] = None
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
        int, Flag("rollout batches generation may be ahead", flat="async_queue_size", only_with=".async_enable")
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
        ),
    ] = 3
    enable_ema: Annotated[
        bool, Flag("average the actor's weights and save the average; sampling uses the live ones", flat="enable_ema")
    ] = False
    ema_beta: Annotated[
        float, Flag("decay β of that average, per optimizer step", flat="ema_beta", only_with=".enable_ema")
    ] = 0.992

"""The size of a trial: how many samples of how many tokens fit into the time, and the flags that follow from it.

What is proved are the user's flags. Only those are replaced that say how much is done, where it is written, and in
which processes; `notes` says of each other change why it is made.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from openrlhf.config.commands import RLConfig, SupervisedConfig
from openrlhf.data.sources import load_records
from openrlhf.runs.worlds import world_records

LOOKED_AT = 256
"""Records among which the shortest are chosen."""
_C = TypeVar("_C", RLConfig, SupervisedConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How much a trial does."""

    prompts: int
    samples: int
    """Of each prompt."""
    response: int
    """Tokens of a response at most."""


SMALLEST = Sizes(prompts=2, samples=2, response=8)
LARGEST = Sizes(prompts=2, samples=4, response=24)


def sizes_for(parameters: int, *, minutes: float, speed: float, prompt_tokens: int, gradients: float) -> Sizes:
    """So that `gradients` forwards and backwards of all samples take at most half of the time.

    `speed`: floating-point operations in a second. The other half is sampling, loading and writing.
    """
    tokens = 0.5 * 60 * minutes * speed / (6 * parameters * gradients)
    for samples in range(LARGEST.samples, SMALLEST.samples - 1, -1):
        for response in (LARGEST.response, 16, 12):
            if 2 * samples * (prompt_tokens + response) <= tokens:
                return Sizes(prompts=2, samples=samples, response=response)
    return SMALLEST


def measured_speed(device: torch.device) -> float:
    """Floating-point operations of fp32 in a second, as a few products of matrices show."""
    size = 512 if device.type == "cpu" else 4096
    a = torch.randn(size, size, device=device)
    done, began = 0, time.perf_counter()
    while time.perf_counter() - began < 0.05:
        a @ a
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        done += 1
    # Layers of a model are narrower, and more than products.
    return 0.3 * done * 2 * size**3 / (time.perf_counter() - began)


def short_data(config: _C, flag: str, dataset: str, folder: Path, *, count: int) -> tuple[str, int | None, int]:
    """A data set of the `count` shortest of the first records, as they are: its path, the number of records that are to
    be read (None: all), and the characters of the longest.

    Where records have images, or what JSON does not have, it is the user's own file, and its first records are read.
    """
    data: Any = config.data
    records = load_records(
        dataset,
        split=data.prompt_split if isinstance(config, RLConfig) else data.dataset_split,
        max_samples=min(LOOKED_AT, data.max_samples or LOOKED_AT),
        probs=data.prompt_probs if isinstance(config, RLConfig) else data.dataset_probs,
        seed=config.train.seed,
        trust_remote_code=data.trust_remote_code,
        worlds=functools.partial(world_records, config, evaluation=False) if isinstance(config, RLConfig) else None,
        flag=flag,
    )
    try:
        if data.max_images_per_prompt > 0:
            raise TypeError
        lines = [json.dumps(dict(records[i]), ensure_ascii=False) for i in range(len(records))]
    except TypeError:
        return dataset, count, 1000
    shortest = sorted(sorted(range(len(lines)), key=lambda i: len(lines[i]))[:count])
    path = folder / "records.jsonl"
    path.write_text("\n".join(lines[i] for i in shortest) + "\n", encoding="utf-8")
    return str(path), None, max(len(lines[i]) for i in shortest)


def trial_of_rl(config: RLConfig, sizes: Sizes, folder: Path, *, data: str, limit: int | None) -> RLConfig:
    """One round of one optimizer step in this process, in fp32, that leaves nothing behind."""
    reward = config.reward
    response = min(sizes.response, config.rollout.max_new_tokens or sizes.response)
    if reward.overlong_buffer_len is not None:
        reward = dataclasses.replace(reward, overlong_buffer_len=min(reward.overlong_buffer_len, response / 2))
    samples = sizes.samples if config.uses_group_baseline else min(sizes.samples, max(2, config.samples_per_prompt))
    engines = config.vllm.num_engines
    return dataclasses.replace(
        config,
        reward=reward,
        rollout=dataclasses.replace(
            config.rollout,
            batch_size=sizes.prompts,
            n_samples_per_prompt=samples,
            vllm_generate_batch_size=None,
            max_new_tokens=response,
            abort_stragglers=False,
            agent_hosts=None if config.rollout.agent_hosts is None else min(1, config.rollout.agent_hosts),
        ),
        train=dataclasses.replace(
            config.train,
            batch_size=sizes.prompts * sizes.samples,
            micro_batch_size=min(config.train.micro_batch_size, max(1, sizes.samples - 1)),
            max_epochs=1,
            total_steps=1,
            num_episodes=1,
            launcher="local",
            async_enable=False,
            partial_rollout_enable=False,
            enable_ema=False,
        ),
        actor=dataclasses.replace(config.actor, optim="adam", aux_loss_coef=0.0),
        critic=dataclasses.replace(config.critic, optim="adam", freezing_steps=-1),
        algo=dataclasses.replace(
            config.algo,
            dynamic_filtering_enable=False,
            advantage=dataclasses.replace(
                config.algo.advantage, pass_k=min(config.algo.advantage.pass_k, max(1, samples - 1))
            ),
        ),
        vllm=dataclasses.replace(
            config.vllm,
            num_engines=engines and min(1, engines),
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
        ),
        ds=_whole(config.ds),
        data=dataclasses.replace(
            config.data, prompt_dataset=data, max_samples=limit or config.data.max_samples, prompt_probs=None
        ),
        eval=dataclasses.replace(config.eval, dataset=None),
        ckpt=dataclasses.replace(
            config.ckpt,
            output_dir=str(folder / "model"),
            path=str(folder / "checkpoints"),
            save_steps=-1,
            load_enable=False,
            auto_resume=False,
        ),
        logger=_quiet(config, folder),
        max_steps=min(config.max_steps or 3, 3) if config.train.agent_func_path else config.max_steps,
    )


def trial_of_supervised(config: Any, sizes: Sizes, folder: Path, *, data: str, limit: int | None) -> Any:
    """One optimizer step of a few samples in this process, in fp32, that leaves nothing behind."""
    count = sizes.prompts * 2
    return dataclasses.replace(
        config,
        optim="adam",
        model=dataclasses.replace(config.model, aux_loss_coef=0.0),
        train=dataclasses.replace(
            config.train,
            batch_size=count,
            micro_batch_size=1,
            max_epochs=1,
            total_steps=None,
            backend="torch",
        ),
        ds=_whole(config.ds),
        data=dataclasses.replace(
            config.data, dataset=data, max_samples=limit or config.data.max_samples, dataset_probs=None
        ),
        eval=dataclasses.replace(config.eval, dataset=None),
        ckpt=dataclasses.replace(
            config.ckpt,
            output_dir=str(folder / "model"),
            path=str(folder / "checkpoints"),
            save_steps=-1,
            load_enable=False,
            auto_resume=False,
        ),
        logger=_quiet(config, folder),
    )


def _whole(ds: Any) -> Any:
    """All of every layer here, in fp32 and without dropout: right ways to compute differ in the last bits only."""
    return dataclasses.replace(
        ds,
        param_dtype="fp32",
        grad_accum_dtype=None,
        load_in_4bit=False,
        deepcompile=False,
        tensor_parallel_size=1,
        ring_attn_size=1,
        adam_offload=False,
        use_universal_ckpt=False,
        lora=dataclasses.replace(ds.lora, dropout=0.0),
    )


def _quiet(config: Any, folder: Path) -> Any:
    changes: dict[str, Any] = {"run_dir": str(folder / "run"), "tensorboard_dir": None}
    if hasattr(config.logger, "wandb"):
        changes["wandb"] = dataclasses.replace(config.logger.wandb, key=None)
    return dataclasses.replace(config.logger, **changes)


def notes_on(config: Any) -> Sequence[str]:
    """What a trial does differently from the run, where that may matter; one line each."""
    ds, model = config.ds, config.actor if isinstance(config, RLConfig) else config.model
    optimizer = config.actor if isinstance(config, RLConfig) else config
    found = {
        "the trial computes in fp32, so that only mistakes are as large as they are": ds.param_dtype != "fp32",
        "--ds.load_in_4bit: the trial holds whole weights": ds.load_in_4bit,
        "--ds.lora.dropout is 0 in the trial: chance cannot be compared": ds.lora.dropout > 0,
        "aux_loss_coef is 0 in the trial: the balancing loss is defined by micro-batch": bool(model.aux_loss_coef),
        "gradients are read from AdamW's moments; muon gets the same ones": optimizer.optim == "muon",
    }
    if isinstance(config, RLConfig):
        found["dynamic filtering is off in the trial: all of its groups are looked at"] = (
            config.algo.dynamic_filtering_enable
        )
    return [line for line, holds in found.items() if holds]

"""From flags to the source of rewards: files, servers and reward models, one or several."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from openrlhf.config.models import RewardEntry
from openrlhf.config.roots import RLConfig, ServeRMConfig
from openrlhf.models.loading import load_tokenizer, load_value_model
from openrlhf.rewards.base import RewardSource
from openrlhf.rewards.combined import CombinedReward
from openrlhf.rewards.function_file import FunctionFileReward
from openrlhf.rewards.model import RewardModel, RewardModelSource
from openrlhf.trainers.local_models import model_dtype
from openrlhf.trainers.preflight import reading_model, warn_of_positions


def build_reward(config: RLConfig, tokenizer: Any, device: torch.device) -> RewardSource | None:
    """Whatever judges this run's samples, not started yet; None: an agent does. `tokenizer`: the policy's."""
    entries, weights = config.reward.sources, config.reward.weights
    if not entries:
        return None
    sources = [_build(entry, config, tokenizer, device) for entry in entries]
    if len(sources) == 1 and weights is None:
        return sources[0]
    return CombinedReward(dict(zip(source_names(entries), sources, strict=True)), weights or [1.0] * len(sources))


def source_names(entries: tuple[RewardEntry, ...]) -> list[str]:
    """How metrics call the sources: by file, host or folder; a name that is taken gets a number."""
    names: list[str] = []
    for kind, (first, *_) in entries:
        plain = {"http": urlsplit(first).netloc, "function": Path(first).stem, "model": Path(first).name}[kind]
        name = re.sub(r"[^\w.-]", "_", plain)
        same = sum(re.fullmatch(rf"{re.escape(name)}(_\d+)?", other) is not None for other in names)
        names.append(f"{name}_{same + 1}" if same else name)
    return names


def _build(entry: RewardEntry, config: RLConfig, tokenizer: Any, device: torch.device) -> RewardSource:
    if entry.kind == "function":
        return FunctionFileReward(entry.names[0], timeout=config.reward.timeout)
    if entry.kind == "http":
        from openrlhf.rewards.http import HttpReward  # aiohttp is only for those who have servers

        return HttpReward(entry.names, timeout=config.reward.timeout, api_key=config.reward.api_key)
    model = load_reward_model(entry.names[0], config, device, trust_remote_code=config.actor.trust_remote_code)
    return RewardModelSource(model, policy_tokenizer=tokenizer, max_batch_tokens=config.scoring_tokens_per_gpu)


def load_reward_model(
    path: str, config: RLConfig | ServeRMConfig, device: torch.device, *, trust_remote_code: bool
) -> RewardModel:
    """The reward model at `path` as the flags say, ready to score."""
    flag = "--reward.model_name_or_path"
    with reading_model(path, flag=flag):
        tokenizer = load_tokenizer(
            path,
            use_fast=not config.data.disable_fast_tokenizer,
            trust_remote_code=trust_remote_code,
            flag=flag,
        )
        model = load_value_model(
            path,
            dtype=model_dtype(config.ds.param_dtype, device),
            device=device,
            head_prefix=config.ds.value_head_prefix,
            fresh_head=False,
            normalise=config.reward.normalize_enable,
            trust_remote_code=trust_remote_code,
            attn_implementation=config.ds.attn_implementation,
            load_in_4bit=config.ds.load_in_4bit,
            experts_implementation=config.ds.experts_implementation,
            flag=flag,
        )
    warn_of_positions(model.model.config, max_len=config.data.max_len)
    return RewardModel(
        model.eval().requires_grad_(False),
        tokenizer,
        max_length=config.data.max_len,
        name=path,
    )

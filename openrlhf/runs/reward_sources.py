"""From flags to the source of rewards: files, servers and reward models, one or several."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch

from openrlhf.backends.base import Distribution
from openrlhf.backends.torch import ONE_PROCESS
from openrlhf.config.commands import RLConfig, ServeRMConfig
from openrlhf.config.models import RewardEntry, TrustSection
from openrlhf.models.loading import LoadSettings, load_config, load_tokenizer, load_value_model
from openrlhf.rewards.base import NoReward, RewardSource
from openrlhf.rewards.combined import CombinedReward
from openrlhf.rewards.function_file import FunctionFileReward
from openrlhf.rewards.model import RewardModel, RewardModelSource, RewardReader
from openrlhf.rewards.steps import StepReader
from openrlhf.runs.preflight import reading_model, warn_of_positions

FLAG = "--reward.model_name_or_path"


ModelSource = Callable[[str, int], RewardSource]
"""The reward model at a path, the so-manieth of the run, as a source."""


class RewardKind(NamedTuple):
    """One kind of reward source (`RewardEntry.kind`)."""

    name: Callable[[str], str]
    """What metrics call a source, from its file, URL or folder."""
    build: Callable[[RewardEntry, RLConfig, Callable[[str], RewardSource]], RewardSource]
    """Given the entry, the configuration, and what makes a reward model at a path a source."""


def _function_file(entry: RewardEntry, config: RLConfig, model_source: Callable[[str], RewardSource]) -> RewardSource:
    return FunctionFileReward(entry.names[0], timeout=config.reward.timeout)


def _servers(entry: RewardEntry, config: RLConfig, model_source: Callable[[str], RewardSource]) -> RewardSource:
    from openrlhf.rewards.http import HttpReward  # only runs with reward servers import aiohttp

    return HttpReward(entry.names, timeout=config.reward.timeout, api_key=config.reward.api_key)


def _model(entry: RewardEntry, config: RLConfig, model_source: Callable[[str], RewardSource]) -> RewardSource:
    return model_source(entry.names[0])


REWARD_KINDS: dict[str, RewardKind] = {
    "function": RewardKind(lambda file: Path(file).stem, _function_file),
    "http": RewardKind(lambda url: urlsplit(url).netloc, _servers),
    "model": RewardKind(lambda folder: Path(folder).name, _model),
}


def build_reward(config: RLConfig, model_source: ModelSource) -> RewardSource | None:
    """The source of this run's rewards, not started yet; None: an agent gives them, if anybody."""
    entries, weights = config.reward.sources, config.reward.weights
    if not entries:
        return NoReward() if config.uses_teacher and config.reward_source is None else None
    numbers = itertools.count()
    sources = [
        REWARD_KINDS[entry.kind].build(entry, config, lambda path: model_source(path, next(numbers)))
        for entry in entries
    ]
    if len(sources) == 1 and weights is None:
        return sources[0]
    return CombinedReward(dict(zip(source_names(entries), sources, strict=True)), weights or [1.0] * len(sources))


def source_names(entries: tuple[RewardEntry, ...]) -> list[str]:
    """The names of sources in metrics: by file, host or folder; a name that is taken gets a number."""
    names: list[str] = []
    for kind, (first, *_) in entries:
        name = re.sub(r"[^\w.-]", "_", REWARD_KINDS[kind].name(first))
        same = sum(re.fullmatch(rf"{re.escape(name)}(_\d+)?", other) is not None for other in names)
        names.append(f"{name}_{same + 1}" if same else name)
    return names


def reward_model_here(config: RLConfig, policy_tokenizer: Any, device: torch.device) -> ModelSource:
    """Reward models in this process."""

    def source(path: str, number: int) -> RewardSource:
        model = load_reward_model(path, config, device, offload=config.reward.offload)
        return RewardModelSource(
            model,
            model.score,
            policy_tokenizer=policy_tokenizer,
            max_batch_tokens=config.scoring_tokens_per_gpu,
            steps=step_reader(config, policy_tokenizer),
        )

    return source


def step_reader(config: RLConfig, policy_tokenizer: Any) -> StepReader | None:
    """How steps are judged; None where whole samples are."""
    reward = config.reward
    if reward.steps is None:
        return None
    separator = reward.separator if reward.steps == "separator" else None
    return StepReader(
        tokenizer=policy_tokenizer, separator=separator, total=reward.step_total, logits=reward.step_logits
    )


def load_reward_reader(path: str, config: RLConfig) -> RewardReader:
    """The reader of a reward model at `path` whose weights are elsewhere: tokeniser and limits."""
    with reading_model(path, flag=FLAG):
        tokenizer = _tokenizer(path, config)
        model_config = load_config(path, trust_remote_code=config.actor.trust_remote_code, flag=FLAG)
    vocab_size = model_config.get_text_config().vocab_size
    return RewardReader(tokenizer, vocab_size=vocab_size, max_length=config.data.max_len, name=path)


def _tokenizer(path: str, config: RLConfig | ServeRMConfig) -> Any:
    trusts = _trust(config).trust_remote_code
    return load_tokenizer(path, use_fast=not config.data.disable_fast_tokenizer, trust_remote_code=trusts, flag=FLAG)


def _trust(config: RLConfig | ServeRMConfig) -> TrustSection:
    """The section that says whether code which comes with a model may run."""
    return config.actor if isinstance(config, RLConfig) else config.model


def load_reward_model(
    path: str,
    config: RLConfig | ServeRMConfig,
    device: torch.device,
    *,
    distribution: Distribution = ONE_PROCESS,
    offload: bool = False,
) -> RewardModel:
    """The reward model at `path` as the flags say, ready to score. `offload`: it waits in CPU memory."""
    images = isinstance(config, RLConfig) and config.data.max_images_per_prompt > 0
    settings = LoadSettings(device=device, ds=config.ds, model=_trust(config), flag=FLAG, images=images)
    with reading_model(path, flag=FLAG):
        tokenizer = _tokenizer(path, config)
        model = load_value_model(
            path,
            settings,
            fresh_head=False,
            normalise=config.reward.normalize_enable,
            classifies=isinstance(config, RLConfig) and config.reward.steps is not None,
        )
    warn_of_positions(model.model.config, max_len=config.data.max_len)
    # Under stage 3 it is DeepSpeed's engine around the model, which has the model's attributes.
    frozen: Any = distribution.freeze(model.eval(), offload=offload)
    return RewardModel(
        frozen,
        tokenizer,
        max_length=config.data.max_len,
        name=path,
        device=device,
        offload=offload and not distribution.shards_weights,
    )

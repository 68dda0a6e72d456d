"""Values no run could use, whatever the other flags say. Each rule yields messages that name the flag."""

import difflib
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from openrlhf.config.commands import RLConfig, ServeRMConfig
from openrlhf.config.models import is_python_file, split_commas
from openrlhf.config.optimizer import MEASURING_SCHEDULES, SCHEDULES
from openrlhf.config.schema import value_at

POSITIVE = (
    "train.batch_size",
    "train.micro_batch_size",
    "train.max_epochs",
    "train.max_skipped_steps",
    "train.total_steps",
    "train.num_episodes",
    "train.max_tokens_per_gpu",
    "train.async_queue_size",
    "rollout.batch_size",
    "rollout.n_samples_per_prompt",
    "rollout.vllm_generate_batch_size",
    "rollout.micro_batch_size",
    "rollout.max_tokens_per_gpu",
    "rollout.max_new_tokens",
    "rollout.temperature",
    "rollout.step_timeout",
    "reward.timeout",
    "reward.overlong_buffer_len",
    "eval.n_samples_per_prompt",
    "vllm.tensor_parallel_size",
    "vllm.pipeline_parallel_size",
    "ds.tensor_parallel_size",
    "ds.ring_attn_size",
    "ds.ring_attn_head_stride",
    "ds.zpg",
    "ds.lora.alpha",
    "data.max_len",
    "data.max_samples",
    "ckpt.max_num",
    "ckpt.max_mem",
    "logger.logging_steps",
    "algo.kl.horizon",
    "algo.kl.target",
    "model.beta",
    "batch_size",
    "max_tokens_per_gpu",
    "max_queue",
    "max_request_bytes",
    "max_query_chars",
    "read_timeout",
    "max_steps",
)

# name -> (low, high), both allowed
RANGES: dict[str, tuple[float, float]] = {
    "algo.advantage.lambd": (0, 1),
    "algo.advantage.gamma": (0, 1),
    "algo.kl.init_coef": (0, float("inf")),
    "vllm.gpu_memory_utilization": (0.01, 1),
    "vllm.num_engines": (0, float("inf")),
    "train.stall_timeout": (0, float("inf")),
    "vllm.health_timeout": (0, float("inf")),
    "train.max_restarts": (0, float("inf")),
    "eval.temperature": (0, float("inf")),
    "reward.stop_properly_penalty_coef": (-float("inf"), 1),
    "reward.overlong_penalty_factor": (0, float("inf")),
    "rollout.agent_hosts": (0, float("inf")),
    "critic.value_clip": (0, float("inf")),
    "ds.zero_stage": (0, 3),
    "ds.lora.rank": (0, float("inf")),
    "ds.lora.dropout": (0, 1),
    "data.dataloader_num_workers": (0, float("inf")),
    "data.max_images_per_prompt": (0, float("inf")),
    "model.label_smoothing": (0, 0.5),
    "model.nll_loss_coef": (0, float("inf")),
    "ckpt.signal_deadline": (0, float("inf")),
    "logger.rollouts": (0, float("inf")),
    "port": (0, 65535),
}

OWNERS = ("", "actor.", "critic.")
"""Whose optimizer it is: the one model of SFT, RM and DPO, or a model of RL."""

OPTIMIZER_RANGES: dict[str, tuple[float, float]] = {
    "adam.lr": (0, float("inf")),
    "adam.eps": (0, float("inf")),
    "adam.weight_decay": (0, float("inf")),
    "muon.lr": (0, float("inf")),
    "muon.ns_steps": (1, 99),
    "lr_warmup_ratio": (0, 1),
    "min_lr_ratio": (0, 1),
    "max_norm": (0, float("inf")),
}


def _lookup(config: Any, path: str) -> Any:
    """The value at `path`, None where the command has no such flag."""
    try:
        return value_at(config, path)
    except AttributeError:
        return None


def sizes_are_positive(config: Any) -> Iterator[str]:
    for path in POSITIVE:
        value = _lookup(config, path)
        if value is not None and value <= 0:
            yield f"--{path} {value}: must be more than 0"


def numbers_are_in_range(config: Any) -> Iterator[str]:
    ranges = RANGES | {owner + name: bounds for owner in OWNERS for name, bounds in OPTIMIZER_RANGES.items()}
    for path, (low, high) in ranges.items():
        value = _lookup(config, path)
        if value is not None and not low <= value <= high:
            bounds = f"at least {low}" if high == float("inf") else f"from {low} to {high}"
            yield f"--{path} {value}: must be {bounds}"


def averages_forget(config: Any) -> Iterator[str]:
    """A running average with a decay of 1 never moves."""
    for owner in OWNERS:
        path = f"{owner}adam.betas"
        betas = _lookup(config, path)
        if betas and not all(0 <= beta < 1 for beta in betas):
            yield f"--{path} {betas[0]} {betas[1]}: both must be at least 0 and less than 1"
    for path in ("train.ema_beta", *(f"{owner}muon.momentum" for owner in OWNERS)):
        decay = _lookup(config, path)
        if decay is not None and not 0 <= decay < 1:
            yield f"--{path} {decay}: must be at least 0 and less than 1"


def schedules_are_known(config: Any) -> Iterator[str]:
    for owner in OWNERS:
        path = f"{owner}lr_scheduler"
        name = _lookup(config, path)
        if name is None or name in SCHEDULES:
            continue
        if name in MEASURING_SCHEDULES:
            problem = "follows a loss as it is measured, and a run is planned by steps"
        else:
            near = difflib.get_close_matches(name, SCHEDULES, n=1)
            problem = "is not a schedule" + (f"; did you mean {near[0]}?" if near else "")
        yield f"--{path} {name} {problem} (choose from {', '.join(SCHEDULES)})"


def periods_are_positive_or_off(config: Any) -> Iterator[str]:
    for path in ("eval.steps", "ckpt.save_steps"):
        value = _lookup(config, path)
        if value is not None and value != -1 and value < 1:
            yield f"--{path} {value}: give a number of steps, or -1 to switch it off"


def probabilities_fit_datasets(config: Any) -> Iterator[str]:
    for data, probs in (("data.dataset", "data.dataset_probs"), ("data.prompt_dataset", "data.prompt_probs")):
        text = _lookup(config, probs)
        if not text:
            continue
        try:
            numbers = [float(part) for part in split_commas(text)]
        except ValueError:
            yield f"--{probs} {text}: must be numbers separated by commas"
            continue
        count = len(split_commas(_lookup(config, data)))
        if count and len(numbers) != count:
            yield f"--{probs} has {len(numbers)} probabilities for the {count} datasets of --{data}: give one for each"
        if not all(number >= 0 for number in numbers) or not abs(sum(numbers) - 1) <= 1e-6:
            yield f"--{probs} {text}: must be probabilities that add up to 1 (they add up to {sum(numbers):g})"


def clip_range_is_valid(config: RLConfig) -> Iterator[str]:
    low, high = config.actor.clip_range
    if not 0 <= low <= 1 or high < 0:
        flag = "--actor.eps_clip_low_high" if config.actor.eps_clip_low_high else "--actor.eps_clip"
        yield f"{flag}: the ratio is clipped to [1 − {low}, 1 + {high}]; eps must be at least 0, the lower at most 1"


def dual_clip_is_above_one(config: RLConfig) -> Iterator[str]:
    if config.actor.dual_clip is not None and config.actor.dual_clip <= 1:
        yield f"--actor.dual_clip {config.actor.dual_clip}: must be more than 1 (3 is usual)"


def sampling_is_valid(config: RLConfig) -> Iterator[str]:
    if not 0 < config.rollout.top_p <= 1:
        yield f"--rollout.top_p {config.rollout.top_p}: must be more than 0 and at most 1"
    if config.rollout.top_k != -1 and config.rollout.top_k < 1:
        yield f"--rollout.top_k {config.rollout.top_k}: give a number of tokens, or -1 for all"
    if not all(config.rollout.stop or (True,)):
        yield "--rollout.stop: an empty text would end every response at once: leave it out"


def template_arguments_are_an_object(config: Any) -> Iterator[str]:
    given = getattr(getattr(config, "data", None), "chat_template_kwargs", None)
    if given is None:
        return
    try:
        arguments = json.loads(given)
    except ValueError as error:
        arguments = error
    if not isinstance(arguments, dict):
        yield f"--data.chat_template_kwargs {given}: must be a JSON object such as '{{\"enable_thinking\": false}}'"
    elif taken := sorted(
        {"conversation", "messages", "tokenize", "chat_template", "add_generation_prompt"} & {*arguments}
    ):
        yield f"--data.chat_template_kwargs: {', '.join(taken)} is given by the run itself: leave it out"


def reward_clip_is_ordered(config: RLConfig) -> Iterator[str]:
    low, high = config.reward.clip_range
    if low >= high:
        yield f"--reward.clip_range {low} {high}: the first must be less than the second"


def reward_addresses_are_usable(config: RLConfig) -> Iterator[str]:
    for name in config.reward.urls:
        if is_python_file(name):
            continue
        try:
            url = urlsplit(name)
            usable = url.scheme in ("http", "https") and url.hostname and (url.port is None or url.port > 0)
        except ValueError:  # a port that is no number
            usable = False
            url = urlsplit("")
        if url.username is not None or url.password is not None:
            yield "--reward.remote_url: a URL is stored and shown, so put no password in it: use --reward.api_key"
        elif not usable:
            yield f"--reward.remote_url {name} is neither a .py file nor a URL such as http://host:5000/get_reward"


def api_key_is_a_key(config: ServeRMConfig) -> Iterator[str]:
    """--api_key "$KEY" without a KEY is meant to lock the door, not to open it."""
    if config.api_key is not None and not config.api_key.strip():
        yield "--api_key is empty: give a key, or leave the flag out"
    elif config.api_key is not None and not config.api_key.isascii():
        yield "--api_key has letters that no HTTP header can carry: use ASCII"


def correction_thresholds_are_ordered(config: RLConfig) -> Iterator[str]:
    low, high = config.algo.advantage.is_correction_threshold
    if not 0 <= low < high:
        yield f"--algo.advantage.is_correction_threshold {low} {high}: must be 0 <= first < second"

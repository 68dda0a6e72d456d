"""Cross-flag rules. Each is a small generator of messages that name the flags and the remedy.

Three lists per command: what contradicts itself (`check`, when parsing), what a run still needs (`require_runnable`,
before a run, so that `--print_config` works without it), and what a user may be surprised by (`notes`).
"""

from collections.abc import Callable, Iterator
from typing import Any

from openrlhf.config.errors import ConfigError
from openrlhf.config.models import split_commas
from openrlhf.config.roots import (
    Config,
    DPOConfig,
    LoraCombinerConfig,
    RLConfig,
    RMConfig,
    ServeRMConfig,
    SFTConfig,
)
from openrlhf.config.schema import value_at

Rule = Callable[[Any], Iterator[str]]

# ---------------------------------------------------------------------------------------------- every command

POSITIVE = (
    "train.batch_size",
    "train.micro_batch_size",
    "train.max_epochs",
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
    "max_steps",
)

# name -> (low, high), both allowed
RANGES: dict[str, tuple[float, float]] = {
    "algo.advantage.lambd": (0, 1),
    "algo.advantage.gamma": (0, 1),
    "algo.kl.init_coef": (0, float("inf")),
    "train.ema_beta": (0, 1),
    "vllm.gpu_memory_utilization": (0.01, 1),
    "vllm.num_engines": (0, float("inf")),
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
    "port": (0, 65535),
}

OPTIMIZER_RANGES: dict[str, tuple[float, float]] = {
    "adam.lr": (0, float("inf")),
    "adam.eps": (0, float("inf")),
    "adam.weight_decay": (0, float("inf")),
    "muon.lr": (0, float("inf")),
    "muon.momentum": (0, 1),
    "muon.ns_steps": (1, float("inf")),
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
    owners = ("", "actor.", "critic.")
    ranges = RANGES | {owner + name: bounds for owner in owners for name, bounds in OPTIMIZER_RANGES.items()}
    for path, (low, high) in ranges.items():
        value = _lookup(config, path)
        if value is not None and not low <= value <= high:
            bounds = f"at least {low}" if high == float("inf") else f"from {low} to {high}"
            yield f"--{path} {value}: must be {bounds}"


def betas_are_below_one(config: Any) -> Iterator[str]:
    for path in ("adam.betas", "actor.adam.betas", "critic.adam.betas"):
        betas = _lookup(config, path)
        if betas and not all(0 <= beta < 1 for beta in betas):
            yield f"--{path} {betas[0]} {betas[1]}: both must be at least 0 and less than 1"


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
        if any(number < 0 for number in numbers) or abs(sum(numbers) - 1) > 1e-6:
            yield f"--{probs} {text}: must be probabilities that add up to 1 (they add up to {sum(numbers):g})"


# ------------------------------------------------------------------------------------------------------- SFT


def multiturn_needs_a_chat_template(config: SFTConfig) -> Iterator[str]:
    if config.data.multiturn and not config.data.apply_chat_template:
        yield "--data.multiturn finds turns by the chat template: add --data.apply_chat_template"


# -------------------------------------------------------------------------------------------------------- RL


def group_estimators_need_samples(config: RLConfig) -> Iterator[str]:
    if config.uses_group_baseline and config.samples_per_prompt == 1:
        yield (
            f"--algo.advantage.estimator {config.algo.advantage.estimator} compares the samples of a prompt: "
            "--rollout.n_samples_per_prompt must be more than 1 (leave it out for 8)"
        )


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


def reward_clip_is_ordered(config: RLConfig) -> Iterator[str]:
    low, high = config.reward.clip_range
    if low >= high:
        yield f"--reward.clip_range {low} {high}: the first must be less than the second"


def correction_thresholds_are_ordered(config: RLConfig) -> Iterator[str]:
    low, high = config.algo.advantage.is_correction_threshold
    if not 0 <= low < high:
        yield f"--algo.advantage.is_correction_threshold {low} {high}: must be 0 <= first < second"


def filtering_is_possible(config: RLConfig) -> Iterator[str]:
    if not config.algo.dynamic_filtering_enable:
        return
    low, high = config.algo.dynamic_filtering_range
    if low >= high:
        yield f"--algo.dynamic_filtering_range {low} {high}: the first must be less than the second"
    if config.samples_per_prompt < 2:
        yield (
            "--algo.dynamic_filtering_enable judges the samples of a prompt: "
            "--rollout.n_samples_per_prompt must be more than 1"
        )


def responses_leave_room_for_prompts(config: RLConfig) -> Iterator[str]:
    new, total = config.rollout.max_new_tokens, config.data.max_len
    if new is not None and new >= total:
        yield (
            f"--rollout.max_new_tokens {new} leaves no room for a prompt in --data.max_len {total}: "
            "data.max_len counts prompt and response together"
        )


def overlong_buffer_fits(config: RLConfig) -> Iterator[str]:
    buffer = config.reward.overlong_buffer_len
    if buffer is not None and buffer > config.response_limit:
        limit = "--rollout.max_new_tokens" if config.rollout.max_new_tokens else "--data.max_len"
        yield (
            f"--reward.overlong_buffer_len {buffer:g} is longer than a response can be "
            f"({limit} {config.response_limit}): make it shorter"
        )


def vision_has_no_critic(config: RLConfig) -> Iterator[str]:
    if config.data.max_images_per_prompt > 0 and config.uses_critic:
        yield (
            "--data.max_images_per_prompt > 0 works without a critic only: "
            "choose another --algo.advantage.estimator than gae"
        )


def one_kind_of_reward(config: RLConfig) -> Iterator[str]:
    urls = config.reward.urls
    if len(urls) > 1 and any(url.endswith(".py") for url in urls):
        yield "--reward.remote_url takes several URLs or one .py file: call the others from your reward_func"


def reward_weights_match(config: RLConfig) -> Iterator[str]:
    weights = config.reward.weights
    count = len(config.reward.urls or config.reward.model_paths)
    if weights is not None and count and len(weights) != count:
        yield f"--reward.weights has {len(weights)} values for {count} rewards: give one for each"


def async_modes_agree(config: RLConfig) -> Iterator[str]:
    train = config.train
    if train.partial_rollout_enable and not train.async_enable:
        yield "--train.partial_rollout_enable changes weights while generating: add --train.async_enable"
    if train.async_enable and config.vllm.enable_sleep:
        yield "--vllm.enable_sleep would stop the generation that --train.async_enable keeps running: drop one of them"
    wanted = config.rollout.vllm_generate_batch_size
    if wanted is not None and wanted > config.rollout.batch_size and not train.async_enable:
        yield (
            f"--rollout.vllm_generate_batch_size {wanted} is more than --rollout.batch_size "
            f"{config.rollout.batch_size}: add --train.async_enable, or make it smaller"
        )


def groups_have_workers(config: RLConfig) -> Iterator[str]:
    """Zero-sized groups are fine where nobody needs them, or where `colocate_all` gives them the actor's devices."""
    for name, needed in _groups(config).items():
        group = getattr(config, name)
        for field in ("num_nodes", "num_gpus_per_node"):
            value = getattr(group, field)
            if value is None:
                continue
            if value < 0:
                yield f"--{name}.{field} {value}: must not be negative"
            elif value == 0 and needed and (name == "actor" or not config.train.colocate_all):
                remedy = "" if name == "actor" else ", or share the actor's devices with --train.colocate_all"
                yield f"--{name}.{field} 0: this run needs a {name} model; give it workers{remedy}"


def shared_devices_agree(config: RLConfig) -> Iterator[str]:
    """Who shares devices must have as many of them. Sizes left to the machine agree by construction."""
    if config.train.launcher == "local":
        return
    needed = _groups(config)
    actor = config.actor.world_size
    if config.train.colocate_all:
        for name in (name for name in needed if needed[name] and name != "actor"):
            size = getattr(config, name).world_size
            if actor is not None and size is not None and size > actor:
                yield (
                    f"--train.colocate_all puts the {name} model on the actor's {actor} devices, but "
                    f"--{name}.num_nodes × --{name}.num_gpus_per_node is {size}: make it {actor} or less"
                )
        engines, tp = config.vllm.num_engines, config.vllm.tensor_parallel_size
        if actor is not None and engines and not config.train.async_enable and engines * tp != actor:
            yield (
                f"--train.colocate_all: --vllm.num_engines {engines} × --vllm.tensor_parallel_size {tp} must equal "
                f"the actor's {actor} devices (--actor.num_nodes × --actor.num_gpus_per_node)"
            )
        return
    for flag, first, second in (("colocate_actor_ref", "actor", "ref"), ("colocate_critic_reward", "critic", "reward")):
        sizes = [(getattr(config, name).num_nodes, getattr(config, name).num_gpus_per_node) for name in (first, second)]
        known = all(gpus is not None for _, gpus in sizes)
        if getattr(config.train, flag) and needed[first] and needed[second] and known and sizes[0] != sizes[1]:
            yield (
                f"--train.{flag}: {first} and {second} need the same num_nodes and num_gpus_per_node, "
                f"not {sizes[0][0]} × {sizes[0][1]} and {sizes[1][0]} × {sizes[1][1]}"
            )


def every_worker_scores_something(config: RLConfig) -> Iterator[str]:
    world = config.actor.world_size
    if world is None or config.train.launcher == "local":
        return
    share = config.ds.ring_attn_size * config.ds.tensor_parallel_size
    workers = world // share
    if world and world % share:
        yield (
            f"--ds.ring_attn_size × --ds.tensor_parallel_size is {share}, which does not divide the actor's {world} "
            "workers (--actor.num_nodes × --actor.num_gpus_per_node)"
        )
    elif config.samples_per_round // config.rollout.micro_batch_size < workers:
        yield (
            f"--rollout.batch_size {config.rollout.batch_size} × {config.samples_per_prompt} samples give fewer "
            f"micro-batches of --rollout.micro_batch_size {config.rollout.micro_batch_size} than there are actor "
            f"workers ({workers}): make the batch larger or the micro-batch smaller"
        )


def _groups(config: RLConfig) -> dict[str, bool]:
    """Worker groups, and whether this run creates them."""
    return {
        "actor": True,
        "critic": config.uses_critic,
        "ref": config.uses_reference,
        "reward": config.reward_source == "model",
    }


# ------------------------------------------------------------------------------------------ what a run needs


def model_is_named(config: Any) -> Iterator[str]:
    for path in ("actor.model_name_or_path", "model.model_name_or_path"):
        section = path.partition(".")[0]
        if hasattr(config, section) and not value_at(config, path):
            yield f"--{path} is missing: the model to train, a Hugging Face name or a folder"


def data_is_named(config: Any) -> Iterator[str]:
    path = "data.prompt_dataset" if isinstance(config, RLConfig) else "data.dataset"
    if not value_at(config, path):
        yield f"--{path} is missing: a dataset name, folder or file"


def rewards_come_from_somewhere(config: RLConfig) -> Iterator[str]:
    if config.reward_source is None:
        yield (
            "no reward: give --reward.remote_url (a .py file with reward_func, or URLs), --train.agent_func_path or "
            "--reward.model_name_or_path"
        )
    if config.reward_source in (None, "model"):
        if config.eval.dataset:
            yield "--eval.dataset needs rewards from --reward.remote_url or --train.agent_func_path"
        if config.algo.dynamic_filtering_enable:
            yield (
                "--algo.dynamic_filtering_enable needs rewards from --reward.remote_url or --train.agent_func_path, "
                "before a reward model runs"
            )


def optimizer_batch_fits_the_round(config: RLConfig) -> Iterator[str]:
    if config.train.batch_size > config.samples_per_round:
        yield (
            f"--train.batch_size {config.train.batch_size} is more than a round has: --rollout.batch_size "
            f"{config.rollout.batch_size} × --rollout.n_samples_per_prompt {config.samples_per_prompt} = "
            f"{config.samples_per_round} samples. Make it {config.samples_per_round} or less"
        )


def reward_model_is_named(config: ServeRMConfig) -> Iterator[str]:
    if not config.reward.model_name_or_path:
        yield "--reward.model_name_or_path is missing: the reward model to serve"


def merge_paths_are_named(config: LoraCombinerConfig) -> Iterator[str]:
    for path in ("model_path", "lora_path", "output_path"):
        if not value_at(config, path):
            yield f"--{path} is missing"


# --------------------------------------------------------------------------------------------------- notes


def template_is_not_used(config: Any) -> Iterator[str]:
    template = config.data.input_template
    if template is None:
        return
    if "{}" not in template:
        yield "--data.input_template has no {} for the prompt: it is not used"
    elif "\\n" in template:
        yield "--data.input_template contains a backslash and an n, not a line break: write $'…\\n…' in the shell"


def gamma_is_one(config: RLConfig) -> Iterator[str]:
    gamma = config.algo.advantage.gamma
    if config.uses_group_baseline and gamma != 1:
        yield f"--algo.advantage.gamma {gamma} is not used: {config.algo.advantage.estimator} has no discount"


def kl_estimator_fits_its_use(config: RLConfig) -> Iterator[str]:
    kl = config.algo.kl
    if not config.uses_reference:
        return
    if kl.use_loss and kl.estimator == "k1":
        yield "--algo.kl.estimator k1 has the wrong gradient as a loss: k2 or k3 is recommended with --algo.kl.use_loss"
    if not kl.use_loss and kl.estimator != "k1":
        yield f"--algo.kl.estimator {kl.estimator} is biased as a reward: k1 is recommended without --algo.kl.use_loss"


def agent_replaces_remote_reward(config: RLConfig) -> Iterator[str]:
    if config.train.agent_func_path and config.reward.remote_url:
        yield "--reward.remote_url is not used: the agent of --train.agent_func_path gives the rewards"


def engines_stay_awake(config: RLConfig) -> Iterator[str]:
    if config.vllm.enable_sleep and not config.train.colocate_all:
        yield "--vllm.enable_sleep is not used: without --train.colocate_all engines have devices of their own"


def async_engines_have_own_devices(config: RLConfig) -> Iterator[str]:
    if config.train.async_enable and config.train.colocate_all and not config.train.async_share_device:
        yield (
            "--train.colocate_all with --train.async_enable: the models share devices, the engines have their own "
            "(on a single device add --train.async_share_device)"
        )


def critic_is_not_used(config: RLConfig) -> Iterator[str]:
    if config.critic.model_name_or_path and not config.uses_critic:
        estimator = config.algo.advantage.estimator
        yield f"--critic.model_name_or_path is not used: --algo.advantage.estimator {estimator} has no critic"


def local_launcher_is_one_process(config: RLConfig) -> Iterator[str]:
    world = config.actor.world_size
    launcher = config.train.launcher
    if launcher != "ray" and world is not None and world > 1:
        yield (
            f"--train.launcher {launcher} is one process on this machine: the actor's {world} workers "
            "(--actor.num_nodes × --actor.num_gpus_per_node) become 1"
        )


# --------------------------------------------------------------------------------------------------- lists

COMMON_RULES: tuple[Rule, ...] = (
    sizes_are_positive,
    numbers_are_in_range,
    betas_are_below_one,
    periods_are_positive_or_off,
    probabilities_fit_datasets,
)
RULES: dict[type, tuple[Rule, ...]] = {
    SFTConfig: (multiturn_needs_a_chat_template,),
    RLConfig: (
        group_estimators_need_samples,
        clip_range_is_valid,
        dual_clip_is_above_one,
        sampling_is_valid,
        reward_clip_is_ordered,
        correction_thresholds_are_ordered,
        filtering_is_possible,
        responses_leave_room_for_prompts,
        overlong_buffer_fits,
        vision_has_no_critic,
        one_kind_of_reward,
        reward_weights_match,
        async_modes_agree,
        groups_have_workers,
        shared_devices_agree,
        every_worker_scores_something,
    ),
}
NEEDS: dict[type, tuple[Rule, ...]] = {
    SFTConfig: (model_is_named, data_is_named),
    RMConfig: (model_is_named, data_is_named),
    DPOConfig: (model_is_named, data_is_named),
    RLConfig: (model_is_named, data_is_named, rewards_come_from_somewhere, optimizer_batch_fits_the_round),
    ServeRMConfig: (reward_model_is_named,),
    LoraCombinerConfig: (merge_paths_are_named,),
}
NOTES: dict[type, tuple[Rule, ...]] = {
    SFTConfig: (template_is_not_used,),
    RMConfig: (template_is_not_used,),
    DPOConfig: (template_is_not_used,),
    RLConfig: (
        template_is_not_used,
        gamma_is_one,
        kl_estimator_fits_its_use,
        agent_replaces_remote_reward,
        engines_stay_awake,
        async_engines_have_own_devices,
        critic_is_not_used,
        local_launcher_is_one_process,
    ),
}


def check(config: Config) -> None:
    """Raise `ConfigError` with every contradiction in the configuration."""
    _refuse(config, (*COMMON_RULES, *RULES.get(type(config), ())))


def require_runnable(config: Config) -> None:
    """Raise `ConfigError` with everything a run of this configuration still needs."""
    _refuse(config, NEEDS[type(config)])


def notes(config: Config) -> Iterator[str]:
    """What the user wrote and this run will not do as written, one line each."""
    for rule in NOTES.get(type(config), ()):
        yield from rule(config)


def _refuse(config: Config, rules: tuple[Rule, ...]) -> None:
    problems = [message for rule in rules for message in rule(config)]
    if problems:
        raise ConfigError("\n".join(problems))

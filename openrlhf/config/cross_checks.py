"""Flags that contradict each other. Each rule yields messages that name the flags and the remedy."""

from collections.abc import Iterator

from openrlhf.algorithms.losses import POLICY_LOSSES
from openrlhf.config.commands import DPOConfig, RLConfig, RMConfig, SFTConfig


def balanced_routers_are_seen(config: SFTConfig | RMConfig | DPOConfig | RLConfig) -> Iterator[str]:
    name = "actor" if isinstance(config, RLConfig) else "model"
    trained = config.actor if isinstance(config, RLConfig) else config.model
    hidden = trained.gradient_checkpointing_enable and trained.gradient_checkpointing_reentrant
    if trained.aux_loss_coef and hidden:
        yield (
            f"--{name}.aux_loss_coef has no gradient through --{name}.gradient_checkpointing_reentrant: leave one of "
            "them out"
        )


def multiturn_needs_a_chat_template(config: SFTConfig) -> Iterator[str]:
    if config.data.multiturn and not config.data.apply_chat_template:
        yield "--data.multiturn finds turns by the chat template: add --data.apply_chat_template"


def pair_options_have_pairs(config: DPOConfig) -> Iterator[str]:
    model = config.model
    of_pairs = {
        "--model.ipo_enable": model.ipo_enable,
        "--model.label_smoothing": model.label_smoothing > 0,
        "--model.nll_loss_coef": model.nll_loss_coef > 0,
    }
    if model.loss_type == "kto":
        for flag, given in of_pairs.items():
            if given:
                yield f"{flag} is about pairs, and --model.loss_type kto has single answers: leave one of them out"


def group_estimators_need_samples(config: RLConfig) -> Iterator[str]:
    if config.uses_group_baseline and config.samples_per_prompt == 1:
        yield (
            f"--algo.advantage.estimator {config.algo.advantage.estimator} compares the samples of a prompt: "
            "--rollout.n_samples_per_prompt must be more than 1 (leave it out for 8)"
        )


def dual_clip_has_a_ratio_to_bound(config: RLConfig) -> Iterator[str]:
    loss = config.actor.policy_loss_type
    if config.actor.dual_clip is not None and not POLICY_LOSSES[loss].takes_dual_clip:
        takers = ", ".join(name for name, entry in POLICY_LOSSES.items() if entry.takes_dual_clip)
        yield (
            f"--actor.dual_clip bounds the token ratio of --actor.policy_loss_type {takers}; {loss} has none: "
            "leave one of them out"
        )


def stalls_outlast_users_code(config: RLConfig) -> Iterator[str]:
    """Nothing else may be going on while the last episode of a round is in a step."""
    allowed = {
        "--rollout.step_timeout": config.rollout.step_timeout if config.train.agent_func_path else 0.0,
        "--reward.timeout": config.reward.timeout if config.reward.remote_url else 0.0,
    }
    for flag, seconds in allowed.items():
        if 0 < config.train.stall_timeout <= seconds:
            yield (
                f"--train.stall_timeout {config.train.stall_timeout:g} would end a run in which users' code takes no "
                f"longer than {flag} {seconds:g} allows: raise the first above the second, or lower the second"
            )


def kl_target_has_a_coefficient(config: RLConfig) -> Iterator[str]:
    if config.algo.kl.target is not None and not config.uses_reference:
        yield (
            "--algo.kl.target adapts the coefficient from where it starts, and no factor leads away from 0: "
            "give --algo.kl.init_coef a value above 0"
        )


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


def surplus_prompts_have_a_use(config: RLConfig) -> Iterator[str]:
    size, wanted = config.rollout.batch_size, config.generate_batch_size
    if wanted > size and not config.algo.dynamic_filtering_enable and not config.plays_across_rounds:
        yield (
            f"--rollout.vllm_generate_batch_size {wanted} is more than --rollout.batch_size {size}: nothing would "
            "use the rest without --algo.dynamic_filtering_enable, --train.async_enable or --rollout.abort_stragglers; "
            "add one, or make it smaller"
        )


def stragglers_have_company(config: RLConfig) -> Iterator[str]:
    if not config.rollout.abort_stragglers:
        return
    if config.train.async_enable:
        yield "--rollout.abort_stragglers is for rounds one after the other: with --train.async_enable drop it"
    elif config.generate_batch_size <= config.rollout.batch_size:
        yield (
            "--rollout.abort_stragglers needs more prompts in play than a round trains on: make "
            f"--rollout.vllm_generate_batch_size more than --rollout.batch_size {config.rollout.batch_size}"
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


def reward_weights_match(config: RLConfig) -> Iterator[str]:
    reward = config.reward
    if reward.weights is None:
        return
    count = len(reward.sources)
    if count and len(reward.weights) != count:
        where = "--reward.remote_url" if reward.urls else "--reward.model_name_or_path"
        yield f"--reward.weights has {len(reward.weights)} values for the {count} of {where}: give one for each"
    if not any(reward.weights):
        yield "--reward.weights: with all weights 0 there is nothing to learn"


def async_modes_agree(config: RLConfig) -> Iterator[str]:
    train = config.train
    if train.partial_rollout_enable and not train.async_enable:
        yield "--train.partial_rollout_enable changes weights while generating: add --train.async_enable"
    if train.async_enable and config.vllm.enable_sleep:
        yield "--vllm.enable_sleep would stop the generation that --train.async_enable keeps running: drop one of them"


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
        engines, parts = config.vllm.num_engines, config.vllm.devices_per_engine
        if actor is not None and engines and not config.train.async_enable and engines * parts != actor:
            yield (
                f"--train.colocate_all: --vllm.num_engines {engines} × {config.vllm.size_in_flags} must equal "
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


def a_local_run_has_one_engine(config: RLConfig) -> Iterator[str]:
    engines = config.vllm.num_engines
    if config.train.launcher == "local" and engines is not None and engines > 1:
        yield (
            f"--vllm.num_engines {engines}: a run with --train.launcher local has one engine; give 1, or use "
            "--train.launcher ray"
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
        "reward": config.uses_reward_model,
    }

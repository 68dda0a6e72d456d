"""Rules between flags, each a small generator of messages that name the flags and say what to do.

A decorator says what becomes of the messages; the annotation of `config` says for which commands the rule holds:

- `contradiction`: refused when the configuration is parsed (`check`).
- `requirement`: refused before a run (`require_runnable`), so that `--print_config` works without it.
- `note`: the user is told, and the run goes on (`notes_on`).

Bounds of single values stand on their fields (`Flag.above`, `Flag.within` …).
"""

import difflib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar
from urllib.parse import urlsplit

from openrlhf.algorithms.advantages import ESTIMATORS
from openrlhf.algorithms.kl import KL_ESTIMATORS
from openrlhf.algorithms.losses import POLICY_LOSSES
from openrlhf.algorithms.preferences import PAIR_LOSSES
from openrlhf.config.backend import undivided_group
from openrlhf.config.commands import (
    Config,
    DPOConfig,
    LoraCombinerConfig,
    RLConfig,
    ServeRMConfig,
    SFTConfig,
    TrainerConfig,
)
from openrlhf.config.effects import flags_without_effect
from openrlhf.config.fields import ConfigError
from openrlhf.config.models import is_python_file, split_commas
from openrlhf.config.schema import command_of, flags_of, value_at
from openrlhf.config.training import MEASURING_SCHEDULES, SCHEDULES
from openrlhf.worlds.base import WorldError, parse_options, parse_tasks

Rule = Callable[[Any], Iterator[str]]
T = TypeVar("T")

CONTRADICTIONS: list[Rule] = []
REQUIREMENTS: list[Rule] = []
NOTES: list[Rule] = []


def contradiction(rule: Rule) -> Rule:
    CONTRADICTIONS.append(rule)
    return rule


def requirement(rule: Rule) -> Rule:
    REQUIREMENTS.append(rule)
    return rule


def note(rule: Rule) -> Rule:
    NOTES.append(rule)
    return rule


def check(config: Config) -> None:
    """Raise `ConfigError` with every contradiction in the configuration."""
    _refuse(_messages(CONTRADICTIONS, config))


def require_runnable(config: Config) -> None:
    """Raise `ConfigError` with everything a run of this configuration still needs."""
    _refuse(_messages(REQUIREMENTS, config))


def required(value: T | None) -> T:
    """The value of a flag that a requirement or another flag asks for: a run that has begun has it."""
    assert value is not None
    return value


def notes_on(config: Config, given: Sequence[tuple[str, ...]] = ()) -> Iterator[str]:
    """What the user wrote and this run will not do as written, one line each.

    `given`: the flags that each of the user's settings set.
    """
    yield from _messages(NOTES, config)
    yield from flags_without_effect(config, given)


def _messages(rules: Sequence[Rule], config: Config) -> Iterator[str]:
    """Those of the rules that hold for this command."""
    for rule in rules:
        if isinstance(config, rule.__annotations__["config"]):
            yield from rule(config)


def _refuse(messages: Iterator[str]) -> None:
    if problems := list(messages):
        raise ConfigError("\n".join(problems))


# ------------------------------------------------------------------------ contradictions: values no run could use


@contradiction
def values_are_within_bounds(config: Config) -> Iterator[str]:
    for path, spec in flags_of(command_of(config)).items():
        value = value_at(config, path)
        values = value if isinstance(value, tuple) else (value,)
        if spec.flag.bounds and value is not None and not all(map(spec.flag.is_within_bounds, values)):
            shown, both = " ".join(map(str, values)), "both " if isinstance(value, tuple) else ""
            yield f"--{path} {shown}: {both}must be {spec.flag.bounds}"


@contradiction
def schedules_are_known(config: TrainerConfig) -> Iterator[str]:
    for path in ("lr_scheduler", "actor.lr_scheduler", "critic.lr_scheduler"):
        name = _value_or_none(config, path)
        if name is None or name in SCHEDULES:
            continue
        if name in MEASURING_SCHEDULES:
            problem = "follows a loss as it is measured, and a run is planned by steps"
        else:
            near = difflib.get_close_matches(name, SCHEDULES, n=1)
            problem = "is not a schedule" + (f"; did you mean {near[0]}?" if near else "")
        yield f"--{path} {name} {problem} (choose from {', '.join(SCHEDULES)})"


@contradiction
def periods_are_positive_or_off(config: TrainerConfig) -> Iterator[str]:
    for path in ("eval.steps", "ckpt.save_steps"):
        value = _value_or_none(config, path)
        if value is not None and value != -1 and value < 1:
            yield f"--{path} {value}: give a number of steps, or -1 to switch it off"


@contradiction
def probabilities_fit_datasets(config: TrainerConfig) -> Iterator[str]:
    for data, probs in (("data.dataset", "data.dataset_probs"), ("data.prompt_dataset", "data.prompt_probs")):
        text = _value_or_none(config, probs)
        if not text:
            continue
        try:
            numbers = [float(part) for part in split_commas(text)]
        except ValueError:
            yield f"--{probs} {text}: must be numbers separated by commas"
            continue
        count = len(split_commas(_value_or_none(config, data)))
        if count and len(numbers) != count:
            yield f"--{probs} has {len(numbers)} probabilities for the {count} datasets of --{data}: give one for each"
        if not all(number >= 0 for number in numbers) or not abs(sum(numbers) - 1) <= 1e-6:
            yield f"--{probs} {text}: must be probabilities that add up to 1 (they add up to {sum(numbers):g})"


@contradiction
def clip_range_is_valid(config: RLConfig) -> Iterator[str]:
    low, high = config.actor.clip_range
    if not 0 <= low <= 1 or high < 0:
        flag = "--actor.eps_clip_low_high" if config.actor.eps_clip_low_high else "--actor.eps_clip"
        yield f"{flag}: the ratio is clipped to [1 − {low}, 1 + {high}]; eps must be at least 0, the lower at most 1"


@contradiction
def dual_clip_is_above_one(config: RLConfig) -> Iterator[str]:
    if config.actor.dual_clip is not None and config.actor.dual_clip <= 1:
        yield f"--actor.dual_clip {config.actor.dual_clip}: must be more than 1 (3 is usual)"


@contradiction
def sampling_is_valid(config: RLConfig) -> Iterator[str]:
    if not 0 < config.rollout.top_p <= 1:
        yield f"--rollout.top_p {config.rollout.top_p}: must be more than 0 and at most 1"
    if config.rollout.top_k != -1 and config.rollout.top_k < 1:
        yield f"--rollout.top_k {config.rollout.top_k}: give a number of tokens, or -1 for all"
    mask = config.algo.sampling_mask
    if mask and mask < config.rollout.top_k and config.rollout.top_p == 1:
        yield (
            f"--algo.sampling_mask {mask} is less than --rollout.top_k {config.rollout.top_k}: no softmax would be "
            f"over what was sampled from; give {config.rollout.top_k} or more, or 0 for the whole vocabulary"
        )
    if not all(config.rollout.stop or (True,)):
        yield "--rollout.stop: an empty text would end every response at once: leave it out"


@contradiction
def curriculum_range_is_ordered(config: RLConfig) -> Iterator[str]:
    low, high = config.data.curriculum_score_range
    if low >= high:
        yield f"--data.curriculum_score_range {low:g} {high:g}: the first must be less than the second"


@contradiction
def template_arguments_are_an_object(config: Config) -> Iterator[str]:
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


@contradiction
def reward_clip_is_ordered(config: RLConfig) -> Iterator[str]:
    low, high = config.reward.clip_range
    if low >= high:
        yield f"--reward.clip_range {low} {high}: the first must be less than the second"


@contradiction
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


@contradiction
def api_key_is_a_key(config: ServeRMConfig) -> Iterator[str]:
    """--api_key "$KEY" without a KEY is meant to lock the door, not to open it."""
    if config.api_key is not None and not config.api_key.strip():
        yield "--api_key is empty: give a key, or leave the flag out"
    elif config.api_key is not None and not config.api_key.isascii():
        yield "--api_key has letters that no HTTP header can carry: use ASCII"


@contradiction
def correction_thresholds_are_ordered(config: RLConfig) -> Iterator[str]:
    low, high = config.algo.advantage.is_correction_threshold
    if not 0 <= low < high:
        yield f"--algo.advantage.is_correction_threshold {low} {high}: must be 0 <= first < second"


def _value_or_none(config: Any, path: str) -> Any:
    """The value at `path`, None where the command has no such flag."""
    try:
        return value_at(config, path)
    except AttributeError:
        return None


# --------------------------------------------------------------- contradictions: flags that exclude each other


@contradiction
def gradients_are_summed_in_fp32_or_as_weights_are(config: TrainerConfig) -> Iterator[str]:
    """Sums of another 16-bit dtype would lose range or bits twice, and fp16 needs the loss scale of fp16 weights."""
    sums, weights = config.ds.grad_accum_dtype, config.ds.param_dtype
    if sums == "fp16" and weights != "fp16":
        yield (
            "--ds.grad_accum_dtype fp16 needs --ds.param_dtype fp16, which scales losses: without it small gradients "
            "are 0 in fp16; use bf16 or fp32"
        )
    if sums == "bf16" and weights == "fp16":
        yield "--ds.grad_accum_dtype bf16 does not go with --ds.param_dtype fp16: use fp16 or fp32"


@contradiction
def balanced_routers_are_seen(config: TrainerConfig) -> Iterator[str]:
    name = "actor" if isinstance(config, RLConfig) else "model"
    trained = config.actor if isinstance(config, RLConfig) else config.model
    hidden = trained.gradient_checkpointing_enable and trained.gradient_checkpointing_reentrant
    if trained.aux_loss_coef and hidden:
        yield (
            f"--{name}.aux_loss_coef has no gradient through --{name}.gradient_checkpointing_reentrant: leave one of "
            "them out"
        )


@contradiction
def multiturn_needs_a_chat_template(config: SFTConfig) -> Iterator[str]:
    if config.data.multiturn and not config.data.apply_chat_template:
        yield "--data.multiturn finds turns by the chat template: add --data.apply_chat_template"


@contradiction
def pair_options_have_pairs(config: DPOConfig) -> Iterator[str]:
    model = config.model
    of_pairs = {
        "--model.ipo_enable": model.ipo_enable,
        "--model.label_smoothing": model.label_smoothing > 0,
        "--model.nll_loss_coef": model.nll_loss_coef > 0,
    }
    for flag, given in of_pairs.items() if model.loss_type not in PAIR_LOSSES else ():
        if given:
            yield (
                f"{flag} is about pairs, and --model.loss_type {model.loss_type} has single answers: leave one of "
                "them out"
            )


@contradiction
def group_estimators_need_samples(config: RLConfig) -> Iterator[str]:
    if config.uses_group_baseline and config.samples_per_prompt == 1:
        yield (
            f"--algo.advantage.estimator {config.algo.advantage.estimator} compares the samples of a prompt: "
            "--rollout.n_samples_per_prompt must be more than 1 (leave it out for 8)"
        )


@contradiction
def subsets_are_smaller_than_groups(config: RLConfig) -> Iterator[str]:
    if (
        ESTIMATORS[config.algo.advantage.estimator].takes_k
        and config.algo.advantage.pass_k >= config.samples_per_prompt
    ):
        yield (
            f"--algo.advantage.pass_k {config.algo.advantage.pass_k}: subsets are compared with each other, so they "
            f"must be smaller than a group (--rollout.n_samples_per_prompt {config.samples_per_prompt})"
        )


@contradiction
def compared_turns_can_be_compared(config: RLConfig) -> Iterator[str]:
    advantage = config.algo.advantage
    if advantage.turns not in (None, "outcome") and ESTIMATORS[advantage.estimator].outcome_only:
        yield (
            f"--algo.advantage.turns {advantage.turns}: --algo.advantage.estimator {advantage.estimator} compares "
            "episodes by their totals: leave it out, or choose another estimator"
        )


@contradiction
def dual_clip_has_a_ratio_to_bound(config: RLConfig) -> Iterator[str]:
    loss = config.actor.policy_loss_type
    if config.actor.dual_clip is not None and not POLICY_LOSSES[loss].takes_dual_clip:
        takers = ", ".join(name for name, entry in POLICY_LOSSES.items() if entry.takes_dual_clip)
        yield (
            f"--actor.dual_clip bounds the token ratio of --actor.policy_loss_type {takers}; {loss} has none: "
            "leave one of them out"
        )


@contradiction
def stalls_outlast_users_code(config: RLConfig) -> Iterator[str]:
    """Nothing else may be going on while the last episode of a round is in a step."""
    allowed = {
        "--rollout.step_timeout": config.rollout.step_timeout if config.plays_agent else 0.0,
        "--world.timeout": config.world.timeout if config.uses_world else 0.0,
        "--reward.timeout": config.reward.timeout if config.reward.remote_url else 0.0,
        "--teacher.timeout": config.teacher.timeout if config.teacher.remote_url else 0.0,
    }
    for flag, seconds in allowed.items():
        if 0 < config.train.stall_timeout <= seconds:
            yield (
                f"--train.stall_timeout {config.train.stall_timeout:g} would end a run in which users' code takes no "
                f"longer than {flag} {seconds:g} allows: raise the first above the second, or lower the second"
            )


@contradiction
def worlds_can_be_asked_for(config: RLConfig) -> Iterator[str]:
    for flag, parse, text in (
        ("--world.tasks", parse_tasks, config.world.tasks),
        ("--world.options", parse_options, config.world.options),
    ):
        try:
            parse(text or "")
        except WorldError as error:
            yield f"{flag}: {str(error).removeprefix(f'{flag} ')}"


@contradiction
def kl_target_has_a_coefficient(config: RLConfig) -> Iterator[str]:
    if config.algo.kl.target is not None and not config.uses_reference:
        yield (
            "--algo.kl.target adapts the coefficient from where it starts, and no factor leads away from 0: "
            "give --algo.kl.init_coef a value above 0"
        )


@contradiction
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


@contradiction
def surplus_prompts_have_a_use(config: RLConfig) -> Iterator[str]:
    size, wanted = config.rollout.batch_size, config.generate_batch_size
    if wanted > size and not config.algo.dynamic_filtering_enable and not config.plays_across_rounds:
        yield (
            f"--rollout.vllm_generate_batch_size {wanted} is more than --rollout.batch_size {size}: nothing would "
            "use the rest without --algo.dynamic_filtering_enable, --train.async_enable or --rollout.abort_stragglers; "
            "add one, or make it smaller"
        )


@contradiction
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


@contradiction
def responses_leave_room_for_prompts(config: RLConfig) -> Iterator[str]:
    new, total = config.rollout.max_new_tokens, config.data.max_len
    if new is not None and new >= total:
        yield (
            f"--rollout.max_new_tokens {new} leaves no room for a prompt in --data.max_len {total}: "
            "data.max_len counts prompt and response together"
        )


@contradiction
def overlong_buffer_fits(config: RLConfig) -> Iterator[str]:
    buffer = config.reward.overlong_buffer_len
    if buffer is not None and buffer > config.response_limit:
        limit = "--rollout.max_new_tokens" if config.rollout.max_new_tokens else "--data.max_len"
        yield (
            f"--reward.overlong_buffer_len {buffer:g} is longer than a response can be "
            f"({limit} {config.response_limit}): make it shorter"
        )


@contradiction
def steps_can_be_judged(config: RLConfig) -> Iterator[str]:
    reward, turns = config.reward, config.algo.advantage.turns
    if reward.steps is None:
        return
    if reward.steps == "separator" and not reward.step_separator:
        yield "--reward.step_separator is empty: give the text that ends a step, or --reward.steps token"
    if turns not in (None, "outcome") and reward.step_total in ("min", "last"):
        yield (
            f"--algo.advantage.turns {turns} compares the rewards of all steps, and --reward.step_total "
            f"{reward.step_total} leaves one of them: add --reward.step_total sum"
        )
    if reward.overlong_buffer_len is not None:
        yield (
            "--reward.overlong_buffer_len is a penalty on the length of a turn, and with --reward.steps each step is "
            "one: leave one of them out"
        )
    if reward.normalize_enable and not reward.step_logits:
        yield "--reward.normalize_enable with --reward.steps: a probability is not normalised; add --reward.step_logits"


@contradiction
def reward_weights_match(config: RLConfig) -> Iterator[str]:
    reward = config.reward
    if reward.weights is None:
        return
    count = len(reward.sources)
    if count and len(reward.weights) != count:
        where = "--reward.remote_url" if reward.urls else "--reward.model_name_or_path"
        yield f"--reward.weights has {len(reward.weights)} values for the {count} of {where}: give one for each"
    if not any(reward.weights) and not config.uses_teacher:
        yield "--reward.weights: with all weights 0 there is nothing to learn"


@contradiction
def there_is_one_teacher(config: RLConfig) -> Iterator[str]:
    teacher = config.teacher
    given = {
        f"--teacher.policy {teacher.policy}": teacher.policy,
        "--teacher.model_name_or_path": teacher.model_name_or_path,
        "--teacher.remote_url": teacher.remote_url,
    }
    named = [flag for flag, value in given.items() if value is not None]
    if len(named) > 1:
        yield f"{' and '.join(named)} are {'three' if named[2:] else 'two'} teachers: give one of them"
    if teacher.policy == "current" and teacher.prompt_key is None:
        yield (
            "--teacher.policy current: a policy that reads what it has read already teaches itself nothing: give "
            "--teacher.prompt_key, or --teacher.policy initial"
        )


@contradiction
def a_served_teacher_can_be_asked(config: RLConfig) -> Iterator[str]:
    """Servers tell the log-probs of a softmax at temperature 1 over all tokens, to whoever asks."""
    teacher, flag = config.teacher, "--teacher.remote_url"
    if teacher.remote_url is None:
        return
    for url in teacher.urls or ("",):
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            yield f"{flag} {url} is no URL such as http://host:8000/v1"
        elif parts.username or parts.password:
            yield f"{flag}: a URL is stored and shown, so put no password in it: use --teacher.api_key"
    if config.rollout.temperature != 1:
        yield f"{flag}: servers tell log-probs at temperature 1: give --rollout.temperature 1"
    if teacher.loss is None and (config.rollout.top_p < 1 or config.rollout.top_k > 0) and config.largest_support:
        yield (
            f"{flag}: servers tell log-probs over all tokens, and those of the policy are of what --rollout.top_p and "
            "--rollout.top_k leave: drop these, or give --teacher.loss or --algo.sampling_mask 0"
        )
    if config.ds.ranks_per_share > 1:
        yield (
            f"{flag}: ranks that compute a sample together would be told different last digits: it needs "
            "--ds.ring_attn_size 1 and --ds.tensor_parallel_size 1"
        )
    if config.data.max_images_per_prompt > 0:
        yield f"{flag}: servers are asked with token ids alone: drop --data.max_images_per_prompt"


@contradiction
def a_teachers_prompt_has_no_images(config: RLConfig) -> Iterator[str]:
    if config.teacher.prompt_key is not None and config.data.max_images_per_prompt > 0:
        yield (
            "--teacher.prompt_key: a prompt of the teacher's own is text alone: drop it, or "
            "--data.max_images_per_prompt"
        )


@contradiction
def async_modes_agree(config: RLConfig) -> Iterator[str]:
    train = config.train
    if train.partial_rollout_enable and not train.async_enable:
        yield "--train.partial_rollout_enable changes weights while generating: add --train.async_enable"
    if train.async_enable and config.vllm.enable_sleep:
        yield "--vllm.enable_sleep would stop the generation that --train.async_enable keeps running: drop one of them"


@contradiction
def rounded_weights_are_of_16_bits(config: RLConfig) -> Iterator[str]:
    kind = config.vllm.quantization
    if kind is not None and config.ds.param_dtype == "fp32":
        yield f"--vllm.quantization {kind} multiplies in 16 bits, and --ds.param_dtype fp32 has 32: use bf16 or fp16"
    if kind is not None and config.vllm.lora_sync == "adapter":
        yield (
            f"--vllm.quantization {kind} rounds an adapter together with its weights: give --vllm.lora_sync merged, or "
            "leave it out"
        )


@contradiction
def exact_runs_have_one_forward(config: RLConfig) -> Iterator[str]:
    """What would change the forward of one side, or the distribution that is sampled from."""
    if not config.rollout.exact:
        return
    others = {
        "--vllm.tensor_parallel_size": config.vllm.tensor_parallel_size > 1,
        "--vllm.pipeline_parallel_size": config.vllm.pipeline_parallel_size > 1,
        "--vllm.quantization": config.vllm.quantization is not None,
        "--vllm.speculation": config.vllm.speculation is not None,
        "--ds.tensor_parallel_size": config.ds.tensor_parallel_size > 1,
        "--ds.ring_attn_size": config.ds.ring_attn_size > 1,
        "--ds.zero_stage 3": config.ds.zero_stage == 3,
        "--ds.deepcompile": config.ds.deepcompile,
        "--ds.lora.rank": bool(config.ds.lora.rank),
        "--rollout.top_p": config.rollout.top_p < 1,
        "--rollout.top_k": config.rollout.top_k > 0,
        "--data.max_images_per_prompt": config.data.max_images_per_prompt > 0,
    }
    if given := [flag for flag, is_given in others.items() if is_given]:
        yield f"--rollout.exact: engines and trainer would compute different things with {', '.join(given)}: drop one"


@contradiction
def drafts_fit_the_run(config: RLConfig) -> Iterator[str]:
    kind = config.vllm.speculation
    if kind is None:
        return
    flag = f"--vllm.speculation {kind}"
    if config.vllm.pipeline_parallel_size > 1:
        yield f"{flag}: drafts need all layers in one stage: drop it, or --vllm.pipeline_parallel_size"
    if config.train.full_determinism_enable:
        yield (
            f"{flag}: which tokens are sampled depends on the drafts, and these on what else is under way: drop it, or "
            "--train.full_determinism_enable"
        )
    if config.algo.router_replay:
        yield f"{flag}: engines that draft tell no routes of experts: drop it, or --algo.router_replay"


@contradiction
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


@contradiction
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


@contradiction
def processes_share_one_device(config: RLConfig) -> Iterator[str]:
    processes, section = config.vllm.processes_per_engine, config.vllm
    if processes > 1 and section.devices_per_engine > 1:
        yield (
            f"--vllm.processes_per_engine {processes} with {section.size_in_flags}: several processes share one "
            "device; give 1, or engines of one device"
        )


@contradiction
def a_local_run_has_one_engine(config: RLConfig) -> Iterator[str]:
    engines = config.vllm.num_engines
    if config.train.launcher == "local" and engines is not None and engines > 1:
        yield (
            f"--vllm.num_engines {engines}: a run with --train.launcher local has one engine; give 1, or use "
            "--train.launcher ray"
        )


@contradiction
def every_worker_scores_something(config: RLConfig) -> Iterator[str]:
    world = config.actor.world_size
    if world is None or config.train.launcher == "local":
        return
    workers = world // config.ds.ranks_per_share
    if config.samples_per_round // config.rollout.micro_batch_size < workers:
        yield (
            f"--rollout.batch_size {config.rollout.batch_size} × {config.samples_per_prompt} samples give fewer "
            f"micro-batches of --rollout.micro_batch_size {config.rollout.micro_batch_size} than there are actor "
            f"workers ({workers}): make the batch larger or the micro-batch smaller"
        )


@contradiction
def shares_divide_every_group(config: RLConfig) -> Iterator[str]:
    """Each group is divided by the same numbers, also one that has devices of its own."""
    size = config.ds.ranks_per_share
    if size == 1:
        return
    if config.train.launcher == "local":
        yield f"{config.ds.share_in_flags}: --train.launcher local is one process; use --train.launcher ray"
        return
    for name, needed in _groups(config).items():
        world = getattr(config, name).world_size
        if needed and world and (error := undivided_group(config.ds.share_in_flags, size, role=name, workers=world)):
            yield error


@contradiction
def four_bit_weights_are_whole(config: TrainerConfig) -> Iterator[str]:
    if config.ds.load_in_4bit and config.ds.tensor_parallel_size > 1:
        yield "--ds.load_in_4bit: weights of 4 bits cannot be cut by --ds.tensor_parallel_size: drop one of them"


def _groups(config: RLConfig) -> dict[str, bool]:
    """Worker groups, and whether this run creates them."""
    return {
        "actor": True,
        "critic": config.uses_critic,
        "ref": config.uses_reference,
        "teacher": config.teacher_path is not None,
        "reward": config.uses_reward_model,
    }


# ------------------------------------------------------------------------------- requirements: what a run needs

ATTENTIONS = (
    "eager",
    "sdpa",
    "flex_attention",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
)


@requirement
def model_is_named(config: TrainerConfig) -> Iterator[str]:
    path = "actor.model_name_or_path" if isinstance(config, RLConfig) else "model.model_name_or_path"
    if not value_at(config, path):
        yield f"--{path} is missing: the model to train, a Hugging Face name or a folder"


@requirement
def data_is_named(config: TrainerConfig) -> Iterator[str]:
    path = "data.prompt_dataset" if isinstance(config, RLConfig) else "data.dataset"
    if not (config.prompt_dataset if isinstance(config, RLConfig) else value_at(config, path)):
        yield f"--{path} is missing: a dataset name, folder or file"


@requirement
def four_bit_weights_have_an_adapter(config: TrainerConfig) -> Iterator[str]:
    if config.ds.load_in_4bit and not config.ds.lora.rank:
        yield "--ds.load_in_4bit: weights of 4 bits cannot be trained: add an adapter (--ds.lora.rank), or leave it out"


@requirement
def universal_checkpoints_are_loaded(config: TrainerConfig) -> Iterator[str]:
    if config.ds.use_universal_ckpt and not config.ckpt.resumes:
        yield "--ds.use_universal_ckpt: reads what a run continues from: add --ckpt.load_enable, or leave it out"


@requirement
def attention_is_known(config: TrainerConfig | ServeRMConfig) -> Iterator[str]:
    """What transformers knows by name, paged or not, or a kernel of the Hub, which is called org/name."""
    name = config.ds.attn_implementation
    if name.removeprefix("paged|") in ATTENTIONS or "/" in name:
        return
    near = difflib.get_close_matches(name, ATTENTIONS, n=1)
    yield (
        f"--ds.attn_implementation {name} is unknown{f'; did you mean {near[0]}?' if near else ''} (choose from "
        f"{', '.join(ATTENTIONS)}, or a kernel of the Hub such as kernels-community/flash-attn2)"
    )


@requirement
def weights_have_a_way(config: RLConfig) -> Iterator[str]:
    backend = config.vllm.sync_backend
    if config.vllm.num_engines != 0 and backend not in ("nccl", "gloo"):
        yield f"--vllm.sync_backend {backend}: give nccl, or gloo for weights that travel by CPU memory"


@requirement
def rewards_come_from_somewhere(config: RLConfig) -> Iterator[str]:
    if config.reward_source is None and not config.uses_teacher:
        yield (
            "no reward: give --reward.remote_url (.py files with reward_func, or URLs), --train.agent_func_path, "
            "--reward.model_name_or_path, or a teacher (--teacher.model_name_or_path, --teacher.policy, "
            "--teacher.remote_url)"
        )
    if config.reward_source is None and config.data.curriculum != "off":
        yield (
            f"--data.curriculum {config.data.curriculum} goes by the scores of samples, and nothing judges them: give "
            "--reward.remote_url (with --reward.weights 0 it only measures), or leave it out"
        )
    if config.reward_source in (None, "model"):
        if config.eval.dataset:
            yield "--eval.dataset needs rewards from --reward.remote_url or --train.agent_func_path"
        if config.algo.dynamic_filtering_enable:
            yield (
                "--algo.dynamic_filtering_enable needs rewards from --reward.remote_url or --train.agent_func_path, "
                "before a reward model runs"
            )


@requirement
def a_teacher_alone_has_no_critic(config: RLConfig) -> Iterator[str]:
    if config.uses_teacher and not config.rewards_a_task and config.uses_critic:
        yield (
            "a teacher alone, without a reward, leaves a critic nothing to learn: give --algo.advantage.estimator "
            "reinforce, or a reward"
        )


@requirement
def optimizer_batch_fits_the_round(config: RLConfig) -> Iterator[str]:
    if config.train.batch_size > config.samples_per_round:
        yield (
            f"--train.batch_size {config.train.batch_size} is more than a round has: --rollout.batch_size "
            f"{config.rollout.batch_size} × --rollout.n_samples_per_prompt {config.samples_per_prompt} = "
            f"{config.samples_per_round} samples. Make it {config.samples_per_round} or less"
        )


@requirement
def reward_model_is_named(config: ServeRMConfig) -> Iterator[str]:
    if not config.reward.model_name_or_path:
        yield "--reward.model_name_or_path is missing: the reward model to serve"


@requirement
def merge_paths_are_named(config: LoraCombinerConfig) -> Iterator[str]:
    for path in ("model_path", "lora_path", "output_path"):
        if not value_at(config, path):
            yield f"--{path} is missing"


# ------------------------------------------------------------- notes: what a run will not do as it is written


@note
def template_is_not_used(config: TrainerConfig) -> Iterator[str]:
    template = config.data.input_template
    if template is None:
        return
    if "{}" not in template:
        yield "--data.input_template has no {} for the prompt: it is not used"
    elif "\\n" in template:
        yield "--data.input_template contains a backslash and an n, not a line break: write $'…\\n…' in the shell"


@note
def raw_text_has_no_template(config: SFTConfig) -> Iterator[str]:
    if config.model.pretrain_mode_enable and config.data.apply_chat_template:
        yield "--data.apply_chat_template is for lists of messages: --model.pretrain_mode_enable learns text as it is"


@note
def stop_text_is_meant(config: RLConfig) -> Iterator[str]:
    if any("\\n" in text for text in config.rollout.stop or ()):
        yield "--rollout.stop contains a backslash and an n, not a line break: write $'…\\n…' in the shell"


@note
def kl_estimator_fits_its_use(config: RLConfig) -> Iterator[str]:
    kl = config.algo.kl
    if not config.uses_reference:
        return
    if KL_ESTIMATORS[kl.estimator].fits_loss != kl.use_loss:
        use, switch = ("a loss", "with") if kl.use_loss else ("a reward", "without")
        fitting = " or ".join(name for name, entry in KL_ESTIMATORS.items() if entry.fits_loss == kl.use_loss)
        yield (
            f"--algo.kl.estimator {kl.estimator} has the wrong gradient as {use}: {fitting} is recommended {switch} "
            "--algo.kl.use_loss"
        )


@note
def rounded_rollouts_are_corrected(config: RLConfig) -> Iterator[str]:
    if not config.rounds_weights:
        return
    why = f"--vllm.quantization {config.vllm.quantization} samples with rounded weights, and others are trained"
    if config.algo.advantage.is_correction_enable is None:
        yield (
            f"--algo.advantage.is_correction_enable ({config.algo.advantage.is_correction_type}) is on because {why}"
        )
    elif not config.corrects_off_policy:
        yield f"--algo.advantage.is_correction_enable is off, and {why}: gradients are biased by the difference"


@note
def agent_replaces_remote_reward(config: RLConfig) -> Iterator[str]:
    if config.train.agent_func_path and config.reward.remote_url:
        yield "--reward.remote_url judges only episodes to which the agent of --train.agent_func_path gives no reward"


@note
def reward_servers_have_a_path(config: RLConfig) -> Iterator[str]:
    for source in config.reward.sources:
        for url in source.names if source.kind == "http" else ():
            if not urlsplit(url).path.strip("/"):
                yield f"--reward.remote_url {url} names no path: {url.rstrip('/')}/get_reward is asked"


@note
def evaluations_beside_training_are_saved(config: RLConfig) -> Iterator[str]:
    measured, saved = config.eval.period, config.ckpt.period
    follows = config.eval.dataset and config.ckpt.best_metric_key != "none"
    if config.train.async_enable and follows and measured and saved and measured % saved:
        yield (
            f"--eval.steps {measured}: evaluations go on beside training, so a checkpoint is written at each as well, "
            "in case it is the best (--ckpt.best_metric_key none leaves these out)"
        )


@note
def async_engines_have_own_devices(config: RLConfig) -> Iterator[str]:
    if config.train.async_enable and config.train.colocate_all and not config.train.async_share_device:
        yield (
            "--train.colocate_all with --train.async_enable: the models share devices, the engines have their own "
            "(on a single device add --train.async_share_device)"
        )


@note
def local_launcher_is_one_process(config: RLConfig) -> Iterator[str]:
    world = config.actor.world_size
    if config.train.launcher == "local" and world is not None and world > 1:
        yield (
            f"--train.launcher local is one process on this machine: the actor's {world} workers "
            "(--actor.num_nodes × --actor.num_gpus_per_node) become 1"
        )


@note
def sums_of_16_bits_cost_precision(config: TrainerConfig) -> Iterator[str]:
    sums = config.ds.grad_accum_dtype
    if sums in ("bf16", "fp16") and config.ds.param_dtype != "fp32":
        lost = {"bf16": 256, "fp16": 2048}[sums]
        yield (
            f"--ds.grad_accum_dtype {sums}: a micro-batch's gradient is lost where it is less than 1/{lost} of the sum "
            "before it; the sum takes 2 bytes per trained parameter during backward instead of 4"
        )


@note
def nothing_to_go_on_from(config: TrainerConfig) -> Iterator[str]:
    if config.ckpt.auto_resume and config.ckpt.period is None:
        yield "--ckpt.auto_resume without --ckpt.save_steps: a checkpoint is written only when a signal stops the run"


@note
def server_is_open(config: ServeRMConfig) -> Iterator[str]:
    if config.api_key is None and config.host not in ("127.0.0.1", "localhost", "::1"):
        yield f"--host {config.host} without --api_key: whoever reaches this machine may ask the reward model"

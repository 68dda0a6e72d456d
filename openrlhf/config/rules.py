"""Which rules hold for which command, and what becomes of their messages.

A rule is a small generator of messages. Contradictions are refused when parsing (`check`), what is missing before a
run (`require_runnable`), so that `--print_config` works without it; the rest is told (`notes_on`).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from openrlhf.config import cross_checks as agreements
from openrlhf.config import limits
from openrlhf.config import required as needs
from openrlhf.config import warnings as notes
from openrlhf.config.commands import (
    Config,
    DPOConfig,
    LoraCombinerConfig,
    RLConfig,
    RMConfig,
    ServeRMConfig,
    SFTConfig,
)
from openrlhf.config.errors import ConfigError

Rule = Callable[[Any], Iterator[str]]

COMMON_RULES: tuple[Rule, ...] = (
    limits.sizes_are_positive,
    limits.numbers_are_in_range,
    limits.averages_forget,
    limits.schedules_are_known,
    limits.periods_are_positive_or_off,
    limits.probabilities_fit_datasets,
    limits.template_arguments_are_an_object,
)
RULES: dict[type, tuple[Rule, ...]] = {
    SFTConfig: (agreements.balanced_routers_are_seen, agreements.multiturn_needs_a_chat_template),
    RMConfig: (agreements.balanced_routers_are_seen,),
    DPOConfig: (agreements.balanced_routers_are_seen, agreements.pair_options_have_pairs),
    RLConfig: (
        agreements.balanced_routers_are_seen,
        agreements.group_estimators_need_samples,
        limits.clip_range_is_valid,
        limits.dual_clip_is_above_one,
        limits.sampling_is_valid,
        limits.reward_clip_is_ordered,
        limits.reward_addresses_are_usable,
        limits.correction_thresholds_are_ordered,
        agreements.dual_clip_has_a_ratio_to_bound,
        agreements.stalls_outlast_users_code,
        agreements.kl_target_has_a_coefficient,
        agreements.filtering_is_possible,
        agreements.surplus_prompts_have_a_use,
        agreements.responses_leave_room_for_prompts,
        agreements.overlong_buffer_fits,
        agreements.vision_has_no_critic,
        agreements.reward_weights_match,
        agreements.async_modes_agree,
        agreements.stragglers_have_company,
        agreements.groups_have_workers,
        agreements.shared_devices_agree,
        agreements.a_local_run_has_one_engine,
        agreements.every_worker_scores_something,
    ),
    ServeRMConfig: (limits.api_key_is_a_key,),
}
_SUPERVISED_NEEDS = (
    needs.model_is_named,
    needs.data_is_named,
    needs.four_bit_weights_have_an_adapter,
    needs.universal_checkpoints_are_loaded,
    needs.attention_is_known,
)
NEEDS: dict[type, tuple[Rule, ...]] = {
    SFTConfig: _SUPERVISED_NEEDS,
    RMConfig: _SUPERVISED_NEEDS,
    DPOConfig: _SUPERVISED_NEEDS,
    RLConfig: (
        needs.model_is_named,
        needs.data_is_named,
        needs.four_bit_weights_have_an_adapter,
        needs.rewards_come_from_somewhere,
        needs.optimizer_batch_fits_the_round,
        needs.attention_is_known,
        needs.weights_have_a_way,
    ),
    ServeRMConfig: (needs.reward_model_is_named, needs.attention_is_known),
    LoraCombinerConfig: (needs.merge_paths_are_named,),
}
_SUPERVISED_NOTES = (notes.template_is_not_used, notes.nothing_to_go_on_from)
NOTES: dict[type, tuple[Rule, ...]] = {
    SFTConfig: (*_SUPERVISED_NOTES, notes.raw_text_has_no_template),
    RMConfig: _SUPERVISED_NOTES,
    DPOConfig: _SUPERVISED_NOTES,
    RLConfig: (
        notes.template_is_not_used,
        notes.stop_text_is_meant,
        notes.kl_estimator_fits_its_use,
        notes.agent_replaces_remote_reward,
        notes.reward_servers_have_a_path,
        notes.async_engines_have_own_devices,
        notes.evaluations_beside_training_are_saved,
        notes.local_launcher_is_one_process,
        notes.nothing_to_go_on_from,
    ),
    ServeRMConfig: (notes.server_is_open,),
}


def check(config: Config) -> None:
    """Raise `ConfigError` with every contradiction in the configuration."""
    _refuse(config, (*COMMON_RULES, *RULES.get(type(config), ())))


def require_runnable(config: Config) -> None:
    """Raise `ConfigError` with everything a run of this configuration still needs."""
    _refuse(config, NEEDS[type(config)])


def notes_on(config: Config, given: Sequence[tuple[str, ...]] = ()) -> Iterator[str]:
    """What the user wrote and this run will not do as written, one line each.

    `given`: the flags that each of the user's settings set.
    """
    for rule in NOTES.get(type(config), ()):
        yield from rule(config)
    yield from notes.flags_without_effect(config, given)


def _refuse(config: Config, rules: tuple[Rule, ...]) -> None:
    problems = [message for rule in rules for message in rule(config)]
    if problems:
        raise ConfigError("\n".join(problems))

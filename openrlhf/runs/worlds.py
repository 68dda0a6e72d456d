"""Binds a run to its world: from a configuration to the Python, the settings and the records of a world."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from openrlhf.config.commands import RLConfig
from openrlhf.config.fields import ConfigError
from openrlhf.data.files import DataError
from openrlhf.utils import waits
from openrlhf.utils.randomness import derive_seed
from openrlhf.worlds.base import WorldError, shown
from openrlhf.worlds.environments import WorldMissingError, find_python, is_world, world_name
from openrlhf.worlds.games import OPPONENT, SELF, GamePlan, no_games
from openrlhf.worlds.process import WorldFailure, WorldPlan

logger = logging.getLogger(__name__)


def world_plan(config: RLConfig, target: str) -> WorldPlan:
    """How the processes of a world are started. Raises ConfigError where its flags cannot be read, and where nothing
    has its package; the text then ends with the command that installs it."""
    try:
        python = find_python(target, wanted=config.world.python)
    except WorldMissingError as error:
        raise ConfigError(f"{_flag_of(config, target)} {target}: {error}") from error
    try:
        settings = config.world.settings(config.train.seed)
    except WorldError as error:
        raise ConfigError(str(error)) from error
    return WorldPlan(target, settings, python, config.world.timeout, config.world.processes, game_plan(config))


def game_plan(config: RLConfig) -> GamePlan:
    """Who plays whom in games of several agents."""
    samples = [("--rollout.n_samples_per_prompt", config.samples_per_prompt)]
    if config.eval.dataset and config.world.eval_opponent in (None, SELF):
        samples.append(("--eval.n_samples_per_prompt", config.eval.n_samples_per_prompt))
    return GamePlan(
        config.world.opponent,
        config.world.eval_opponent if config.eval.dataset else None,
        tuple(samples),
        members=config.fewest_compared,
    )


def require_worlds(config: RLConfig) -> None:
    """Raises ConfigError where a world of this run is not installed."""
    for target in config.worlds:
        world_plan(config, target)


def world_records(config: RLConfig, target: str, limit: int | None, *, evaluation: bool) -> Sequence[dict[str, Any]]:
    """The records of a world that is a data set, `limit` at most. Those of an evaluation are drawn with another seed,
    and worlds are told which they are. Raises ConfigError, and DataError with what the world says."""
    plan = world_plan(config, target)
    evaluated, held_out = config.world.eval_samples, derive_seed(config.train.seed, "held out") % 2**31
    if evaluation:
        count, seed = evaluated, held_out
    else:
        count, seed = config.world.samples, derive_seed(config.train.seed, "prompts") % 2**31
        if config.eval.dataset == target:
            plan = plan._replace(settings=replace(plan.settings, held_out=(evaluated, held_out)))
    process = plan.process()
    opponent = config.world.eval_opponent if evaluation else None
    try:
        if opponent is not None and process.start_now()["agents"] < 2:
            raise ConfigError(no_games(target, "--world.eval_opponent", opponent))
        with waits.waiting(f"for the records of world {world_name(target)}"):
            records = list(process.records(count=count if limit is None else min(count, limit), seed=seed))
    except WorldFailure as error:
        raise DataError(f"{_flag_of(config, target)}: {error}") from error
    finally:
        process.close()
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict) or not {"input", "label"} <= set(record):
            expected = '{"input": …, "label": …}'
            raise DataError(f"record {number} of world {world_name(target)} must be {expected}, got {shown(record)}")
    if opponent is not None:
        for record in records:
            if not isinstance(record["label"], dict):
                raise DataError(
                    f"--world.eval_opponent {opponent}: the opponent stands in the label, which must be an object for "
                    f"that; world {world_name(target)} has {shown(record['label'])}"
                )
            record["label"] = {**record["label"], OPPONENT: opponent}
    return records


def _flag_of(config: RLConfig, target: str) -> str:
    if config.train.agent_func_path == target and is_world(target):
        return "--train.agent_func_path"
    return "--data.prompt_dataset" if target in (config.prompt_dataset or "") else "--eval.dataset"

"""Flags without an effect: what a flag needs is declared on it (`Flag.only_with`, `Flag.no_effect`), and a user who
gives it in vain is told so."""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from openrlhf.algorithms.advantages import ESTIMATORS
from openrlhf.config.commands import Config
from openrlhf.config.schema import command_of, flags_of, value_at

NEEDED = {
    "uses_critic": "a critic (--algo.advantage.estimator gae)",
    "uses_reference": "a reference model (--algo.kl.init_coef above 0)",
    "uses_teacher": "a teacher (--teacher.model_name_or_path, --teacher.policy or --teacher.remote_url)",
    "teacher_path": "a teacher with weights of its own (--teacher.model_name_or_path, or --teacher.policy initial "
    "without an adapter)",
    "uses_reward_model": "a reward model that judges (--reward.model_name_or_path)",
    "asks_reward_servers": "a reward server (a URL in --reward.remote_url)",
    "uses_group_baseline": "an estimator that compares a prompt's samples (--algo.advantage.estimator "
    f"{', '.join(name for name, entry in ESTIMATORS.items() if entry.needs_group and not entry.outcome_only)})",
    "whitens_advantages": "an estimator that whitens (--algo.advantage.estimator "
    f"{', '.join(name for name, entry in ESTIMATORS.items() if entry.whiten)})",
    "!reward.remote_url|reward.weights": "--reward.weights beside --reward.remote_url, which judges alone without them",
    "corrects_off_policy": "--algo.advantage.is_correction_enable",
    "uses_world": "a world (--train.agent_func_path openrlhf.worlds.NAME, or as a data set)",
    "plays_agent": "a Python file with an agent (--train.agent_func_path); a world has --world.timeout",
    "plays_world": "a world that is played (--train.agent_func_path openrlhf.worlds.NAME)",
    "measures_world": "records of a world to measure on (--eval.dataset openrlhf.worlds.NAME)",
    "cuts_distributions": "--rollout.top_p, --rollout.top_k, or an agent (--train.agent_func_path)",
    "ckpt.uses_folder": "checkpoints (--ckpt.save_steps, --ckpt.load_enable or --ckpt.auto_resume)",
}
"""Conditions and properties in the words of a note: "… is not used: it needs …"."""
UNWANTED = {
    "uses_group_baseline": "--algo.advantage.estimator {0.algo.advantage.estimator}, which has no discount",
    "plays_world": "--train.agent_func_path {0.train.agent_func_path}, whose messages the chat template writes",
    "reference_is_base": "--ds.lora.rank: the reference is the trained model without its adapter",
}
"""The same for those that must not hold: "… is not used with …"."""


class Reason(NamedTuple):
    """Why a flag has no effect, as the end of a sentence that begins with its name, or with several names."""

    of_one: str
    of_several: str


def flags_without_effect(config: Config, given: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """A note for whatever of `given` changes nothing, one for all flags with the same reason.

    `given` has the flags that each of the user's settings set. A setting of several flags has an effect where one of
    them has, and is told only where none has.
    """
    reasons: dict[Reason, list[str]] = {}
    for paths in given:
        found = {f"--{path}": reason for path in paths if (reason := why_without_effect(config, path))}
        if len(found) == len(paths):
            for flag, reason in found.items():
                if flag not in reasons.setdefault(reason, []):
                    reasons[reason].append(flag)
    for reason, flags in reasons.items():
        if len(flags) == 1:
            yield f"{flags[0]} {reason.of_one}"
        else:
            yield f"{', '.join(flags[:-1])} and {flags[-1]} {reason.of_several}"


def newly_without_effect(config: Config, settled: Config) -> Iterator[str]:
    """The same for what turned out when a run began: `settled` has the choices that `config` left to the machine."""
    specs = flags_of(command_of(config)).values()
    changed = [spec.path for spec in specs if value_at(config, spec.path) != spec.default]
    yield from flags_without_effect(settled, [(path,) for path in changed if why_without_effect(config, path) is None])


def why_without_effect(config: Config, path: str) -> Reason | None:
    """None: the flag has an effect, or asks for nothing."""
    spec = flags_of(command_of(config))[path]
    value = value_at(config, path)
    if value is None or (isinstance(value, int) and not is_on(value) and spec.default is not True):
        return None  # unset, a switch that is off, a group of no workers
    if why := spec.flag.no_effect:
        return Reason(f"does nothing: {why}", f"do nothing: {why}")
    return next((_reason(config, condition) for condition in spec.only_with if not holds(config, condition)), None)


def is_on(value: Any) -> bool:
    """A number that is a size or a period is off at 0 and below."""
    return bool(value) and not (isinstance(value, int | float) and value < 0)


def holds(config: Config, condition: str) -> bool:
    """Of a condition as `Flag.only_with` describes them, with full names."""
    return any(_holds(config, one) for one in condition.split("|"))


def parts(condition: str) -> list[tuple[str, str, str]]:
    """(operator, name, values) of each alternative; the operator is "", "!", "=" or "!="."""
    found = [re.fullmatch(r"(!?)([\w.]+)(?:(!?=)(\S+))?", one) for one in condition.split("|")]
    return [(match[3] or match[1], match[2], match[4] or "") for match in found if match]


def _holds(config: Config, condition: str) -> bool:
    ((operator, name, values),) = parts(condition)
    try:
        value = value_at(config, name)
    except AttributeError:
        return True  # this command has no such flag
    if operator in ("", "!"):
        return is_on(value) == (operator == "")
    # What is left to the machine may turn out as it should.
    return value == "auto" or (str(value).lower() in values.split(",")) == (operator == "=")


def _reason(config: Config, condition: str) -> Reason:
    """For a condition that does not hold."""
    alternatives = parts(condition)
    if len(alternatives) == 1 and alternatives[0][0] in ("!", "!="):
        name = alternatives[0][1]
        value = value_at(config, name)
        shown = " ".join(map(str, value)) if isinstance(value, tuple) else "" if value is True else str(value)
        against = UNWANTED[name].format(config) if name in UNWANTED else f"--{name} {shown}".rstrip()
        return Reason(f"is not used with {against}", f"are not used with {against}")
    needed = NEEDED.get(condition) or " or ".join(_needed(*one) for one in alternatives)
    return Reason(f"is not used: it needs {needed}", f"are not used: they need {needed}")


def _needed(operator: str, name: str, values: str) -> str:
    shown = NEEDED.get(name) or f"--{name}"
    if operator in ("!", "!="):
        return f"no {shown} {values.replace(',', ' or ')}".rstrip()
    return f"{shown} {values.replace(',', ' or ')}".rstrip()

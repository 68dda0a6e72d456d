"""What the user wrote and a run will not do as written: told, not refused.

Most of it is declared on the flags themselves (`Flag.only_with`, `Flag.no_effect`), and told here of those that were
given. A function below is for what takes more than that.
"""

import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from openrlhf.config.commands import ROOTS, Config, RLConfig, ServeRMConfig, SFTConfig
from openrlhf.config.schema import flags_of, value_at

NEEDED = {
    "uses_critic": "a critic (--algo.advantage.estimator gae)",
    "uses_reference": "a reference model (--algo.kl.init_coef above 0)",
    "uses_reward_model": "a reward model that judges (--reward.model_name_or_path)",
    "asks_reward_servers": "a reward server (a URL in --reward.remote_url)",
    "uses_group_baseline": "an estimator that compares a prompt's samples (--algo.advantage.estimator rloo, "
    "reinforce_baseline, group_norm, dr_grpo)",
    "whitens_advantages": "an estimator that whitens (--algo.advantage.estimator gae, reinforce, reinforce_baseline)",
    "!reward.remote_url|reward.weights": "--reward.weights beside --reward.remote_url, which judges alone without them",
    "ckpt.uses_folder": "checkpoints (--ckpt.save_steps, --ckpt.load_enable or --ckpt.auto_resume)",
}
"""Conditions and properties in the words of a note: "… is not used: it needs …"."""
UNWANTED = {
    "uses_group_baseline": "--algo.advantage.estimator {0.algo.advantage.estimator}, which has no discount",
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


def settled_differently(config: Config, settled: Config) -> Iterator[str]:
    """The same for what turned out when a run began: `settled` has the choices that `config` left to the machine."""
    specs = flags_of(_command(config)).values()
    changed = [spec.path for spec in specs if value_at(config, spec.path) != spec.default]
    yield from flags_without_effect(settled, [(path,) for path in changed if why_without_effect(config, path) is None])


def why_without_effect(config: Config, path: str) -> Reason | None:
    """None: the flag has an effect, or asks for nothing."""
    spec = flags_of(_command(config))[path]
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


def _command(config: Config) -> str:
    return next(command for command, root in ROOTS.items() if type(config) is root)


def template_is_not_used(config: Any) -> Iterator[str]:
    template = config.data.input_template
    if template is None:
        return
    if "{}" not in template:
        yield "--data.input_template has no {} for the prompt: it is not used"
    elif "\\n" in template:
        yield "--data.input_template contains a backslash and an n, not a line break: write $'…\\n…' in the shell"


def raw_text_has_no_template(config: SFTConfig) -> Iterator[str]:
    if config.model.pretrain_mode_enable and config.data.apply_chat_template:
        yield "--data.apply_chat_template is for lists of messages: --model.pretrain_mode_enable learns text as it is"


def stop_text_is_meant(config: RLConfig) -> Iterator[str]:
    if any("\\n" in text for text in config.rollout.stop or ()):
        yield "--rollout.stop contains a backslash and an n, not a line break: write $'…\\n…' in the shell"


def kl_estimator_fits_its_use(config: RLConfig) -> Iterator[str]:
    kl = config.algo.kl
    if not config.uses_reference:
        return
    if kl.use_loss and kl.estimator == "k1":
        yield "--algo.kl.estimator k1 has the wrong gradient as a loss: k2 or k3 is recommended with --algo.kl.use_loss"
    if not kl.use_loss and kl.estimator != "k1":
        yield (
            f"--algo.kl.estimator {kl.estimator} has the wrong gradient as a reward: "
            "k1 is recommended without --algo.kl.use_loss"
        )


def agent_replaces_remote_reward(config: RLConfig) -> Iterator[str]:
    if config.train.agent_func_path and config.reward.remote_url:
        yield "--reward.remote_url judges only episodes to which the agent of --train.agent_func_path gives no reward"


def reward_servers_have_a_path(config: RLConfig) -> Iterator[str]:
    for source in config.reward.sources:
        for url in source.names if source.kind == "http" else ():
            if not urlsplit(url).path.strip("/"):
                yield f"--reward.remote_url {url} names no path: {url.rstrip('/')}/get_reward is asked"


def evaluations_beside_training_are_saved(config: RLConfig) -> Iterator[str]:
    measured, saved = config.eval.period, config.ckpt.period
    follows = config.eval.dataset and config.ckpt.best_metric_key != "none"
    if config.train.async_enable and follows and measured and saved and measured % saved:
        yield (
            f"--eval.steps {measured}: evaluations go on beside training, so a checkpoint is written at each as well, "
            "in case it is the best (--ckpt.best_metric_key none leaves these out)"
        )


def async_engines_have_own_devices(config: RLConfig) -> Iterator[str]:
    if config.train.async_enable and config.train.colocate_all and not config.train.async_share_device:
        yield (
            "--train.colocate_all with --train.async_enable: the models share devices, the engines have their own "
            "(on a single device add --train.async_share_device)"
        )


def local_launcher_is_one_process(config: RLConfig) -> Iterator[str]:
    world = config.actor.world_size
    if config.train.launcher == "local" and world is not None and world > 1:
        yield (
            f"--train.launcher local is one process on this machine: the actor's {world} workers "
            "(--actor.num_nodes × --actor.num_gpus_per_node) become 1"
        )


def nothing_to_go_on_from(config: Any) -> Iterator[str]:
    if config.ckpt.auto_resume and config.ckpt.period is None:
        yield "--ckpt.auto_resume without --ckpt.save_steps: a checkpoint is written only when a signal stops the run"


def server_is_open(config: ServeRMConfig) -> Iterator[str]:
    if config.api_key is None and config.host not in ("127.0.0.1", "localhost", "::1"):
        yield f"--host {config.host} without --api_key: whoever reaches this machine may ask the reward model"

"""What `--help` prints: the flags that matter most, one line each; `--help all` has every flag, in groups."""

import argparse
import shutil
from collections.abc import Iterable, Mapping

from openrlhf.config.commands import ROOTS
from openrlhf.config.schema import FlagSpec, flags_of

_SFT_TRAINING = {
    "adam.lr": "learning rate",
    "train.batch_size": "samples per optimizer step",
    "train.micro_batch_size": "longest samples that fit a forward",
    "train.max_epochs": "passes over the data",
    "ds.lora.rank": "train an adapter of this rank; 0 = all",
    "model.gradient_checkpointing_enable": "less memory, more time",
}
_SFT_RESULTS = {
    "eval.dataset": "data to evaluate on",
    "ckpt.output_dir": "folder of the trained model",
    "ckpt.save_steps": "steps between checkpoints; -1 = none",
    "ckpt.load_enable": "go on from the last checkpoint",
}
_SFT_TEXT = {
    "data.apply_chat_template": "format with the chat template",
    "data.max_len": "longest sample in tokens",
}

THAT_MATTER: dict[str, dict[str, dict[str, str]]] = {
    "train_ppo_ray": {
        "model and prompts": {
            "actor.model_name_or_path": "model to train: name or folder",
            "data.prompt_dataset": "prompts: names, folders or files",
            "data.input_key": "key of the prompt",
            "data.label_key": "key of the right answer",
            "data.apply_chat_template": "format with the chat template",
            "data.max_len": "tokens of prompt and response",
        },
        "rewards": {
            "reward.remote_url": ".py file with reward_func, or URLs",
            "reward.model_name_or_path": "reward model",
            "train.agent_func_path": ".py file with an agent, or a world",
        },
        "algorithm": {
            "algo.advantage.estimator": "group_norm is GRPO, gae is PPO",
            "algo.kl.init_coef": "KL to the first model; 0 = none",
            "actor.adam.lr": "learning rate",
        },
        "size of a step": {
            "rollout.batch_size": "prompts per step",
            "rollout.n_samples_per_prompt": "responses per prompt",
            "rollout.max_new_tokens": "longest response in tokens",
            "train.batch_size": "samples per optimizer step",
            "train.num_episodes": "passes over the prompts",
        },
        "machine and results": {
            "vllm.num_engines": "0 = without vLLM",
            "eval.dataset": "prompts to evaluate on (eval.steps)",
            "ckpt.output_dir": "folder of the trained model",
        },
    },
    "train_sft": {
        "model and data": {
            "model.model_name_or_path": "model to train: name or folder",
            "data.dataset": "names, folders or files",
            "data.input_key": "key of the prompt or messages",
            "data.output_key": "key of the answer",
            "data.multiturn": "learn every assistant turn",
            **_SFT_TEXT,
        },
        "training": _SFT_TRAINING,
        "results": _SFT_RESULTS,
    },
    "train_rm": {
        "model and data": {
            "model.model_name_or_path": "model to train: name or folder",
            "data.dataset": "names, folders or files",
            "data.prompt_key": "key of the prompt",
            "data.chosen_key": "key of the better answer",
            "data.rejected_key": "key of the other answer",
            **_SFT_TEXT,
        },
        "training": _SFT_TRAINING,
        "results": _SFT_RESULTS,
    },
    "train_dpo": {
        "model and data": {
            "model.model_name_or_path": "model to train: name or folder",
            "ref.model_name_or_path": "reference, if another model",
            "data.dataset": "names, folders or files",
            "data.prompt_key": "key of the prompt",
            "data.chosen_key": "key of the better answer",
            "data.rejected_key": "key of the other answer",
            **_SFT_TEXT,
        },
        "loss": {
            "model.loss_type": "pairs (dpo), judged answers (kto)",
            "model.beta": "how firmly the reference holds",
        },
        "training": _SFT_TRAINING,
        "results": _SFT_RESULTS,
    },
}
"""Heading -> flag -> a few words, for 80 columns. A command that is not here has few flags, and shows them all."""

ALWAYS = {
    "--config FILE": "YAML file of defaults; flags override it",
    "--print_config": "print all settings and exit",
}


def help_of(command: str, parser: argparse.ArgumentParser, *, name: str, topic: str | None) -> str:
    """`topic`: None for the flags that matter, "all", or a section. `name`: how the command was called."""
    if topic is None and command in THAT_MATTER:
        return _short(command, name=name)
    parser.prog, parser.usage = name, f"{name} [FLAGS]"
    groups = [group for group in parser._action_groups if topic in (None, "all", group.title)]
    formatter = argparse.HelpFormatter(name, max_help_position=32, width=_width())
    formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
    formatter.add_text(parser.description)
    for group in groups:
        formatter.start_section(group.title)
        formatter.add_text(group.description)
        formatter.add_arguments(group._group_actions)
        formatter.end_section()
    formatter.add_text(parser.epilog)
    return formatter.format_help()


def described(command: str) -> str:
    """What the command does, in a line."""
    _, _, text = (ROOTS[command].__doc__ or "").partition(": ")
    return text[:1].upper() + text[1:]


def topics(command: str) -> list[str]:
    """What may stand after --help."""
    return ["all", *dict.fromkeys(spec.section for spec in flags_of(command).values() if spec.section)]


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 120) - 2


def _short(command: str, *, name: str) -> str:
    specs, chosen = flags_of(command), THAT_MATTER[command]
    lines = [f"usage: {name} [FLAGS]", "", described(command), ""]
    for heading, flags in chosen.items():
        lines += [f"{heading}:", *_rows({f"--{path}": _line(specs[path], text) for path, text in flags.items()}), ""]
    lines += ["always:", *_rows(ALWAYS), ""]
    sections: dict[str, int] = {}
    for spec in specs.values():
        sections[spec.section or "top level"] = sections.get(spec.section or "top level", 0) + 1
    lines.append(f"--help all shows all {len(specs)} flags, --help SECTION those of one of these sections:")
    lines += _wrapped(f"{section} ({count})" for section, count in sections.items())
    return "\n".join(lines) + "\n"


def _line(spec: FlagSpec, text: str) -> str:
    default = spec.shown_default
    return text if default in ("unset", "false", "0", "-1") else f"{text} [{default}]"


def _rows(rows: Mapping[str, str]) -> list[str]:
    return [f"  {flag:<38}{text}" for flag, text in rows.items()]


def _wrapped(words: Iterable[str]) -> list[str]:
    lines = ["  "]
    for word in words:
        if len(lines[-1]) + len(word) > 76:
            lines.append("  ")
        lines[-1] += f"{word}  "
    return [line.rstrip() for line in lines]

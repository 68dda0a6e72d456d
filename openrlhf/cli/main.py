"""The `openrlhf` command: one word per job, each imported only when asked for."""

import difflib
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

from openrlhf.config.commands import SHORT_NAMES

COMMANDS = {
    "demo": ("openrlhf.cli.demo", "train a small model with RL on this machine, from nothing"),
    "check": ("openrlhf.cli.check", "try a reward or agent file, or look at data, before a run does"),
    "worlds": ("openrlhf.cli.worlds", "environments of existing packages to train in: list and install them"),
    "eval": ("openrlhf.cli.eval", "pass@k and mean score of a model on prompts, judged by a reward or an agent"),
    "chat": ("openrlhf.cli.chat", "talk to a model in the terminal"),
    "export": ("openrlhf.cli.export", "a run's model as a folder for the Hub, with a model card"),
    "view": ("openrlhf.cli.view", "show runs on a local web page: curves, rollouts, tokens"),
    "prove": ("openrlhf.cli.prove", "prove that a training command does what its flags say, in minutes"),
    "doctor": ("openrlhf.cli.doctor", "what a training command will take, whether it fits, and what is wrong here"),
    "report": ("openrlhf.cli.report", "make a run's report again, or compare several runs on one page"),
    "replay": ("openrlhf.cli.replay", "take a logged step of an RL run again, and see what each sample did to it"),
    "rl": ("openrlhf.cli.train_ppo_ray", "reinforcement learning"),
    "sft": ("openrlhf.cli.train_sft", "supervised fine-tuning"),
    "rm": ("openrlhf.cli.train_rm", "train a reward model"),
    "dpo": ("openrlhf.cli.train_dpo", "train on preference pairs"),
    "serve-rm": ("openrlhf.cli.serve_rm", "serve a reward model over HTTP"),
    "lora-combine": ("openrlhf.cli.lora_combiner", "merge an adapter into its base model"),
}
"""Word -> (module with `main(argv)`, what it does)."""

MODULES = {module.rpartition(".")[2]: word for word, (module, _) in COMMANDS.items()}
"""`openrlhf train_ppo_ray` is `openrlhf rl`."""

ELSEWHERE = {
    "train_ppo": "openrlhf rl, which needs neither Ray nor vLLM on one machine",
    "ppo": "openrlhf rl",
    "grpo": "openrlhf rl --algo.advantage.estimator group_norm",
    "train_kto": "openrlhf dpo --model.loss_type kto (--input_key is --data.prompt_key there, and --output_key "
    "--data.response_key)",
    "kto": "openrlhf dpo --model.loss_type kto",
    "batch_inference": "openrlhf eval MODEL, which saves answers with their rewards and makes data of them "
    "(docs/recipes.md: rejection sampling, iterative DPO), vLLM's own `vllm run-batch` for answers alone, and "
    "openrlhf serve-rm for rewards",
    "interactive_chat": "openrlhf chat MODEL, or vLLM's own `vllm serve` and `vllm chat`",
    "train_kd": "openrlhf rl --teacher.model_name_or_path TEACHER, which learns from a teacher on the policy's own "
    "samples (docs/distillation.md)",
    "train_prm": "openrlhf rm --model.loss_type prm, which learns from records with steps and labels "
    "(docs/supervised.md)",
}
"""Commands of older versions and other tools, and what does their work."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command with the rest of the arguments; the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if words else 2
    name, rest = words[0], words[1:]
    if name == "--version":
        print(f"openrlhf {_version()}")
        return 0
    if name in ELSEWHERE:
        return refer(name, called=f"openrlhf {name}")
    word = MODULES.get(name, name)
    if word not in COMMANDS:
        near = difflib.get_close_matches(name, [*COMMANDS, *MODULES], n=1)
        instead = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
        print(f"openrlhf: error: no command {name!r}; {instead}", file=sys.stderr)
        return 2
    run = import_module(COMMANDS[word][0]).main
    try:
        status = (run(rest, name=f"openrlhf {word}") if word in SHORT_NAMES.values() else run(rest)) or 0
        sys.stdout.flush()
    except BrokenPipeError:  # who read it, such as `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status


def refer(command: str, *, called: str) -> int:
    """Say what does the work of a command that is not here; the exit status."""
    print(f"{called}: error: there is no such command; use {ELSEWHERE[command]}", file=sys.stderr)
    return 2


def _usage() -> str:
    lines = [f"  {name:<14}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: openrlhf COMMAND [FLAGS]",
            "",
            *lines,
            "",
            "openrlhf COMMAND --help shows the flags that matter, --help all every flag.",
            "openrlhf --version says which version this is.",
        ]
    )


def _version() -> str:
    try:
        return version("openrlhf")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    raise SystemExit(main())

"""The `openrlhf` command: one word per job, each imported only when asked for."""

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

COMMANDS = {
    "demo": ("openrlhf.cli.demo", "train a small model with RL on this machine, from nothing"),
    "check": ("openrlhf.cli.check", "try a reward or agent file on a few prompts, before a run does"),
    "report": ("openrlhf.cli.report", "make a run's report again, or compare several runs on one page"),
    "rl": ("openrlhf.cli.train_ppo_ray", "reinforcement learning"),
    "sft": ("openrlhf.cli.train_sft", "supervised fine-tuning"),
    "rm": ("openrlhf.cli.train_rm", "train a reward model"),
    "dpo": ("openrlhf.cli.train_dpo", "train on preference pairs"),
    "serve-rm": ("openrlhf.cli.serve_rm", "serve a reward model over HTTP"),
    "lora-combine": ("openrlhf.cli.lora_combiner", "merge an adapter into its base model"),
}
"""Word -> (module with `main(argv)`, what it does)."""


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
    if name not in COMMANDS:
        print(f"openrlhf: error: no command {name!r}; there are {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    return import_module(COMMANDS[name][0]).main(rest) or 0


def _usage() -> str:
    lines = [f"  {name:<14}{text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: openrlhf COMMAND [FLAGS]   (openrlhf COMMAND --help lists its flags)", "", *lines])


def _version() -> str:
    try:
        return version("openrlhf")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    raise SystemExit(main())

"""`openrlhf prove COMMAND …`: does this training command do what its flags say? Proofs on its own model and data."""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
import sys
from collections.abc import Sequence
from typing import Any

from openrlhf.config.commands import SHORT_NAMES
from openrlhf.config.parser import enter

TRAINING = ("train_ppo_ray", "train_sft", "train_rm", "train_dpo")
WORDS = {word: command for command, word in SHORT_NAMES.items() if command in TRAINING}
"""rl, sft, rm and dpo."""
PREFIX = "openrlhf.cli."


def main(argv: Sequence[str] | None = None) -> int:
    """0: all that applies is proved; 1: something is not as it has to be, or was not tried; 2: the command is wrong."""
    words = list(sys.argv[1:] if argv is None else argv)
    found = _command(words)
    parser = _parser()
    if found is None:
        given = parser.parse_args(words)
        if given.list:
            return _list()
        parser.error("which command? For instance: openrlhf prove rl --actor.model_name_or_path …")
    place, command = found
    given = parser.parse_args(_own(words[:place]))
    if given.list:
        return _list()

    def run(config: Any) -> int:
        return _run(config, given, launcher=_launcher(words[:place]))

    return enter(command, words[place + 1 :], run, name=f"openrlhf prove {SHORT_NAMES[command]}")


def _command(words: Sequence[str]) -> tuple[int, str] | None:
    """Where the training command stands, and which it is: `rl`, `train_ppo_ray` or `openrlhf.cli.train_ppo_ray`."""
    for place, word in enumerate(words):
        name = word.removeprefix(PREFIX)
        if name in TRAINING or word in WORDS:
            return place, WORDS.get(word, name)
    return None


LAUNCHERS = ("torchrun", "deepspeed", "ray", "srun", "openrlhf")


def _is_launcher(word: str) -> bool:
    name = os.path.basename(word)
    return name in LAUNCHERS or name.startswith("python")


def _own(words: Sequence[str]) -> list[str]:
    """Our own options, which come first: what follows the name of a launcher is the launcher's."""
    return list(itertools.takewhile(lambda word: not _is_launcher(word), words))


def _launcher(words: Sequence[str]) -> str:
    """The program that starts the run's processes; "" where it is Python itself."""
    names = (os.path.basename(word) for word in words if _is_launcher(word))
    return next((name for name in names if name in ("torchrun", "deepspeed", "srun")), "")


def _run(config: Any, given: argparse.Namespace, *, launcher: str) -> int:
    from openrlhf.proving.registry import REGISTRY
    from openrlhf.proving.report import print_report
    from openrlhf.proving.run import prove  # seconds of imports
    from openrlhf.runs.process import user_errors_end_the_run

    only = [name.strip() for name in (given.only or "").split(",") if name.strip()]
    for name in only:
        if name not in REGISTRY:
            near = difflib.get_close_matches(name, REGISTRY, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(REGISTRY)}"
            print(f"openrlhf prove: error: --only {name}: there is no such proof; {hint}", file=sys.stderr)
            return 2
    with user_errors_end_the_run() as ending:
        report = prove(
            config,
            minutes=given.minutes,
            only=only,
            quiet=not given.verbose,
            launcher=launcher,
            on_start=lambda proof: print(f"… {proof.title}", file=sys.stderr, flush=True),
        )
        if given.json:
            print(report.to_json())
        else:
            print_report(report, sys.stdout)
        ending.status = report.status
    return ending.status


def _list() -> int:
    from openrlhf.proving.run import in_order  # seconds of imports

    for proof in in_order():
        print(f"{proof.name:<16}{proof.title} ({', '.join(proof.kinds)})")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openrlhf prove",
        usage="openrlhf prove [OPTIONS] COMMAND FLAGS",
        description="Takes a training command as it would be run (rl, sft, rm or dpo with its flags, or python -m "
        "openrlhf.cli.train_ppo_ray …), makes a small trial of it, and holds that against definitions: masks, "
        "log-probs, loss, gradient, advantages, weights in the engine, checkpoints. One table at the end. Exit status "
        "0: all that applies is proved; 1: something is not as it has to be, or was not tried.",
        epilog="Options come before the command. docs/prove.md says what each proof shows, and what it cannot show.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--minutes", type=_minutes, default=5.0, help="about the time it may take; it decides the trial's size (5)"
    )
    parser.add_argument("--json", action="store_true", help="the result as JSON on stdout, in place of the table")
    parser.add_argument("--only", metavar="NAME,…", help="these proofs alone; --list has their names")
    parser.add_argument("--list", action="store_true", help="list all proofs and exit")
    parser.add_argument("--verbose", action="store_true", help="show the log lines of the trial too")
    return parser


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = 0.0
    if not 0 < minutes < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number > 0, got {text!r}")
    return minutes


if __name__ == "__main__":
    raise SystemExit(main())

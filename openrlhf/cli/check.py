"""`openrlhf check FILE`: what is wrong with a reward file, agent file or data set; or what training will see of it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf.agents.user_calls import UserFileError
from openrlhf.checking.options import CheckOptions, captured_stderr, kinds_of, replay
from openrlhf.utils import interrupts
from openrlhf.worlds.environments import is_world


def main(argv: Sequence[str] | None = None) -> int:
    """0: it can be trained with; 1: it cannot, or a model or data could not be read."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and not words[0].startswith("-") and not words[0].endswith(".py") and not is_world(words[0]):
        return _check_data(words)
    parser = _parser()
    given = parser.parse_args(words)
    if given.max_new_tokens >= given.max_len:
        parser.error(
            f"--max_new_tokens {given.max_new_tokens} leaves no room for a prompt in --max_len {given.max_len}"
        )
    with interrupts.handled():
        try:
            return _run(CheckOptions(**vars(given)))
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return interrupts.exit_status()


def _check_data(words: Sequence[str]) -> int:
    from openrlhf.checking.data_check import run  # seconds of imports

    with interrupts.handled():
        try:
            return run(words)
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return interrupts.exit_status()


def _run(options: CheckOptions) -> int:
    # With --agent_hosts 0 the file is loaded in this process alone, where a debugger can follow.
    load = options.agent_hosts > 0
    with contextlib.ExitStack() as held:
        printed = held.enter_context(captured_stderr())  # it is loaded again for the check, and prints again
        try:
            kinds = asyncio.run(kinds_of(options.file, start_timeout=options.start_timeout, load=load))
        except UserFileError as error:
            held.close()
            replay(printed)
            print(f"error: {error}", file=sys.stderr)
            return 1
    from openrlhf.checking.run import (
        check,
    )  # seconds of imports, which a file that says nothing useful need not wait for

    return check(options, kinds)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openrlhf check",
        usage="openrlhf check FILE.py|WORLD [OPTIONS]",
        description="Try a file that defines reward_func or AgentExecutor, or a world (openrlhf.worlds.NAME, or a file "
        "that defines World), on a few prompts, by the code that runs it in training. Says in one line what is wrong "
        "with it (exit status 1), or shows what it judged or played (0). Without options it takes prompts of its own "
        "and a tiny model with random weights.",
        epilog="With a data set in place of the file (openrlhf check DATA --model MODEL) it shows which tokens of its "
        "records are learnt; openrlhf check DATA --help. Options may also have the names they have in a run.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("file", type=_file, metavar="FILE.py", help="reward or agent file, or both in one; or a world")
    add("--prompt_data", "--data.prompt_dataset", metavar="DATA", help="where prompts are: the first four are taken")
    add("--input_key", "--data.input_key", metavar="KEY", default="input", help="field of the prompt (default input)")
    add("--label_key", "--data.label_key", metavar="KEY", help="field of the label")
    add("--apply_chat_template", "--data.apply_chat_template", action="store_true", help="put prompts into it")
    add(
        *("--max_images_per_prompt", "--data.max_images_per_prompt"),
        metavar="N",
        type=_number,
        default=0,
        help="images a prompt may have; > 0 lets prompts and agents show images, also to the tiny model (0)",
    )
    add("--image_key", "--data.image_key", metavar="KEY", default="images", help="field of images (default images)")
    add("--allow_image_urls", "--data.allow_image_urls", action="store_true", help="fetch images that are URLs")
    add("--pretrain", "--actor.model_name_or_path", metavar="MODEL", help="model and tokenizer to use")
    add("--n", "--rollout.n_samples_per_prompt", metavar="N", type=_count, default=4, help="samples of each prompt (4)")
    add(
        *("--timeout", "--reward.timeout", "--rollout.step_timeout", "--world.timeout"),
        metavar="SECONDS",
        type=_seconds,
        default=30.0,
        help="what a call of reward_func, reset, step or execute may take (30); loading the file may take 60 or more",
    )
    add("--max_len", "--data.max_len", metavar="TOKENS", type=_count, default=4096, help="of an episode at most (4096)")
    add(
        *("--max_new_tokens", "--rollout.max_new_tokens"),
        metavar="TOKENS",
        type=_count,
        default=64,
        help="of a turn at most (64)",
    )
    add("--max_steps", metavar="TURNS", type=_count, default=8, help="of an episode at most (8)")
    add(
        *("--agent_hosts", "--rollout.agent_hosts"),
        type=int,
        choices=(0, 1),
        default=1,
        help="0 plays agents in this process, where a debugger can follow and no time limit holds",
    )
    add("--tasks", "--world.tasks", metavar="TASKS", help="of a world, as in a run")
    add("--world_options", "--world.options", metavar="OPTIONS", help="of a world, as in a run")
    add("--python", "--world.python", metavar="PROGRAM", help="interpreter that has the world's package")
    return parser


def _file(text: str) -> Path:
    path = Path(text)
    return path if is_world(text) and path.suffix != ".py" else path.expanduser().resolve()


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number >= 0, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number > 0, got {text!r}")
    return seconds


if __name__ == "__main__":
    raise SystemExit(main())

"""`openrlhf chat MODEL`: a conversation with a model in the terminal."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from openrlhf.cli.eval import count, not_negative
from openrlhf.config.fields import ConfigError
from openrlhf.config.parser import USAGE_ERROR
from openrlhf.utils import interrupts


def main(argv: Sequence[str] | None = None) -> int:
    """0: the conversation has ended; 1: the model cannot be loaded; 2: usage; 130: Ctrl-C."""
    given = _parser().parse_args(argv)
    with interrupts.handled():
        try:
            from openrlhf.runs.chatting import ChatOptions, chat  # seconds of imports

            return chat(ChatOptions(**vars(given)))
        except ConfigError as error:
            print(f"openrlhf chat: error: {error}", file=sys.stderr)
            return USAGE_ERROR
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return interrupts.exit_status()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openrlhf chat",
        usage="openrlhf chat MODEL [OPTIONS]",
        description="Talk to a model: its chat template around what you write, its answer token by token. /help shows "
        "the commands there (/system, /reset, /undo, /save, /temperature, /tokens, /quit). Ctrl-C stops an answer, "
        "twice it quits. In a pipe every line is a message, and only answers go to stdout: "
        "echo hello | openrlhf chat MODEL.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="folder or Hub name of a model, folder of an adapter, or folder of a run")
    add("--system", metavar="TEXT", help="what the model is told before everything else")
    add("--temperature", type=not_negative, default=0.7, metavar="T", help="0 is greedy (0.7)")
    add("--top_p", type=float, default=1.0, metavar="P", help="sample from the smallest set with this probability (1)")
    add("--top_k", type=int, default=-1, metavar="K", help="sample from this many likeliest tokens; -1 = all (-1)")
    add("--max_new_tokens", type=count, metavar="TOKENS", help="of an answer at most (what --max_len leaves)")
    add("--max_len", type=count, metavar="TOKENS", help="of the conversation at most (8192, or what the model knows)")
    add("--seed", type=int, default=0, help="the same seed and the same questions give the same answers (0)")
    add(
        "--engine",
        choices=("auto", "embedded", "vllm"),
        default="auto",
        help="what samples; auto: vLLM where it is installed and there is a GPU, else this process",
    )
    add("--chat_template", metavar="FILE", help="a Jinja file, or its text, in place of the tokenizer's template")
    add("--trust_remote_code", action="store_true", help="run Python code that comes with the model")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

"""Reward-model training: `python -m openrlhf.cli.train_rm --help`."""

from collections.abc import Sequence

from openrlhf.config import RMConfig
from openrlhf.config.parser import enter


def main(argv: Sequence[str] | None = None, *, name: str | None = None) -> int:
    """Parse `argv` (default: the command line) and run; the exit status. `name`: what the user called it by."""
    return enter("train_rm", argv, _run, name=name)


def _run(config: RMConfig) -> int | None:
    from openrlhf.runs.supervised_assembly import run_supervised

    return run_supervised(config)


if __name__ == "__main__":
    raise SystemExit(main())

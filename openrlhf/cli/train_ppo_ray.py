"""Reinforcement learning: `python -m openrlhf.cli.train_ppo_ray --help`."""

from collections.abc import Sequence

from openrlhf.config import RLConfig
from openrlhf.config.entry import enter


def main(argv: Sequence[str] | None = None) -> int:
    """Parse `argv` (default: the command line) and run; the exit status."""
    return enter("train_ppo_ray", argv, _run)


def _run(config: RLConfig) -> int | None:
    from openrlhf.trainers.assembly import run_rl

    return run_rl(config)


if __name__ == "__main__":
    raise SystemExit(main())

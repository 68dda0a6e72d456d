"""Reinforcement learning: `python -m openrlhf.cli.train_ppo_ray --help`."""

import os
from collections.abc import Sequence

from openrlhf.config import RLConfig
from openrlhf.config.parser import enter
from openrlhf.rollout.vllm.spare import prepared, wants_spare


def main(argv: Sequence[str] | None = None, *, name: str | None = None) -> int:
    """Parse `argv` (default: the command line) and run; the exit status. `name`: what the user called it by."""
    return enter("train_ppo_ray", argv, _run, name=name)


def _run(config: RLConfig) -> int | None:
    with prepared(wants_spare(config, os.environ)):  # imports in another process what an engine needs
        from openrlhf.runs.rl_assembly import run_rl

        return run_rl(config)


if __name__ == "__main__":
    raise SystemExit(main())

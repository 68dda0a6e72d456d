"""Preference training (DPO, IPO, cDPO): `python -m openrlhf.cli.train_dpo --help`."""

from collections.abc import Sequence

from openrlhf.config import DPOConfig
from openrlhf.config.entry import enter


def main(argv: Sequence[str] | None = None) -> int:
    """Parse `argv` (default: the command line) and run; the exit status."""
    return enter("train_dpo", argv, _run)


def _run(config: DPOConfig) -> int | None:
    from openrlhf.trainers.assembly import run_dpo

    return run_dpo(config)


if __name__ == "__main__":
    raise SystemExit(main())

"""Preference training (DPO, IPO, cDPO, KTO): `python -m openrlhf.cli.train_dpo --help`."""

from collections.abc import Sequence

from openrlhf.config import DPOConfig
from openrlhf.config.parser import enter


def main(argv: Sequence[str] | None = None, *, name: str | None = None) -> int:
    """Parse `argv` (default: the command line) and run; the exit status. `name`: what the user called it by."""
    return enter("train_dpo", argv, _run, name=name)


def _run(config: DPOConfig) -> int | None:
    from openrlhf.runs.supervised_assembly import run_supervised

    return run_supervised(config)


if __name__ == "__main__":
    raise SystemExit(main())

"""`openrlhf replay RUN --step N`: a logged step taken again, and what each of its samples has done to it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf.config.fields import ConfigError
from openrlhf.utils import interrupts


def main(argv: Sequence[str] | None = None) -> int:
    """1 when the step cannot be taken again, 2 for flags that cannot be."""
    given, overrides = _parser().parse_known_args(argv)
    with interrupts.handled():
        try:
            return _replay(given, overrides)
        except ConfigError as error:
            for line in str(error).splitlines():
                print(f"openrlhf replay: error: {line}", file=sys.stderr)
            return 2


def _replay(given: argparse.Namespace, overrides: Sequence[str]) -> int:
    from openrlhf.observability.jsonl import finite
    from openrlhf.observability.token_log import TokenLogError
    from openrlhf.runs.process import user_errors_end_the_run
    from openrlhf.runs.replay import ReplayError, replay, summary, table

    with user_errors_end_the_run() as ending:
        try:
            found = replay(given.run.expanduser(), given.step, overrides)
        except (ReplayError, TokenLogError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1
        print("\n".join(summary(found)))
        if found.effects:
            print("\n" + "\n".join(table(found, most=None if given.all else 10)))
        if given.json is not None:
            try:
                given.json.write_text(json.dumps(finite(found.as_json()), indent=1) + "\n", encoding="utf-8")
            except OSError as error:
                print(f"error: --json {given.json}: {error.strerror}", file=sys.stderr)
                return 1
    return ending.status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openrlhf replay",
        usage="openrlhf replay RUN --step N [--all] [--json FILE] [FLAGS of openrlhf rl]",
        description="Take one step of an RL run again, in this process, from the checkpoint before it and the rollouts "
        "that the run has logged (--logger.rollouts_per_step -1); compare its numbers and weights with the run's; and "
        "show how much of the step's gradient is each sample's, the largest first. Flags of openrlhf rl take the place "
        "of the run's: another place of the model or of the checkpoints, or another setting, to see what the step "
        "would have been with it.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("run", type=Path, metavar="RUN", help="folder of a run, such as runs/demo-seed0")
    add("--step", type=int, required=True, metavar="N", help="the step, as metrics.jsonl counts them")
    add("--all", action="store_true", help="show all samples, not the first ten")
    add("--json", type=Path, metavar="FILE", help="write everything to a file")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

"""`openrlhf report RUN…`: a run's report made again from its folder; several runs compared on one page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from openrlhf.observability.comparison import MOST_RUNS, write_comparison
from openrlhf.observability.report import write_report
from openrlhf.observability.run_directory import RunDirectory


def main(argv: Sequence[str] | None = None) -> int:
    """The paths of the pages go to stdout; 1 when a folder holds no run or a page cannot be written."""
    given = _parser().parse_args(argv)
    runs: list[Path] = list(dict.fromkeys(path.expanduser() for path in given.runs))
    for path in runs:
        if problem := _problem(path):
            print(f"error: {problem}", file=sys.stderr)
            return 1
    if len(runs) > MOST_RUNS:
        print(f"error: {len(runs)} runs: at most {MOST_RUNS} can be told apart on one page", file=sys.stderr)
        return 1
    try:
        if len(runs) > 1:
            print(write_comparison(runs, given.output or Path("comparison.html")))
        else:
            print(write_report(runs[0], path=given.output))
    except OSError as error:
        print(f"error: {error.filename or given.output}: {error.strerror}", file=sys.stderr)
        return 1
    return 0


def _problem(path: Path) -> str:
    """Why this is no run; "" if it is one."""
    if not path.is_dir():
        return f"there is no folder {path}"
    run = RunDirectory(path)
    if run.config.exists() or run.metrics.exists():
        return ""
    inside = sorted(folder.name for folder in path.iterdir() if RunDirectory(folder).config.exists())[:3]
    hint = f"; there are runs in it: {', '.join(inside)}" if inside else ""
    return f"{path} holds no run: it has neither config.yaml nor metrics.jsonl{hint}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="openrlhf report",
        usage="openrlhf report RUN [RUN …] [--output FILE]",
        description="Make report.html of a run's folder again, from what the run has written so far. Of several runs "
        "make one page that compares them: results, settings that differ, and curves over each other. Prints the "
        "path of the page.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run, such as runs/demo-seed0")
    add(
        *("-o", "--output"),
        type=Path,
        metavar="FILE",
        help="the page (default: report.html in the run's folder; of several runs ./comparison.html)",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

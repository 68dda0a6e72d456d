"""The result of proofs, for people and for machines. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from openrlhf.proving.registry import Status, Verdict

WIDTH = 120
"""Of what is not a terminal."""
STYLES = {Status.PASS: "green", Status.FAIL: "bold red", Status.NOT_APPLICABLE: "dim", Status.UNTRIED: "yellow"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was tried, and how."""

    title: str
    verdicts: Sequence[Verdict]
    notes: Sequence[str]
    """What the trial did differently from the run."""
    shown: Sequence[str]
    """Texts with marked tokens."""
    seconds: float

    @property
    def failed(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.status is Status.FAIL]

    @property
    def untried(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if verdict.status is Status.UNTRIED]

    @property
    def status(self) -> int:
        """Exit status: 0 where nothing that applies failed, or was left out."""
        return 1 if self.failed or self.untried else 0

    def to_json(self) -> str:
        return json.dumps(
            {
                "run": self.title,
                "ok": self.status == 0,
                "seconds": round(self.seconds, 1),
                "proofs": [
                    {
                        "name": v.proof.name,
                        "title": v.proof.title,
                        "status": str(v.status),
                        "detail": v.detail,
                        "shows": v.proof.shows,
                        "remedy": v.proof.remedy if v.status is Status.FAIL else "",
                        "seconds": round(v.seconds, 2),
                    }
                    for v in self.verdicts
                ],
                "notes": list(self.notes),
                "shown": list(self.shown),
            },
            indent=1,
            ensure_ascii=False,
        )


def print_report(report: Report, file: IO[str]) -> None:
    """One table, then what failed means and what to do."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=file, highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = WIDTH
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("proof", no_wrap=True)
    table.add_column("what was seen")
    table.add_column("s", justify="right")
    for verdict in report.verdicts:
        table.add_row(
            Text(str(verdict.status), style=STYLES[verdict.status]),
            Text(verdict.proof.title),
            Text(verdict.detail),
            f"{verdict.seconds:.1f}",
        )
    console.print(Text(report.title, style="bold"))
    console.print(table)
    for line in report.shown:
        console.print(Text(line, style="dim"), soft_wrap=True)
    for line in report.notes:
        console.print(Text(f"note: {line}", style="dim"), soft_wrap=True)
    for verdict in report.failed:
        console.print(Text.assemble((f"\n{verdict.proof.name} failed: ", "bold red"), verdict.detail), soft_wrap=True)
        console.print(f"  it should be: {verdict.proof.shows}", soft_wrap=True)
        console.print(f"  what to do:   {verdict.proof.remedy}", soft_wrap=True)
    console.print(Text(summary(report), style="bold"), soft_wrap=True)


def summary(report: Report) -> str:
    counts: dict[Any, int] = {}
    for verdict in report.verdicts:
        counts[verdict.status] = counts.get(verdict.status, 0) + 1
    parts = ", ".join(f"{count} {status}" for status, count in counts.items())
    return f"\n{parts}; {report.seconds:.0f} s"

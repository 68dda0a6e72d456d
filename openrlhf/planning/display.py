"""A plan and findings for people, in tables that fit 80 columns; and as plain values for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import IO, Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from openrlhf.checking.display import PIPE_WIDTH
from openrlhf.planning.fit import RANKS, Fitted
from openrlhf.planning.hardware import GIB
from openrlhf.planning.machine import Finding, Status
from openrlhf.planning.plan import Plan, PoolPlan
from openrlhf.planning.times import MEASURED

MARKS = {Status.PASS: ("ok", "green"), Status.WARNING: ("warning", "yellow"), Status.FAILURE: ("failure", "bold red")}
COLUMNS = {
    "weights": ("weights",),
    "optimizer": ("optimizer",),
    "gradients": ("gradients",),
    "activations": ("activations", "logits", "step"),
    "engine": ("engine weights", "engine work", "engine asleep"),
    "keys, values": ("keys and values",),
    "other": (),
}
"""Column → the parts that it adds up; weights of all models, and whatever is left, have the first and the last one."""
WIDE = 100
"""Columns of a terminal from which on a table has all of them."""


class DoctorDisplay:
    def __init__(self, file: IO[str], *, explain: bool) -> None:
        self._console = Console(file=file, highlight=False, markup=False, emoji=False)
        if not self._console.is_terminal:
            self._console.width = PIPE_WIDTH
        self._explain = explain

    def plan(self, plan: Plan) -> None:
        self._head(f"{plan.command} on {plan.machines}, {_launcher(plan)}")
        for name, model in plan.models.items():
            shape = model.shape
            active = f", {(model.matrices + model.head) / 1e9:.3g}B for a token" if model.is_mixture else ""
            trained = f", {_count(shape.trained)} trained" if 0 < shape.trained < shape.parameters else ""
            kind = "" if shape.trained else ", frozen"
            self._print(f"  {name}: {_count(shape.parameters)} parameters{active}{trained}{kind}", style="dim")
        if plan.placement:
            self._print("")
            self._head("Placement")
            for line in plan.placement.splitlines():
                self._print(Text(f"  {line}"))
        if plan.pools:
            self._print("")
            self._head("Memory of each device, GiB")
            self._print(self._memory(plan.pools))
            self._notes([f"{pool.name}: {pool.note}" for pool in plan.pools if pool.note])
            if self._explain:
                self._print(self._parts(plan.pools))
        if plan.times:
            self._print("")
            self._head("Time of a step")
            self._print(self._times(plan))
            self._print(Text(f"  {summary(plan)}"))
        self._notes(plan.notes)
        if self._explain:
            self._constants()

    def problems(self, plan: Plan) -> None:
        for problem in plan.problems:
            self._print(Text.assemble(("does not fit: ", "bold red"), problem.text), soft_wrap=True)

    def findings(self, findings: Sequence[Finding]) -> None:
        if not findings:
            return
        self._print("")
        self._head("What is here")
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), show_header=False)
        table.add_column("", no_wrap=True)
        table.add_column("", no_wrap=True)
        table.add_column("", overflow="fold")
        for finding in findings:
            mark, style = MARKS[finding.status]
            text = Text(finding.text)
            if finding.remedy:
                text.append(f"\n→ {finding.remedy}", style="cyan")
            table.add_row(Text(mark, style=style), finding.what, text)
        self._print(table)

    def fit(self, found: Fitted | None, *, asked: bool) -> None:
        self._print("")
        if found is None:
            self._print(Text("No change of flags that is known here makes it fit on these devices.", style="bold red"))
            return
        self._head("The smallest change that fits")
        for step in found.steps:
            words = " ".join(_flag(path, value) for path, value in step.changes.items())
            self._print(Text.assemble("  ", (words, "cyan"), f"  {step.why}"), soft_wrap=True)
        pools = ", ".join(
            f"{pool.name} {pool.peak.total / GIB:.0f} of {pool.limit / GIB:.0f} GiB" for pool in found.plan.pools
        )
        then = Text(f"then: {pools}; a step of {_seconds(found.plan.step_seconds)}")
        self._print(Padding(then, (0, 0, 0, 2), expand=False))
        if asked:
            self._print("")
            self._print(found.command.lines(), soft_wrap=True)
        else:
            self._print("  --fit prints the whole command", style="dim")

    def verdict(self, *, starts: bool, failures: int, warnings: int) -> None:
        counted = [f"{failures} failure{'s' if failures > 1 else ''}"] if failures else []
        counted += [f"{warnings} warning{'s' if warnings > 1 else ''}"] if warnings else []
        said = f" ({', '.join(counted)})" if counted else ""
        if starts:
            self._print(Text.assemble("\n", ("ok: ", "green"), f"the run can start{said}"))
        else:
            self._print(Text.assemble("\n", ("no: ", "bold red"), f"the run cannot start as it is{said}"))

    # ------------------------------------------------------------------------------------------------------- tables

    def _memory(self, pools: Sequence[PoolPlan]) -> Table:
        wide = self._console.width >= WIDE
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0) if wide else (0, 1, 0, 0))
        table.add_column("  devices", no_wrap=True)
        table.add_column("phase", no_wrap=True)
        names = list(COLUMNS) if wide else ["weights", "optim", "grads", "activ", "engine", "k, v", "other"]
        for name in [*names, "total", "of"]:
            table.add_column(name, justify="right", no_wrap=True)
        for pool in pools:
            title = f"  {pool.devices} × {pool.name}" if wide else f"  {pool.devices}×{_short(pool.name)}"
            for phase in pool.phases:
                values = _columns(phase.parts)
                over = phase.total > pool.limit
                style = "bold red" if over else "yellow" if phase is pool.peak and pool.tight else ""
                style = style or ("bold" if phase is pool.peak else "")
                cells = [Text(_number(value / GIB), style=style) for value in values]
                total = Text(_number(phase.total / GIB), style=style)
                table.add_row(title, Text(phase.phase, style=style), *cells, total, _number(pool.limit / GIB))
                title = ""
        return table

    def _parts(self, pools: Sequence[PoolPlan]) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        for _ in range(2):
            table.add_column("", no_wrap=True)
        table.add_column("", justify="right", no_wrap=True)
        table.add_column("", overflow="fold")
        for pool in pools:
            seen: set[tuple[str, str]] = set()
            for phase in pool.phases:
                for part in phase.parts:
                    if (part.name, part.why) not in seen:
                        seen.add((part.name, part.why))
                        where = f"  {_short(pool.name)}" if len(pools) > 1 else "  "
                        table.add_row(where, part.name, f"{part.bytes / GIB:.2f}", Text(f"= {part.why}", style="dim"))
        return table

    def _times(self, plan: Plan) -> Table:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
        table.add_column("", no_wrap=True)
        table.add_column("", justify="right", no_wrap=True)
        table.add_column("", justify="right", no_wrap=True)
        table.add_column("", overflow="fold")
        for time in plan.times:
            share = time.seconds.total / plan.step_seconds if plan.step_seconds else 0.0
            style = "bold" if time.name == plan.bottleneck else ""
            why = time.seconds.why + (", beside training" if time.overlaps else "")
            table.add_row(
                Text(f"  {time.name}", style=style),
                Text(_seconds(time.seconds.total), style=style),
                f"{share:.0%}",
                Text(why, style="dim"),
            )
        return table

    def _constants(self) -> None:
        self._print("")
        self._head("Measured constants")
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2), show_header=False)
        table.add_column("", no_wrap=True)
        table.add_column("", justify="right", no_wrap=True)
        table.add_column("", overflow="fold")
        for name, constant in MEASURED.items():
            table.add_row(name, f"{constant.value:g}", Text(constant.source, style="dim"))
        self._print(table)

    def _notes(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._print(Padding(Text.assemble(("note: ", "yellow"), line), (0, 0, 0, 2), expand=False))

    def _head(self, text: str) -> None:
        self._print(Text(text, style="bold"))

    def _print(self, what: Any, **how: Any) -> None:
        self._console.print(what, **how)


def summary(plan: Plan) -> str:
    """Steps, tokens and hours, in a line."""
    rate = plan.tokens_per_step / plan.step_seconds if plan.step_seconds else 0.0
    parts = [
        f"a step: {_seconds(plan.step_seconds)}",
        f"{plan.samples_per_step:,} samples, {plan.tokens_per_step:,.0f} tokens, {rate:,.0f} tokens/s",
    ]
    if plan.steps is not None and plan.hours is not None:
        parts.append(f"{plan.steps:,} steps: {_hours(plan.hours)}")
    return "; ".join(parts)


def _launcher(plan: Plan) -> str:
    if plan.launcher == "local":
        return "one process"
    return {"ray": "Ray", "processes": "a process on each"}.get(plan.launcher, plan.launcher)


def _columns(parts: Sequence[Any]) -> list[float]:
    found = dict.fromkeys(COLUMNS, 0.0)
    names = {name: column for column, those in COLUMNS.items() for name in those}
    for part in parts:
        engine = part.name.startswith("engine")
        column = "weights" if part.name.endswith(" weights") and not engine else names.get(part.name, "other")
        found[column] += part.bytes
    return list(found.values())


def _flag(path: str, value: Any) -> str:
    if path == RANKS:
        return f"{value} processes"
    if value is None:
        return f"(without --{path})"
    return f"--{path}" + ("" if value is True else f" {str(value).lower() if value is False else value}")


def _short(name: str) -> str:
    return "+".join(part[:6] for part in name.split(" + "))


def _number(gib: float) -> str:
    return "" if gib < 0.005 else f"{gib:.2f}" if gib < 1 else f"{gib:.1f}" if gib < 99.95 else f"{gib:,.0f}"


def _count(value: float) -> str:
    for size, name in ((1e9, "B"), (1e6, "M")):
        if value >= size:
            return f"{value / size:.3g}{name}"
    return f"{value:,.0f}"


def _seconds(value: float) -> str:
    if value < 0.095:
        return f"{value * 1e3:.0f} ms"
    return f"{value:.1f} s" if value < 120 else f"{value / 60:.1f} min"


def _hours(value: float) -> str:
    if value < 1 / 30:
        return f"{value * 3600:.0f} s"
    return f"{value * 60:.0f} min" if value < 2 else f"{value:.1f} h" if value < 72 else f"{value / 24:.1f} days"


# ----------------------------------------------------------------------------------------------------- for programs


def as_values(
    plan: Plan | None, findings: Sequence[Finding], found: Fitted | None, *, starts: bool, sought: bool
) -> dict[str, Any]:
    """Everything as JSON has it: bytes and seconds."""
    values: dict[str, Any] = {
        "starts": starts,
        "findings": [finding._asdict() for finding in findings],
    }
    if plan is not None:
        values |= plan_values(plan)
    if sought:
        values["fit"] = None
        if found is not None:
            values["fit"] = {
                "command": str(found.command),
                "changes": {path: value for step in found.steps for path, value in step.changes.items()},
                "plan": plan_values(found.plan),
            }
    return values


def plan_values(plan: Plan) -> dict[str, Any]:
    return {
        "command": plan.command,
        "machines": {
            "nodes": plan.machines.nodes,
            "devices_per_node": plan.machines.per_node,
            "device": dataclasses.asdict(plan.machines.device),
        },
        "launcher": plan.launcher,
        "fits": plan.fits,
        "problems": [problem._asdict() for problem in plan.problems],
        "notes": list(plan.notes),
        "pools": [
            {
                "name": pool.name,
                "devices": pool.devices,
                "limit_bytes": pool.limit,
                "phases": {
                    phase.phase: {
                        "bytes": phase.total,
                        "parts": [part._asdict() for part in phase.parts],
                    }
                    for phase in pool.phases
                },
            }
            for pool in plan.pools
        ],
        "seconds": {time.name: {"total": time.seconds.total, "why": time.seconds.why} for time in plan.times},
        "step_seconds": plan.step_seconds,
        "samples_per_step": plan.samples_per_step,
        "tokens_per_step": plan.tokens_per_step,
        "steps": plan.steps,
        "hours": plan.hours,
    }

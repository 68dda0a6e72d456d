"""Several runs on one page: what differs in their settings, what came out, and their curves over each other."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from openrlhf.observability.charts import RUN_COLOURS, Curve, line_chart, short_number
from openrlhf.observability.progress import clock_text
from openrlhf.observability.report import (
    PLANS,
    chart_section,
    contents,
    evaluation_label,
    evaluation_names,
    fill_template,
    plan_title,
    planned_curves,
    put_in_place,
    score_text,
    setting_text,
    status_chip,
)
from openrlhf.observability.run_directory import NAMES_OF_RUNS, RunData, read_run

MOST_RUNS = len(RUN_COLOURS)
"""The most runs on one page: more curves cannot be told apart."""
MOST_VALUE = 300
"""Characters of a setting's value."""


def write_comparison(run_dirs: Sequence[str | Path], path: Path) -> Path:
    """Write the page to `path`. The first run is the one that others are compared with."""
    runs = [read_run(run_dir) for run_dir in run_dirs][:MOST_RUNS]
    names = told_apart([run.directory.path for run in runs])
    differing = settings_that_differ(runs)
    body = _results(runs, names) + _settings(differing, names) + _charts(runs, names)
    page = fill_template(
        {
            "title": f"{len(runs)} runs",
            "eyebrow": "OpenRLHF runs compared",
            "head": "",
            "live": "",
            "subtitle": escape(" · ".join(names)),
            "status": "",
            "progress": "",
            "cards": "",
            "contents": contents(body),
            "body": body,
        }
    )
    return put_in_place(path, page)


def told_apart(paths: Sequence[Path]) -> list[str]:
    """The folders' names, with as much of the path before them as tells all apart.

    >>> told_apart([Path("/a/x/run"), Path("/a/y/run")])
    ['x/run', 'y/run']
    """
    parts = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, parts)) + 1):
        names = ["/".join(one[-count:]) for one in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return [str(path) for path in paths]


def settings_that_differ(runs: Sequence[RunData]) -> dict[str, list[Any]]:
    """Setting -> its value in each run, None where it has none; without those that say where a run is."""
    names = dict.fromkeys(name for run in runs for name in run.config if name not in NAMES_OF_RUNS)
    table = {name: [run.config.get(name) for run in runs] for name in names}
    return {name: values for name, values in table.items() if any(value != values[0] for value in values)}


def _results(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """A row per run: how far it is, and what came out in the end."""
    columns: dict[str, list[str]] = {
        "ended": [status_chip(run.end) or "–" for run in runs],
        "steps": [f"{run.train[-1]['step'] if run.train else 0:,}" for run in runs],
        "time": [clock_text(math.nan if run.seconds is None else run.seconds) for run in runs],
    }
    if any(run.warnings for run in runs):
        columns["warnings"] = [str(len(run.warnings)) for run in runs]
    scores = dict.fromkeys(name for run in runs for name in evaluation_names(run.evaluations))
    for name in scores:
        columns[f"{evaluation_label(name)}, last"] = [_value(run.evaluations, name, _last, score_text) for run in runs]
        if name.endswith("pass1"):
            columns[f"{evaluation_label(name)}, best"] = [
                _value(run.evaluations, name, max, score_text) for run in runs
            ]
    for title, metrics, text in (
        ("reward", ("reward", "rollout/reward_mean"), score_text),
        ("loss", ("loss", "gpt_loss"), short_number),
        ("accuracy", ("acc",), score_text),
        ("length", ("response_length",), short_number),
        ("KL", ("kl",), short_number),
        ("entropy", ("entropy_loss",), short_number),
        ("tokens / s", ("perf/tokens_per_second",), short_number),
    ):
        values = [next((v for m in metrics if (v := _value(run.train, m, _late, text)) != "–"), "–") for run in runs]
        if any(value != "–" for value in values):
            columns[title] = values
    head = "".join(f"<th>{escape(title)}</th>" for title in ("run", *columns))
    rows = "".join(
        f'<tr><th><i class="swatch c{RUN_COLOURS[i]}"></i>{escape(name)}</th>'
        + "".join(f"<td>{values[i]}</td>" for values in columns.values())
        + "</tr>"
        for i, name in enumerate(names)
    )
    return (
        '<section id="results"><h2>Results <span class="count">training: means of the last tenth of the steps</span>'
        "</h2>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>'
    )


def _value(
    records: Sequence[Mapping], name: str, reduce: Callable[[list[float]], float], text: Callable[[float], str]
) -> str:
    values = [point.value for point in Curve.read(name, records, trend=False).finite]
    return escape(text(reduce(values))) if values else "–"


def _last(values: list[float]) -> float:
    return values[-1]


def _late(values: list[float]) -> float:
    return statistics.fmean(values[-max(1, len(values) // 10) :])


def _settings(differing: Mapping[str, Sequence[Any]], names: Sequence[str]) -> str:
    if not differing:
        return '<section><h2>Settings</h2><p class="empty">All settings of these runs are the same.</p></section>'
    head = "".join(
        f'<th><i class="swatch c{colour}"></i>{escape(name)}</th>'
        for name, colour in zip(names, RUN_COLOURS, strict=False)
    )
    rows = "".join(
        f"<tr><th>--{escape(setting)}</th>"
        + "".join(f"<td>{escape(setting_text(value)[:MOST_VALUE])}</td>" for value in values)
        + "</tr>"
        for setting, values in differing.items()
    )
    return (
        f'<section id="settings"><h2>Settings that differ <span class="count">{len(differing)}</span></h2>'
        '<div class="scroll">'
        f'<table class="words"><thead><tr><th></th>{head}</tr></thead><tbody>{rows}</tbody></table></div></section>'
    )


def _charts(runs: Sequence[RunData], names: Sequence[str]) -> str:
    """A chart per metric, a curve per run. Of a chart of several metrics each has one of its own."""
    sections: dict[str, list[str]] = {"Learning": []}
    for plan in PLANS:
        by_label: dict[str, list[Curve]] = {}
        for place, run in enumerate(runs):
            for curve in planned_curves(plan, run):
                label = "" if plan.alternatives else curve.name
                row = by_label.setdefault(label, [Curve(name, ()) for name in names])
                row[place] = Curve(names[place], curve.points)
        for label, curves in by_label.items():
            title = plan_title(plan, runs)
            if len(by_label) > 1:
                title += f": {label}"
            card = line_chart(title, curves, zero=plan.zero, colours=RUN_COLOURS, trends=True)
            sections.setdefault(plan.section, []).append(card)
    for name in dict.fromkeys(name for run in runs for name in evaluation_names(run.evaluations)):
        curves = [Curve.read(name, run.evaluations, label=label) for run, label in zip(runs, names, strict=True)]
        if any(curve.points for curve in curves):
            title = f"Evaluation: {evaluation_label(name)}"
            sections["Learning"].append(line_chart(title, curves, dots=True, colours=RUN_COLOURS))
    html = "".join(chart_section(title, cards) for title, cards in sections.items() if cards)
    return html or '<section><p class="empty">No step was finished, so there is nothing to draw.</p></section>'

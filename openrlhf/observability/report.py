"""A finished, or interrupted, run as one page that needs nothing else: no network, no script from elsewhere."""

from __future__ import annotations

import math
import os
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from openrlhf.observability.charts import COLOURS, REST, line_chart, stacked_chart
from openrlhf.observability.loggers import is_time, read_metrics, score_names
from openrlhf.observability.progress import clock_text
from openrlhf.observability.rollout_samples import render_rollouts
from openrlhf.observability.run_directory import RunDirectory
from openrlhf.observability.series import Curve, short_number

MOST_EXTRA_CHARTS = 24
MOST_CONFIG_CHARACTERS = 200_000


@dataclass(frozen=True, slots=True)
class ChartPlan:
    """A chart that is drawn when the run logged any of its metrics."""

    section: str
    title: str
    metrics: tuple[str, ...]
    zero: bool = False
    alternatives: bool = False
    """The metrics are names for the same thing: the first that is there is enough."""


PLANS = (
    ChartPlan("Learning", "Reward", ("reward", "rollout/reward_mean"), alternatives=True),
    ChartPlan("Learning", "Loss", ("loss", "gpt_loss")),
    ChartPlan("Learning", "Accuracy", ("acc", "accuracy")),
    ChartPlan(
        "Responses",
        "Response length (tokens)",
        ("response_length", "rollout/response_length_mean"),
        zero=True,
        alternatives=True,
    ),
    ChartPlan("Responses", "Truncated", ("truncated", "rollout/truncated_rate"), zero=True, alternatives=True),
    ChartPlan("Responses", "Spread of rewards in a group", ("group_reward_std",), zero=True),
    ChartPlan("Responses", "Groups accepted", ("dynamic_filtering_pass_rate",), zero=True),
    ChartPlan("Update", "Policy loss", ("policy_loss",)),
    ChartPlan("Update", "Critic loss", ("critic_loss",)),
    ChartPlan("Update", "Gradient norm", ("actor_grad_norm", "critic_grad_norm", "grad_norm"), zero=True),
    ChartPlan("Update", "KL to the reference", ("kl",)),
    ChartPlan("Update", "KL coefficient", ("kl_coef",), zero=True),
    ChartPlan("Update", "KL within the update", ("ppo_kl", "vllm_kl")),
    ChartPlan("Update", "Clipped tokens", ("ppo_clip_ratio",), zero=True),
    ChartPlan("Update", "Gap between engine and trainer (nats)", ("logprobs_diff",), zero=True),
    ChartPlan("Update", "Corrected tokens", ("is_corrected",), zero=True),
    ChartPlan("Update", "Entropy", ("entropy", "entropy_loss"), alternatives=True),
    ChartPlan("Speed", "Tokens per second", ("perf/tokens_per_second",), zero=True),
)


def write_report(run_dir: str | Path, *, status: str = "") -> Path:
    """Write report.html from what the folder holds, however little, and return its path.

    `status` is shown beside the title, e.g. "interrupted".
    """
    run = RunDirectory(Path(run_dir))
    history = read_metrics(run.metrics)
    train = [record for record in history if record["kind"] == "train"]
    evaluations = [record for record in history if record["kind"] == "eval"]
    config_text, config = _read_config(run.config)
    page = _fill_template(
        {
            "title": escape(run.path.resolve().name),
            "subtitle": escape(_subtitle(config)),
            "status": f'<span class="status">{escape(status)}</span>' if status else "",
            "cards": _cards(config, train, evaluations),
            "charts": _charts(train, evaluations),
            "rollouts": render_rollouts(run.rollouts),
            "config": _config_section(config_text),
        }
    )
    # Renamed into place: whoever has the page open never meets half of it.
    draft = run.report.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(page, encoding="utf-8", errors="replace")
    draft.replace(run.report)
    return run.report


def _read_config(path: Path) -> tuple[str, dict[str, Any]]:
    """The text of config.yaml and its entries by dotted name; empty when it is missing or half-written."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "", {}
    try:
        return text, dict(_dotted(yaml.safe_load(text)))
    except yaml.YAMLError:
        return text, {}


def _dotted(tree: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(tree, Mapping):
        return [(prefix.removesuffix("."), tree)]
    return [entry for key, value in tree.items() for entry in _dotted(value, f"{prefix}{key}.")]


def _first(config: Mapping[str, Any], *names: str) -> str:
    return next((str(config[name]) for name in names if config.get(name)), "")


def _model(config: Mapping[str, Any]) -> str:
    """The model's name; of a long path, the end."""
    names = ("actor.model_name_or_path", "model.model_name_or_path", "model_name_or_path", "pretrain", "model")
    return "/".join(Path(_first(config, *names)).parts[-2:])


def _estimator(config: Mapping[str, Any]) -> str:
    return _first(config, "algo.advantage.estimator", "advantage_estimator", "estimator")


def _subtitle(config: Mapping[str, Any]) -> str:
    data = _first(config, "data.prompt_dataset", "data.dataset", "prompt_data", "dataset")
    return " · ".join(part for part in (_model(config), _estimator(config), data) if part)


def _cards(config: Mapping[str, Any], train: Sequence[Mapping], evaluations: Sequence[Mapping]) -> str:
    change = _score_change(train, evaluations)
    cards = [change] if change else []
    cards.append(_card("Steps", f"{len(train):,}"))
    seconds = max(
        (r["time"] for r in [*train, *evaluations] if isinstance(r.get("time"), int | float)), default=math.nan
    )
    cards.append(_card("Time", clock_text(seconds), _per_step(train)))
    speeds = [point.value for point in Curve.read("perf/tokens_per_second", train).finite]
    if speeds:
        cards.append(_card("Tokens / s", short_number(statistics.median(speeds)), "median step"))
    if estimator := _estimator(config):
        cards.append(_card("Estimator", estimator))
    if model := _model(config):
        cards.append(_card("Model", model))
    return "".join(cards)


def _per_step(train: Sequence[Mapping]) -> str:
    seconds = [point.value for point in Curve.read("timing/step_total", train).finite]
    return f"{short_number(statistics.fmean(seconds))} s per step" if seconds else ""


def _card(label: str, value: str, detail: str = "") -> str:
    size = "small" if len(value) > 9 else ""
    below = f"<small>{escape(detail)}</small>" if detail else ""
    return f'<div class="card"><span>{escape(label)}</span><strong class="{size}">{escape(value)}</strong>{below}</div>'


def _score_change(train: Sequence[Mapping], evaluations: Sequence[Mapping]) -> str:
    """Before → after: the first and the last evaluation, or the rewards, else losses, of the first and last steps."""
    curves = [Curve.read(name, evaluations).finite for name in _evaluation_names(evaluations) if name.endswith("pass1")]
    curves = [points for points in curves if len(points) > 1]
    if curves:
        label, detail = "Evaluation, pass@1", "first → last evaluation"
        if len(curves) > 1:
            detail += f", mean of {len(curves)} data sources"
        before = statistics.fmean(points[0].value for points in curves)
        after = statistics.fmean(points[-1].value for points in curves)
    else:
        label, points = next(
            ((p.title, c) for p in PLANS[:2] for n in p.metrics if len(c := Curve.read(n, train).finite) > 1), ("", [])
        )
        if not points:
            return ""
        tenth = max(1, len(points) // 10)
        detail = f"first → last {tenth} step{'s' if tenth > 1 else ''}"
        before = statistics.fmean(point.value for point in points[:tenth])
        after = statistics.fmean(point.value for point in points[-tenth:])
    gain = before - after if label == "Loss" else after - before
    direction = "up" if gain > 0 else "down" if gain < 0 else ""
    return (
        f'<div class="card wide"><span>{label}</span><strong>{_score(before)}<i>→</i>'
        f'<em class="{direction}">{_score(after)}</em></strong><small>{detail}</small></div>'
    )


def _score(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else short_number(value)


def _evaluation_names(evaluations: Sequence[Mapping]) -> list[str]:
    return score_names(dict.fromkeys(name for record in evaluations for name in record))


def _charts(train: Sequence[Mapping], evaluations: Sequence[Mapping]) -> str:
    if not train and not evaluations:
        return '<section><p class="empty">No step was finished, so there is nothing to draw yet.</p></section>'
    sections: dict[str, list[str]] = {"Learning": []}
    shown = {"step", "kind", "time", "global_step"}
    for plan in PLANS:
        curves = [curve for name in plan.metrics if (curve := Curve.read(name, train)).points]
        shown |= {curve.name for curve in curves}
        if plan.alternatives:
            curves = curves[:1]
        if curves:
            sections.setdefault(plan.section, []).append(line_chart(plan.title, curves, zero=plan.zero))
    scores = [
        curve
        for name in _evaluation_names(evaluations)
        if (curve := Curve.read(name, evaluations, label=name.removeprefix("eval_").removeprefix("default_"))).points
    ]
    if scores:
        sections["Learning"].append(line_chart("Evaluation", scores, dots=True))
    if phases := _phases(train):
        sections.setdefault("Speed", []).append(stacked_chart("Time per step", phases, unit=" s"))
    html = "".join(_chart_section(title, cards) for title, cards in sections.items() if cards)
    return html + _extra_charts(train, shown)


def _chart_section(title: str, cards: Sequence[str]) -> str:
    css = "charts large" if title in ("Learning", "Speed") else "charts"
    return f'<section><h2>{title}</h2><div class="{css}">{"".join(cards)}</div></section>'


def _phases(train: Sequence[Mapping]) -> dict[str, Curve]:
    """Seconds per phase, the longest first; small ones and what no phase covers are "other"."""
    names = dict.fromkeys(name for r in train for name in r if name.startswith("timing/"))
    curves = {name: curve for name in names if (curve := Curve.read(name, train)).finite}
    total = curves.pop("timing/step_total", None)
    ranked = sorted(curves, key=lambda name: -sum(point.value for point in curves[name].finite))[: COLOURS - 1]
    phases = {name.removeprefix("timing/"): curves[name] for name in ranked}
    if total is None:
        return phases
    rest = []
    for record in train:
        whole = record.get("timing/step_total")
        parts = [record.get(name) or 0.0 for name in ranked]
        rest.append({"step": record["step"], "other": max(0.0, whole - sum(parts)) if whole else None})
    phases[REST] = Curve.read("other", rest)
    return phases


def _extra_charts(train: Sequence[Mapping], shown: set[str]) -> str:
    names = sorted({name for record in train for name in record if name not in shown and not is_time(name)})
    curves = [curve for name in names if (curve := Curve.read(name, train)).points]
    if not curves:
        return ""
    cards = "".join(line_chart(curve.name, [curve]) for curve in curves[:MOST_EXTRA_CHARTS])
    left = len(curves) - MOST_EXTRA_CHARTS
    more = f'<p class="note">{left} more in metrics.jsonl</p>' if left > 0 else ""
    return (
        f'<section><details><summary>All other metrics <span class="count">{len(curves)}</span></summary>'
        f'<div class="charts">{cards}</div>{more}</details></section>'
    )


def _config_section(text: str) -> str:
    if not text:
        return ""
    cut = text[:MOST_CONFIG_CHARACTERS]
    return f"<section><details><summary>Configuration</summary><pre>{escape(cut)}</pre></details></section>"


def _fill_template(parts: Mapping[str, str]) -> str:
    """The template with {{name}} replaced, in one pass, so that nothing in a part is taken for a placeholder."""
    template = resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match.group(1)], template)

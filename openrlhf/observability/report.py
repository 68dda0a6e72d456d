"""A run as one page that needs nothing else: no network, no script from elsewhere. It is there from the beginning."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from openrlhf.observability.charts import COLOURS, REST, Curve, line_chart, short_number, stacked_chart
from openrlhf.observability.loggers import Kind, is_time, score_names
from openrlhf.observability.progress import clock_text
from openrlhf.observability.rollout_samples import RolloutFile, mean_rewards, render_rollouts
from openrlhf.observability.run_directory import RunData, RunDirectory, read_run

logger = logging.getLogger(__name__)

MOST_EXTRA_CHARTS = 24
MOST_CONFIG_CHARACTERS = 200_000
MOST_NOTES = 200

REFRESH_SECONDS = 10
"""How often an open page of a running run is loaded again."""
LEAST_SECONDS = 2.0
"""The least time between two pages of a running run."""
MOST_SHARE = 0.01
"""The most that making pages may take of a run's time: where a page takes longer, there are fewer."""


@dataclass(frozen=True, slots=True)
class ChartPlan:
    """A chart that is drawn when the run logged any of its metrics."""

    section: str
    title: str
    metrics: Mapping[str, str]
    """Name in metrics.jsonl -> name in the legend."""
    zero: bool = False
    alternatives: bool = False
    """The metrics are names for the same thing: the first that is there is enough."""
    rare: bool = False
    """Left out as long as it is 0."""


def _plan(section: str, title: str, *metrics: str, **options: bool) -> ChartPlan:
    return ChartPlan(section, title, {name: name for name in metrics}, **options)


PLANS = (
    _plan("Learning", "Reward", "reward", "rollout/reward_mean", alternatives=True),
    _plan("Learning", "Loss", "loss", "gpt_loss"),
    _plan("Learning", "Accuracy", "acc", "accuracy"),
    _plan("Learning", "Success (score)", "score"),
    _plan("Learning", "Reward of chosen and rejected", "chosen_reward", "reject_reward"),
    _plan(
        "Responses",
        "Response length (tokens)",
        *("response_length", "rollout/response_length_mean"),
        zero=True,
        alternatives=True,
    ),
    _plan(
        "Responses", "Truncated (share)", "truncated", "rollout/truncated_rate", zero=True, alternatives=True, rare=True
    ),
    _plan("Responses", "Failed samples", "rollout/failed", zero=True, rare=True),
    _plan("Responses", "Spread of rewards in a group", "group_reward_std", zero=True),
    _plan("Responses", "Groups accepted (share)", "dynamic_filtering_pass_rate", zero=True),
    ChartPlan(
        "Responses",
        "Age of samples (weight versions)",
        {"rollout/staleness": "mean", "rollout/staleness_max": "oldest"},
        zero=True,
    ),
    _plan("Update", "Policy loss", "policy_loss"),
    _plan("Update", "Critic loss", "critic_loss"),
    ChartPlan(
        "Update",
        "Gradient norm",
        {"actor_grad_norm": "policy", "critic_grad_norm": "critic", "grad_norm": "model"},
        zero=True,
    ),
    _plan("Update", "KL to the reference", "kl"),
    _plan("Update", "KL coefficient", "kl_coef", zero=True),
    _plan("Update", "KL of the update", "ppo_kl"),
    _plan("Update", "Clipped tokens (share)", "ppo_clip_ratio", zero=True),
    ChartPlan(
        "Update",
        "{engine} against trainer (nats per token)",
        {"logprobs_diff": "gap of log-probs", "vllm_kl": "KL"},
        zero=True,
    ),
    _plan("Update", "Corrected tokens (share)", "is_corrected", zero=True),
    _plan("Update", "Entropy", "entropy", "entropy_loss", alternatives=True),
    ChartPlan(
        "Update",
        "Learning rate",
        {"actor_lr": "policy", "critic_lr": "critic", "lr": "model"},
        zero=True,
    ),
    ChartPlan(
        "Speed",
        "Tokens per second",
        {"perf/tokens_per_second": "of samples, whole", "perf/generated_tokens_per_second": "generated"},
        zero=True,
    ),
)

PHASES = {
    "generation": "generation",
    "make_experience": "scoring",
    "ppo_train": "training",
    "broadcast": "weights to the engine",
    "evaluation_wait": "waiting for evaluation",
}
"""The phases of a step, as the page names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """The progress of a run that has not ended."""

    step: int
    total: int
    seconds_left: float = math.nan


class LiveReport:
    """Writes the page while a run goes on; a `Logger`, told after those that write what the page is made from.

    A page that cannot be written is said once, and ends no run.
    """

    def __init__(self, run_dir: RunDirectory, *, steps: int, now: Callable[[], float] = time.monotonic) -> None:
        self._run_dir = run_dir
        self._total = steps
        self._now = now
        self._rollouts = RolloutFile(run_dir.rollouts)
        self._began = now()
        self._first: int | None = None
        self._step = 0
        self._next = -math.inf
        self._failed = False

    def start(self) -> None:
        """Write a page without steps, so that the path that was printed exists."""
        self._write()
        self._next = -math.inf  # the first step is shown however soon it comes

    def log(self, step: int, metrics: Mapping[str, float], *, kind: Kind = "train") -> None:
        if kind == "train":
            self._first = step - 1 if self._first is None else self._first
            self._step = step
        if self._now() >= self._next:
            self._write()

    def close(self) -> None:
        pass

    def finish(self, status: str) -> None:
        """The last page, however the run ended."""
        self._write(status=status)

    def _write(self, *, status: str | None = None) -> None:
        began = self._now()
        try:
            running = self._running() if status is None else None
            write_report(self._run_dir.path, status=status, running=running, rollouts=self._rollouts)
        except Exception:
            if not self._failed:
                logger.exception("report.html could not be written")
            self._failed = True
        ended = self._now()
        self._next = ended + max(LEAST_SECONDS, (ended - began) / MOST_SHARE)

    def _running(self) -> Running:
        done = self._step - (self._first or 0)
        pace = (self._now() - self._began) / done if done else math.nan
        return Running(step=self._step, total=self._total, seconds_left=pace * max(0, self._total - self._step))


def write_report(
    run_dir: str | Path,
    *,
    status: str | None = None,
    running: Running | None = None,
    rollouts: RolloutFile | None = None,
    path: Path | None = None,
) -> Path:
    """Write report.html (or `path`) from what the folder holds, however little, and return its path.

    `status` is shown beside the title, e.g. "interrupted"; None: what the folder itself says. While a run goes on
    (`running`) an open page is loaded again and again. `rollouts` remembers what it has read of them.
    """
    run = read_run(run_dir)
    rollouts = rollouts or RolloutFile(run.directory.rollouts)
    body = "".join(
        (
            _warnings(run),
            _charts(run, ended=running is None),
            render_rollouts(rollouts, mean_rewards(run.train)),
            _notes(run),
            _settings(run),
        )
    )
    page = fill_template(
        {
            "title": escape(run.name),
            "eyebrow": "OpenRLHF run",
            "head": f'<noscript><meta http-equiv="refresh" content="{REFRESH_SECONDS}"></noscript>' if running else "",
            "live": f' data-refresh="{REFRESH_SECONDS}" data-written="{time.time():.0f}"' if running else "",
            "subtitle": escape(_subtitle(run)),
            "status": status_chip("running" if running else run.end if status is None else status),
            "progress": _progress(running) if running else "",
            "cards": _cards(run),
            "contents": contents(body),
            "body": body,
        }
    )
    return put_in_place(path or run.directory.report, page)


def contents(body: str) -> str:
    """Links to the sections of a page that is longer than a screen."""
    names = re.findall(r'<section id="(\w+)"', body)
    links = "".join(f'<a href="#{name}">{name.capitalize()}</a>' for name in names)
    return f"<nav>{links}</nav>" if len(names) > 2 else ""


def put_in_place(path: Path, page: str) -> Path:
    """The page is renamed into place, so that a reader never sees half of it."""
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        draft.write_text(page, encoding="utf-8", errors="replace")
        draft.replace(path)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    return path


def _subtitle(run: RunData) -> str:
    data = run.first("data.prompt_dataset", "data.dataset", "prompt_data", "dataset")
    return " · ".join(part for part in (run.model, run.estimator, data) if part)


def status_chip(status: str | None) -> str:
    if not status:
        return ""
    word = status.split(":")[0]
    kind = word if word in ("running", "finished", "failed", "interrupted") else ""
    return f'<span class="status {kind}">{escape(word)}</span>'


def _progress(running: Running) -> str:
    share = running.step / running.total if running.total else 0.0
    left = f" · about {clock_text(running.seconds_left)} left" if math.isfinite(running.seconds_left) else ""
    return (
        f'<div class="going"><div class="bar"><i style="width:{min(1.0, share):.1%}"></i></div>'
        f"<p>step {running.step:,} of {running.total:,}{left}"
        '<span class="age">this page is loaded again by itself</span></p></div>'
    )


def _cards(run: RunData) -> str:
    train = run.train
    change = _score_change(run)
    cards = [change] if change else []
    cards.append(_card("Steps", f"{train[-1]['step'] if train else 0:,}"))
    seconds = math.nan if run.seconds is None else run.seconds
    cards.append(_card("Time", clock_text(seconds), _per_step(train)))
    speeds = [point.value for point in Curve.read("perf/tokens_per_second", train, trend=False).finite]
    if speeds:
        cards.append(_card("Tokens / s", short_number(statistics.median(speeds)), "median step"))
    cards.append(_gap(run))
    if run.estimator:
        cards.append(_card("Estimator", run.estimator))
    if run.model:
        cards.append(_card("Model", run.model))
    return "".join(cards)


def _gap(run: RunData) -> str:
    """Between the log-probs of engine and trainer; nothing where no step has measured it."""
    found = {name: Curve.read(f"logprobs_diff{name}", run.train, trend=False).finite for name in ("", "_p99", "_max")}
    means, nearly_all, largest = ([point.value for point in points] for points in found.values())
    if not means:
        return ""
    parts = ["nats per token, median step"]
    if nearly_all:
        parts.append(f"99 % below {short_number(statistics.median(nearly_all))}")
    if largest:
        parts.append(f"largest {short_number(max(largest))}")
    engine = "vLLM" if run.has_vllm else "the engine"
    return _card(f"Gap to {engine}", short_number(statistics.median(means)), ", ".join(parts))


def _per_step(train: Sequence[Mapping]) -> str:
    seconds = [point.value for point in Curve.read("timing/step_total", train, trend=False).finite]
    return f"{short_number(statistics.fmean(seconds))} s per step" if seconds else ""


def _card(label: str, value: str, detail: str = "") -> str:
    size = "small" if len(value) > 9 else ""
    below = f"<small>{escape(detail)}</small>" if detail else ""
    return f'<div class="card"><span>{escape(label)}</span><strong class="{size}">{escape(value)}</strong>{below}</div>'


def _score_change(run: RunData) -> str:
    """Before → after: the first and the last evaluation, or the rewards, else losses, of the first and last steps."""
    names = [name for name in evaluation_names(run.evaluations) if name.endswith("pass1")]
    curves = [points for name in names if len(points := Curve.read(name, run.evaluations, trend=False).finite) > 1]
    if curves:
        label, detail = "Evaluation, pass@1", "first → last evaluation"
        if len(curves) > 1:
            detail += f", mean of {len(curves)} data sources"
        before = statistics.fmean(points[0].value for points in curves)
        after = statistics.fmean(points[-1].value for points in curves)
    else:
        label, points = next(
            (
                (plan.title, values)
                for plan in PLANS[:2]
                for name in plan.metrics
                if len(values := Curve.read(name, run.train, trend=False).finite) > 1
            ),
            ("", []),
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
        f'<div class="card wide"><span>{label}</span><strong>{score_text(before)}<i>→</i>'
        f'<em class="{direction}">{score_text(after)}</em></strong><small>{detail}</small></div>'
    )


def score_text(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 100 else short_number(value)


def evaluation_names(evaluations: Sequence[Mapping]) -> list[str]:
    return score_names(dict.fromkeys(name for record in evaluations for name in record))


def evaluation_label(name: str) -> str:
    """
    >>> evaluation_label("eval_default_pass1"), evaluation_label("eval_aime_pass4")
    ('pass@1', 'aime pass@4')
    """
    label = name.removeprefix("eval_").removeprefix("default_")
    return re.sub(r"(^|_)pass(\d+)$", lambda m: f"{' ' if m[1] else ''}pass@{m[2]}", label)


def _warnings(run: RunData) -> str:
    """The failure and the warnings of a run, at the top of the page."""
    failure = run.end if run.end is not None and run.end.startswith("failed: ") else None
    html = ""
    if failure:
        html += f'<p class="alert"><b>The run failed.</b> {escape(failure.removeprefix("failed: "))}</p>'
    if run.warnings:
        count = f'<span class="count">{len(run.warnings)}</span>'
        html += f'<h2>Warnings {count}</h2><ul class="notes warn">{_note_lines(run.warnings)}</ul>'
    return f'<section id="warnings" class="said-so">{html}</section>' if html else ""


def _notes(run: RunData) -> str:
    """The other notes, folded up."""
    notes = [note for note in run.notes if note.get("kind") == "note"]
    if not notes:
        return ""
    summary = f'<summary>Notes <span class="count">{len(notes)}</span></summary>'
    folded = f'<details data-key="notes">{summary}<ul class="notes">{_note_lines(notes)}</ul></details>'
    return f"<section>{folded}</section>"


def _note_lines(notes: Sequence[Mapping]) -> str:
    lines = [
        f"<li><span>{f'step {step}' if (step := note.get('step')) else 'start'}</span>{escape(note['text'])}</li>"
        for note in notes[:MOST_NOTES]
    ]
    if len(notes) > MOST_NOTES:
        lines.append(f"<li><span></span>{len(notes) - MOST_NOTES} more in notes.jsonl</li>")
    return "".join(lines)


def planned_curves(plan: ChartPlan, run: RunData) -> list[Curve]:
    """The series that the run has of a chart, under the names of the legend."""
    curves = [c for name, label in plan.metrics.items() if (c := Curve.read(name, run.train, label=label)).points]
    if plan.rare and not any(point.value for curve in curves for point in curve.points):
        return []
    return curves[:1] if plan.alternatives else curves


def plan_title(plan: ChartPlan, runs: Iterable[RunData]) -> str:
    return plan.title.replace("{engine}", "vLLM" if all(run.has_vllm for run in runs) else "Engine")


def _charts(run: RunData, *, ended: bool) -> str:
    train, evaluations = run.train, run.evaluations
    if not train and not evaluations:
        nothing = "No step was finished, so there is nothing to draw." if ended else "The first step is being taken."
        return f'<section><p class="empty">{nothing}</p></section>'
    sections: dict[str, list[str]] = {"Learning": []}
    shown = {"step", "kind", "time", "global_step"}
    for plan in PLANS:
        shown |= plan.metrics.keys()
        curves = planned_curves(plan, run)
        if plan.title == "Success (score)" and _same_values(run, "score", "reward"):
            continue
        if curves:
            title = plan_title(plan, [run])
            sections.setdefault(plan.section, []).append(line_chart(title, curves, zero=plan.zero))
    scores = [
        curve
        for name in evaluation_names(evaluations)
        if (curve := Curve.read(name, evaluations, label=evaluation_label(name))).points
    ]
    if scores:
        title = f"Evaluation ({scores[0].name})" if len(scores) == 1 else "Evaluation"
        sections["Learning"].append(line_chart(title, scores, dots=True))
    if phases := _phases(train):
        sections.setdefault("Speed", []).append(stacked_chart("Time per step", phases, unit=" s"))
    html = "".join(chart_section(title, cards) for title, cards in sections.items() if cards)
    return html + _extra_charts(train, shown)


def _same_values(run: RunData, one: str, other: str) -> bool:
    return all(record.get(one) == record.get(other) for record in run.train)


def chart_section(title: str, cards: Sequence[str]) -> str:
    css = "charts large" if title in ("Learning", "Speed") and len(cards) % 3 else "charts"
    return f'<section id="{title.lower()}"><h2>{title}</h2><div class="{css}">{"".join(cards)}</div></section>'


def _phases(train: Sequence[Mapping]) -> dict[str, Curve]:
    """Seconds per phase, the longest first; small ones and what no phase covers are "other"."""
    names = dict.fromkeys(name for r in train for name in r if name.startswith("timing/"))
    curves = {name: curve for name in names if (curve := Curve.read(name, train, trend=False)).finite}
    total = curves.pop("timing/step_total", None)
    ranked = sorted(curves, key=lambda name: -sum(point.value for point in curves[name].finite))[: COLOURS - 1]
    phases = {PHASES.get(short := name.removeprefix("timing/"), short): curves[name] for name in ranked}
    if total is None:
        return phases
    rest = []
    for record in train:
        whole = record.get("timing/step_total")
        parts = [record.get(name) or 0.0 for name in ranked]
        rest.append({"step": record["step"], "other": max(0.0, whole - sum(parts)) if whole else None})
    phases[REST] = Curve.read("other", rest, trend=False)
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
        f'<section><details data-key="others"><summary>All other metrics <span class="count">{len(curves)}</span>'
        f'</summary><div class="charts">{cards}</div>{more}</details></section>'
    )


def _settings(run: RunData) -> str:
    """The settings that differ from the defaults, then all of config.yaml."""
    parts = []
    if chosen := run.settings_set():
        rows = "".join(f"<dt>--{escape(name)}</dt><dd>{escape(setting_text(v))}</dd>" for name, v in chosen.items())
        parts.append(
            f'<details data-key="set" open><summary>Settings that differ from the defaults '
            f'<span class="count">{len(chosen)}</span></summary><dl>{rows}</dl></details>'
        )
    if text := run.config_text[:MOST_CONFIG_CHARACTERS]:
        parts.append(
            f'<details data-key="config"><summary>All settings <span class="count">config.yaml</span></summary>'
            f"<pre>{escape(text)}</pre></details>"
        )
    return f'<section id="settings" class="settings">{"".join(parts)}</section>' if parts else ""


def setting_text(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def fill_template(parts: Mapping[str, str]) -> str:
    """The template with {{name}} replaced, in one pass, so that nothing in a part is taken for a placeholder."""
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match.group(1)], _template())


@functools.cache
def _template() -> str:
    """Read once: an installation that changes during a run does not change its page."""
    return resources.files(__package__).joinpath("report.html").read_text(encoding="utf-8")

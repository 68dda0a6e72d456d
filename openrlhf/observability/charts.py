"""Charts as SVG, for the report of a run and for the pictures of the documents.

A report is one file that opens without a network, so that a chart library would have to be part of each: plotly's
script is 4.8 MB, where a card with 400 points here is 22 kB. matplotlib, without numbers under the mouse, would be one
more dependency of every run. A card can be read without scripts; the numbers for the mouse are beside it as JSON.

First come the curves (smoothed, thinned out, with axes of round numbers), then cards of a report, then pictures.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

from openrlhf.observability.loggers import score_names


class Point(NamedTuple):
    """A tuple, because a page of a long run is made of half a million of them."""

    step: int
    value: float
    """The number as it was logged; NaN where it was not finite."""
    smooth: float
    """The trend at this step."""


@dataclass(frozen=True, slots=True)
class Curve:
    """One metric over the steps of a run."""

    name: str
    points: tuple[Point, ...]

    @staticmethod
    def read(name: str, records: Iterable[Mapping[str, Any]], *, label: str = "", trend: bool = True) -> Curve:
        """The metric `name` of every record that has it. null stands for a number that was not finite.

        Without `trend` the values are their own trend: for numbers that are summed up and not drawn.
        """
        steps, values = [], []
        for record in records:
            value = record.get(name, "")
            if value is None or type(value) in (float, int):  # no bool, which is an int to isinstance
                steps.append(record["step"])
                values.append(float(value) if value is not None and math.isfinite(value) else math.nan)
        points = zip(steps, values, smoothed(values) if trend else values, strict=True)
        return Curve(label or name, tuple(map(Point._make, points)))

    @property
    def finite(self) -> list[Point]:
        return [point for point in self.points if math.isfinite(point.value)]

    @property
    def broken_steps(self) -> list[int]:
        """Steps that reported a number that was not finite."""
        return [point.step for point in self.points if not math.isfinite(point.value)]

    def thinned(self, most: int) -> Curve:
        """At most about `most` points: the lowest and the highest of each stretch, so that no spike is lost.

        Steps without a finite value are kept: one per stretch.
        """
        if len(self.points) <= most:
            return self
        stretches = max(1, most // 2)
        cuts = [len(self.points) * i // stretches for i in range(stretches + 1)]
        kept: list[Point] = [self.points[0]]
        for start, end in itertools.pairwise(cuts):
            stretch = self.points[start:end]
            finite = [point for point in stretch if math.isfinite(point.value)]
            chosen = {min(finite, key=lambda p: p.value), max(finite, key=lambda p: p.value)} if finite else set()
            chosen |= set(itertools.islice((p for p in stretch if not math.isfinite(p.value)), 1))
            kept.extend(sorted(chosen, key=lambda p: p.step))
        kept.append(self.points[-1])
        return Curve(self.name, tuple(dict.fromkeys(kept)))


def smoothed(values: Sequence[float]) -> list[float]:
    """The trend: Σ_j d^|i-j| x_j / Σ_j d^|i-j| over finite x_j, looking about n / 25 values either way.

    It looks both ways so that it does not lag. Spikes count only as far as the axis reaches (`visible_range`).
    Fewer than ten values are left as they are.
    """
    if len(values) < 10:
        return list(values)
    decay = 1 - 1 / max(2.0, len(values) / 25)
    low, high = visible_range(value for value in values if math.isfinite(value))
    near = [min(max(value, low), high) if math.isfinite(value) else None for value in values]
    left = _decayed_sums(near, decay)
    right = _decayed_sums(near[::-1], decay)[::-1]
    trend = []
    for value, (left_sum, left_weight), (right_sum, right_weight) in zip(near, left, right, strict=True):
        # Both sides count the value itself; once is enough.
        total = left_sum + right_sum - (value or 0.0)
        weight = left_weight + right_weight - (value is not None)
        trend.append(total / weight if weight > 1e-9 else math.nan)
    return trend


def _decayed_sums(values: Sequence[float | None], decay: float) -> list[tuple[float, float]]:
    """(Σ decay^(i-j) x_j, Σ decay^(i-j)) over the x_j that are there, j ≤ i."""
    total = weight = 0.0
    sums = []
    for value in values:
        total, weight = total * decay, weight * decay
        if value is not None:
            total, weight = total + value, weight + 1
        sums.append((total, weight))
    return sums


@dataclass(frozen=True, slots=True)
class Axis:
    low: float
    high: float
    ticks: tuple[float, ...]

    @staticmethod
    def over(low: float, high: float, *, ticks: int = 6, whole: bool = False) -> Axis:
        """Bounds and about `ticks` round numbers that cover [low, high]; `whole` keeps them integers."""
        if not (math.isfinite(low) and math.isfinite(high)):
            low, high = 0.0, 1.0
        size = max(abs(low), abs(high))
        if high - low <= max(1e-9 * size, 1e-290):
            room = 0.1 * size if size > 1e-280 else 0.5
            low, high = low - room, high + room
        step = _round_number((high - low) / max(1, ticks - 1))
        if whole:
            step = max(1.0, step)
        first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
        return Axis(first * step, last * step, tuple(i * step for i in range(first, last + 1)))


def _round_number(size: float) -> float:
    """The smallest of 1, 2, 2.5, 5, 10 × 10^k that is not below `size`.

    >>> _round_number(0.3), _round_number(18)
    (0.5, 20.0)
    """
    power = 10.0 ** math.floor(math.log10(size))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= size * (1 - 1e-9))


def visible_range(numbers: Iterable[float]) -> tuple[float, float]:
    """The range that an axis must cover: all of it, unless a few spikes would flatten the rest.

    Then (the middle 96% of at least 30 numbers fills less than a quarter) it is that middle, widened by half.
    """
    values = sorted(numbers)
    if not values:
        return (math.nan, math.nan)
    low, high = values[0], values[-1]
    if len(values) >= 30:
        rim = max(1, len(values) // 50)
        inner_low, inner_high = values[rim], values[-1 - rim]
        inner = inner_high - inner_low
        if 0 < inner < (high - low) / 4:
            low, high = max(low, inner_low - inner / 2), min(high, inner_high + inner / 2)
    return low, high


def bounds(curves: Sequence[Curve], *, zero: bool = False) -> tuple[float, float]:
    """The visible range of all curves together; `zero` takes 0 in."""
    ranges = [visible_range(point.value for point in curve.finite) for curve in curves if curve.finite]
    if not ranges:
        return (math.nan, math.nan)
    low, high = min(low for low, _ in ranges), max(high for _, high in ranges)
    return (min(low, 0.0), max(high, 0.0)) if zero else (low, high)


def short_number(value: float) -> str:
    """Three or four digits, whatever the size.

    >>> [short_number(x) for x in (0, 0.5, 0.01234, 1234.5, 2_500_000, 1e-6, float("nan"))]
    ['0', '0.5', '0.0123', '1,234', '2.5M', '1e-06', '–']
    """
    if not math.isfinite(value):
        return "–"
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-4:
        return f"{value:.2e}".replace(".00e", "e").replace("0e", "e")
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if unit == 'k' else limit):.4g}{unit}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100:
        return f"{value:.4g}"
    return f"{float(f'{value:.3g}'):g}"


WIDTH, HEIGHT = 420, 220
LEFT, RIGHT, TOP, BOTTOM = 44, 10, 8, 24
COLOURS = 6
"""The colours of the layers of a stack and of the curves of a metric's chart; the last one is grey."""
RUN_COLOURS = (1, 2, 3, 4, 5, 7, 8, 6)
"""The colours of runs that are compared."""
MOST_POINTS = 400
REST = "other"
"""The layer of a stack that is what the others leave; drawn grey."""


def line_chart(
    title: str,
    curves: Sequence[Curve],
    *,
    zero: bool = False,
    dots: bool = False,
    colours: Sequence[int] = range(1, COLOURS + 1),
    trends: bool = False,
) -> str:
    """One card: the title, the latest value, the curves (faint as logged, strong as trend), their legend.

    `zero` makes the axis begin at 0; `dots` marks every point, for curves of few points; `trends` leaves out what was
    logged where there is a trend. A curve has the colour at its place.
    """
    drawable = [(colour, curve) for colour, curve in zip(colours, curves, strict=False) if curve.points]
    curves = [curve for _, curve in drawable]
    steps = [point.step for curve in curves for point in curve.points]
    frame = _Frame.over((min(steps), max(steps)), Axis.over(*bounds(curves, zero=zero)))
    drawn = [(colour, curve.thinned(MOST_POINTS)) for colour, curve in drawable]
    few = dots or max(len(curve.points) for curve in curves) < 10
    marks: list[str] = []
    for colour, curve in drawn:
        if few:
            marks.append(_path(frame, [(p.step, p.value) for p in curve.points], f"trend c{colour}"))
            marks.extend(_dot(frame, p.step, p.value, colour) for p in curve.finite)
        else:
            if not trends:
                marks.append(_path(frame, [(p.step, p.value) for p in curve.points], f"raw c{colour}"))
            marks.append(_path(frame, [(p.step, p.smooth) for p in curve.points], f"trend c{colour}"))
    marks.extend(_broken(frame, step) for _, curve in drawn for step in curve.broken_steps)
    data = {
        "x": [frame.x_axis.low, frame.x_axis.high],
        "y": [frame.y_axis.low, frame.y_axis.high],
        "series": [{"name": c.name, "points": [_numbers(p, few=few) for p in c.points]} for _, c in drawn],
        "colours": [colour for colour, _ in drawn],
    }
    latest = math.nan
    if len(curves) == 1 and curves[0].finite:
        last = curves[0].finite[-1]
        latest = last.value if few else last.smooth
    legend = [(curve.name, colour) for colour, curve in drawable] if len(curves) > 1 else []
    svg = _svg(title, frame, marks, [(frame.x(tick), tick) for tick in frame.x_axis.ticks])
    return _card(title, svg, data=data, latest=latest, legend=legend, note=_note(frame, curves))


def stacked_chart(title: str, layers: Mapping[str, Curve], *, unit: str, most_bars: int = 48) -> str:
    """One card: a bar per step (or per stretch of steps: the mean), cut into layers from the bottom up."""
    table: dict[int, dict[str, float]] = {}
    for name, curve in layers.items():
        for point in curve.finite:
            table.setdefault(point.step, {})[name] = max(0.0, point.value)
    steps = sorted(table)
    count = min(most_bars, len(steps))
    cuts = [len(steps) * i // count for i in range(count + 1)]
    bars = []
    for start, end in itertools.pairwise(cuts):
        members = steps[start:end]
        heights = [sum(table[step].get(name, 0.0) for step in members) / len(members) for name in layers]
        bars.append((members[0], members[-1], heights))
    frame = _Frame.over((0, count), Axis.over(0.0, max(sum(heights) for _, _, heights in bars)))
    width = (WIDTH - LEFT - RIGHT) / count
    gap = min(2.0, width * 0.2)
    colours = [COLOURS if name == REST else place for place, name in enumerate(layers, start=1)]
    marks = []
    for place, (_, _, heights) in enumerate(bars):
        base = 0.0
        for colour, height in zip(colours, heights, strict=True):
            x, y = LEFT + place * width + gap / 2, frame.y(base + height)
            tall = frame.y(base) - y
            if tall > 0.05:
                marks.append(
                    f'<rect class="c{colour}" x="{x:.1f}" y="{y:.1f}" width="{width - gap:.1f}" height="{tall:.1f}"/>'
                )
            base += height
    every = max(1, math.ceil(count / 6))
    labels = [(LEFT + (place + 0.5) * width, bars[place][0]) for place in range(0, count, every)]
    data = {
        "unit": unit,
        "bars": [{"from": a, "to": b, "heights": [_short(h) for h in heights]} for a, b, heights in bars],
        "names": list(layers),
        "colours": colours,
    }
    mean = sum(sum(row.values()) for row in table.values()) / len(table)
    shares = [sum(row.get(name, 0.0) for row in table.values()) / len(table) / (mean or 1.0) for name in layers]
    legend = [(f"{name} {share:.0%}", colour) for name, share, colour in zip(layers, shares, colours, strict=True)]
    svg = _svg(title, frame, marks, labels)
    return _card(title, svg, data=data, latest=mean, unit=unit, legend=legend, note="")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Where the numbers of a chart lie in the picture."""

    x_axis: Axis
    y_axis: Axis
    left: float = LEFT
    right: float = WIDTH - RIGHT
    top: float = TOP
    bottom: float = HEIGHT - BOTTOM
    overshoot: float = 0.1
    """How far outside the box a number beyond the axis is drawn, in heights of the box; there it is clipped."""

    @staticmethod
    def over(x: tuple[float, float], y_axis: Axis, **box: float) -> _Frame:
        ticks = tuple(tick for tick in Axis.over(*x, whole=True).ticks if x[0] <= tick <= x[1])
        # A single step stands in the middle.
        low, high = x if x[0] < x[1] else (x[0] - 1, x[1] + 1)
        return _Frame(x_axis=Axis(low, high, ticks), y_axis=y_axis, **box)

    def x(self, step: float) -> float:
        return self.left + (step - self.x_axis.low) / (self.x_axis.high - self.x_axis.low) * (self.right - self.left)

    def y(self, value: float) -> float:
        share = (value - self.y_axis.low) / (self.y_axis.high - self.y_axis.low)
        return self.bottom - min(1 + self.overshoot, max(-self.overshoot, share)) * (self.bottom - self.top)

    def y_label(self, tick: float) -> str:
        if self.y_axis.high >= 1e4 and abs(tick) < 1e4:
            # All labels in one unit: 5k below 10k, not 5,000.
            return f"{tick / 1e3:.4g}k" if tick else "0"
        return short_number(tick)

    def level(self, value: float, css: str) -> str:
        """A horizontal line at `value`."""
        y = self.y(value)
        return f'<line class="{css}" x1="{self.left:.0f}" x2="{self.right:.0f}" y1="{y:.1f}" y2="{y:.1f}"/>'

    def grid(self, label: Callable[[float], str]) -> list[str]:
        parts = []
        for tick in self.y_axis.ticks:
            place = f'x="{self.left - 6:.0f}" y="{self.y(tick) + 3.5:.1f}"'
            parts.append(self.level(tick, "grid"))
            parts.append(f'<text class="tick" {place} text-anchor="end">{label(tick)}</text>')
        return parts

    def x_label(self, x: float, step: float) -> str:
        # At the right end a label is pulled in, so that none is cut off.
        anchor = "end" if x > self.right - 14 else "middle"
        return f'<text class="tick" x="{x:.1f}" y="{self.bottom + 16:.0f}" text-anchor="{anchor}">{step:,.0f}</text>'


def _svg(title: str, frame: _Frame, marks: Sequence[str], labels: Sequence[tuple[float, float]]) -> str:
    """`labels`: (place, step) of the marks below the horizontal axis."""
    grid = frame.grid(frame.y_label) + [frame.x_label(x, step) for x, step in labels]
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'{"".join(grid)}<svg x="0" y="{TOP - 4}" width="{WIDTH}" height="{HEIGHT - BOTTOM - TOP + 8}" '
        f'viewBox="0 {TOP - 4} {WIDTH} {HEIGHT - BOTTOM - TOP + 8}">{"".join(marks)}</svg>'
        f"{frame.level(frame.y_axis.low, 'axis')}</svg>"
    )


def _card(
    title: str, svg: str, *, data: dict, latest: float, legend: Sequence[tuple[str, int]], note: str, unit: str = ""
) -> str:
    value = "" if math.isnan(latest) else f'<span class="latest">{short_number(latest)}{escape(unit)}</span>'
    entries = "".join(f'<li><i class="c{i}"></i>{escape(name)}</li>' for name, i in legend)
    return (
        f'<figure class="chart" data-chart="{escape(_json(data))}">'
        f"<figcaption><b>{escape(title)}</b>{value}</figcaption>"
        + (f'<ul class="legend">{entries}</ul>' if entries else "")
        + f'<div class="plot">{svg}</div>'
        + (f'<p class="note">{escape(note)}</p>' if note else "")
        + "</figure>"
    )


def _path(frame: _Frame, places: Iterable[tuple[float, float]], css: str) -> str:
    """A line that is broken where a value is missing."""
    parts: list[str] = []
    pen = "M"
    for step, value in places:
        if math.isfinite(value):
            parts.append(f"{pen}{frame.x(step):.1f} {frame.y(value):.1f}")
            pen = "L"
        else:
            pen = "M"
    return f'<path class="{css}" d="{"".join(parts)}"/>'


def _dot(frame: _Frame, step: float, value: float, colour: int) -> str:
    return f'<circle class="c{colour}" cx="{frame.x(step):.1f}" cy="{frame.y(value):.1f}" r="3"/>'


def _broken(frame: _Frame, step: int) -> str:
    """A red mark on the floor where a number was not finite."""
    x, floor = frame.x(step), HEIGHT - BOTTOM
    return f'<line class="broken" x1="{x:.1f}" x2="{x:.1f}" y1="{floor - 8}" y2="{floor}"/>'


def _note(frame: _Frame, curves: Sequence[Curve]) -> str:
    broken = sum(len(curve.broken_steps) for curve in curves)
    axis = frame.y_axis
    outside = sum(not axis.low <= p.value <= axis.high for curve in curves for p in curve.finite)
    notes = []
    if broken:
        notes.append(f"{broken} value{'s were' if broken > 1 else ' was'} not finite (red)")
    if outside:
        notes.append(f"{outside} point{'s' if outside > 1 else ''} beyond the axis")
    return " · ".join(notes)


def _numbers(point: Point, *, few: bool) -> list[float | None]:
    """[step, value] where values are drawn as they are, else [step, value, trend]."""
    return [point.step, _short(point.value)] + ([] if few else [_short(point.smooth)])


def _short(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def _json(data: dict) -> str:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False)


# ------------------------------------------------------------------------------ pictures of the documents

PICTURE_HEIGHT, PANEL_TOP, PANEL_BOTTOM = 348, 84, 296
PICTURE_WIDTHS = {1: 760, 2: 900, 3: 980}
"""The width of a picture by its number of panels."""
MARGIN, GAP, LABELS = 20, 26, 44
"""The room around a picture, between its panels, and for the numbers at the left of a panel."""
FEW_POINTS = 16
"""Shorter curves are drawn point by point, longer ones as a trend with the numbers faint behind."""
STYLE = """
svg { --ink: #1b1c1e; --text: #4a4d52; --faint: #7a7d83; --grid: #ecece8; --line: #c9c9c4;
  --card: #fbfbf9; --rim: #deded9;
  --c1: #2667d8; --c2: #d9700f; --c3: #0d9488; --c4: #8055d9; --c5: #cc3f7c; --c6: #6b6f76; }
@media (prefers-color-scheme: dark) {
  svg { --ink: #eceded; --text: #c3c5c9; --faint: #94979d; --grid: #2e3034; --line: #4b4e54;
    --card: #1d1f22; --rim: #34363b;
    --c1: #6fa3ff; --c2: #f39a4a; --c3: #3cc4b5; --c4: #ab8cf5; --c5: #f079ac; --c6: #a3a6ad; }
}
.c1 { color: var(--c1); } .c2 { color: var(--c2); } .c3 { color: var(--c3); }
.c4 { color: var(--c4); } .c5 { color: var(--c5); } .c6 { color: var(--c6); }
text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: var(--text); }
.title { font-size: 13px; font-weight: 600; fill: var(--ink); } .tick { font-size: 11px; fill: var(--faint); }
.card { fill: var(--card); stroke: var(--rim); }
.grid { stroke: var(--grid); } .axis { stroke: var(--line); }
.mark { stroke: var(--ink); stroke-dasharray: 5 4; }
.key { stroke: currentColor; stroke-width: 3; stroke-linecap: round; }
.raw { fill: none; stroke: currentColor; opacity: .3; }
.trend { fill: none; stroke: currentColor; stroke-width: 2.2; stroke-linejoin: round; }
.band { fill: currentColor; opacity: .12; } circle { fill: currentColor; }
"""


def picture(data: Mapping[str, Any]) -> str:
    """An SVG file that needs nothing else: panels side by side, and one legend for all of them.

    `data`: {"title", "panels": [{"title", "x", "percent", "zero", "mark": None or {"name", "value"}, "curves": [{
    "name", "points"}]}]}. Points are [x, value], or [x, mean, lowest, highest] of several runs.
    """
    panels = data["panels"]
    names = dict.fromkeys(curve["name"] for panel in panels for curve in panel["curves"])
    colours = {name: colour for colour, name in enumerate(names, start=1)}
    width = PICTURE_WIDTHS[len(panels)]
    each = (width - 2 * MARGIN - GAP * (len(panels) - 1)) / len(panels)
    parts = [f'<rect class="card" x="0.5" y="0.5" width="{width - 1}" height="{PICTURE_HEIGHT - 1}" rx="10"/>']
    x = MARGIN + 2.0
    for name, colour in colours.items():
        parts.append(f'<line class="key c{colour}" x1="{x:.0f}" x2="{x + 18:.0f}" y1="26" y2="26"/>')
        parts.append(f'<text x="{x + 25:.0f}" y="30">{escape(name)}</text>')
        x += 46 + 6.7 * len(name)
    for number, panel in enumerate(panels):
        left = MARGIN + number * (each + GAP)
        parts += _panel(panel, left=left, right=left + each, colours=colours)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {PICTURE_HEIGHT}" width="{width}" '
        f'height="{PICTURE_HEIGHT}" role="img" aria-label="{escape(data["title"])}">\n<style>{STYLE}</style>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def telling_metrics(records: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The metrics that say most about a run: reward or loss, the score of evaluations, the length of responses."""
    names = {name for record in records for name in record}
    train = next((name for name in ("reward", "gpt_loss", "loss") if name in names), None)
    measured = score_names(dict.fromkeys(name for r in records if r["kind"] == "eval" for name in r))[:1]
    found = [name for name in (train, *measured, "response_length") if name in names]
    return tuple(dict.fromkeys(name for name in found if name is not None))


def training_panel(name: str, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A panel of `picture` with one metric over the steps of a run. Raises KeyError for one that it has not."""
    points = [[record["step"], record[name]] for record in records if isinstance(record.get(name), int | float)]
    if not points:
        known = sorted({n for r in records for n in r if isinstance(r[n], float)})
        raise KeyError(f"the run has no metric {name!r}; it has {', '.join(known)}")
    curve = {"name": name, "points": points}
    return {"title": name, "x": "step", "percent": False, "zero": False, "mark": None, "curves": [curve]}


def _panel(panel: Mapping[str, Any], *, left: float, right: float, colours: Mapping[str, int]) -> list[str]:
    mark, percent = panel["mark"], panel["percent"]
    xs: list[float] = []
    heights: list[float] = [mark["value"]] if mark else []
    curves = []
    for curve in panel["curves"]:
        points = [point for point in curve["points"] if all(map(math.isfinite, point))]
        if points:
            steps, values, *spread = map(list, zip(*points, strict=True))
            trend = values if len(points) < FEW_POINTS else smoothed(values)
            curves.append((colours[curve["name"]], steps, values, trend, spread))
            xs += steps
            heights += itertools.chain(trend, *spread)
    # What is drawn strongly is always inside; a single number faint behind it may be cut off. No share exceeds 100%.
    low, high = min(heights, default=0.0), max(heights, default=1.0)
    y_axis = Axis.over(0.0 if panel["zero"] else low, min(high, 1.0) if percent else high, ticks=5)
    box = {"left": left + LABELS, "right": right, "top": PANEL_TOP, "bottom": PANEL_BOTTOM, "overshoot": 0.0}
    frame = _Frame.over((min(xs, default=0.0), max(xs, default=1.0)), y_axis, **box)
    behind, front = [], []
    for colour, steps, values, trend, spread in curves:
        if spread:
            lows, highs = spread
            outline = [*zip(steps, highs, strict=True), *zip(steps[::-1], lows[::-1], strict=True)]
            behind.append(_path(frame, outline, f"band c{colour}"))
        elif trend is not values:
            behind.append(_path(frame, zip(steps, values, strict=True), f"raw c{colour}"))
        front.append(_path(frame, zip(steps, trend, strict=True), f"trend c{colour}"))
        if trend is values:
            front += [_dot(frame, step, value, colour) for step, value in zip(steps, values, strict=True)]
    parts = [f'<text class="title" x="{left:.0f}" y="{PANEL_TOP - 22}">{escape(panel["title"])}</text>']
    parts += frame.grid("{:.0%}".format if percent else short_number)
    parts += [frame.x_label(frame.x(tick), tick) for tick in frame.x_axis.ticks]
    middle = f'x="{(frame.left + right) / 2:.0f}" y="{PANEL_BOTTOM + 36}"'
    parts.append(f'<text class="tick" {middle} text-anchor="middle">{escape(panel["x"])}</text>')
    parts += [*behind, *front, frame.level(y_axis.low, "axis")]
    if mark:
        place = f'x="{right:.0f}" y="{frame.y(mark["value"]) - 6:.1f}"'
        parts += [frame.level(mark["value"], "mark"), f'<text {place} text-anchor="end">{escape(mark["name"])}</text>']
    return parts

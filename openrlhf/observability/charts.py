"""Charts as inline SVG. They read without scripts; the numbers for hovering ride along as JSON."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from html import escape

from openrlhf.observability.series import Axis, Curve, Point, bounds, short_number

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
    frame = _Frame.over((min(steps), max(steps)), bounds(curves, zero=zero))
    drawn = [(colour, curve.thinned(MOST_POINTS)) for colour, curve in drawable]
    few = dots or max(len(curve.points) for curve in curves) < 10
    marks: list[str] = []
    for colour, curve in drawn:
        if few:
            marks.append(_path(frame, [(p.step, p.value) for p in curve.points], f"trend c{colour}"))
            marks.extend(_dot(frame, point, colour) for point in curve.finite)
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
    frame = _Frame.over((0, count), (0.0, max(sum(heights) for _, _, heights in bars)))
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


class _Frame:
    """From steps and values to places in the picture."""

    def __init__(self, x_axis: Axis, y_axis: Axis) -> None:
        self.x_axis = x_axis
        self.y_axis = y_axis

    @staticmethod
    def over(x: tuple[float, float], y: tuple[float, float]) -> _Frame:
        ticks = tuple(tick for tick in Axis.over(*x, whole=True).ticks if x[0] <= tick <= x[1])
        # A single step stands in the middle.
        low, high = x if x[0] < x[1] else (x[0] - 1, x[1] + 1)
        return _Frame(Axis(low, high, ticks), Axis.over(*y))

    def x(self, step: float) -> float:
        return LEFT + (step - self.x_axis.low) / (self.x_axis.high - self.x_axis.low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Off-axis values are drawn a little outside, where they are clipped."""
        share = (value - self.y_axis.low) / (self.y_axis.high - self.y_axis.low)
        return HEIGHT - BOTTOM - min(1.1, max(-0.1, share)) * (HEIGHT - TOP - BOTTOM)

    def y_label(self, tick: float) -> str:
        if self.y_axis.high >= 1e4 and abs(tick) < 1e4:
            # All labels in one unit: 5k below 10k, not 5,000.
            return f"{tick / 1e3:.4g}k" if tick else "0"
        return short_number(tick)


def _svg(title: str, frame: _Frame, marks: Sequence[str], labels: Sequence[tuple[float, float]]) -> str:
    """`labels`: (place, step) of the marks below the horizontal axis."""
    grid = []
    for tick in frame.y_axis.ticks:
        y = frame.y(tick)
        grid.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        grid.append(
            f'<text class="tick" x="{LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{frame.y_label(tick)}</text>'
        )
    grid.extend(_x_label(x, step) for x, step in labels)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'{"".join(grid)}<svg x="0" y="{TOP - 4}" width="{WIDTH}" height="{HEIGHT - BOTTOM - TOP + 8}" '
        f'viewBox="0 {TOP - 4} {WIDTH} {HEIGHT - BOTTOM - TOP + 8}">{"".join(marks)}</svg>'
        f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/></svg>'
    )


def _x_label(x: float, step: float) -> str:
    # At the rim it is pulled in, so that none is cut off.
    anchor = "end" if x > WIDTH - RIGHT - 14 else "middle"
    return f'<text class="tick" x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{step:,.0f}</text>'


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


def _path(frame: _Frame, places: Sequence[tuple[int, float]], css: str) -> str:
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


def _dot(frame: _Frame, point: Point, colour: int) -> str:
    return f'<circle class="c{colour}" cx="{frame.x(point.step):.1f}" cy="{frame.y(point.value):.1f}" r="3"/>'


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

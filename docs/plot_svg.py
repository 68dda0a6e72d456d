"""Figures of `docs/plots.py` as SVG files that need nothing else: panels side by side, one legend, a light card."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from openrlhf.observability.series import Axis, short_number, smoothed

COLOURS = ("#2667d8", "#d9700f", "#0d9488", "#8055d9", "#cc3f7c", "#6b6f76")
HEIGHT, PANEL_TOP, PANEL_BOTTOM = 348, 84, 296
MARGIN, GAP, AXIS = 20, 26, 44
"""Around the figure, between panels, and what a panel's numbers take on its left."""
WIDTHS = {1: 760, 2: 900, 3: 980}
FEW = 16
"""Curves of fewer points are drawn point by point, longer ones as a trend with the numbers faint behind."""

STYLE = """
text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #4a4d52; }
.title { font-size: 13px; font-weight: 600; fill: #1b1c1e; }
.tick { font-size: 11px; fill: #7a7d83; }
.grid { stroke: #ecece8; } .axis { stroke: #c9c9c4; }
.mark { stroke: #1b1c1e; stroke-dasharray: 5 4; }
.raw { fill: none; stroke-width: 1; opacity: .3; } .trend { fill: none; stroke-width: 2.2; stroke-linejoin: round; }
.band { opacity: .12; }
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One curve of a panel. `lows` and `highs` span several runs; without them the values are one run's."""

    name: str
    xs: list[float]
    values: list[float]
    lows: list[float] | None = None
    highs: list[float] | None = None

    @property
    def few(self) -> bool:
        return len(self.xs) < FEW

    @property
    def trend(self) -> list[float]:
        return self.values if self.few else smoothed(self.values)


@dataclass(frozen=True, slots=True)
class Place:
    """From numbers to where they lie in the picture, for one panel."""

    left: float
    right: float
    x_axis: Axis
    y_axis: Axis

    def x(self, number: float) -> float:
        share = (number - self.x_axis.low) / (self.x_axis.high - self.x_axis.low)
        return self.left + share * (self.right - self.left)

    def y(self, number: float) -> float:
        share = (number - self.y_axis.low) / (self.y_axis.high - self.y_axis.low)
        return PANEL_BOTTOM - min(max(share, 0.0), 1.0) * (PANEL_BOTTOM - PANEL_TOP)

    def path(self, xs: Sequence[float], ys: Sequence[float]) -> str:
        return "M" + "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in zip(xs, ys, strict=True))


def figure(data: dict[str, Any]) -> str:
    """The SVG of one family, from what `plots.collect` gathered."""
    panels = data["panels"]
    names = list(dict.fromkeys(curve["name"] for panel in panels for curve in panel["curves"]))
    colours = dict(zip(names, COLOURS, strict=False))
    width = WIDTHS[len(panels)]
    each = (width - 2 * MARGIN - GAP * (len(panels) - 1)) / len(panels)
    parts = [
        f'<rect x="0.5" y="0.5" width="{width - 1}" height="{HEIGHT - 1}" rx="10" fill="#fbfbf9" stroke="#deded9"/>',
        _legend(colours),
    ]
    for number, panel in enumerate(panels):
        left = MARGIN + number * (each + GAP)
        parts += _panel(panel, left=left, right=left + each, colours=colours)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {HEIGHT}" width="{width}" height="{HEIGHT}" '
        f'role="img" aria-label="{escape(data["title"])}">\n<style>{STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _legend(colours: dict[str, str]) -> str:
    parts, x = [], MARGIN + 2.0
    for name, colour in colours.items():
        parts.append(
            f'<line x1="{x:.0f}" x2="{x + 18:.0f}" y1="26" y2="26" stroke="{colour}" stroke-width="3" '
            f'stroke-linecap="round"/><text x="{x + 25:.0f}" y="30">{escape(name)}</text>'
        )
        x += 46 + 6.7 * len(name)
    return "".join(parts)


def _panel(panel: dict[str, Any], *, left: float, right: float, colours: dict[str, str]) -> list[str]:
    lines = [_line(curve) for curve in panel["curves"]]
    place = _place(lines, panel, left=left + AXIS, right=right)
    parts = [f'<text class="title" x="{left:.0f}" y="62">{escape(panel["title"])}</text>']
    for tick in place.y_axis.ticks:
        y = place.y(tick)
        label = f"{tick:.0%}" if panel["percent"] else short_number(tick)
        parts.append(f'<line class="grid" x1="{place.left:.0f}" x2="{right:.0f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick" x="{place.left - 7:.0f}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    for tick in place.x_axis.ticks:
        x = place.x(tick)
        anchor = "end" if x > right - 8 else "middle"
        parts.append(
            f'<text class="tick" x="{x:.1f}" y="{PANEL_BOTTOM + 17}" text-anchor="{anchor}">{tick:,.0f}</text>'
        )
    middle = (place.left + right) / 2
    parts.append(
        f'<text class="tick" x="{middle:.0f}" y="{PANEL_BOTTOM + 36}" text-anchor="middle">{escape(panel["x"])}</text>'
    )
    for layer in (_behind, _front):
        parts += [element for line in lines for element in layer(line, place, colours[line.name])]
    parts.append(f'<line class="axis" x1="{place.left:.0f}" x2="{right:.0f}" y1="{PANEL_BOTTOM}" y2="{PANEL_BOTTOM}"/>')
    if mark := panel["mark"]:
        y = place.y(mark["value"])
        parts.append(f'<line class="mark" x1="{place.left:.0f}" x2="{right:.0f}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{right:.0f}" y="{y - 6:.1f}" text-anchor="end">{escape(mark["name"])}</text>')
    return parts


def _place(lines: Sequence[Line], panel: dict[str, Any], *, left: float, right: float) -> Place:
    """What is drawn strongly is always inside; a single number faint behind may be cut off. No share exceeds 100%."""
    marked = [panel["mark"]["value"]] if panel["mark"] else []
    heights = [y for line in lines for column in (line.lows, line.highs, line.trend) for y in column or ()] + marked
    top = max(heights, default=1.0)
    y_axis = Axis.over(
        0.0 if panel["zero"] else min(heights, default=0.0), min(top, 1.0) if panel["percent"] else top, ticks=5
    )
    ends = [x for line in lines for x in line.xs]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    ticks = tuple(t for t in Axis.over(low, high, ticks=6, whole=True).ticks if low <= t <= high)
    return Place(left, right, Axis(low, max(high, low + 1), ticks), y_axis)


def _behind(line: Line, place: Place, colour: str) -> list[str]:
    if line.lows and line.highs:
        there, back = place.path(line.xs, line.highs), place.path(line.xs[::-1], line.lows[::-1])
        return [f'<path class="band" fill="{colour}" d="{there}L{back[1:]}Z"/>']
    return [] if line.few else [f'<path class="raw" stroke="{colour}" d="{place.path(line.xs, line.values)}"/>']


def _front(line: Line, place: Place, colour: str) -> list[str]:
    if not line.xs:
        return []
    parts = [f'<path class="trend" stroke="{colour}" d="{place.path(line.xs, line.trend)}"/>']
    if line.few:
        parts += [
            f'<circle cx="{place.x(x):.1f}" cy="{place.y(y):.1f}" r="2.6" fill="{colour}"/>'
            for x, y in zip(line.xs, line.values, strict=True)
        ]
    return parts


def _line(curve: dict[str, Any]) -> Line:
    """Points are [x, value], or [x, mean, lowest, highest] of several runs."""
    points = [point for point in curve["points"] if all(math.isfinite(number) for number in point)]
    columns = [list(column) for column in zip(*points, strict=True)] or [[], []]
    several = len(columns) == 4
    return Line(
        name=curve["name"],
        xs=columns[0],
        values=columns[1],
        lows=columns[2] if several else None,
        highs=columns[3] if several else None,
    )

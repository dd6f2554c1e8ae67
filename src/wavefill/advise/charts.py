"""Charts as SVG text: lines and points on linear or logarithmic axes, and bars of shares. No script, nothing fetched.

A chart is 400 units wide, so that its words can still be read on a phone. Text takes the page's colour.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from wavefill.advise.words import figure

WIDTH, HEIGHT = 400, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 20, 12, 42
COLORS = ("#2f6fb3", "#d1662b", "#3c8d53", "#8b5fb5", "#b8912b", "#4a9aa5", "#a34a6b", "#7a7f87")


@dataclass(frozen=True)
class Series:
    """points: (x, y), or (x, y, words) of a tooltip. line: whether they are joined; dots: whether each is drawn."""

    name: str
    points: Sequence[tuple[float, float] | tuple[float, float, str]]
    line: bool = True
    dots: bool = True
    color: int = 0
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """From `low` to `high`, at whole ticks."""

    label: str
    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool

    def at(self, value: float) -> float:
        """0 to 1."""
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def axis(label: str, values: Sequence[float], log: bool, marks: Sequence[float] | None = None) -> Axis:
    """That holds all values. marks: ticks to have; by default round numbers."""
    low, high = min(values), max(values)
    if log:
        first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
        last = max(last, first + 1)
        ticks = [10.0**i for i in range(first, last + 1, max(1, (last - first) // 6))]
        if marks:
            return Axis(label, low / 1.15, high * 1.15, tuple(marks), True)
        return Axis(label, 10.0**first, 10.0**last, tuple(ticks), True)
    step = 10.0 ** math.floor(math.log10(high or 1.0))
    step = next(step * part for part in (0.1, 0.2, 0.5, 1, 2) if high / (step * part) <= 6)
    last = math.ceil(high / step - 1e-9) or 1
    return Axis(label, 0.0, last * step, tuple(i * step for i in range(last + 1)), False)


def lines(label: str, x: Axis, y: Axis, series: Sequence[Series]) -> str:
    """All series on the two axes; `label` says what the chart shows to who cannot see it."""
    def place(px: float, py: float) -> tuple[float, float]:
        return (_LEFT + x.at(px) * (WIDTH - _LEFT - _RIGHT), HEIGHT - _BOTTOM - y.at(py) * (HEIGHT - _TOP - _BOTTOM))

    parts = [_open(label), _grid(x, y)]
    for one in series:
        color, at = COLORS[one.color % len(COLORS)], [place(point[0], point[1]) for point in one.points]
        if one.line and len(at) > 1:
            path = " ".join(f"{px:.1f},{py:.1f}" for px, py in at)
            dash = ' stroke-dasharray="5 4"' if one.dashed else ""
            parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"{dash}/>')
        if one.dots:
            for point, (px, py) in zip(one.points, at, strict=True):
                words = point[2] if len(point) > 2 else f"{one.name}: {short(point[0])}, {short(point[1])}"
                parts.append(f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.5" fill="{color}">'
                             f"<title>{escape(words)}</title></circle>")
    return "".join([*parts, "</svg>"])


def shares(label: str, x_label: str, bars: Sequence[tuple[str, str, Sequence[float]]], names: Sequence[str]) -> str:
    """Bars of 100 %. bars: (name below, words above, a number for each of `names`)."""
    top = _TOP + 14
    parts = [_open(label)]
    wide, tall = (WIDTH - _LEFT - _RIGHT) / len(bars), HEIGHT - top - _BOTTOM
    for tick in (0, 50, 100):
        at = HEIGHT - _BOTTOM - tick / 100 * tall
        parts.append(_text(_LEFT - 6, at + 4, f"{tick} %", "end"))
    for i, (below, above, numbers) in enumerate(bars):
        left, at, total = _LEFT + i * wide, float(HEIGHT - _BOTTOM), sum(numbers)
        for k, (name, number) in enumerate(zip(names, numbers, strict=True)):
            high = number / total * tall
            at -= high
            if high > 0:
                words = escape(f"{below}: {name} {number / total:.1%}")
                parts.append(f'<rect x="{left + 2:.1f}" y="{at:.1f}" width="{wide - 4:.1f}" height="{high:.1f}" '
                             f'fill="{COLORS[k % len(COLORS)]}"><title>{words}</title></rect>')
        middle = left + wide / 2
        parts += [_text(middle, HEIGHT - _BOTTOM + 15, below), _text(middle, top - 4, above, size=11)]
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 6, x_label))
    return "".join([*parts, "</svg>"])


def legend(names: Sequence[str], colors: Sequence[int] | None = None) -> str:
    """As HTML, to stand below a chart."""
    chosen = colors if colors is not None else range(len(names))
    return '<p class="note">' + "".join(
        f'<span class="item"><span class="key" style="background:{COLORS[color % len(COLORS)]}"></span>{escape(name)}'
        "</span> "
        for name, color in zip(names, chosen, strict=True)) + "</p>"


def short(value: float) -> str:
    """Few characters: 128K and 1M are of 1,024 where they are whole, else three digits."""
    for power, unit in ((1 << 20, "M"), (1 << 10, "K")):
        if value >= power and value % power == 0:
            return f"{value / power:.0f}{unit}"
    if value >= 1e4 or 0 < value < 1e-3:
        return re.sub(r"e([-+])0*", lambda sign: "e" + sign[1].strip("+"), f"{value:.0e}")
    return figure(value)


def _open(label: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'


def _grid(x: Axis, y: Axis) -> str:
    parts = []
    for tick in x.ticks:
        at = _LEFT + x.at(tick) * (WIDTH - _LEFT - _RIGHT)
        parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" class="grid"/>'
                     + _text(at, HEIGHT - _BOTTOM + 15, short(tick)))
    for tick in y.ticks:
        at = HEIGHT - _BOTTOM - y.at(tick) * (HEIGHT - _TOP - _BOTTOM)
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}" class="grid"/>'
                     + _text(_LEFT - 6, at + 4, short(tick), "end"))
    middle = (HEIGHT - _BOTTOM + _TOP) / 2
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 6, x.label))
    parts.append(f'<text x="12" y="{middle}" text-anchor="middle" font-size="13" transform="rotate(-90 12 {middle})">'
                 f"{escape(y.label)}</text>")
    return "".join(parts)


def _text(x: float, y: float, words: str, anchor: str = "middle", size: int = 13) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}">{escape(words)}</text>'

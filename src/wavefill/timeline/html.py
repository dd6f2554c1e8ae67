"""Timelines as one HTML file: SVG inside, no script, nothing fetched."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from wavefill.timeline.lanes import Panel, Picture, color, count, picture

if TYPE_CHECKING:
    from pathlib import Path

    from wavefill.select import Choice

_WIDTH = 1100  # pixels of the time axis
_LEFT = 56  # pixels for worker numbers
_TOOLTIPS = 3000  # spans of a file that may carry a tooltip; more would make the file heavy

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2430; background: #fff; margin: 2rem auto; max-width: 1200px;
       padding: 0 1rem; }
h1 { font-size: 1.25rem; margin: 0 0 .25rem; } h2 { font-size: 1.05rem; margin: 1.6rem 0 .1rem; }
p { margin: .25rem 0; } .note { color: #5b6675; font-size: .87rem; } svg { display: block; width: 100%; height: auto; }
table { border-collapse: collapse; margin: 1rem 0; } td, th { padding: .15rem 1.2rem .15rem 0; text-align: left; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; } th { border-bottom: 1px solid #c7ced8; }
.key { display: inline-block; width: 1em; height: 1em; vertical-align: -.13em; margin: 0 .35em 0 1em; }
.chosen { font-weight: 600; }
"""
_HATCH = ('<pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
          '<rect width="6" height="6" fill="#eceff3"/><rect width="2" height="6" fill="#c3cad4"/></pattern>')


def write_html(choice: Choice, path: Path) -> None:
    """Write `to_html(choice)` to `path`."""
    path.write_text(to_html(choice), encoding="utf-8")


def to_html(choice: Choice) -> str:
    """A page with the choice, its reason, a table of the schedules and their timelines."""
    drawn = picture(choice, max_lanes=320, columns=400, max_spans=30_000)
    tooltips = sum(len(lane.spans) for panel in drawn.panels for lane in panel.lanes) <= _TOOLTIPS
    floor = "" if choice.floor_us is None else f" Floor: {choice.floor_us:,.1f} us {escape(choice.floor_note)}."
    body = [
        f"<h1>{escape(choice.label)}</h1>", f"<p>{escape(drawn.heading)}.</p>",
        f"<p>{escape(choice.reason)}{floor}</p>", _table(choice), _legend(drawn),
    ]
    for panel in drawn.panels:
        body.append(f"<h2>{escape(panel.title)}</h2>")
        if panel.note:
            body.append(f'<p class="note">{escape(panel.note)}</p>')
        body.append(_svg(drawn, panel, tooltips))
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>wavefill: {escape(choice.label)}'
            f"</title><style>{_STYLE}</style></head><body>\n" + "\n".join(body) + "\n</body></html>\n")


def _table(choice: Choice) -> str:
    rows = []
    for i, option in enumerate((choice.option, *choice.considered)):
        line = option.timeline
        numbers = (f"{line.makespan:,}", f"{line.fill:.0%}", f"{len(line.table):,}", f"{line.waves:,}",
                   f"{option.partials:,}")
        cells = "".join(f'<td class="n">{number}</td>' for number in numbers)
        rows.append(f"<tr{' class=chosen' if i == 0 else ''}><td>{escape(option.label)}</td>{cells}</tr>")
    heads = "".join(f'<th class="n">{name}</th>' for name in ("makespan, tiles", "filled", "work items", "waves",
                                                             "states to merge"))
    return f"<table><tr><th>schedule</th>{heads}</tr>{''.join(rows)}</table>"


def _legend(drawn: Picture) -> str:
    named, more = drawn.legend()
    keys = "".join(f'<span class="key" style="background:{color(request, 0)}"></span>{escape(words)}'
                   for request, words in named)
    rest = f"<span> and {more:,} more</span>" if more > 0 else ""
    idle = (f'<svg style="display:inline-block;width:1em;height:1em;vertical-align:-.13em;margin:0 .35em 0 1em" '
            f'viewBox="0 0 12 12"><defs>{_HATCH}</defs><rect width="12" height="12" fill="url(#idle)"/></svg>'
            "idle until the last worker is done")
    return f'<p class="note">{keys}{rest}{idle}</p>'


def _svg(drawn: Picture, panel: Panel, tooltips: bool) -> str:
    lane_height = min(max(560 / max(len(panel.lanes), 1), 2.5), 16)
    gap = 1 if lane_height >= 6 else 0
    height = lane_height * len(panel.lanes)
    scale = _WIDTH / max(drawn.horizon, 1)
    parts = [f'<svg viewBox="0 0 {_LEFT + _WIDTH + 60} {height + 24:.1f}" role="img" '
             f'aria-label="{escape(panel.title)}"><defs>{_HATCH}</defs>']
    end = _LEFT + panel.makespan * scale
    every = max(1, round(len(panel.lanes) / 12))
    for i, lane in enumerate(panel.lanes):
        y = i * lane_height
        if i % every == 0:
            parts.append(f'<text x="{_LEFT - 6}" y="{y + lane_height / 2 + 4:.1f}" text-anchor="end" font-size="11" '
                         f'fill="#5b6675">{lane.worker}</text>')
        for span in lane.spans:
            x, width = _LEFT + span.t0 * scale, (span.t1 - span.t0) * scale
            inset = 0.6 if width > 4 else 0
            tip = f"<title>{escape(_words(drawn, panel, lane.worker, span.segment))}</title>" if tooltips else ""
            parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width - inset:.1f}" height="{lane_height - gap:.1f}" '
                         f'fill="{drawn.color(panel, span.segment)}">{tip}</rect>')
        if lane.end < panel.makespan:
            x = _LEFT + lane.end * scale
            parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{end - x:.1f}" height="{lane_height - gap:.1f}" '
                         'fill="url(#idle)"/>')
    parts.append(f'<line x1="{end:.1f}" y1="0" x2="{end:.1f}" y2="{height:.1f}" stroke="#1c2430" stroke-width="1.5"/>'
                 f'<text x="{end:.1f}" y="{height + 16:.1f}" text-anchor="middle" font-size="12" fill="#1c2430">'
                 f"{count(panel.makespan, 'tile')}</text></svg>")
    return "".join(parts)


def _words(drawn: Picture, panel: Panel, worker: int, segment: int) -> str:
    table = panel.timeline.table
    return (f"worker {worker}: request {drawn.request(panel, segment)}, KV head {drawn.head(panel, segment)}, "
            f"tiles {int(table.begin[segment]):,} to {int(table.end[segment]) - 1:,}")

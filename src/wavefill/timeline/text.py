"""Timelines on a terminal: a line a worker. A letter stands for the request, so that it reads without colour too."""

from __future__ import annotations

import string
from typing import TYPE_CHECKING

import numpy as np
from rich.text import Text

from wavefill.timeline.lanes import Lane, Panel, Picture, color, count, picture

if TYPE_CHECKING:
    from wavefill.select import Choice

_LETTERS = string.ascii_uppercase + string.ascii_lowercase + string.digits
_IDLE, _EDGE = "░", "│"
_ASCII = str.maketrans(_IDLE + _EDGE, ".|")
_RUNS = 8  # lines of a legend


def to_text(choice: Choice, *, width: int = 100, max_lanes: int = 12, ascii_only: bool = False) -> Text:
    """The timelines of `choice` in lines of at most `width` characters, which ASCII has if `ascii_only`."""
    label = len(str(choice.workers - 1)) + 3
    columns = max(width - label - 2, 10)
    drawn = picture(choice, max_lanes=max_lanes, columns=columns)
    text = Text(no_wrap=True, overflow="crop")
    for panel in drawn.panels:
        text.append(panel.title + "\n", style="bold")
        for lane in panel.lanes:
            text.append(f"{lane.worker:>{label - 2}} {_EDGE}", style="dim")
            _lane(text, drawn, panel, lane, columns)
            text.append("\n")
        skipped = panel.timeline.table.workers - len(panel.lanes)
        if skipped:
            text.append(f"{'':>{label}}{len(panel.lanes)} of {panel.timeline.table.workers:,} workers shown, "
                        "evenly spaced\n", style="dim")
        text.append("\n")
    _legend(text, drawn)
    if ascii_only:
        text.plain = text.plain.translate(_ASCII)  # one character for each, so that styles stay where they are
    return text


def _lane(text: Text, drawn: Picture, panel: Panel, lane: Lane, columns: int) -> None:
    step = drawn.horizon / columns if drawn.horizon else 1.0
    width = round(panel.makespan / step)
    # Less than a character of idle time is none: rounding must not make a full lane look unfilled.
    busy = width if panel.makespan - lane.end < step else round(lane.end / step)
    at = 0
    for i, span in enumerate(lane.spans):
        end = busy if i == len(lane.spans) - 1 else min(round(span.t1 / step), busy)
        if end > at:
            request = drawn.request(panel, span.segment)
            text.append(_letter(request) * (end - at), style=f"#ffffff on {drawn.color(panel, span.segment)}")
            at = end
    text.append(_IDLE * (width - at), style="bright_black")
    if width:
        text.append(_EDGE, style="dim")


def _legend(text: Text, drawn: Picture) -> None:
    """A line for each run of requests of one length."""
    active = np.flatnonzero(drawn.keys)
    cuts = np.flatnonzero((np.diff(drawn.keys[active]) != 0) | (np.diff(active) != 1)) + 1
    begins, ends = [0, *cuts[:_RUNS].tolist()], [*cuts[:_RUNS].tolist(), active.size]
    for begin, end in list(zip(begins, ends, strict=True))[:_RUNS if active.size else 0]:
        first, last = int(active[begin]), int(active[end - 1])
        text.append(f" {_letter(first)} ", style=f"#ffffff on {color(first, 0)}")
        keys = f"{int(drawn.keys[first]):,} keys"
        if last > first:
            text.append(f" to {_letter(last)}  requests {first:,} to {last:,}, {keys} each\n")
        else:
            text.append(f"  request {first:,}, {keys}\n")
    if len(ends) > _RUNS:
        text.append(f"and {count(active.size - ends[_RUNS - 1], 'request')} more\n")
    text.append(_IDLE * 3, style="bright_black")
    text.append("  idle until the last worker is done")


def _letter(request: int) -> str:
    return _LETTERS[request % len(_LETTERS)]

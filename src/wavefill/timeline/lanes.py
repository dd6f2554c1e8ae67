"""What every picture draws: the spans of the workers shown, and the colours of the requests."""

from __future__ import annotations

import colorsys
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from wavefill.schedule import Ints, Timeline
    from wavefill.select import Choice

#: Requests that a legend names; the rest are counted.
LEGEND = 10


@dataclass(frozen=True)
class Span:
    """Time [t0, t1) in tiles that a worker spends on one segment; index `segment` of the table."""

    t0: float
    t1: float
    segment: int


@dataclass(frozen=True)
class Lane:
    """One worker; it works without a gap until `end`, in tiles."""

    worker: int
    spans: tuple[Span, ...]
    end: int


@dataclass(frozen=True)
class Panel:
    """One schedule's part of a picture.

    title: the schedule, its makespan and its fill.
    note:  what is left out, or an empty string.
    """

    title: str
    note: str
    timeline: Timeline
    lanes: tuple[Lane, ...]

    @property
    def makespan(self) -> int:
        return self.timeline.makespan


@dataclass(frozen=True)
class Picture:
    """All panels of a choice, the chosen schedule first.

    horizon:    tiles of the time axis, the same in all panels.
    request_of: [rows] request of each row.
    keys:       [requests] keys that a request reads.
    """

    heading: str
    panels: tuple[Panel, ...]
    horizon: int
    request_of: Ints
    keys: Ints

    def request(self, panel: Panel, segment: int) -> int:
        return int(self.request_of[panel.timeline.table.row[segment]])

    def head(self, panel: Panel, segment: int) -> int:
        return int(panel.timeline.table.head[segment])

    def color(self, panel: Panel, segment: int) -> str:
        """#rrggbb: the hue of the request; KV heads alternate in lightness so that their ends show."""
        return color(self.request(panel, segment), self.head(panel, segment) % 2)

    def legend(self) -> tuple[list[tuple[int, str]], int]:
        """(request, words) for the first requests that have keys, and how many more there are."""
        active = np.flatnonzero(self.keys)
        named = [(int(r), f"request {r}: {int(self.keys[r]):,} keys") for r in active[:LEGEND]]
        return named, active.size - len(named)


def picture(choice: Choice, *, max_lanes: int, columns: int, max_spans: int | None = None) -> Picture:
    """Lay out the timelines of `choice`.

    max_lanes: workers shown of a schedule, evenly spaced from the first.
    columns:   equal steps in which lanes are sampled where they are not drawn piece by piece.
    max_spans: a panel of at most this many pieces is drawn piece by piece; one of more takes no more columns than
               stay within it. None samples always.
    """
    timelines = choice.timelines()
    horizon = max((line.makespan for line in timelines.values()), default=0)
    panels = tuple(_panel(label, line, horizon, max_lanes, columns, max_spans) for label, line in timelines.items())
    keys = np.zeros(int(choice.rows.request.max(initial=-1)) + 1, dtype=np.int64)
    np.maximum.at(keys, choice.rows.request, choice.rows.stop - choice.rows.start)
    spec = choice.spec
    heading = (f"{choice.device}: {count(int(np.count_nonzero(keys)), 'request')}, {count(spec.HQ, 'query head')} over "
               f"{count(spec.KH, 'KV head')}, {count(choice.tiles, 'tile')} of {choice.tile} tokens on "
               f"{count(choice.workers, 'worker')}")
    return Picture(heading, panels, horizon, choice.rows.request, keys)


def count(n: int, noun: str) -> str:
    return f"{n:,} {noun}{'s' if n != 1 else ''}"


@lru_cache(maxsize=4096)
def color(request: int, shade: int) -> str:
    """A colour of its own for each request: hues a golden angle apart stay distinct however many there are."""
    hue = (0.58 + request * 0.6180339887) % 1.0
    red, green, blue = colorsys.hls_to_rgb(hue, 0.47 if shade else 0.58, 0.62)
    return f"#{round(red * 255):02x}{round(green * 255):02x}{round(blue * 255):02x}"


def _panel(label: str, line: Timeline, horizon: int, max_lanes: int, columns: int,
           max_spans: int | None) -> Panel:
    workers = line.table.workers
    shown = np.unique(np.linspace(0, workers - 1, min(workers, max_lanes)).round().astype(np.int64))
    order = np.argsort(line.worker, kind="stable")
    ends = np.searchsorted(line.worker[order], np.arange(workers + 1))
    segments = [order[ends[w]:ends[w + 1]] for w in shown]
    sampled = max_spans is None or sum(s.size for s in segments) > max_spans
    if max_spans is not None:
        columns = min(columns, max(max_spans // max(shown.size, 1), 1))
    step = horizon / columns if horizon else 1.0
    lanes = tuple(Lane(int(w), _sampled(line, s, step) if sampled else _exact(line, s), int(line.busy[w]))
                  for w, s in zip(shown, segments, strict=True))
    notes = []
    if shown.size < workers:
        notes.append(f"{shown.size} of {workers:,} workers shown, evenly spaced")
    if sampled:
        notes.append(f"one sample every {step:.3g} tiles; shorter pieces may not show")
    title = f"{label}: done after {count(line.makespan, 'tile')}, {line.fill:.0%} filled"
    return Panel(title, "; ".join(notes), line, lanes)


def _exact(line: Timeline, segments: Ints) -> tuple[Span, ...]:
    return tuple(Span(int(line.t0[s]), int(line.t1[s]), int(s)) for s in segments)


def _sampled(line: Timeline, segments: Ints, step: float) -> tuple[Span, ...]:
    """Spans of whole steps, each showing the segment at the step's middle; runs of one segment are one span."""
    if not segments.size:
        return ()
    ends = line.t1[segments]
    steps = max(round(int(ends[-1]) / step), 1)  # a worker has no gaps, so it is busy until its last end
    middles = (np.arange(steps) + 0.5) * step
    at = np.minimum(np.searchsorted(ends, middles, side="right"), segments.size - 1)
    begins = np.flatnonzero(np.concatenate((np.ones(1, dtype=np.bool_), at[1:] != at[:-1])))
    stops = np.append(begins[1:], steps)
    return tuple(Span(float(a) * step, float(b) * step, int(segments[at[a]]))
                 for a, b in zip(begins, stops, strict=True))

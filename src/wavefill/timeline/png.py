"""Timelines as a PNG, drawn by matplotlib from the `bench` extra."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wavefill.spec import BackendUnavailable, complaint
from wavefill.timeline.lanes import Panel, Picture, color, picture

if TYPE_CHECKING:
    from pathlib import Path

    from wavefill.select import Choice


def write_png(choice: Choice, path: Path) -> None:
    """Draw the timelines of `choice` into `path`.

    Raises BackendUnavailable where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ModuleNotFoundError as error:
        raise BackendUnavailable(complaint("--png", "needs matplotlib", f"no module {error.name}",
                                           "Run: pip install 'wavefill[bench]', or use --html.")) from error
    drawn = picture(choice, max_lanes=320, columns=600, max_spans=30_000)
    heights = [min(max(0.16 * len(panel.lanes), 0.9), 3.2) for panel in drawn.panels]
    figure: Any = Figure(figsize=(12, sum(heights) + 0.85 * len(heights) + 1.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(drawn.heading, fontsize=12, x=0.01, ha="left")
    axes = figure.subplots(len(heights), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axis, panel in zip(axes, drawn.panels, strict=True):
        _draw(axis, drawn, panel)
    axes[-1].set_xlabel("time in tiles")
    named, more = drawn.legend()
    keys = [Patch(color=color(request, 0), label=words) for request, words in named]
    if more > 0:
        keys.append(Patch(color="none", label=f"and {more:,} more"))
    keys.append(Patch(facecolor="#eceff3", edgecolor="#9aa4b2", hatch="////", linewidth=0,
                      label="idle until the last worker is done"))
    figure.legend(handles=keys, loc="outside lower left", ncols=4, frameon=False, fontsize=9)
    figure.savefig(path, format="png")


def _draw(axis: Any, drawn: Picture, panel: Panel) -> None:
    lanes = panel.lanes
    thin = len(lanes) > 60
    axis.add_patch(_idle(panel.makespan, len(lanes)))
    for i, lane in enumerate(lanes):
        axis.broken_barh(
            [(span.t0, span.t1 - span.t0) for span in lane.spans], (i, 1.0),
            facecolors=[drawn.color(panel, span.segment) for span in lane.spans],
            edgecolor="white", linewidth=0 if thin else 0.8,
        )
    axis.axvline(panel.makespan, color="#1c2430", linewidth=1.4)
    axis.set_xlim(0, max(drawn.horizon, 1) * 1.01)
    axis.set_ylim(len(lanes), 0)
    axis.xaxis.set_major_formatter("{x:,.0f}")
    ticks = sorted({round(i * (len(lanes) - 1) / 5) for i in range(6)})
    axis.set_yticks([tick + 0.5 for tick in ticks], [str(lanes[tick].worker) for tick in ticks], fontsize=8)
    axis.set_ylabel("worker", fontsize=9)
    axis.set_title(panel.title + (f"   ({panel.note})" if panel.note else ""), fontsize=11, loc="left")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _idle(makespan: int, lanes: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((0, 0), makespan, lanes, facecolor="#eceff3", edgecolor="#9aa4b2", hatch="////", linewidth=0)

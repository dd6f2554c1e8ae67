"""Tables and the plot of a GPU run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wavefill.bench import bars
from wavefill.bench.report import Cells, duration
from wavefill.bench.results import READ, is_peer
from wavefill.spec import BackendUnavailable, complaint

if TYPE_CHECKING:
    from wavefill.bench.gpu import GpuResult

#: Columns of schedules that are a ratio elsewhere or no schedule.
EVEN = "wavefill:even"


def table(results: Sequence[GpuResult]) -> tuple[list[str], Cells]:
    """Header and rows: the read floor, wavefill, its share of the floor and GB/s, peers, the ratio, other schedules."""
    ran = [name for r in results for name in r.times]
    peers = [name for name in dict.fromkeys(ran) if is_peer(name)]
    extra = [name for name in dict.fromkeys([*ran, *(n for r in results for n in r.absent)])
             if name.startswith("wavefill:") and name != EVEN]
    even = EVEN in ran
    header = ["row", "KV", "read floor", "wavefill", "of read", "GB/s", *peers, "best paged / ours",
              *(name.removeprefix("wavefill:") for name in extra), *(["same total, even"] if even else []), "host"]
    return header, [_cells(result, peers, [*extra, *([EVEN] if even else [])]) for result in results]


def _cells(result: GpuResult, peers: list[str], extra: list[str]) -> list[str]:
    def cell(name: str) -> str:
        if name in result.times:
            return microseconds(result.times[name].median)
        return "WRONG" if "wrong result" in result.absent.get(name, "") else "-"

    share, ahead = result.read_share(), bars.ratio(result)
    ours = bars.seconds(result, "wavefill")
    host = result.host_s.get("wavefill")
    return [result.row.name, f"{result.kv_bytes / 1e6:,.0f} MB", cell(READ), cell("wavefill"),
            f"{share:.0%}" if share else "-", f"{result.kv_bytes / ours / 1e9:,.0f}" if ours else "-",
            *map(cell, peers), f"{ahead:.2f}x" if ahead else "-", *map(cell, extra),
            microseconds(host) if host else "-"]


def line(result: GpuResult) -> str:
    """A row in a line, for who waits for the table."""
    def time(name: str | None) -> str:
        return f"{name} {microseconds(result.times[name].median)}" if name in result.times else f"{name} none"

    best = bars.best_peer(result)
    parts = [time(READ), time("wavefill"), *([] if best is None else [time(best)])]
    reasons = [f"{name} {why}" for name, why in result.absent.items() if name.startswith("wavefill") or name == READ]
    return f"{result.row.name}: {', '.join(parts + reasons)}"


def microseconds(seconds: float) -> str:
    """One digit after the point below a millisecond: rows differ by tenths of a microsecond."""
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else duration(seconds)


def summary_table(results: Sequence[GpuResult]) -> tuple[list[str], Cells]:
    """Geometric means of each class."""
    columns = {"read_share": "of read", "best_paged_ratio": "best paged / ours",
               "fixed_over_stream_k": "fixed / stream_k",
               "flashdecoding_over_stream_k": "flashdecoding / stream_k", "invariant_over_first": "invariant / first"}
    cells = [[line["class"], str(line["rows"]),
              *("-" if line[key] is None else f"{line[key]:.3f}" for key in columns)] for line in bars.summary(results)]
    return ["class", "rows", *columns.values()], cells


def bar_table(found: Sequence[bars.Bar]) -> tuple[list[str], Cells]:
    """What the run must show, and whether it does."""
    def value(number: float | None, unit: str) -> str:
        if number is None:
            return "-"
        return microseconds(number) if unit == "s" else f"{number:.3f}"

    verdicts = {True: "pass", False: "FAIL", None: "not measured"}
    return ["bar", "verdict", "value", "limit", "where"], [
        [bar.name, verdicts[bar.ok], value(bar.value, bar.unit), value(bar.limit, bar.unit), bar.where]
        for bar in found]


def notes(results: Sequence[GpuResult]) -> list[str]:
    """What a reader of the table must know: why times are missing, how calls were kept apart, what plans cost."""
    lines = _grouped(results, lambda r: [f"{name}: {why}" for name, why in r.absent.items()])
    lines += _grouped(results, lambda r: [
        f"{name}: a kernel between the calls keeps them apart, its own time taken off" for name in r.apart])
    for name in dict.fromkeys(name for r in results for name in r.plan_s):
        taken = [r.plan_s[name] for r in results if name in r.plan_s]
        lines.append(f"{name}: its host step for new lengths is not in its time and takes "
                     f"{microseconds(min(taken))} to {microseconds(max(taken))}")
    for name in dict.fromkeys(name for r in results for name in r.host_s if name != "wavefill"):
        taken = [r.host_s[name] for r in results if name in r.host_s]
        lines.append(f"{name}: host time of a call {microseconds(min(taken))} to {microseconds(max(taken))}")
    spreads = [(s.spread, name, r.row.name) for r in results for name, s in r.times.items()]
    if spreads:
        worst, name, row = max(spreads)
        lines.append(f"largest spread (half the quartiles' distance): {worst:.1%}, {name} on {row}")
    return lines


def _grouped(results: Sequence[GpuResult], lines_of: Any) -> list[str]:
    """Equal lines of several rows as one, with the names of the rows."""
    rows: dict[str, list[str]] = {}
    for result in results:
        for line in lines_of(result):
            rows.setdefault(line, []).append(result.row.name)
    return [f"{line} ({'all rows' if len(names) == len(results) else ', '.join(names)})"
            for line, names in rows.items()]


def plot(results: Sequence[GpuResult], path: Path, title: str) -> None:
    """Draw time over read floor, row by row, wavefill beside its peers, as a PNG.

    Raises BackendUnavailable where matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ModuleNotFoundError as error:
        raise BackendUnavailable(complaint("--plot", "needs matplotlib", f"no module {error.name}",
                                           "Run: pip install 'wavefill[bench]'.")) from error
    drawn = [r for r in results if READ in r.times]
    names = ["wavefill", *dict.fromkeys(name for r in drawn for name in r.times if is_peer(name))]
    figure: Any = Figure(figsize=(max(6.0, 0.62 * len(drawn) + 2.5), 5.2), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    axis = figure.subplots()
    markers = "osD^vPX*<>"
    for i, name in enumerate(names):
        at = [x for x, r in enumerate(drawn) if name in r.times]
        over = [drawn[x].times[name].median / drawn[x].times[READ].median for x in at]
        axis.plot(at, over, markers[i % len(markers)], label=name, linestyle="none",
                  markersize=8 if name == "wavefill" else 6, color="#d1495b" if name == "wavefill" else None,
                  zorder=3 if name == "wavefill" else 2, alpha=1.0 if name == "wavefill" else 0.75)
    axis.axhline(1.0, color="#1c2430", linewidth=1)
    axis.set_yscale("log", base=2)
    axis.yaxis.set_major_formatter("{x:g}")
    axis.set_ylabel("time over the read floor")
    axis.set_xticks(range(len(drawn)), [r.row.name for r in drawn], rotation=60, ha="right", fontsize=8)
    axis.grid(axis="y", alpha=0.3)
    axis.set_title(title, fontsize=10, loc="left")
    axis.legend(frameon=False, fontsize=8, ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")

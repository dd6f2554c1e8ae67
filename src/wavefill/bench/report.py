"""Tables of results for a terminal and for Markdown. The numbers come from the reports' own dictionaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from wavefill.bench.overhead import Overhead
    from wavefill.bench.results import RowResult

Cells = list[list[str]]


def duration(seconds: float) -> str:
    """Three digits and a unit that suits: us or ms."""
    value, unit = (seconds * 1e3, "ms") if seconds >= 1e-3 else (seconds * 1e6, "us")
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"


def kernel_table(results: Sequence[RowResult]) -> tuple[list[str], Cells]:
    """Header and rows: KV size, wavefill's time, GB/s and share of the read bandwidth, read floor, peers, speed-ups."""
    from wavefill.bench.peers import PEERS  # it loads torch, and doctor prints its tables without

    peers = [peer for peer in PEERS if any(peer in r.times or peer in r.absent for r in results)]
    extra = list(dict.fromkeys(name for r in results for name in (*r.times, *r.absent)
                               if name.startswith("wavefill:") and name != "wavefill:even"))
    even = any("wavefill:even" in r.times for r in results)
    header = ["row", "KV", "wavefill", "GB/s", "of read", "read floor"]
    for peer in peers:
        header += [peer, "speed-up"]
    header += [name.removeprefix("wavefill:") for name in extra] + (["same total, even"] if even else [])
    return header, [_kernel_row(result, peers, extra, even) for result in results]


def _kernel_row(result: RowResult, peers: list[str], extra: list[str], even: bool) -> list[str]:
    def cell(name: str) -> str:
        if name in result.times:
            return duration(result.times[name].median)
        return "WRONG" if "wrong result" in result.absent.get(name, "") else "-"

    cells = [result.row.name, f"{result.kv_bytes / 2**20:,.0f} MB", cell("wavefill")]
    share = result.read_share()
    cells += [f"{result.kv_bytes / result.times['wavefill'].median / 1e9:.1f}" if share else "-",
              f"{share:.0%}" if share else "-", cell("read")]
    for peer in peers:
        speedup = result.speedup(peer)
        cells += [cell(peer), f"{speedup:.2f}x" if speedup else "-"]
    return cells + [cell(name) for name in extra] + ([cell("wavefill:even")] if even else [])


def kernel_notes(results: Sequence[RowResult]) -> list[str]:
    """What a reader of the table must know: why a time is missing, and how peers run ragged rows."""
    from wavefill.bench.peers import PEERS

    reasons: dict[str, list[str]] = {}
    for result in results:
        for name, why in result.absent.items():
            reasons.setdefault(f"{name}: {why}", []).append(result.row.name)
    notes = [f"{why} ({'all rows' if len(rows) == len(results) else ', '.join(rows)})"
             for why, rows in reasons.items()]
    if any(r.row.ragged and any(peer in r.times for peer in PEERS) for r in results):
        notes.append("ragged rows: the peers take no ragged batch and run once a request")
    return notes


def overhead_table(results: Sequence[Overhead]) -> tuple[list[str], Cells]:
    return ["call", "median", "best"], [[r.name, duration(r.median), duration(min(r.seconds))] for r in results]


def generate_table(run: dict[str, Any]) -> tuple[list[str], Cells]:
    """Header and rows of one run of `wavefill generate`, with the column of stock transformers where it was compared.
    """
    ours, theirs = run["wavefill"], run.get("sdpa")
    lines = [  # label, key, format
        ("first token, prompt included", "first_token_s", "{:.1f} s"),
        ("tokens/s", "tokens_per_s", "{:.1f}"),
        ("a token (median)", "ms_per_token", "{:.1f} ms"),
        ("a token at a context of 64", "ms_per_token_at_64", "{:.1f} ms"),
        ("the part that grows with context", "growing_ms", "{:.1f} ms"),
        ("KV reads in that part", "kv_gbs", "{:.1f} GB/s"),
    ]
    speedup = run.get("speedup", {})
    ratio = {"first_token_s": "first_token", "ms_per_token": "token", "growing_ms": "growing"}
    cells: Cells = []
    for label, key, form in lines:
        if key not in ours:
            continue
        row = [label, _figure(form, ours, key)]
        if theirs is not None:
            factor = speedup.get(ratio.get(key, ""))
            row += [_figure(form, theirs, key), f"{factor:.2f}x" if factor else ""]
        cells.append(row)
    header = [f"{run['dtype']}", "wavefill"]
    if theirs is not None:
        header += [f"transformers {theirs['attention']}", "speed-up"]
    return header, cells


def _figure(form: str, side: dict[str, Any], key: str) -> str:
    """A figure, or "-" where there is none; a difference of two times below 0 says that something disturbed them."""
    if key not in side:
        return "-"
    return form.format(side[key]) if side[key] >= 0 else "disturbed"


def verdict(run: dict[str, Any]) -> str:
    """One or two sentences on whether both decodings gave the same tokens."""
    tokens = run["tokens"]
    if tokens["identical"]:
        return (f"all {tokens['count']} tokens are identical (largest logit difference "
                f"{tokens['max_logit_difference']:.2g})")
    first, stock = tokens["first_difference"], run["sdpa"]["attention"]
    ids, gaps, errors = first["tokens"], first["gaps"], first["errors"]
    return (f"the first {first['index']} of {tokens['count']} tokens are identical; then wavefill chose {ids[0]} and "
            f"{stock} {ids[1]}, whose logits are {gaps[0]:.3g} (wavefill) and {gaps[1]:.3g} ({stock}) apart. In "
            f"{first['precise']} they are {abs(first['exact_gap']):.3g} apart, and the logits of wavefill and {stock} "
            f"are off by at most {errors[0]:.3g} and {errors[1]:.3g}: "
            + ("a tie within rounding." if first["within_rounding"] else "MORE THAN ROUNDING EXPLAINS."))


def print_generate(report: dict[str, Any]) -> None:
    """The summary after the text of `wavefill generate`."""
    console = wide_console()
    console.print(f"{report['model']['name']}, a prompt of {report['prompt']['tokens']:,} tokens, "
                  f"{report['threads']} threads, {report['cpu']} ({report['isa']}), wavefill with --linear "
                  f"{report['linear']}", highlight=False)
    for run in report["runs"]:
        console.print(terminal_table(*generate_table(run)))
        if "tokens" in run:
            console.print(verdict(run), highlight=False)
        if "read_bandwidth_gbs" in run:
            console.print(f"read bandwidth of this machine in this run: {run['read_bandwidth_gbs']:.1f} GB/s\n",
                          highlight=False)


def wide_console() -> Any:
    """A console that wraps at the width of a terminal, and nowhere when the output goes to a file."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=250)


def terminal_table(header: list[str], cells: Cells) -> Any:
    """A rich table, first column to the left and figures to the right."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i == 0 else "right", overflow="fold")
    for row in cells:
        table.add_row(*row)
    return table


def markdown(header: list[str], cells: Cells) -> str:
    """The same table as Markdown."""
    lines = ["| " + " | ".join(row) + " |" for row in (header, ["---"] + ["---:"] * (len(header) - 1), *cells)]
    return "\n".join(lines) + "\n"

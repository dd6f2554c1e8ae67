"""Attention of several query tokens on one GPU: drafts, prompts, chunks, windows, and other libraries.

    python tools/gpu_several.py [--sections drafts,prompts,chunks,windows,libraries] [--peers fa3,flashinfer]
                                [--seconds 0.3] [--no-warmup] [--peers-from .peers] [--output FILE]

Peers are unpacked as gpu_session.py does it. Tables come last, one a section. The JSON, written after each section,
goes to --output, else to gpu-several.json in $OUT or in build/gpu-session, and the tables to a .md beside it. The peer
flashinfer_fa3 runs only when it is named: its kernels take minutes to compile. Needs the checkout's package on the path
(PYTHONPATH=src).
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import gpu_session


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", help="names with commas between; all of them if not given")
    parser.add_argument("--peers", help="names with commas between, all, or none")
    parser.add_argument("--peers-from", type=Path, default=gpu_session.ROOT / ".peers")
    parser.add_argument("--seconds", type=float, default=0.3, help="of timing of each group of cases")
    parser.add_argument("--no-warmup", action="store_true", help="let the calls compile wavefill's kernels one by one")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    folder = Path(os.environ.get("OUT") or gpu_session.ROOT / "build" / "gpu-session")
    output = options.output or folder / "gpu-several.json"
    _prepare(options)

    import torch

    import wavefill
    from wavefill.bench import (
        gpu,
        gpu_several,
        gpu_several_cases,
        gpu_several_peers,
        gpu_several_report,
        gpu_timing,
        probing,
        report,
    )
    from wavefill.cli._output import save_json

    every = gpu_several_cases.sections()
    try:
        names = gpu_several_cases.choose(options.sections)
        libraries = gpu_several_peers.choose(options.peers)
        gpu.require()
    except wavefill.WavefillError as error:
        parser.error(str(error))
    began, notes = time.perf_counter(), []
    if not options.no_warmup:
        try:
            specs = {spec for name in names for plan in every[name].plans for spec in plan.specs}
            print(f"{wavefill.warmup(specs)} kernels, {time.perf_counter() - began:.0f} s", flush=True)
        except Exception as error:  # the calls compile what they need
            notes.append(f"warmup: {gpu_timing.reason(error)}")
    if "drafts" in names:
        notes += gpu_several_peers.precompile([library.name for library in libraries],
                                              [row.D for row in gpu_several_cases.draft_rows()])
        print(f"peers compiled, {time.perf_counter() - began:.0f} s", flush=True)
    found: dict[str, Any] = {**probing.provenance(), **gpu.facts(), "dtype": gpu_several_cases.DTYPE, "notes": notes,
                             "results": [], "bars": [], "nan_past_the_end": []}
    tables: list[tuple[str, tuple[list[str], report.Cells]]] = []
    for name in names:
        outcomes, failed = gpu_several.run(name, libraries, seconds=options.seconds,
                                           done=lambda outcome: print(gpu_several_report.line(outcome), flush=True))
        bars = gpu_several_report.evaluate(outcomes)
        notes += [*failed, *(f"{name}: {why}" for why in gpu_several_report.reasons(outcomes))]
        tables.append((name, gpu_several_report.table(outcomes, bars, every[name].rate)))
        if name == "libraries":
            try:
                probes = [probe for D in gpu_several_cases.SIZES
                          for probe in gpu_several_peers.probe(libraries, D, gpu.DEVICE)]
            except Exception as error:  # the times are worth their tables all the same
                notes.append(f"no probe of what lies past the end: {gpu_timing.reason(error)}")
            else:
                tables.append(("NaN past the end of a contiguous cache", gpu_several_report.probe_table(probes)))
                found["nan_past_the_end"] = [probe.to_dict() for probe in probes]
        found["results"] += [outcome.to_dict() for outcome in outcomes]
        found["bars"] += [bar.to_dict() for _, bar in bars]
        save_json(output, found)
        print(f"=== {name}: {time.perf_counter() - began:.0f} s", flush=True)
    print("\n".join(notes))
    output.with_suffix(".md").write_text("\n".join(f"{title}\n\n{report.markdown(*cells)}" for title, cells in tables),
                                         encoding="utf-8")
    for title, cells in tables:
        report.wide_console().print(f"\n{title}", report.terminal_table(*cells))
    print(f"{sum(bar['ok'] is True for bar in found['bars'])} of {len(found['bars'])} bars met, "
          f"{torch.cuda.max_memory_allocated() / 1e9:.0f} GB at most, {time.perf_counter() - began:.0f} s")
    return 0


def _prepare(options: argparse.Namespace) -> None:
    """Unpack the peers and set the variables that they and wavefill read, before any of it is imported."""
    gpu_session.take_core()
    peers = None
    if options.peers_from.is_dir() and options.peers != "none":
        for problem in gpu_session.unpack(options.peers_from, gpu_session.UNPACKED):
            print(problem, flush=True)
        peers = gpu_session.UNPACKED
    os.environ.update(gpu_session.environment(peers, gpu_session.capability(), os.cpu_count() or 1))


if __name__ == "__main__":
    sys.exit(main())

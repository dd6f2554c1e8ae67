"""What wavefill costs on the host: calls so small that the attention itself takes no time, tables of large batches as
`explain` makes them, and the import."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

#: Calls of one measurement, and measurements of each variant; they are taken by turns.
CALLS = 200
REPEATS = 25
#: Requests of a large batch, and measurements of what takes long enough to be measured call by call.
REQUESTS = 100_000
LONG_REPEATS = 5

Report = Callable[[str, float], None]


@dataclass(frozen=True)
class Overhead:
    """Seconds a call of one variant, one value a measurement of `calls` calls."""

    name: str
    seconds: tuple[float, ...]
    calls: int

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        return {"call": self.name, "us": self.median * 1e6, "best_us": min(self.seconds) * 1e6,
                "measurements": len(self.seconds), "calls_each": self.calls}


def run(report: Report = lambda description, share: None) -> list[Overhead]:
    """Time each variant: a call of 1 request, 4 query heads over 2 KV heads, D 64, 16 keys, float32; the timeline of
    each schedule for `REQUESTS` requests of 0 to 4,095 keys, 8 KV heads, 264 workers; `import wavefill`."""
    return [
        *_by_turns(_calls(), CALLS, REPEATS, lambda share: report("timing tiny calls", share / 2)),
        *_by_turns(_long(), 1, LONG_REPEATS, lambda share: report("timing large tables", 0.5 + share / 2)),
    ]


def _by_turns(variants: dict[str, Callable[[], object]], calls: int, repeats: int,
              report: Callable[[float], None]) -> list[Overhead]:
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(-1, repeats):  # the first round warms up
        report((repeat + 1) / repeats)
        for name, call in variants.items():
            start = time.perf_counter()
            for _ in range(calls):
                call()
            elapsed = (time.perf_counter() - start) / calls
            if repeat >= 0:
                seconds[name].append(elapsed)
    return [Overhead(name, tuple(values), calls) for name, values in seconds.items()]


def _calls() -> dict[str, Callable[[], object]]:
    from wavefill import decode_attention

    q, out = torch.randn(1, 4, 64), torch.empty(1, 4, 64)
    k, v = torch.randn(2, 1, 16, 2, 64).unbind()
    lens, table = torch.tensor([16], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    query, keys, values = q.unsqueeze(2), k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()
    sdpa = torch.nn.functional.scaled_dot_product_attention
    return {
        "decode_attention, paged": lambda: decode_attention(q, k, v, lens, table),
        "decode_attention, contiguous": lambda: decode_attention(q, k, v, lens),
        "decode_attention, paged, out=": lambda: decode_attention(q, k, v, lens, table, out=out),
        "decode_attention, paged, schedule='stream_k'": lambda: decode_attention(
            q, k, v, lens, table, schedule="stream_k"),
        "decode_attention, paged, return_lse=True": lambda: decode_attention(q, k, v, lens, table, return_lse=True),
        "torch sdpa": lambda: sdpa(query, keys, values, enable_gqa=True),
    }


def _long() -> dict[str, Callable[[], object]]:
    from wavefill.schedule import Timeline, make_table
    from wavefill.spec import Fixed, Invariant, Schedule, StreamK

    stops = np.random.default_rng(0).integers(0, 4096, REQUESTS)
    starts = np.zeros_like(stops)

    def timeline(schedule: Schedule) -> int:
        return Timeline(make_table(schedule, starts, stops, KH=8, workers=264, tile=64)).makespan

    batch = f"timeline of {REQUESTS:,} requests"
    return {
        f"{batch}, stream_k": lambda: timeline(StreamK()),
        f"{batch}, fixed": lambda: timeline(Fixed()),
        f"{batch}, invariant": lambda: timeline(Invariant()),
        "import wavefill, the start of Python included": lambda: subprocess.run(
            [sys.executable, "-c", "import wavefill"], check=True),
        "the start of Python": lambda: subprocess.run([sys.executable, "-c", ""], check=True),
    }

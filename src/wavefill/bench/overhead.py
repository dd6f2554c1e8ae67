"""What a call costs on the host: `decode_attention` on inputs so small that the attention itself takes no time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

#: Calls of one measurement, and measurements of each variant; they are taken by turns.
CALLS = 200
REPEATS = 25


@dataclass(frozen=True)
class Overhead:
    """Seconds a call of one variant, one value a measurement of `CALLS` calls."""

    name: str
    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    def to_dict(self) -> dict[str, Any]:
        return {"call": self.name, "us": self.median * 1e6, "best_us": min(self.seconds) * 1e6,
                "measurements": len(self.seconds), "calls_each": CALLS}


def run(report: Callable[[str, float], None] = lambda description, share: None) -> list[Overhead]:
    """Time each variant of a call: 1 request, 4 query heads over 2 KV heads, D 64, 16 keys, float32."""
    variants = _variants()
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(-1, REPEATS):  # the first round warms up
        report("timing tiny calls", (repeat + 1) / REPEATS)
        for name, call in variants.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                call()
            elapsed = (time.perf_counter() - start) / CALLS
            if repeat >= 0:
                seconds[name].append(elapsed)
    return [Overhead(name, tuple(values)) for name, values in seconds.items()]


def _variants() -> dict[str, Callable[[], object]]:
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

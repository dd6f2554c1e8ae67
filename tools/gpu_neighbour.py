"""How much decode attention and a matrix product slow each other down on one GPU, at several `sm_budget`s.

    python tools/gpu_neighbour.py [--budgets 0,99,66,33] [--row llama8b-b16-8k] [--size 8192] [--output FILE]

Attention runs on one stream, products [size, size] x [size, size] in bfloat16 on another, each as a CUDA graph that is
replayed over and over. A time is that of a call while the other stream is busy from before its start until after its
end; beside it stand the times of both alone. A budget of 0 is none. Needs the checkout's package (see gpu_session.py).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import wavefill
from wavefill.bench import gpu, gpu_timing, inputs, probing, suites
from wavefill.cli._output import save_json

#: Seconds of one replay, replays that are timed, and rounds.
REPLAY, TIMED, ROUNDS = 2e-3, 10, 5

cuda: Any = torch.cuda


class Load:
    """Calls of one kind in a graph of about `REPLAY` seconds."""

    def __init__(self, call: Callable[[int], object], copies: int) -> None:
        self.stream = cuda.Stream()
        with torch.cuda.stream(self.stream):
            for i in range(3):
                call(i % copies)
            begin, end = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
            begin.record()
            for i in range(10):
                call(i % copies)
            end.record()
        torch.cuda.synchronize()
        self.calls = max(copies, round(REPLAY / (begin.elapsed_time(end) * 1e-4)))
        self.graph = cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, stream=self.stream):
            for i in range(self.calls):
                call(i % copies)

    def replay(self, times: int) -> tuple[Any, Any]:
        """Events before and after so many replays."""
        events = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
        with torch.cuda.stream(self.stream):
            events[0].record()
            for _ in range(times):
                self.graph.replay()
            events[1].record()
        return events

    def alone(self) -> float:
        """Seconds of a call with the GPU to itself."""
        taken = []
        for _ in range(ROUNDS):
            begin, end = self.replay(TIMED)
            torch.cuda.synchronize()
            taken.append(begin.elapsed_time(end) * 1e-3 / (TIMED * self.calls))
        return statistics.median(taken)

    def beside(self, other: Load) -> float:
        """Seconds of a call while `other` runs all the time."""
        taken: list[float] = []
        replays = 3 * TIMED
        while len(taken) < ROUNDS:
            before, after = other.replay(replays)
            self.replay(2)  # both are under way now
            begin, end = self.replay(TIMED)
            torch.cuda.synchronize()
            if before.elapsed_time(begin) > 0 and end.elapsed_time(after) > 0:
                taken.append(begin.elapsed_time(end) * 1e-3 / (TIMED * self.calls))
            else:
                replays *= 2  # the other was done too early
        return statistics.median(taken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", default="0,99,66,33")
    parser.add_argument("--row", default="llama8b-b16-8k")
    parser.add_argument("--size", type=int, default=8192)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    row, = suites.load().select([options.row])
    count = gpu_timing.rotation(row.kv_bytes("bfloat16"), torch.cuda.mem_get_info()[0], row.kv_bytes("bfloat16"))
    made = inputs.build(row, "bfloat16", "paged", 16, order="HND", peers=False, device="cuda", count=count)
    a, b = (torch.randn(options.size, options.size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    c = torch.empty_like(a)
    product = Load(lambda copy: torch.mm(a, b, out=c), 1)
    product_alone = product.alone()
    out = torch.empty_like(made.q)
    results = []
    print(f"{row.name}, product of {options.size}: {product_alone * 1e6:.0f} us alone")
    for budget in map(int, options.budgets.split(",")):
        def attend(copy: int, budget: int = budget) -> None:
            kv = made.copies[copy]
            wavefill.decode_attention(made.q, kv.k, kv.v, made.lens, made.block_table, out=out,
                                      sm_budget=budget or None)

        attention = Load(attend, count)
        alone, beside, product_beside = attention.alone(), attention.beside(product), product.beside(attention)
        results.append({"sm_budget": budget or None, "attention_us": alone * 1e6, "attention_beside_us": beside * 1e6,
                        "product_us": product_alone * 1e6, "product_beside_us": product_beside * 1e6})
        print(f"sm_budget {budget or 'none'}: attention {alone * 1e6:.1f} us alone, {beside * 1e6:.1f} beside "
              f"({beside / alone:.2f}x); product {product_beside * 1e6:.0f} us beside "
              f"({product_beside / product_alone:.2f}x)", flush=True)
    if options.output:
        found = {**probing.provenance(), **gpu.facts(), "row": row.name, "size": options.size, "results": results}
        save_json(options.output, found)


if __name__ == "__main__":
    main()

"""Runs the kernels on tensors that touch forbidden memory at their end, then at their start; a stray access is fatal.

Usage: python fenced_calls.py            every way of cutting
       python fenced_calls.py overrun    claims one slot too many, and must die
"""

from __future__ import annotations

import mmap
import sys
from dataclasses import replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "cases"))

from reads_in_bounds import Fence
from running import CUTS, call

from helpers import Case, make_case


def place(case: Case, fences: list[Fence], at_end: bool) -> Case:
    """The case's tensors, each against its own fence."""
    tensors = [f.place(t, at_end) for f, t in zip(fences, (case.q, case.k_cache, case.v_cache, case.seq_lens),
                                                  strict=False)]
    table = None if case.block_table is None else fences[4].place(case.block_table, at_end)
    return replace(case, q=tensors[0], k_cache=tensors[1], v_cache=tensors[2], seq_lens=tensors[3], block_table=table)


def main() -> None:
    fences = [Fence(1 << 16) for _ in range(7)]
    for page_size, lens in ((None, [66]), (16, [17, 66]), (3, [7]), (1, [31])):
        case = make_case(lens, HQ=2, KH=1, D=24, DV=17, page_size=page_size, spare_pages=0)
        for schedule in CUTS:
            for at_end in (True, False):
                print(page_size, lens, schedule, "end" if at_end else "start", flush=True)
                out = fences[5].place(torch.full(case.out_shape, torch.nan), at_end)
                lse = fences[6].place(torch.full(case.out_shape[:2], torch.nan), at_end)
                call(place(case, fences, at_end), schedule, out, lse)
                case.expected.check(out, lse)
    print("all in bounds")


def overrun() -> None:
    """A table of one entry less than the lengths need, with a limit that lets the kernel read on."""
    fences = [Fence(1 << 16) for _ in range(5)]
    case = make_case([64], HQ=1, KH=1, D=16, page_size=16)
    out, lse = torch.zeros(case.out_shape), torch.zeros(case.out_shape[:2])
    fenced = place(case, fences, at_end=True)
    call(fenced, CUTS[0], out, lse)
    print("4 entries read", flush=True)
    start = mmap.PAGESIZE + fences[4].size - 16
    table = torch.frombuffer(fences[4].memory, dtype=torch.int32, count=5, offset=start).view(1, 5)
    call(replace(fenced, block_table=table, seq_lens=torch.tensor([65], dtype=torch.int32)), CUTS[0], out, lse)


if __name__ == "__main__":
    overrun() if sys.argv[1:] == ["overrun"] else main()

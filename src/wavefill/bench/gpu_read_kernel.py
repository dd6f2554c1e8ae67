# mypy: ignore-errors
"""The kernel of the read floor, in a file of its own since importing it needs Triton, whose language has no types."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def read_units(
    K, V, UNITS, SUM, n_units,
    UNIT: tl.constexpr,  # 32-bit words of a unit
    N: tl.constexpr,  # units that a program reads at once, of K and of V each
    STAGES: tl.constexpr,  # 1: through registers; more: asynchronous copies, so many steps ahead
    CHECK: tl.constexpr,  # add up all words
):
    # Programs take runs of units that differ by one step at most, as a schedule of equal shares would.
    steps = tl.cdiv(n_units, N)
    each, more = steps // tl.num_programs(0), steps % tl.num_programs(0)
    pid = tl.program_id(0)
    begin = pid * each + tl.minimum(pid, more)
    end = begin + each + tl.where(pid < more, 1, 0)
    word = tl.arange(0, UNIT)[None, :]
    total = tl.zeros([N, UNIT], tl.int32)
    for step in tl.range(begin, end, num_stages=STAGES):
        at = step * N + tl.arange(0, N)
        inside = at < n_units
        unit = tl.load(UNITS + at, mask=inside, other=0).to(tl.int64)
        offset = unit[:, None] * UNIT + word
        # Past the end a step reads unit 0 once more: cheaper than a mask on every load of every step.
        k, v = tl.load(K + offset), tl.load(V + offset)
        if CHECK:
            k, v = tl.where(inside[:, None], k, 0), tl.where(inside[:, None], v, 0)
        total += k ^ (v << 1)
    if CHECK:
        tl.atomic_add(SUM, tl.sum(tl.sum(total, 1), 0))
    else:
        # A store that random data all but never takes keeps the loads alive and costs a comparison. Its address runs
        # as theirs do, so that the sums stay in the registers where they are.
        tl.store(SUM + (0 * tl.arange(0, N))[:, None] + word, total, mask=total == 0x5EED1234)

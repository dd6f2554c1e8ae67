"""Partial results that a caller holds become one: the kernel of `wavefill::merge_states`."""

import triton
import triton.language as tl


@triton.jit
def join_states(OUTS, LSES, OUT, LSE, N, rows, DV: tl.constexpr, COLUMNS: tl.constexpr):
    """OUTS [N, rows, DV] and LSES [N, rows], natural logarithms, into OUT [rows, DV] and LSE [rows].

    One program a row and COLUMNS of the output. States are added in order; those with an LSE of -inf are not read. An
    LSE of NaN or +inf makes the row NaN.
    """
    row = tl.program_id(0).to(tl.int64)
    o_c = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    top = float("-inf")
    for i in range(0, N):
        top = tl.maximum(top, tl.load(LSES + tl.cast(i, tl.int64) * rows + row))
    base = tl.where(top == float("-inf"), 0.0, top)
    total = 0.0
    for i in range(0, N):
        total += tl.exp(tl.load(LSES + tl.cast(i, tl.int64) * rows + row) - base)
    inverse = tl.where(total == 0.0, 0.0, 1.0 / total)
    b_acc = tl.zeros([COLUMNS], tl.float32)
    for i in range(0, N):
        at = tl.cast(i, tl.int64) * rows + row
        weight = tl.exp(tl.load(LSES + at) - base) * inverse
        if weight != 0.0:
            b_acc += weight * tl.load(OUTS + at * DV + o_c, mask=o_c < DV, other=0.0).to(tl.float32)
    tl.store(OUT + row * DV + o_c, b_acc.to(OUT.dtype.element_ty), mask=o_c < DV)
    if tl.program_id(1) == 0:
        tl.store(LSE + row, tl.where(total == 0.0, float("-inf"), top + tl.log(total)))

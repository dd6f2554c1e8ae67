"""A result is checked against the float64 oracle before any time of it is shown."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from wavefill import reference
from wavefill.bench.inputs import Inputs

#: wavefill's error may be this many times sdpa's, or rounding, whichever is larger.
FACTOR = 2.0
#: A peer's error may be this many times rounding: it may hold its probabilities in 16 bits.
PEER_FACTOR = 4.0
#: Rounding of the float32 sums: units of float32's eps, for values up to the largest that a normal distribution gives.
SUM_EPS, LARGEST_VALUE = 16.0, 8.0


def oracle(inputs: Inputs, requests: Sequence[int] | None = None) -> Tensor:
    """Float64 result [B, HQ, D] on the first copy, or of some requests; all copies hold the same values."""
    copy, pick = inputs.copies[0], slice(None) if requests is None else list(requests)
    k, v, table = copy.k, copy.v, inputs.block_table
    if table is None:
        k, v = k[pick], v[pick]
    else:
        table = table[pick]
    return reference.attention(inputs.q[pick], k, v, inputs.lens[pick], table)[0]


def sample(lens: Sequence[int], most: int) -> list[int]:
    """Up to `most` requests to check: the first, the last, a longest, a shortest, and others evenly between."""
    if len(lens) <= most:
        return list(range(len(lens)))
    order = range(len(lens))
    worst = {0, len(lens) - 1, max(order, key=lens.__getitem__), min(order, key=lens.__getitem__)}
    between = [i * len(lens) // most for i in range(most)]
    return sorted({*worst, *[i for i in between if i not in worst][:max(most - len(worst), 0)]})


def error(result: Tensor, exact: Tensor) -> float:
    """Largest absolute difference, infinity when anything is not a number."""
    difference = (result.double() - exact).abs().max()
    return float(difference) if torch.isfinite(difference) else float("inf")


def rounding(exact: Tensor, dtype: torch.dtype) -> float:
    """What rounding alone makes of the error: of the output to `dtype`, and of sums in float32."""
    sums = SUM_EPS * torch.finfo(torch.float32).eps * LARGEST_VALUE
    return torch.finfo(dtype).eps * float(exact.abs().max()) + sums


def peer_bound(exact: Tensor, dtype: torch.dtype) -> float:
    """What a peer's error must stay under to count as a right result."""
    return PEER_FACTOR * rounding(exact, dtype)


def bound(exact: Tensor, dtype: torch.dtype, sdpa_error: float | None) -> float:
    """What wavefill's error must stay under; sdpa_error is None where sdpa did not run or was itself wrong."""
    return max(rounding(exact, dtype), FACTOR * min(sdpa_error or 0.0, peer_bound(exact, dtype)))

"""A result is checked against the float64 oracle before any time of it is shown."""

from __future__ import annotations

import torch
from torch import Tensor

from wavefill import reference
from wavefill.bench.inputs import Inputs

#: Error that any 16- or 32-bit implementation stays under, in units of the dtype's eps times the largest output.
PEER_EPS = 4.0
#: wavefill's error may be this many times sdpa's, or half a unit of rounding, whichever is larger.
FACTOR = 2.0


def oracle(inputs: Inputs) -> Tensor:
    """Float64 result [B, HQ, D] on the first copy; all copies hold the same values."""
    copy = inputs.copies[0]
    return reference.attention(inputs.q, copy.k, copy.v, inputs.lens, inputs.block_table)[0]


def error(result: Tensor, exact: Tensor) -> float:
    """Largest absolute difference, infinity when anything is not a number."""
    difference = (result.double() - exact).abs().max()
    return float(difference) if torch.isfinite(difference) else float("inf")


def peer_bound(exact: Tensor, dtype: torch.dtype) -> float:
    """What a peer's error must stay under to count as a right result."""
    return PEER_EPS * torch.finfo(dtype).eps * float(exact.abs().max())


def bound(exact: Tensor, dtype: torch.dtype, sdpa_error: float | None) -> float:
    """What wavefill's error must stay under; sdpa_error is None where sdpa did not run or was itself wrong."""
    rounding = torch.finfo(dtype).eps * float(exact.abs().max())
    return max(rounding, FACTOR * min(sdpa_error or 0.0, peer_bound(exact, dtype)))

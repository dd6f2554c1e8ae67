"""What the kernels of a decoder layer compute, by PyTorch, rounded as transformers rounds; in float64 the reference."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of rows."""
    wide = x if x.dtype == torch.float64 else x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def silu_times(x: Tensor) -> Tensor:
    """silu(g) * u, of g in the first half of the columns and u in the other."""
    g, u = x.chunk(2, -1)
    return torch.nn.functional.silu(g) * u


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, norm: tuple[Tensor, float] | None = None,
            residual: Tensor | None = None, gated: bool = False) -> Tensor:
    """As `flat.linear`."""
    y = torch.nn.functional.linear(x if norm is None else normed(x, *norm), weight, bias)
    y = silu_times(y) if gated else y
    return y if residual is None else residual + y


def hold(got: Tensor, compute: Callable[[bool], Tensor]) -> None:
    """Rows at most twice as far from float64 as PyTorch's in their dtype, plus the rounding of the result.

    compute: PyTorch's result, in float64 where it is called with True.
    """
    truth = compute(True)
    assert got.shape == truth.shape
    error, plain = (got.double() - truth).abs(), (compute(False).double() - truth).abs()
    eps = torch.finfo(got.dtype).eps
    assert bool((error.amax(-1) <= 2 * plain.amax(-1) + eps * truth.abs().amax(-1)).all())

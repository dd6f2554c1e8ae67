"""What a decoder layer computes between its products and its attention, each in one launch on the current stream.

Tensors are of one dtype (fp32, fp16 or bf16) on one device, with last strides of 1; shapes are the callers' to check.
Nothing is synchronised, and what is returned is contiguous.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from wavefill.backends.gpu import launch
from wavefill.backends.gpu.kernels import Variant, constants
from wavefill.backends.gpu.operators import _launch
from wavefill.backends.gpu.variants import _power

#: Columns of a row, at most, that a program of the norm holds.
MAX_NORM = 16384
#: Elements that a program of `fused.rotate`, and columns that one of `fused.gate` takes: 16 bytes a thread in 16 bits.
ROTATE_ELEMENTS, GATE_COLUMNS, FEW_WARPS = 512, 512, 2


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, interpret: bool = False) -> Tensor:
    """RMSNorm of the rows of x [rows, N] by weight [N], N up to `MAX_NORM`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _norm(x, x, x, weight, out, eps, False, interpret)
    return out


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float, *,
                 interpret: bool = False) -> tuple[Tensor, Tensor]:
    """x + delta, both [rows, N], and `rms_norm` of that."""
    total, out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    _norm(x, delta, total, weight, out, eps, True, interpret)
    return total, out


def _norm(x: Tensor, delta: Tensor, total: Tensor, weight: Tensor, out: Tensor, eps: float, added: bool,
          interpret: bool) -> None:
    rows, N = x.shape
    tensors = x, delta, total, weight, out
    variant = norm_variant(launch._DTYPE_NAMES[x.dtype], N, added, _aligned(*tensors))
    scalars: tuple[Any, ...] = eps, x.stride(0), delta.stride(0)
    _launch(variant, (rows, 1, 1), scalars, tensors, interpret)


def rotate_(qkv: Tensor, cos: Tensor, sin: Tensor, HQ: int, KH: int, D: int, *, q_weight: Tensor | None = None,
            k_weight: Tensor | None = None, eps: float = 0.0, interpret: bool = False) -> None:
    """Rotary embedding, in place, of the HQ heads of q and KH of k in front of each row of qkv [B * T, more].

    cos, sin:           [B or 1, T, size] of the same strides; the first `size` elements of a head, D at most, are
                        rotated: d with size / 2 + d.
    q_weight, k_weight: [D] both, by which each head gets an RMSNorm first (with `eps`), or neither; size is D then.
    """
    T, half = cos.shape[1], cos.shape[2] // 2
    tensors = qkv, cos, sin, qkv if q_weight is None else q_weight, qkv if k_weight is None else k_weight
    variant = rotate_variant(launch._DTYPE_NAMES[qkv.dtype], D, half, q_weight is not None, _aligned(*tensors))
    grid = qkv.shape[0], -(-(HQ + KH) // dict(variant.constants)["HEADS"]), 1
    batch_stride = cos.stride(0) if cos.shape[0] > 1 else 0
    scalars: tuple[Any, ...] = eps, HQ, KH, T, qkv.stride(0), batch_stride, cos.stride(1)
    _launch(variant, grid, scalars, tensors, interpret)


def silu_mul(gate_up: Tensor, *, interpret: bool = False) -> Tensor:
    """silu(g) * u [rows, N], where gate_up [rows, 2 * N] has g in its first N columns and u in the others."""
    rows, N = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, N, dtype=gate_up.dtype, device=gate_up.device)
    variant = gate_variant(launch._DTYPE_NAMES[out.dtype], _aligned(gate_up, out) and N % 16 == 0)
    _launch(variant, (rows, -(-N // GATE_COLUMNS), 1), (N, gate_up.stride(0)), (gate_up, out), interpret)
    return out


@lru_cache(maxsize=256)
def norm_variant(dtype: str, N: int, added: bool, aligned: bool = True) -> Variant:
    """The kernel of both norms; aligned, here and below: rows are read and written in vectors."""
    columns = _power(N)
    return Variant("norm", dtype, constants({"N": N, "NP": columns, "ADDED": added}),
                   min(max(columns // 512, 1), 16), aligned=("s_x", "s_d") if aligned else (),
                   unaligned=() if aligned else ("X", "DELTA", "SUM", "WEIGHT", "OUT"))


@lru_cache(maxsize=256)
def rotate_variant(dtype: str, D: int, half: int, normed: bool, aligned: bool = True) -> Variant:
    """The kernel of `rotate_`; half: pairs of elements of a head that turn."""
    pairs = _power(half)
    return Variant("rotate", dtype, constants({
        "D": D, "HALF": half, "HP": pairs, "HEADS": max(ROTATE_ELEMENTS // (2 * pairs), 1), "NORMED": normed,
    }), FEW_WARPS, aligned=("s_r", "s_cb", "s_ct") if aligned else (),
                   unaligned=() if aligned else ("QKV", "COS", "SIN", "Q_WEIGHT", "K_WEIGHT"))


@lru_cache(maxsize=256)
def gate_variant(dtype: str, aligned: bool = True) -> Variant:
    """The kernel of `silu_mul`."""
    return Variant("gate", dtype, constants({"COLUMNS": GATE_COLUMNS}), FEW_WARPS,
                   aligned=("N", "s_r") if aligned else (), unaligned=() if aligned else ("GATE_UP", "OUT"))


def _aligned(*tensors: Tensor) -> bool:
    """Whether all begin at a multiple of 16 bytes, and rows at a multiple of 16 elements from each other."""
    return not any(x.data_ptr() % 16 or any(stride % 16 for stride in x.stride()[:-1]) for x in tensors)

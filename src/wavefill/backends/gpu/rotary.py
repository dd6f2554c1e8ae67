"""Rotation and the cache's new tokens in one launch on a GPU of compute capability 9.0 (cuda/rotary.cu)."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from wavefill.backends.gpu import flat, hopper, launch, nvrtc

#: Threads of a program, and heads that it takes (rotary.cu).
THREADS, HEADS = 128, 4
#: Rows at most: they are programs along y.
MOST_ROWS = 64


@dataclass(frozen=True)
class Build(nvrtc.Build):
    """One compilation of rotary.cu. normed: heads of q and k are normalised first."""

    dtype: str
    normed: bool
    entry: ClassVar[str] = "rotary"
    files: ClassVar[tuple[str, ...]] = ("rotary.cu", "instructions.cuh", "elements.cuh")

    @property
    def header(self) -> str:
        """variant.cuh."""
        return nvrtc.header({"BF16": int(self.dtype == "bfloat16")}, {"NORMED": int(self.normed)})

    @property
    def dynamic_bytes(self) -> int:
        """None."""
        return 0


def builds(dtype: str) -> list[Build]:
    """All compilations for a dtype."""
    return [Build(dtype, normed) for normed in (False, True)]


class Args(ctypes.Structure):
    """`Args` of rotary.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("qkv", "cos", "sin", "q_norm", "k_norm", "k", "v", "slots")),
        *((name, ctypes.c_int64) for name in ("s_r", "s_cb", "s_ct", "k_p", "k_t", "k_h", "v_p", "v_t", "v_h")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("T", "HQ", "KH", "D", "half", "pages", "page_size")),
    )


def takes(qkv: Tensor, k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether `rotate_and_append` takes rows of heads [rows, (HQ + 2 * KH) * D] and such a cache."""
    D, DV = k_cache.shape[3], v_cache.shape[3]
    if not (len(qkv) <= MOST_ROWS and D == DV and D % 8 == 0 and flat.works(qkv.device) and qkv.dtype in flat.DTYPES):
        return False
    if (k_cache.dtype, k_cache.device) != (qkv.dtype, qkv.device) or not k_cache.stride(3) == v_cache.stride(3) == 1:
        return False
    strides = *v_cache.stride()[:3], qkv.stride(0)
    return not (qkv.data_ptr() | v_cache.data_ptr()) % 16 and not any(stride % 8 for stride in strides)


def rotate_and_append(
    qkv: Tensor, cos: Tensor, sin: Tensor, HQ: int, k_cache: Tensor, v_cache: Tensor, slots: Tensor, *,
    q_weight: Tensor | None = None, k_weight: Tensor | None = None, eps: float = 0.0,
) -> None:
    """Rotary embedding of q, in place, and of k, which goes to the cache with v; one launch on the current stream.

    qkv:              [B * T, (HQ + 2 * KH) * D], one token a row; k and v are left as they are.
    cos, sin, q_weight, k_weight, eps: as for `layer.rotate_`.
    k_cache, v_cache: [pages, page_size, KH, D]; slots: int64 [B * T], as `append` has them.

    All on one device and of one 16-bit dtype, which `takes` has said yes to.
    """
    (pages, page_size, KH, D), device = k_cache.shape, qkv.get_device()
    build = Build(launch._DTYPE_NAMES[qkv.dtype], q_weight is not None)
    args = Args(
        qkv=qkv.data_ptr(), cos=cos.data_ptr(), sin=sin.data_ptr(), q_norm=_address(q_weight),
        k_norm=_address(k_weight), k=k_cache.data_ptr(), v=v_cache.data_ptr(), slots=slots.data_ptr(),
        s_r=qkv.stride(0), s_cb=cos.stride(0) if cos.shape[0] > 1 else 0, s_ct=cos.stride(1),
        k_p=k_cache.stride(0), k_t=k_cache.stride(1), k_h=k_cache.stride(2),
        v_p=v_cache.stride(0), v_t=v_cache.stride(1), v_h=v_cache.stride(2),
        eps=eps, T=cos.shape[1], HQ=HQ, KH=KH, D=D, half=cos.shape[2] // 2, pages=pages, page_size=page_size)
    with torch.cuda.device(device):
        _grid(build, len(qkv), HQ + 2 * KH, device).launch(
            torch._C._cuda_getCurrentRawStream(device), (ctypes.c_void_p * 1)(ctypes.addressof(args)))


def _address(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


@cache
def _grid(build: Build, rows: int, heads: int, device: int) -> hopper.Grid:
    """The grid for so many heads of so many rows, on the current device."""
    return hopper.Grid(nvrtc.function(build, device), -(-heads // HEADS), rows, THREADS, 0, follows=True)

"""Products of a few rows with a matrix of weights on a GPU of compute capability 9.0 (cuda/flat.cu): launching them.

What a decoding step multiplies: weights are read once, at the speed of memory, and a launch begins to read its own
while the kernel before it ends.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from wavefill.backends.gpu import hopper, launch, nvrtc

#: Rows of x at most, threads of a program, columns of a step and rows of weights of a tile (flat.cu).
MOST_ROWS, THREADS, STEP, TILE = 8, 256, 64, 16
#: Programs that an SM has room for, and the shared memory of one where it has two.
PER_SM, HALF = 2, 104 << 10
#: Shared memory that a program has besides x.
_STATIC = 2 * 8 * 32 * 16 + 8 * 8 * 4
_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class Build(nvrtc.Build):
    """One compilation of flat.cu.

    normed: rows of x are normalised first. gated: the result is silu(gate) * up. staged: x lies in shared memory.
    """

    dtype: str
    normed: bool
    gated: bool
    staged: bool
    entry: ClassVar[str] = "flat"
    files: ClassVar[tuple[str, ...]] = ("flat.cu", "instructions.cuh")

    @property
    def header(self) -> str:
        """variant.cuh."""
        return nvrtc.header({"BF16": int(self.dtype == "bfloat16")},
                            {"NORMED": int(self.normed), "GATED": int(self.gated), "STAGED": int(self.staged)})

    @property
    def dynamic_bytes(self) -> int:
        """Dynamic shared memory of a program at most; a launch asks for what its rows take."""
        return hopper.SHARED - _STATIC if self.staged else 0


def builds(dtype: str) -> list[Build]:
    """All compilations for a dtype."""
    return [Build(dtype, normed, gated, staged) for normed, gated, staged in (
        (False, False, False), (False, False, True), (True, False, True), (True, True, True), (False, True, False),
        (False, True, True))]


class Args(ctypes.Structure):
    """`Args` of flat.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "w", "bias", "norm", "residual", "y")),
        ("x_s", ctypes.c_int64), ("r_s", ctypes.c_int64), ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("M", "N", "K")),
    )


def takes(rows: int, N: int, K: int, dtype: torch.dtype, device: torch.device, *, normed: bool = False) -> bool:
    """Whether `linear` computes products of so many rows, normalised or not, with weights [N, K] on a device."""
    return (0 < rows <= MOST_ROWS and N % TILE == 0 and K % STEP == 0 and 0 < N < 1 << 30 and 0 < K < 1 << 30
            and dtype in _DTYPES and device.type == "cuda"
            and (not normed or rows * (2 * K + 64) <= hopper.SHARED - _STATIC) and _works(device.index))


@cache
def _works(index: int) -> bool:
    from wavefill.backends.gpu import device_gap

    return (device_gap(index) is None and torch.version.hip is None
            and torch.cuda.get_device_capability(index) == (9, 0) and nvrtc.compiler_gap() is None)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, norm: tuple[Tensor, float] | None = None,
           residual: Tensor | None = None, gated: bool = False) -> Tensor:
    """x weight^T + bias, rounded where transformers rounds; one launch on the current stream.

    x:        [M, K], M up to `MOST_ROWS`; rows at multiples of 16 bytes.
    weight:   [N, K], contiguous, from a multiple of 16 bytes on. bias: [N].
    norm:     a weight [K], 16-byte aligned, and eps: rows of x go through an RMSNorm first.
    residual: [M, N]: what the product is added to; rows of unit stride.
    gated:    weight has N / 2 gate rows and then as many up rows; the result is silu(gate) * up, [M, N / 2].

    All of one 16-bit dtype on one device, which `takes` has said yes to. Returns a new contiguous tensor. Weights must
    not be written by the kernel just before: they are read while that one ends.
    """
    M, (N, K) = x.shape[0], weight.shape
    device = x.get_device()
    y = torch.empty(M, N // 2 if gated else N, dtype=x.dtype, device=x.device)
    staged = norm is not None or M * (2 * K + 64) <= HALF
    build = Build(launch._DTYPE_NAMES[x.dtype], norm is not None, gated, staged)
    args = Args(
        x=x.data_ptr(), w=weight.data_ptr(), bias=0 if bias is None else bias.data_ptr(),
        norm=0 if norm is None else norm[0].data_ptr(), eps=0.0 if norm is None else norm[1],
        residual=0 if residual is None else residual.data_ptr(), y=y.data_ptr(), x_s=x.stride(0),
        r_s=0 if residual is None else residual.stride(0), M=M, N=N, K=K)
    if torch.cuda.current_device() == device:
        _run(build, args, device)
    else:
        with torch.cuda.device(device):
            _run(build, args, device)
    return y


def _run(build: Build, args: Args, device: int) -> None:
    grid = _grid(build, args.N, args.M * (2 * args.K + 64) if build.staged else 0, device)
    grid.launch(torch._C._cuda_getCurrentRawStream(device), (ctypes.c_void_p * 1)(ctypes.addressof(args)))


@cache
def _grid(build: Build, N: int, bytes_: int, device: int) -> hopper.Grid:
    """The grid for weights of N rows, with so much dynamic shared memory, on the current device."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return hopper.Grid(nvrtc.function(build, device), min(N // TILE, PER_SM * sms), 1, THREADS, bytes_, follows=True)

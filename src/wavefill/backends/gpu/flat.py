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

#: Rows of x at most, threads of a program, columns that a warp multiplies at once, and rows of weights of a tile
#: (flat.cu).
MOST_ROWS, THREADS, STEP, TILE = 8, 256, 64, 16
#: Stages of a ring: the most, and the fewest that keep memory busy.
STAGES = (6, 5, 4)
_STATIC = 2 * 8 * 32 * 16 + 2 * 128  # outputs of warps, and little else
HALF = hopper.SHARED // 2 - 1024 - _STATIC
DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class Build(nvrtc.Build):
    """One compilation of flat.cu.

    normed: rows of x are normalised first, and stay in shared memory. gated: the result is silu(gate) * up.
    stages: of a warp's ring.
    """

    dtype: str
    normed: bool
    gated: bool
    stages: int
    entry: ClassVar[str] = "flat"
    files: ClassVar[tuple[str, ...]] = ("flat.cu", "instructions.cuh", "elements.cuh")

    @property
    def header(self) -> str:
        """variant.cuh."""
        return nvrtc.header({"BF16": int(self.dtype == "bfloat16")},
                            {"NORMED": int(self.normed), "GATED": int(self.gated), "STAGES": self.stages})

    @property
    def dynamic_bytes(self) -> int:
        """Dynamic shared memory of a program at most; a launch asks for what its rows take."""
        return hopper.SHARED - _STATIC


def builds(dtype: str) -> list[Build]:
    """All compilations for a dtype."""
    return [Build(dtype, normed, gated, stages) for normed in (False, True) for gated in (False, True)
            for stages in STAGES]


class Args(ctypes.Structure):
    """`Args` of flat.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("x", "w", "bias", "norm", "residual", "y")),
        ("x_s", ctypes.c_int64), ("r_s", ctypes.c_int64), ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("M", "N", "K")),
    )


def ring(rows: int, K: int, normed: bool) -> tuple[int, int]:
    """Stages of a warp's ring, none where there is no room for enough of them, and dynamic shared memory of a program.
    """
    stage, x = THREADS // 32 * STEP * 2 * (TILE if normed else TILE + rows), rows * (2 * K + 16) if normed else 0
    for room in (HALF, hopper.SHARED - _STATIC):
        for stages in STAGES:
            if x + stages * stage <= room:
                return stages, x + stages * stage
    return 0, 0


def takes(rows: int, N: int, K: int, dtype: torch.dtype, device: torch.device, *, normed: bool = False) -> bool:
    """Whether `linear` computes products of so many rows, normalised or not, with weights [N, K] on a device."""
    return (0 < rows <= MOST_ROWS and N % TILE == 0 and K % STEP == 0 and 0 < N < 1 << 30 and 0 < K < 1 << 30
            and dtype in DTYPES and ring(rows, K, normed)[0] > 0 and works(device))


def works(device: torch.device) -> bool:
    """Whether a device is a GPU of compute capability 9.0, and there is what compiles for it."""
    return device.type == "cuda" and _works(device.index)


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
    stages, shared = ring(M, K, norm is not None)
    build = Build(launch._DTYPE_NAMES[x.dtype], norm is not None, gated, stages)
    args = Args(
        x=x.data_ptr(), w=weight.data_ptr(), bias=0 if bias is None else bias.data_ptr(),
        norm=0 if norm is None else norm[0].data_ptr(), eps=0.0 if norm is None else norm[1],
        residual=0 if residual is None else residual.data_ptr(), y=y.data_ptr(), x_s=x.stride(0),
        r_s=0 if residual is None else residual.stride(0), M=M, N=N, K=K)
    if torch.cuda.current_device() == device:
        _run(build, args, shared, device)
    else:
        with torch.cuda.device(device):
            _run(build, args, shared, device)
    return y


def _run(build: Build, args: Args, shared: int, device: int) -> None:
    grid = _grid(build, args.N, shared, device)
    grid.launch(torch._C._cuda_getCurrentRawStream(device), (ctypes.c_void_p * 1)(ctypes.addressof(args)))


@cache
def _grid(build: Build, N: int, shared: int, device: int) -> hopper.Grid:
    """The grid for weights of N rows, with so much dynamic shared memory, on the current device."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return hopper.Grid(nvrtc.function(build, device), min(N // TILE, sms), 1, THREADS, shared, follows=True)

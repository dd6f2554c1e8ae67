"""The CUDA C++ kernel of compute capability 9.0 for several query tokens a request (cuda/many.cu), and launching it."""

from __future__ import annotations

import ctypes
import math
import struct
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from wavefill.backends.gpu import hopper, nvrtc
from wavefill.backends.gpu.memory import done

#: Head sizes that it has, and the queries of a unit (query tokens x heads of a group) at most.
HEAD_SIZES, MOST_QUERIES = (64, 128), 128
#: Threads of a program: a group of four warps that brings tiles, two that multiply.
THREADS = 384


@dataclass(frozen=True)
class Build(nvrtc.Build):
    """One compilation of many.cu: all that changes the code.

    queries: of a unit, 64 or 128. page: tokens of a page, 0 for contiguous caches. kind: how rows are cut, or ROUNDS.
    """

    dtype: str
    D: int
    queries: int
    page: int
    kind: int
    scanned: bool
    capped: bool
    sloped: bool
    sinks: bool
    masked: bool
    entry: ClassVar[str] = "many"
    files: ClassVar[tuple[str, ...]] = ("many.cu", "cursor.cuh", "instructions.cuh", "scan.cuh", "wgmma.cuh")

    @property
    def tile(self) -> int:
        """Tokens of a tile."""
        return tile_of(self.queries)

    @property
    def box(self) -> int:
        """Tokens that the copy engine brings at a time: whole pages, or as many as divide one."""
        return math.gcd(self.page, self.tile)

    @property
    def header(self) -> str:
        """variant.cuh."""
        values = {"T": self.tile, "KIND": self.kind, "SCANNED": int(self.scanned), "D": self.D, "DV": self.D,
                  "QUERIES": self.queries, "STAGES": self.stages, "PAGE": self.page, "BOX": self.box,
                  "CAPPED": int(self.capped), "SLOPED": int(self.sloped), "SINKS": int(self.sinks),
                  "MASKED": int(self.masked)}
        return nvrtc.header({"BF16": int(self.dtype == "bfloat16"), "WIDE": int(self.scanned), "SEVERAL": 1}, values)

    @property
    def stages(self) -> int:
        """Tiles on their way; an even number where the groups of warps take every other one."""
        fit = min((hopper.SHARED - self._fixed_bytes) // (4 * self.tile * self.D), 8)
        return fit - fit % 2 if self.queries == 64 else fit

    @property
    def _fixed_bytes(self) -> int:
        join = (self.D // 2 + 4) * 128 * 4 if self.queries == 64 else 16
        return self.queries * self.D * 2 + join + 8 * 32 + 8 * 96 + 1024

    @property
    def dynamic_bytes(self) -> int:
        """Dynamic shared memory of a program: `Shared` of many.cu."""
        return self._fixed_bytes + self.stages * 4 * self.tile * self.D


def tile_of(queries: int) -> int:
    """Tokens of a tile for units of so many queries."""
    return 64 if queries == 64 else 128


class Args(ctypes.Structure):
    """`Args` of many.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in (
            "q", "k", "v", "table", "rows", "before", "out", "lse", "part_o", "part_m", "part_l", "sinks", "slopes",
            "mask")),
        *((name, ctypes.c_int64) for name in ("q_b", "q_h", "o_b", "o_h", "l_b", "l_h", "t_b", "mask_row")),
        ("scale", ctypes.c_float), ("cap", ctypes.c_float),
        *((name, ctypes.c_int32) for name in (
            "B", "KH", "G", "block", "tokens", "causal", "window", "param", "rule", "words")),
    )


@dataclass(frozen=True)
class Launch:
    """What calls of one geometry have in common: the build, the programs of the grid, and strides and sizes."""

    build: Build
    programs: int
    args: Args


class Kernel:
    """A launch on one device, which must be the current one; compiled if it is the first of its build."""

    def __init__(self, launch: Launch, device: int) -> None:
        from cuda.bindings import driver

        self._driver, self._launch = driver, launch
        self._function = nvrtc.function(launch.build, device)
        self._maps = hopper.Maps(launch.build.box)

    def __call__(self, stream: int, k: Tensor, v: Tensor, addresses: tuple[int, ...]) -> None:
        """One launch on a stream; `addresses` are those of `Args`, in its order.

        All calls of a launch have caches of one geometry.
        """
        launch = self._launch
        args = Args.from_buffer_copy(launch.args)
        _ADDRESSES.pack_into(args, 0, *addresses)
        maps = self._maps.of(k, v)
        given = (ctypes.c_void_p * 2)(ctypes.addressof(maps), ctypes.addressof(args))
        done(self._driver.cuLaunchKernel(self._function, launch.programs, 1, 1, THREADS, 1, 1,
                                         launch.build.dynamic_bytes, stream, ctypes.addressof(given), 0))


_ADDRESSES = struct.Struct("=14Q")

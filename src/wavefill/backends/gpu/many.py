"""The CUDA C++ kernel of compute capability 9.0 for several query tokens a request (cuda/many.cu), and launching it."""

from __future__ import annotations

import ctypes
import math
import struct
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from wavefill.backends.gpu import hopper, memory, nvrtc
from wavefill.backends.gpu.kernels import STREAM_K

#: Head sizes that it has, and the queries of a unit (query tokens x heads of a group) at most.
HEAD_SIZES, MOST_QUERIES = (64, 128), 128
#: Threads of a program: a group of four warps that brings tiles, two that multiply.
THREADS = 384
#: Rows of a call that programs make for themselves (`rows` of `Shared` in many.cu).
MOST_ROWS = 1024
_ROWS_BYTES = 4 * (7 * MOST_ROWS + 2)
#: Threads of a program of `Join`, and those that may share the parts of a vector.
JOINERS, JOIN_LANES = 256, (1, 2, 4, 8, 16)


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
    files: ClassVar[tuple[str, ...]] = ("many.cu", "cursor.cuh", "instructions.cuh", "scan.cuh", "states.cuh",
                                        "walk.cuh", "wgmma.cuh")

    @property
    def joined(self) -> bool:
        """Whether the kernel makes the rows and joins parts of units by itself: drafts, cut as `stream_k`."""
        return self.queries == 64 and self.kind == STREAM_K and not self.scanned

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
        return self.variant(join_lanes=0)

    def variant(self, join_lanes: int) -> str:
        """variant.cuh of the kernel, or of `join` with so many lanes for a vector."""
        values = {"T": self.tile, "KIND": self.kind, "SCANNED": int(self.scanned), "D": self.D, "DV": self.D,
                  "QUERIES": self.queries, "STAGES": self.stages, "PAGE": self.page, "BOX": self.box,
                  "CAPPED": int(self.capped), "SLOPED": int(self.sloped), "SINKS": int(self.sinks),
                  "MASKED": int(self.masked), "MOST_ROWS": MOST_ROWS, "JOINERS": JOINERS, "LANES": join_lanes or 1,
                  "UNIT_PROGRAMS": slices_of(self.D, join_lanes), "SHARED_BYTES": self.dynamic_bytes}
        macros = {"BF16": int(self.dtype == "bfloat16"), "WIDE": int(self.scanned), "SEVERAL": 1,
                  "JOIN": int(join_lanes > 0)}
        return nvrtc.header(macros, values)

    @property
    def stages(self) -> int:
        """Tiles on their way; an even number where the groups of warps take every other one."""
        fit = min((hopper.SHARED - self._fixed_bytes) // (4 * self.tile * self.D), 8)
        return fit - fit % 2 if self.queries == 64 else fit

    @property
    def _fixed_bytes(self) -> int:
        state = state_words(self.D) * 4 if self.queries == 64 else 16
        rows = _ROWS_BYTES if self.joined else 4
        sides = 2 if self.queries == 64 else 1
        return -(-rows // 1024) * 1024 + sides * self.queries * self.D * 2 + state + 8 * 32 + 4 * 8 + 8 * 96 + 16

    @property
    def dynamic_bytes(self) -> int:
        """Dynamic shared memory of a program: `Shared` of many.cu."""
        return self._fixed_bytes + self.stages * 4 * self.tile * self.D


@dataclass(frozen=True)
class Join(nvrtc.Build):
    """One compilation of `join` of many.cu, for the parts of drafts; `lanes` threads share the parts of a vector."""

    dtype: str
    D: int
    sinks: bool
    lanes: int
    entry: ClassVar[str] = "join"
    files: ClassVar[tuple[str, ...]] = Build.files

    @property
    def header(self) -> str:
        """variant.cuh."""
        return Build(self.dtype, self.D, 64, 0, STREAM_K, False, False, False, self.sinks, False).variant(self.lanes)

    @property
    def slices(self) -> int:
        """Programs of a unit."""
        return slices_of(self.D, self.lanes)

    @property
    def dynamic_bytes(self) -> int:
        """Dynamic shared memory of a program: the rows."""
        return _ROWS_BYTES


def slices_of(D: int, lanes: int) -> int:
    """Programs of `Join` for a unit."""
    return 8 * max(D // 8 * lanes // 16, 1)


def join_lanes(units: int, programs: int) -> int:
    """Threads that share the parts of a vector in `Join`, for at least so many units; 0 where the kernel itself joins.

    Parts of few units are many, and many programs read them sooner than the last one to arrive.
    """
    if 2 * units > programs:
        return 0
    return max(lanes for lanes in JOIN_LANES if lanes == 1 or 4 * lanes * units <= programs)


def tile_of(queries: int) -> int:
    """Tokens of a tile for units of so many queries."""
    return 64 if queries == 64 else 128


def state_words(DV: int) -> int:
    """4-byte words of a partial state of drafts: 64 queries, by threads of a group (states.cuh)."""
    return (DV // 8 + 1) * 128 * 4


class Args(ctypes.Structure):
    """`Args` of many.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in (
            "q", "k", "v", "table", "rows", "starts", "seq", "before", "out", "lse", "part_o", "part_m", "part_l",
            "sinks", "slopes", "mask", "counters")),
        *((name, ctypes.c_int64) for name in ("q_b", "q_h", "o_b", "o_h", "l_b", "l_h", "t_b", "mask_row")),
        ("scale", ctypes.c_float), ("cap", ctypes.c_float),
        *((name, ctypes.c_int32) for name in (
            "B", "KH", "G", "block", "tokens", "causal", "window", "param", "rule", "words", "requests", "limit",
            "programs", "apart", "early")),
    )


@dataclass(frozen=True)
class Launch:
    """What calls of one geometry have in common.

    programs: of the grid.
    join:     the kernel that joins parts after it, and its programs; None where parts are joined otherwise.
    args:     strides, sizes and the schedule's parameter.
    """

    build: Build
    programs: int
    join: tuple[Join, int] | None
    args: Args


class Kernel:
    """A launch on one device, which must be the current one; compiled if it is the first of its build."""

    def __init__(self, launch: Launch, device: int) -> None:
        self._launch, self._device, build = launch, device, launch.build
        self._counted = build.joined and launch.join is None
        self._grid = hopper.Grid(nvrtc.function(build, device), launch.programs, 1, THREADS, build.dynamic_bytes,
                                 follows=not (build.joined or build.scanned))
        self._join = None
        if launch.join is not None:
            join, programs = launch.join
            self._join = hopper.Grid(nvrtc.function(join, device), programs, 1, JOINERS, join.dynamic_bytes,
                                     follows=True)
        self._maps = hopper.Maps(build.box)

    def __call__(self, stream: int, capturing: bool, k: Tensor, v: Tensor, addresses: tuple[int, ...]) -> None:
        """One launch, or two, on a stream, which may be `capturing`; `addresses` are those of `Args` up to the mask.

        All calls of a launch have caches of one geometry.
        """
        args = Args.from_buffer_copy(self._launch.args)
        counters = memory.counters(self._device, stream, self._launch.programs, capturing) if self._counted else 0
        _ADDRESSES.pack_into(args, 0, *addresses, counters)
        maps = self._maps.of(k, v)
        self._grid.launch(stream, (ctypes.c_void_p * 2)(ctypes.addressof(maps), ctypes.addressof(args)))
        if self._join is not None:
            self._join.launch(stream, (ctypes.c_void_p * 1)(ctypes.addressof(args)))


_ADDRESSES = struct.Struct("=17Q")

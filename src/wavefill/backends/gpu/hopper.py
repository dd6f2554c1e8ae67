"""The CUDA C++ kernel of compute capability 9.0 for one query token a request (cuda/decode.cu), and launching it."""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from wavefill.backends.gpu import memory, nvrtc
from wavefill.backends.gpu.memory import done

#: Bytes of shared memory that a program may have; tokens that a warp reads at once, and bytes of a piece of a box.
SHARED, SIXTEEN, PIECE = 227 << 10, 16, 2048
#: Programs that share a unit at most, and so the widest cluster of a launch.
TEAM = 8
#: Tiles that a unit counts at most beyond its own (`OPENING` of cursor.cuh, for the widest team).
MOST_OPENING = 7 * TEAM
#: Up to so many bytes of KV a call, few units are each read by a cluster of `TEAM`, on about half of the GPU: faster by
#: a merge in device memory than on all of it. Above, clusters of two leave no part of the GPU out.
SMALL_BYTES = 128 << 20
#: (request, KV head) pairs up to which programs share one, and up to which they always do in full clusters.
FEW_UNITS, LEAST_UNITS = 64, 4

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Build(nvrtc.Build):
    """One compilation of decode.cu: all that changes the code.

    groups: of eight query heads that a program serves at once.
    page:   tokens of a page, 0 for contiguous caches.
    boxes:  whether the copy engine brings boxes of 16 tokens, or rows.
    kind:   how rows are cut, and `scanned` whether `merge.prefix` ran before.
    capped, sloped, sinks: what scores go through.
    """

    dtype: str
    D: int
    DV: int
    groups: int
    page: int
    boxes: bool
    kind: int
    scanned: bool
    tile: int
    warps: int
    stages: int
    capped: bool = False
    sloped: bool = False
    sinks: bool = False
    entry: ClassVar[str] = "decode"
    files: ClassVar[tuple[str, ...]] = ("decode.cu", "cursor.cuh", "instructions.cuh", "scan.cuh", "attend.cuh",
                                        "join.cuh")

    @property
    def header(self) -> str:
        """variant.cuh."""
        values = {"T": self.tile, "KIND": self.kind, "SCANNED": int(self.scanned), "D": self.D, "DV": self.DV,
                  "NT": self.groups, "WARPS": self.warps, "STAGES": self.stages, "PAGE": self.page,
                  "BOXES": int(self.boxes), "CAPPED": int(self.capped), "SLOPED": int(self.sloped),
                  "SINKS": int(self.sinks)}
        macros = {"BF16": int(self.dtype == "bfloat16"), "WIDE": int(self.scanned), "SEVERAL": 0}
        return nvrtc.header(macros, values)

    @property
    def dynamic_bytes(self) -> int:
        """Dynamic shared memory of a program: its rings, and so much that an SM has room for one program."""
        return max(self.warps * self.stages * stage_bytes(self.D, self.DV, self.boxes), SHARED // 2)

    @property
    def shared_bytes(self) -> int:
        """All of it: what `Shared` in join.cuh takes besides, with the rings at a whole KB."""
        heads = 8 * self.groups
        fixed = (self.warps * heads * 8 + 2 * 16 * heads * 8 + 2 * (heads * self.DV // 4 + 16) * 16
                 + 8 * (2 + self.warps * self.stages) + 8)
        return -(-fixed // 1024) * 1024 + self.dynamic_bytes


def stage_bytes(D: int, DV: int, boxes: bool) -> int:
    """Bytes of 16 tokens in a warp's ring."""
    if boxes:
        return (-(-D // 64) + -(-DV // 64)) * PIECE
    return SIXTEEN * ((D // 8 | 1) + (DV // 8 | 1)) * 16


@cache
def depth(D: int, DV: int, groups: int, boxes: bool) -> tuple[int, int]:
    """Warps of a program and stages of each: eight warps where rows are short enough, and what fits."""
    warps = 8 if max(D, DV) <= 128 else 4
    for stages in (4, 3, 2) if warps == 4 else (3, 2):
        if Build("bfloat16", D, DV, groups, 0, boxes, 0, False, 64, warps, stages).shared_bytes <= SHARED:
            return warps, stages
    raise AssertionError(f"no ring fits head sizes {D} and {DV}")


# ------------------------------------------------------------------------------------------------------ launching


class Args(ctypes.Structure):
    """`Args` of decode.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in (
            "q", "k", "v", "table", "seq", "before", "out", "lse", "part_o", "part_m", "part_l", "sinks",
            "slopes", "counters")),
        *((name, ctypes.c_int64) for name in (
            "q_b", "q_h", "k_p", "k_t", "k_h", "v_p", "v_t", "v_h", "o_b", "o_h", "l_b", "l_h", "t_b")),
        ("scale", ctypes.c_float), ("cap", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("B", "KH", "G", "window", "limit", "param", "rule", "align")),
    )


@dataclass(frozen=True)
class Launch:
    """What calls of one geometry have in common.

    blocks:   programs that a group of query heads takes, each for some of them.
    programs: of the grid at most, by blocks; cluster: those of a cluster.
    args:     strides, sizes and the schedule's parameter.
    """

    build: Build
    blocks: int
    programs: int
    cluster: int
    args: Args


def cluster_of(units: int, kv_bytes: int) -> int:
    """Programs of a cluster for `units` (request, KV head) pairs and the most bytes of KV that a call can read."""
    if units > FEW_UNITS:
        return 1
    return TEAM if units <= LEAST_UNITS or kv_bytes <= SMALL_BYTES else 2


class Grid:
    """A function with the grid that it is launched with, in clusters, on the current device.

    programs: of the grid along x: as many whole clusters as run at once, at most those asked for; blocks: along y.
    cluster:  programs of a cluster: those asked for, or fewer where not one of them can run.
    follows:  whether it may begin while the kernel before it ends, which it waits for by itself.
    """

    def __init__(self, function: Any, programs: int, blocks: int, threads: int, dynamic_bytes: int, *,
                 cluster: int = 1, follows: bool = False) -> None:
        from cuda.bindings import driver

        self._driver, self._function, self._follows = driver, function, follows
        self._sizes = blocks, threads, dynamic_bytes
        self.programs, self.cluster = programs, cluster
        while self.cluster > 1:
            fit = done(driver.cuOccupancyMaxActiveClusters(function, self._config(self.cluster, driver.CUstream(0))))
            clusters = min(programs // self.cluster, fit)
            if clusters:
                self.programs = clusters * self.cluster
                break
            self.cluster //= 2
        self._configs: dict[int, Any] = {}

    def _config(self, programs: int, stream: Any) -> Any:
        driver, (blocks, threads, dynamic_bytes) = self._driver, self._sizes
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = programs, blocks, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes = dynamic_bytes
        config.hStream = stream
        cluster = driver.CUlaunchAttribute()
        cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = self.cluster, 1, 1
        follows = driver.CUlaunchAttribute()
        follows.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        follows.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = ([cluster, follows], 2) if self._follows else ([cluster], 1)
        return config

    def launch(self, stream: int, given: Any) -> None:
        """One launch on a stream; `given` are the addresses of the kernel's parameters."""
        config = self._configs.get(stream)
        if config is None:
            config = self._configs[stream] = self._config(self.programs, self._driver.CUstream(stream))
        done(self._driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(given), 0))


class Kernel:
    """A launch on one device, which must be the current one; compiled if it is the first of its build."""

    def __init__(self, launch: Launch, device: int) -> None:
        self._launch, self._device, build = launch, device, launch.build
        self._grid = Grid(nvrtc.function(build, device), launch.programs, launch.blocks, build.warps * 32,
                          build.dynamic_bytes, cluster=launch.cluster)
        self._maps = Maps()

    def __call__(self, stream: int, capturing: bool, k: Tensor, v: Tensor, addresses: tuple[int, ...]) -> None:
        """One launch on a stream, which may be `capturing`; `addresses` are those of `Args` up to slopes.

        All calls of a launch have caches of one geometry.
        """
        launch = self._launch
        args = Args.from_buffer_copy(launch.args)
        _ADDRESSES.pack_into(args, 0, *addresses, memory.counters(self._device, stream, launch.programs * launch.blocks,
                                                                  capturing))
        maps = self._maps.of(k, v) if launch.build.boxes else _NO_MAPS
        self._grid.launch(stream, (ctypes.c_void_p * 2)(ctypes.addressof(maps), ctypes.addressof(args)))


_ADDRESSES = struct.Struct("=14Q")
_NO_MAPS = (ctypes.c_uint8 * 256)()


#: Pairs of caches whose maps a launch keeps.
MOST_MAPS = 4096


class Maps:
    """The maps of pairs of caches of one geometry, by their addresses; boxes of `tokens`."""

    def __init__(self, tokens: int = SIXTEEN) -> None:
        self._tokens = tokens
        self._found: dict[tuple[int, int], Any] = {}

    def of(self, k: Tensor, v: Tensor) -> Any:
        """K's and V's map, side by side."""
        key = k.data_ptr(), v.data_ptr()
        found = self._found.get(key)
        if found is None:
            if len(self._found) >= MOST_MAPS:
                self._found.clear()
            found = self._found[key] = _maps_of(self._tokens, k, v)
        return found


def _maps_of(box: int, *caches: Tensor) -> Any:
    """K and V as the copy engine takes them: [pages, heads, tokens, columns] in boxes of tokens and 64 columns.

    No promotion in L2: with one to 256 bytes, which a box's rows of 128 do not fill, long calls took 5 to 8 % longer.
    """
    from cuda.bindings import driver

    maps = (ctypes.c_uint8 * 256)()
    kind = driver.CUtensorMapDataType
    for i, side in enumerate(caches):
        element = (kind.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 if side.dtype == torch.bfloat16 else
                   kind.CU_TENSOR_MAP_DATA_TYPE_FLOAT16)
        pages, tokens, heads, columns = side.shape
        # A dimension of one may have any stride, which the engine does not take.
        page, token, head = (s * 2 if n > 1 else 16 for s, n in zip(side.stride()[:3], side.shape[:3], strict=True))
        made = done(driver.cuTensorMapEncodeTiled(
            element, 4, side.data_ptr(), [driver.cuuint64_t(n) for n in (columns, tokens, heads, pages)],
            [driver.cuuint64_t(n) for n in (token, head, page)],
            [driver.cuuint32_t(n) for n in (64, box, 1, 1)], [driver.cuuint32_t(1)] * 4,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE))
        ctypes.memmove(ctypes.addressof(maps) + 128 * i, made.getPtr(), 128)
    return maps

"""The CUDA C++ kernel of compute capability 9.0 (cuda/decode.cu): compiling it through NVRTC, and launching it."""

from __future__ import annotations

import ctypes
import hashlib
import os
import struct
import tempfile
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from wavefill import env
from wavefill.backends.gpu import kernels, memory
from wavefill.backends.gpu.memory import done

SOURCES = ("decode.cu", "cursor.cuh", "instructions.cuh", "scan.cuh", "attend.cuh", "join.cuh")
ARCHITECTURE = "sm_90a"
#: Bytes of shared memory that a program may have; tokens that a warp reads at once, and bytes of a piece of a box.
SHARED, SIXTEEN, PIECE = 227 << 10, 16, 2048
#: Programs that share a unit at most, and so the widest cluster of a launch.
TEAM = 8
#: Up to so many bytes of KV a call, few units are each read by a cluster of `TEAM`, on about half of the GPU: faster by
#: a merge in device memory than on all of it. Above, clusters of two leave no part of the GPU out.
SMALL_BYTES = 128 << 20
#: (request, KV head) pairs up to which programs share one, and up to which they always do in full clusters.
FEW_UNITS, LEAST_UNITS = 64, 4

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Build:
    """One compilation: all that changes the code.

    groups: of eight query heads that a program serves at once.
    page:   tokens of a page, 0 for contiguous caches.
    boxes:  whether the copy engine brings boxes of 16 tokens, or rows.
    kind:   how rows are cut, and `scanned` whether `merge.prefix` ran before.
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

    @property
    def header(self) -> str:
        """variant.cuh."""
        values = {"T": self.tile, "KIND": self.kind, "SCANNED": int(self.scanned), "D": self.D, "DV": self.DV,
                  "NT": self.groups, "WARPS": self.warps, "STAGES": self.stages, "PAGE": self.page,
                  "BOXES": int(self.boxes)}
        macros = {"BF16": int(self.dtype == "bfloat16"), "WIDE": int(self.scanned)}
        return "\n".join([*(f"#define {name} {value}" for name, value in macros.items()),
                          *(f"constexpr int {name} = {value};" for name, value in values.items()), ""])

    @property
    def ring_bytes(self) -> int:
        """Dynamic shared memory of a program: its rings, and so much that an SM has room for one program."""
        return max(self.warps * self.stages * stage_bytes(self.D, self.DV, self.boxes), SHARED // 2)

    @property
    def shared_bytes(self) -> int:
        """All of it: what `Shared` in join.cuh takes besides, with the rings at a whole KB."""
        heads = 8 * self.groups
        fixed = (self.warps * heads * 8 + 2 * 16 * heads * 8 + 2 * (heads * self.DV // 4 + 16) * 16
                 + 8 * (2 + self.warps * self.stages) + 8)
        return -(-fixed // 1024) * 1024 + self.ring_bytes


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


# ----------------------------------------------------------------------------------------------------- compiling


def compiler_gap() -> str | None:
    """Why the kernel cannot be compiled here, with what to do about it; None when it can."""
    cuda = (torch.version.cuda or "13").split(".", maxsplit=1)[0]
    try:
        from cuda.bindings import nvrtc

        done(nvrtc.nvrtcVersion())
    except ImportError as error:
        return f"cuda.bindings cannot be imported ({error}). Run: pip install 'cuda-bindings=={cuda}.*'"
    except RuntimeError as error:  # cuda.bindings says so when it finds no library
        return f"NVRTC cannot be used ({error}). Run: pip install 'nvidia-cuda-nvrtc{'-cu12' if cuda == '12' else ''}'"
    return None


def sources() -> dict[str, str]:
    """The files of the kernel by their names."""
    folder = files("wavefill.backends.gpu") / "cuda"
    return {name: (folder / name).read_text() for name in SOURCES}


def compile_source(build: Build, options: tuple[str, ...] = ()) -> tuple[bytes, str]:
    """The machine code of a build and what the compiler said; needs no GPU. RuntimeError where it fails."""
    from cuda.bindings import nvrtc

    main, texts = SOURCES[0], {**sources(), "variant.cuh": build.header}
    program = done(nvrtc.nvrtcCreateProgram(texts[main].encode(), main.encode(), len(texts),
                                             [text.encode() for text in texts.values()],
                                             [name.encode() for name in texts]))
    try:
        given = (f"--gpu-architecture={ARCHITECTURE}", "--std=c++17", "-diag-suppress=128,186", *options)
        status, = nvrtc.nvrtcCompileProgram(program, len(given), [option.encode() for option in given])
        log = b" " * done(nvrtc.nvrtcGetProgramLogSize(program))
        done(nvrtc.nvrtcGetProgramLog(program, log))
        said = log.decode(errors="replace").strip("\0 \n")
        if int(status):
            raise RuntimeError(f"NVRTC could not compile {main}: {said}")
        code = b" " * done(nvrtc.nvrtcGetCUBINSize(program))
        done(nvrtc.nvrtcGetCUBIN(program, code))
        return code, said
    finally:
        done(nvrtc.nvrtcDestroyProgram(program))


def machine_code(build: Build) -> bytes:
    """The machine code of a build, from the cache folder if it is there; the folder is not needed to go on."""
    from cuda.bindings import nvrtc

    version = done(nvrtc.nvrtcVersion())
    key = hashlib.sha256(repr((version, ARCHITECTURE, build.header, sorted(sources().items()))).encode()).hexdigest()
    path = env.cache_dir() / "cuda" / f"decode-{key[:32]}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        code, _ = compile_source(build)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.replace(file.name, path)
    except OSError:
        pass  # a read-only or full disk: the next process compiles again
    return code


# ------------------------------------------------------------------------------------------------------ launching


class Args(ctypes.Structure):
    """`Args` of decode.cu."""

    _fields_ = (
        *((name, ctypes.c_uint64) for name in (
            "q", "k", "v", "table", "seq", "before", "out", "lse", "part_o", "part_m", "part_l", "counters")),
        *((name, ctypes.c_int64) for name in (
            "q_b", "q_h", "k_p", "k_t", "k_h", "v_p", "v_t", "v_h", "o_b", "o_h", "l_b", "l_h", "t_b")),
        ("scale", ctypes.c_float),
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


class Kernel:
    """A launch on one device, which must be the current one; compiled if it is the first of its build."""

    def __init__(self, launch: Launch, device: int) -> None:
        from cuda.bindings import driver

        self._driver, self._launch, self._device = driver, launch, device
        self._function = function(launch.build, device)
        self._cluster, self._programs = launch.cluster, launch.programs
        while self._cluster > 1:  # as many whole clusters as run at once, smaller ones where none does
            config = self._config(self._cluster, driver.CUstream(0))
            fit = done(driver.cuOccupancyMaxActiveClusters(self._function, config))
            clusters = min(launch.programs // self._cluster, fit)
            if clusters:
                self._programs = clusters * self._cluster
                break
            self._cluster //= 2
        self._configs: dict[int, Any] = {}
        self._maps: dict[tuple[int, ...], Any] = {}

    def _config(self, programs: int, stream: Any) -> Any:
        driver, launch = self._driver, self._launch
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = programs, launch.blocks, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.build.warps * 32, 1, 1
        config.sharedMemBytes = launch.build.ring_bytes
        config.hStream = stream
        cluster = driver.CUlaunchAttribute()
        cluster.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = self._cluster, 1, 1
        config.attrs, config.numAttrs = [cluster], 1
        return config

    def __call__(self, stream: int, capturing: bool, k: Tensor, v: Tensor, addresses: tuple[int, ...]) -> None:
        """One launch on a stream, which may be `capturing`; `addresses` are those of `Args` up to part_l.

        All calls of a launch have caches of one geometry.
        """
        launch = self._launch
        config = self._configs.get(stream)
        if config is None:
            config = self._configs[stream] = self._config(self._programs, self._driver.CUstream(stream))
        args = Args.from_buffer_copy(launch.args)
        _ADDRESSES.pack_into(args, 0, *addresses, memory.counters(self._device, stream, launch.programs * launch.blocks,
                                                                  capturing))
        maps = _NO_MAPS
        if launch.build.boxes:
            found = self._maps.get(addresses[1:3])
            if found is None:
                if len(self._maps) >= MOST_MAPS:
                    self._maps.clear()
                found = self._maps[addresses[1:3]] = _maps_of(k, v)
            maps = found
        given = (ctypes.c_void_p * 2)(ctypes.addressof(maps), ctypes.addressof(args))
        done(self._driver.cuLaunchKernelEx(config, self._function, ctypes.addressof(given), 0))


_ADDRESSES = struct.Struct("=12Q")
_NO_MAPS = (ctypes.c_uint8 * 256)()


def function(build: Build, device: int) -> Any:
    """A build as a function of a device's context, which must be the current one; compiled at the first call."""
    return kernels.once(build, device, lambda: _load(build, device))


def _load(build: Build, device: int) -> Any:
    from cuda.bindings import driver

    if not int(done(driver.cuCtxGetCurrent())):  # a thread that has not called CUDA yet
        done(driver.cuCtxSetCurrent(done(driver.cuDevicePrimaryCtxRetain(device))))
    module = done(driver.cuModuleLoadData(machine_code(build)))
    found = done(driver.cuModuleGetFunction(module, b"decode"))
    most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    done(driver.cuFuncSetAttribute(found, most, build.ring_bytes))
    return found


#: Pairs of caches whose maps a launch keeps.
MOST_MAPS = 4096


def _maps_of(*caches: Tensor) -> Any:
    """K and V as the copy engine takes them: [pages, heads, tokens, columns] in boxes of 16 tokens, 64 columns.

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
            [driver.cuuint32_t(n) for n in (64, SIXTEEN, 1, 1)], [driver.cuuint32_t(1)] * 4,
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_NONE,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE))
        ctypes.memmove(ctypes.addressof(maps) + 128 * i, made.getPtr(), 128)
    return maps

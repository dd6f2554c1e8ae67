"""Variants that calls take, compiled without a GPU: registers, spills and shared memory."""

from __future__ import annotations

import contextlib
import io
import itertools
import re
import tempfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context

from wavefill.backends.gpu import configs, flat, kernels, launch, layer, many, nvrtc, operators, rotary
from wavefill.backends.gpu.configs import Config
from wavefill.backends.gpu.kernels import ROUNDS, STREAM_K, Variant
from wavefill.backends.gpu.nvrtc import Build
from wavefill.backends.gpu.variants import Switches, pieces_variant
from wavefill.spec import Fixed, Invariant, Schedule, StreamK

HEAD_SIZES = (64, 80, 96, 112, 128, 192, 256)
GROUPS = (1, 4, 8, 16, 32, 64, 128)
#: Group sizes and most query tokens of a request, for products of 16, 32 and 64 queries and a group of their own size.
QUERIES = ((4, 4), (4, 8), (4, None), (128, None))
#: One for each way of cutting, and each code of its own that a kernel has for it.
SCHEDULES: tuple[Schedule, ...] = (StreamK(), Fixed(), Invariant())
HOPPER = "cuda:90"
#: Streaming multiprocessors of an H200, so that a grid is as wide as it is there.
SMS = 132

#: Lines for the end of the run.
REPORT: list[str] = []


@dataclass(frozen=True)
class Job:
    """One variant for one target, "cuda:90" or "hip:gfx942", and the programs that an SM must hold."""

    variant: Variant | Build
    target: str
    ctas: int = 1

    @property
    def kernel(self) -> str:
        return self.variant.entry if isinstance(self.variant, Build) else self.variant.kernel

    @property
    def name(self) -> str:
        if isinstance(self.variant, Build):
            return f"{self.target} {self.variant}"
        have = dict(self.variant.constants)
        parts = [f"{key}{have[key]:d}" for key in ("D", "DV", "GP", "T", "STAGES", "COLUMNS", "STATES", "N", "HALF")
                 if key in have]
        parts += [*([f"kind{have['KIND']}"] if "KIND" in have else []), f"{self.variant.num_warps}warps"]
        parts += [key.lower() for key in ("PAGED", "UNIT", "SCANNED", "BY_WORKER", "PDL", "SEVERAL", "CAPPED", "SLOPED",
                                          "SINKS", "MASKED", "NORMED", "ADDED") if have.get(key)]
        return " ".join([self.target, self.variant.kernel, self.variant.dtype, *parts])


@dataclass(frozen=True)
class Result:
    """registers: of a thread. spills: bytes of spill stores. stack: bytes of a thread's stack frame. shared: bytes of a
    program. copies: bytes of its asynchronous copies, each size once. error: what the compiler said instead."""

    registers: int = 0
    spills: int = 0
    stack: int = 0
    shared: int = 0
    copies: tuple[int, ...] = ()
    error: str = ""


def variants(config: Config, D: int, G: int, schedule: Schedule, *, DV: int | None = None, dtype: str = "bfloat16",
             B: int = 4, KH: int = 8, page_size: int | None = 16, aligned: bool = True, pdl: bool = True,
             several: bool = False, optional: bool = False) -> list[Variant | Build]:
    """All kernels of a call of that shape; `several` query tokens of each of B requests, all options or none."""
    DV, HQ, T = D if DV is None else DV, KH * G, B * 8 if several else B
    pages, tokens = (64, page_size) if page_size else (B, 512)
    strides = [(tokens * KH * n, KH * n, n, 1) for n in (D, DV)]
    call = launch.make(launch.Geometry(
        dtype, ((T, HQ, D), (HQ * D, D, 1)), ((pages, tokens, KH, D), strides[0]),
        ((pages, tokens, KH, DV), strides[1]),
        ((B, 9), (9, 1)) if page_size else None, (HQ * DV, DV, 1), (HQ, 1), aligned, D**-0.5,
        requests=B if several else None, softcap=30.0 if optional else None, sinks=optional, sloped=optional,
        mask=(1, 1) if several and optional else (0, 0)), schedule, config, SMS * config.ctas, pdl)
    attention = call.attention if isinstance(call.attention, Variant) else call.attention.build
    return [variant for variant in (call.expand, call.prefix, attention, call.merge) if variant is not None]


def hopper_jobs() -> Iterator[Job]:
    """Every variant for an H200 that the table of configurations leads to."""
    for D, G, schedule in itertools.product(HEAD_SIZES, GROUPS, SCHEDULES):
        config = configs.hopper(D, D, G, "boxes")
        yield from jobs(config, HOPPER, variants(config, D, G, schedule))
    for schedule in SCHEDULES:
        for D, DV, G, page_size, dtype, B, copies in [
            (128, 128, 4, None, "bfloat16", 4, "boxes"), (128, 128, 4, 48, "float16", 4, "boxes"),
            (192, 128, 16, 16, "bfloat16", 4, "boxes"), (128, 128, 4, 16, "bfloat16", 2000, "boxes"),
            (64, 64, 8, 16, "bfloat16", 200, "boxes"), (128, 128, 16, 1, "bfloat16", 4, "rows"),
            (64, 128, 16, 16, "bfloat16", 4, "boxes"), (16, 48, 16, 3, "bfloat16", 4, "rows"),
            (256, 256, 2, 7, "bfloat16", 4, "rows"), (192, 192, 16, None, "float16", 2000, "rows"),
        ]:
            config = configs.hopper(D, DV, G, copies)
            yield from jobs(config, HOPPER, variants(config, D, G, schedule, DV=DV, dtype=dtype, page_size=page_size,
                                                     B=B))
        for D, G in ((64, 16), (128, 4), (128, 16), (192, 16), (256, 2)):
            config = configs.hopper(D, D, G, "boxes")
            yield from jobs(config, HOPPER, variants(config, D, G, schedule, optional=True))


def many_jobs() -> Iterator[Job]:
    """The Hopper kernel of several query tokens: each way of cutting with all options, and some with none or one."""
    every = Switches(True, True, True, True, True)
    for D, most, kind in itertools.product((64, 128), (8, None), range(ROUNDS + 1)):
        config = configs.many(8, most)
        some = [every]
        if kind in (STREAM_K, ROUNDS):
            some.append(Switches(True))
        if kind == STREAM_K and D == 128 and most is None:
            some += [Switches(True, *(i == j for j in range(4))) for i in range(4)]
            yield Job(launch.many_build("float16", D, config, kind, 0, True, every), HOPPER)
        for switches in some:
            yield Job(launch.many_build("bfloat16", D, config, kind, 16, False, switches), HOPPER)
        if kind == ROUNDS:
            yield Job(pieces_variant("bfloat16", D, config.tile, True, every), HOPPER)
    yield Job(launch.many_build("bfloat16", 128, configs.many(8, 8), STREAM_K, 16, True, every), HOPPER)
    for D, lanes in itertools.product((64, 128), many.JOIN_LANES):
        yield Job(many.Join("bfloat16", D, True, lanes), HOPPER)


def portable_jobs(target: str, head_sizes: Iterable[int], groups: Iterable[int]) -> Iterator[Job]:
    """Variants of the portable kernel, what runs beside it, and the kernels of `append` and `merge_states`."""
    for D, dtype in ((128, "bfloat16"), (80, "float32"), (576, "float16")):
        yield Job(operators.merge_variant(dtype, D, aligned=D == 128), target)
        for aligned, wide in ((True, False), (False, True)):
            yield Job(operators.append_variant(dtype, D, D, aligned=aligned, wide=wide), target)
    pdl = target in ("cuda:90", "cuda:100", "cuda:120")
    for D, G, schedule in itertools.product(head_sizes, groups, SCHEDULES):
        config = configs.portable(D, G, 2)
        yield from jobs(config, target, variants(config, D, G, schedule, pdl=pdl))
    for D, DV, G, dtype, page_size, aligned, B in [
        (128, 128, 4, "float32", 16, True, 4), (256, 256, 32, "float32", 16, True, 4),
        (64, 64, 1, "float16", None, True, 4), (192, 128, 16, "bfloat16", 1, True, 4),
        (80, 80, 5, "bfloat16", 3, False, 4), (128, 128, 8, "bfloat16", 16, True, 2000),
    ]:
        config = configs.portable(max(D, DV), G, 4 if dtype == "float32" else 2)
        yield from jobs(config, target, variants(config, D, G, StreamK(), DV=DV, dtype=dtype, page_size=page_size,
                                                 aligned=aligned, B=B, pdl=pdl))


def layer_jobs(target: str) -> Iterator[Job]:
    """The kernels of a decoder layer, and on Hopper the products of a few rows and what follows that for q, k and v."""
    for dtype, aligned in itertools.product(("float32", "float16", "bfloat16"), (True, False)):
        for N, added in itertools.product((64, 4096, layer.MAX_NORM), (True, False)):
            yield Job(layer.norm_variant(dtype, N, added, aligned), target)
        for D, half, normed in ((128, 64, False), (128, 64, True), (96, 48, False), (128, 16, False)):
            yield Job(layer.rotate_variant(dtype, D, half, normed, aligned), target)
        yield Job(layer.gate_variant(dtype, aligned), target)
    if target == HOPPER:
        for dtype in ("float16", "bfloat16"):
            for build in (*flat.builds(dtype), *rotary.builds(dtype)):  # the most shared memory is that of one on an SM
                yield Job(build, target, 1)


def several_jobs(target: str, head_sizes: Iterable[int], *, few: bool = False) -> Iterator[Job]:
    """The portable kernel with several query tokens a request and with options, and what runs beside it.

    few: one shape with all options and one schedule, for targets whose compilers are as good as those of others.
    """
    pdl = target in ("cuda:90", "cuda:100", "cuda:120")
    for D, (G, most), optional in itertools.product(head_sizes, QUERIES[:1] if few else QUERIES, (False, True)):
        config = configs.portable_several(D, G, 2, most)
        yield from jobs(config, target, variants(config, D, G, StreamK(), pdl=pdl, several=True, optional=optional))
    if few:
        return
    for schedule, dtype, (D, DV, G, page_size, aligned, B) in itertools.product(
            SCHEDULES, ("bfloat16", "float32"), [
                (128, 128, 4, None, True, 4), (192, 128, 16, 1, True, 4), (80, 80, 5, 3, False, 4),
                (128, 128, 64, 16, True, 2000)]):
        config = configs.portable_several(max(D, DV), G, 4 if dtype == "float32" else 2, None)
        yield from jobs(config, target, variants(config, D, G, schedule, DV=DV, dtype=dtype, page_size=page_size,
                                                 aligned=aligned, B=B, pdl=pdl, several=True, optional=True))
    for D, G in itertools.product(head_sizes, GROUPS):
        config = configs.portable(D, G, 2, optional=True)
        yield from jobs(config, target, variants(config, D, G, StreamK(), pdl=pdl, optional=True))


def jobs(config: Config, target: str, some: Iterable[Variant | Build]) -> Iterator[Job]:
    for variant in some:
        attention = isinstance(variant, Build) or variant.kernel == "portable"
        yield Job(variant, target, config.ctas if attention else 1)


def compile_job(job: Job) -> Result:
    """The result, or the error as text: exceptions of the compiler cannot all be sent between processes."""
    if isinstance(job.variant, Build):
        return compile_cuda(job.variant)
    import triton
    from triton.backends.compiler import GPUTarget

    kind, arch = job.target.split(":")
    target = GPUTarget(kind, int(arch), 32) if kind == "cuda" else GPUTarget(kind, arch, 64)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said):
            made = triton.compile(kernels.source(job.variant), target=target, options=kernels.options(job.variant))
    except Exception as error:
        return Result(error=f"{type(error).__name__}: {error}")
    shared = made.metadata.shared
    if kind == "hip":
        notes = made.asm["amdgcn"]
        registers, spills, stack = (int(re.search(rf"\.{key}:\s*(\d+)", notes)[1])
                                    for key in ("vgpr_count", "vgpr_spill_count", "private_segment_fixed_size"))
        return Result(registers, spills, stack, shared)
    registers, spills, stack = (max(map(int, re.findall(pattern, said.getvalue()))) for pattern in (
        r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes stack frame"))
    copies = set(re.findall(r"cp\.async\.c[ag]\.shared\.global.*?, (0x\w+|\d+),", made.asm["ptx"]))
    return Result(registers, spills, stack, shared, tuple(sorted(int(size, 0) for size in copies)))


def compile_cuda(build: Build) -> Result:
    """The same of the kernels in CUDA C++, through NVRTC."""
    try:
        _, said = nvrtc.compile_source(build, options=("--ptxas-options=-v",))
    except RuntimeError as error:
        return Result(error=str(error))
    registers, spills, stack = (max(map(int, re.findall(pattern, said))) for pattern in (
        r"Used (\d+) registers", r"(\d+) bytes spill stores", r"(\d+) bytes stack frame"))
    fixed = max(map(int, re.findall(r"(\d+) bytes smem", said)), default=0)  # nothing is said of none
    return Result(registers, spills, stack, fixed + build.dynamic_bytes)


def _prepare(cache: str) -> None:
    """What a process of `compile_all` does first: a cache of its own, and the assembler's words on every kernel."""
    from triton import knobs

    knobs.cache.dir = cache
    knobs.nvidia.dump_ptxas_log = True


def compile_all(some: Iterable[Job]) -> dict[Job, Result]:
    """All of them, on every processor, each once and afresh."""
    work = list(dict.fromkeys(some))
    with (tempfile.TemporaryDirectory() as folder,
          ProcessPoolExecutor(mp_context=get_context("spawn"), initializer=_prepare, initargs=(folder,)) as pool):
        results = dict(zip(work, pool.map(compile_job, work), strict=True))
    for job, result in results.items():
        REPORT.append(f"{job.name}: {result.error.splitlines()[0]}" if result.error else
                      f"{job.name}: {result.registers} registers, {result.spills} B spilled, {result.shared} B shared")
    return results

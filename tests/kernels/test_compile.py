"""Every kernel that a call can take compiles, without a GPU; on Hopper nothing spills and all programs have room."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from compiling import (
    GROUPS,
    HEAD_SIZES,
    HOPPER,
    Job,
    Result,
    compile_all,
    hopper_jobs,
    layer_jobs,
    many_jobs,
    portable_jobs,
    several_jobs,
)

from wavefill.backends.gpu import flat, many, rotary
from wavefill.backends.gpu.kernels import CHUNKS
from wavefill.backends.gpu.many import JOINERS, THREADS
from wavefill.backends.gpu.nvrtc import Build

#: Targets of the portable kernel besides Hopper.
OTHERS = ("cuda:80", "cuda:89", "cuda:100", "cuda:120", "hip:gfx90a", "hip:gfx942")
#: Bytes of shared memory of an SM of compute capability 9.0, of which each program takes 1 KB more than it asks for;
#: the most that a program may ask for on the smallest (8.6, 8.9, 12.0); registers of an SM, given out in eights.
SHARED, SMALLEST_SHARED, REGISTERS = 228 << 10, 99 << 10, 1 << 16

Results = dict[Job, Result]


@pytest.fixture(scope="module")
def results() -> Results:
    everything = [*hopper_jobs(), *many_jobs(), *portable_jobs(HOPPER, HEAD_SIZES, GROUPS),
                  *several_jobs(HOPPER, (64, 80, 128, 256)), *layer_jobs(HOPPER)]
    for target in OTHERS:
        everything += [*portable_jobs(target, (80, 256), (8,)), *several_jobs(target, (80,), few=True),
                       *layer_jobs(target)]
    return compile_all(everything)


@pytest.fixture(scope="module")
def on_hopper(results: Results) -> Results:
    return {job: result for job, result in results.items() if job.target == HOPPER}


def none_is(results: Results, bad: Callable[[Job, Result], bool]) -> None:
    """Fails with the names of those that are."""
    found = [f"{job.name}: {result}" for job, result in results.items() if bad(job, result)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("target", [HOPPER, *OTHERS])
def test_everything_compiles(results: Results, target: str) -> None:
    here = {job: result for job, result in results.items() if job.target == target}
    assert {job.kernel for job in here} >= {"portable", "merge", "prefix", "expand", "norm", "rotate", "gate"}
    none_is(here, lambda job, result: bool(result.error))


def test_nothing_spills_on_hopper(on_hopper: Results) -> None:
    """But for four words, with several query tokens: of a merge around a division of 64 bits, which is a call of a
    function, and of the slow way of caches that cannot be read in vectors. And for two, around such a division, of the
    portable kernel with head sizes that are no power of two, which one query token takes on other GPUs alone, and of
    the kernel of several query tokens with a soft cap, ALiBi and a mask at once, whose 224 registers are all in use."""
    def spills(job: Job, result: Result) -> bool:
        if isinstance(job.variant, many.Build) and job.variant.capped and job.variant.sloped and job.variant.masked:
            return max(result.spills, result.stack) > 8
        have = {} if isinstance(job.variant, Build) else dict(job.variant.constants)
        may = have.get("SEVERAL") and (job.kernel == "merge" or not have.get("UNIT", True))
        padded = have.get("DP") != have.get("D") and have.get("KIND") == CHUNKS
        return max(result.spills, result.stack) > (16 if may else 8 if padded else 0)

    none_is(on_hopper, spills)


def test_an_sm_holds_the_programs_that_a_configuration_asks_for(on_hopper: Results) -> None:
    """Two where it asks for two; the second waits in the slow way of caches that cannot be read in vectors."""
    def too_large(job: Job, result: Result) -> bool:
        if isinstance(job.variant, Build):
            threads = {"many": THREADS, "join": JOINERS, "flat": flat.THREADS, "rotary": rotary.THREADS}.get(job.kernel)
            warps = threads // 32 if threads else job.variant.warps
        elif not dict(job.variant.constants).get("UNIT", True):
            return False
        else:
            warps = job.variant.num_warps
        registers = -(-result.registers // 8) * 8 * 32 * warps
        return job.ctas * registers > REGISTERS or job.ctas * (result.shared + 1024) > SHARED

    none_is(on_hopper, too_large)


def test_the_portable_kernel_fits_the_smallest_shared_memory(on_hopper: Results) -> None:
    none_is(on_hopper, lambda job, result: not isinstance(job.variant, Build) and result.shared > SMALLEST_SHARED)


def test_the_hopper_kernel_takes_the_shared_memory_that_the_host_reckons_with(on_hopper: Results) -> None:
    none_is(on_hopper, lambda job, result: job.kernel == "decode"
            and result.shared > max(job.variant.shared_bytes, job.variant.dynamic_bytes + (32 << 10)))


def test_the_portable_kernel_copies_k_and_v_in_vectors_and_all_stages(on_hopper: Results) -> None:
    """Shared memory holds a tile of K and one of V for every stage but the one that is computed."""
    def not_pipelined(job: Job, result: Result) -> bool:
        if isinstance(job.variant, Build):
            return False
        have = dict(job.variant.constants)
        if job.variant.kernel != "portable" or not have["UNIT"] or job.variant.dtype == "float32":
            return False
        row = (have["DP"] + have["DVP"]) * 2
        widest = {min(16, 2 * have["T"] * have[columns] // (32 * job.variant.num_warps)) for columns in ("DP", "DVP")}
        return result.shared < (have["STAGES"] - 1) * have["T"] * row or set(result.copies) != widest

    none_is(on_hopper, not_pipelined)

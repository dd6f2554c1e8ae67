"""Compiling ahead of serving: every kernel that the calls of a list of shapes can take."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from wavefill import prefill
from wavefill.backends.gpu import (
    capability,
    config_of,
    copies_of_several,
    device_gap,
    hopper,
    is_hopper,
    kernels,
    launch,
    libraries,
    nvrtc,
)
from wavefill.backends.gpu.kernels import SPLITS, STREAM_K
from wavefill.backends.gpu.variants import Switches
from wavefill.spec import DTYPE_BYTES, AttentionSpec, BackendUnavailable, Invariant, Schedule, StreamK, complaint


def warmup(specs: Iterable[AttentionSpec], schedules: Sequence[Schedule], options: Collection[str], index: int,
           jobs: int | None) -> int:
    """Compile and load what `specs` and `schedules` take on a device; returns the number of kernels.

    options: which of `scores.OPTIONS` the calls have, all of them together; "mask" only with q_len above 1.

    Kernels are compiled in processes of their own, `jobs` at a time, into the folder that calls load them from.
    """
    wanted: dict[kernels.Variant | nvrtc.Build, None] = {}
    for spec in specs:
        gap = device_gap(index) or capability(spec)
        if gap is not None:
            raise BackendUnavailable(complaint("specs", "the GPU backend must be able to serve each", gap,
                                               "Leave that shape out."))
        for schedule in schedules:
            wanted |= dict.fromkeys(variants(spec, schedule, options, index))
    with torch.cuda.device(index):
        fresh = [variant for variant in wanted if not kernels.is_compiled(variant, index)]
        count = min(jobs or os.cpu_count() or 1, len(fresh))
        if count > 1:
            from triton.runtime import driver

            # Fresh processes: a fork of one that holds a CUDA context cannot use it, and these need none.
            with ProcessPoolExecutor(count, multiprocessing.get_context("spawn")) as pool:
                list(pool.map(_compile, fresh, [driver.active.get_current_target()] * len(fresh)))
        for variant in fresh:
            if isinstance(variant, nvrtc.Build):
                nvrtc.function(variant, index)
            else:
                kernels.compiled(variant, index)
    return len(wanted)


def _compile(variant: kernels.Variant | nvrtc.Build, target: Any) -> None:
    """In a process of its own: into the folder that calls load from."""
    if isinstance(variant, nvrtc.Build):
        nvrtc.machine_code(variant)
    else:
        kernels.compile_only(variant, target)


def variants(spec: AttentionSpec, schedule: Schedule, options: Collection[str],
             index: int) -> list[kernels.Variant | nvrtc.Build]:
    """Every kernel that calls of a shape with a schedule and options can take on a device.

    They may have any lengths, batch, table width and sm_budget, and any bound of their query tokens.
    """
    item = DTYPE_BYTES[spec.dtype]
    copies = ""
    several = spec.q_len > 1
    if is_hopper(index) and item == 2 and not (spec.D % 16 or spec.DV % 16):
        copies = "rows" if (spec.page_size or 0) % hopper.SIXTEEN else "boxes"
    # The bound that a call names decides by its power of two; `invariant` does not look at it.
    bounds: list[int | None] = [None]
    if several and not isinstance(schedule, Invariant):
        bounds += [1 << i for i in range((spec.q_len - 1).bit_length() + 1)]
    switches = Switches(several, "softcap" in options, "alibi_slopes" in options, "sinks" in options, "mask" in options)
    found: dict[kernels.Variant | nvrtc.Build, None] = {}
    configs = dict.fromkeys(config_of(
        spec.D, spec.DV, spec.G, item, schedule, several=several, max_q_len=bound, optional=bool(options),
        copies=copies_of_several(copies, spec.D, spec.DV, spec.G, schedule, bound) if several else copies, alone=alone,
    ) for bound in bounds for alone in (False, True))
    for config in configs:
        kinds = [launch.cut_of(schedule, config.tile).kind]
        # A call with an sm_budget may have any number of workers, KH among them.
        if kinds == [STREAM_K] and config.copies in ("boxes", "rows") and launch.splits_instead(1, spec.KH, spec.KH):
            kinds.append(SPLITS)
        for kind in kinds:
            found |= dict.fromkeys(launch.variants(
                spec.dtype, spec.D, spec.DV, spec.G, config, kind, spec.page_size, launch.dependent_launch(index),
                switches))
    if several and schedule == StreamK() and not options and prefill.takes(spec):
        for past in (False, True):
            found |= dict.fromkeys(libraries.variants(spec.dtype, spec.D, past))
    return list(found)

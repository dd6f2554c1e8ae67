"""A call of the GPU backend, judged as the public functions are: in Triton's interpreter, or on a GPU.

On a GPU each case takes the kernel that serves it: Hopper's for 16-bit caches with rows in whole 16 bytes, else the
portable one, both with a small tile.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from helpers import Case, guarded
from wavefill.backends import gpu
from wavefill.backends.gpu import launch
from wavefill.backends.gpu.configs import Config
from wavefill.scores import NONE, Options
from wavefill.spec import Fixed, Invariant, Schedule, StreamK

#: A small tile, so that short contexts have many. Stages and warps mean nothing here.
TILE = 16
CONFIG = Config(TILE, 1, 1, 1)
SCHEDULES: tuple[Schedule, ...] = (
    StreamK(), Fixed(), Fixed(splits=1), Fixed(splits=3), Fixed(chunk=40), Fixed(rule="flashdecoding"),
    Invariant(chunk=32),
)
#: One of each way of cutting.
CUTS = (StreamK(), Fixed(splits=3), Invariant(chunk=32))
ON_GPU = os.environ.get("TRITON_INTERPRET") != "1" and torch.cuda.is_available()


def run(case: Case, schedule: Schedule, workers: int = 3, config: Config = CONFIG) -> tuple[Tensor, Tensor]:
    """(out, lse), both NaN before the call and between guard bands that it must not touch."""
    out, out_untouched = guarded(case.out_shape, case.q.dtype)
    lse, lse_untouched = guarded(case.out_shape[:2], torch.float32)
    call(case, schedule, out, lse, workers, config)
    out_untouched()
    lse_untouched()
    return out, lse


def call(case: Case, schedule: Schedule, out: Tensor, lse: Tensor, workers: int = 3, config: Config = CONFIG) -> None:
    """The call alone, into given tensors."""
    assert case.v_cache is not None
    D = case.q.shape[-1]
    how: dict[str, Any] = {
        "scale": 1 / math.sqrt(D) if case.scale is None else case.scale, "window": case.window, "causal": case.causal,
        "schedule": schedule, "workers": workers}
    tensors = case.q, case.k_cache, case.v_cache, case.seq_lens, case.block_table, out, lse
    more = case.cu_seqlens_q, case.sinks, case.alibi_slopes, case.mask
    if not ON_GPU:
        launch.attend(*tensors, config=config, interpret=True, starts=more[0],
                      options=_options(case.softcap, *more[1:]), **how)
        return
    moved = _moved((*tensors, *more))
    given = moved[7:]
    config = _config(*moved[:3], case.block_table is not None, schedule, config,
                     portable=any(x is not None for x in (case.softcap, *given)))
    launch.attend(*moved[:7], config=config, starts=given[0], options=_options(case.softcap, *given[1:]), **how)
    for here, there in ((out, moved[5]), (lse, moved[6])):  # with all that lies around them
        here.untyped_storage().copy_(there.untyped_storage())


def _options(softcap: float | None, sinks: Tensor | None, slopes: Tensor | None, mask: Tensor | None) -> Options:
    """What `wavefill.ops` makes of them."""
    if softcap is None and sinks is None and slopes is None and mask is None:
        return NONE
    return Options(softcap, *(None if x is None else x.float() for x in (sinks, slopes)), mask)


def _moved(tensors: tuple[Tensor | None, ...]) -> list[Any]:
    """The tensors on the GPU, each with its strides and in a copy of all its memory."""
    storages: dict[int, Any] = {}
    moved: list[Tensor | None] = []
    for tensor in tensors:
        if tensor is None:
            moved.append(None)
            continue
        storage = tensor.untyped_storage()
        there = storages.setdefault(storage.data_ptr(), storage.cuda())
        empty = torch.empty(0, dtype=tensor.dtype, device="cuda")
        moved.append(empty.set_(there, tensor.storage_offset(), tensor.shape, tensor.stride()))
    return moved


def _config(q: Tensor, k: Tensor, v: Tensor, paged: bool, schedule: Schedule, asked: Config, portable: bool) -> Config:
    D, DV, G = q.shape[2], v.shape[3], q.shape[1] // k.shape[2]
    ways = (launch.copies_of(k.shape, k.stride(), paged), launch.copies_of(v.shape, v.stride(), paged))
    fits = (gpu.is_hopper(0) and not portable and q.element_size() == 2 and "" not in ways
            and not (k.data_ptr() | v.data_ptr()) % 16
            and not (q.data_ptr() % 4 or q.stride(0) % 2 or q.stride(1) % 2))
    config = gpu.config_of(D, DV, G, q.element_size(), schedule, copies=max(ways) if fits else "")
    return replace(config, tile=TILE, heads=config.heads if config.copies else min(config.heads, asked.heads),
                   block=asked.block)


def check(case: Case, schedule: Schedule, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """`run`, held to the float64 reference."""
    out, lse = run(case, schedule, **kwargs)
    case.expected.check(out, lse)
    return out, lse

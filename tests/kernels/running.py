"""A call of the GPU backend in Triton's interpreter, judged as the public functions are."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from helpers import Case, guarded
from wavefill.backends.gpu import launch
from wavefill.backends.gpu.configs import Config
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
    launch.decode(case.q, case.k_cache, case.v_cache, case.seq_lens, case.block_table, out, lse,
                  scale=1 / math.sqrt(D) if case.scale is None else case.scale, window=case.window, schedule=schedule,
                  config=config, workers=workers, interpret=True)


def check(case: Case, schedule: Schedule, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """`run`, held to the float64 reference."""
    out, lse = run(case, schedule, **kwargs)
    case.expected.check(out, lse)
    return out, lse

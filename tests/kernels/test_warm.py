"""`warm.variants` has every kernel that calls take, whatever their lengths, batch, table, budget of SMs and bound.

Calls are planned on tensors without memory, for a GPU that is not there.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wavefill.backends import gpu
from wavefill.backends.gpu import launch, warm
from wavefill.backends.gpu.kernels import Variant
from wavefill.scores import NONE, OPTIONS, Options
from wavefill.spec import AttentionSpec, Fixed, Invariant, StreamK

SCHEDULES = (StreamK(), StreamK(tile=64), Fixed(), Fixed(splits=3), Fixed(chunk=100), Invariant())
#: Query heads a KV head and KV heads; the fewest KV heads are cut as splits on Hopper.
HEADS = ((1, 1), (4, 2), (5, 3), (16, 4), (8, 8), (40, 1))
SIZES = ((64, 64), (128, 128), (80, 80), (24, 16), (192, 128))
SMS = 132


@st.composite
def calls(draw: st.DrawFn) -> tuple[AttentionSpec, dict[str, Any]]:
    """A shape, and what a call of it has besides."""
    (G, KH), (D, DV) = draw(st.sampled_from(HEADS)), draw(st.sampled_from(SIZES))
    q_len = draw(st.sampled_from([1, 2, 5, 8, 100]))
    spec = AttentionSpec(G * KH, KH, D, DV, draw(st.sampled_from(["bfloat16", "float32"])),
                         draw(st.sampled_from([None, 5, 16, 48])), q_len=q_len)
    names = OPTIONS if q_len > 1 else OPTIONS[:-1]
    B = draw(st.sampled_from([1, 2, 100, 1500]))
    return spec, {
        "schedule": draw(st.sampled_from(SCHEDULES)), "options": draw(st.sets(st.sampled_from(names))), "B": B,
        "tokens": B * draw(st.integers(1, q_len)), "slots": draw(st.sampled_from([1, 300, 2**27])),
        "most": draw(st.none() | st.integers(0, q_len)), "sm_budget": draw(st.none() | st.integers(1, SMS)),
        "window": draw(st.sampled_from([None, 100])), "hopper": draw(st.booleans())}


def planned(spec: AttentionSpec, *, schedule: Any, options: set[str], B: int, tokens: int, slots: int, most: int | None,
            sm_budget: int | None, window: int | None, hopper: bool) -> launch.Call:
    """The call as `gpu.attention` plans it."""
    def empty(*shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype or getattr(torch, spec.dtype), device="meta")

    several, page = spec.q_len > 1, spec.page_size
    table = None if page is None else empty(B, -(-slots // page), dtype=torch.int32)
    pages = (B, slots) if page is None else (9, page)
    out, lse = empty(tokens, spec.HQ, spec.DV), empty(tokens, spec.HQ, dtype=torch.float32)
    heads = empty(spec.HQ, dtype=torch.float32)
    given = NONE if not options else Options(
        30.0 if "softcap" in options else None, heads if "sinks" in options else None,
        heads if "alibi_slopes" in options else None,
        empty(tokens, 4, dtype=torch.int32) if "mask" in options else None)
    return gpu._plan(empty(tokens, spec.HQ, spec.D), empty(*pages, spec.KH, spec.D), empty(*pages, spec.KH, spec.DV),
                     table, out, lse, 0.1, True, window, schedule, sm_budget, B if several else None,
                     None if isinstance(schedule, Invariant) else most, given)


@settings(max_examples=400)
@given(calls())
def test_no_call_takes_a_kernel_that_warmup_leaves_out(call: tuple[AttentionSpec, dict[str, Any]]) -> None:
    spec, how = call
    with pytest.MonkeyPatch.context() as patched:
        for module in (gpu, warm):
            patched.setattr(module, "is_hopper", lambda index: how["hopper"])
        patched.setattr(launch, "sm_count", lambda index: SMS)
        patched.setattr(launch, "dependent_launch", lambda index: how["hopper"])
        made = planned(spec, **how)
        found = warm.variants(spec, how["schedule"], how["options"], 0)
    attention = made.attention if isinstance(made.attention, Variant) else made.attention.build
    join = None if isinstance(made.attention, Variant) else getattr(made.attention, "join", None)
    taken = {kernel for kernel in (made.expand, made.prefix, attention, made.merge) if kernel is not None}
    taken |= {join[0]} if join else set()
    assert taken <= set(found)
    assert len(found) == len(set(found))

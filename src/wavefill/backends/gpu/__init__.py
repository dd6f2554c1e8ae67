"""The GPU backend: kernels that derive their work from lengths in device memory.

Callers (ops.py) have checked shapes, dtypes and devices. Values in tensors (lengths, page ids) are on the device and
are not looked at, unless WAVEFILL_CHECK=1 asks for it: a length past the cache's capacity is cut to it, and page ids
out of range in slots that are read are undefined behaviour.

Importing this module needs no compiler; the first call does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from wavefill import env
from wavefill.backends.gpu import configs, hopper, launch
from wavefill.backends.gpu.configs import Config
from wavefill.backends.gpu.launch import Call as Call
from wavefill.backends.gpu.launch import run as run
from wavefill.backends.values import value_error
from wavefill.spec import (
    AttentionSpec,
    BackendUnavailable,
    Schedule,
    StreamK,
    complaint,
    invalid,
)

MAX_HEAD_DIM = 256
MAX_GROUP = 128
MIN_CAPABILITY = (8, 0)
#: Tokens that a tile may have where StreamK(tile=...) names them.
TILES = (16, 32, 64, 128)
#: Tokens of a request that the Hopper kernel counts in 32 bits, with what the warps of a team begin apart.
MAX_HOPPER_TOKENS = (1 << 31) - 2048
#: Bytes of shared memory that the stages of the portable kernel take on any SM.
_PORTABLE_BYTES = 80 << 10


def capability(spec: AttentionSpec) -> str | None:
    """Why this backend cannot serve `spec` on any GPU, or None when it can."""
    for name, value in (("D", spec.D), ("DV", spec.DV)):
        if value > MAX_HEAD_DIM:
            return f"{name} is {value}; the GPU backend takes head sizes up to {MAX_HEAD_DIM}"
    if spec.G > MAX_GROUP:
        return f"G is {spec.G}; the GPU backend takes up to {MAX_GROUP} query heads a KV head"
    if spec.q_len > 1:
        return "there are several query tokens a request; the GPU backend of this version serves one"
    return None


@cache
def device_gap(index: int) -> str | None:
    """Why this backend cannot run on a device, with what to do about it; None when it can."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        return f"Triton cannot be imported ({error}). Run: pip install 'triton>=3.6'"
    if torch.version.hip is None:
        have = torch.cuda.get_device_capability(index)
        if have < MIN_CAPABILITY:
            return (f"{torch.cuda.get_device_name(index)} has compute capability {have[0]}.{have[1]}, and the kernels "
                    "need 8.0. Move the tensors to the CPU and use impl=\"cpu\"")
        if is_hopper(index):
            return hopper.compiler_gap()
    return None


@cache
def is_hopper(index: int) -> bool:
    """Whether the Hopper kernel runs on a device."""
    return torch.version.hip is None and torch.cuda.get_device_capability(index) == (9, 0)


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    window: int | None,
    schedule: Schedule,
    sm_budget: int | None = None,
) -> Call | None:
    """Decode attention, written into `out` and `lse` on q's device and current stream, without a synchronisation.

    q:           [B, HQ, D], fp32, fp16 or bf16; its last stride is 1.
    k_cache:     [pages, page_size, KH, D] with a block table, else [B, S, KH, D]; q's dtype, any strides.
    v_cache:     the same with DV.
    seq_lens:    [B] int32, contiguous: keys of each request, this step's included.
    block_table: [B, max_pages] int32 with unit last stride, or None.
    out, lse:    [B, HQ, DV] with unit last stride; [B, HQ] float32.
    sm_budget:   at most this many SMs are used; None: all.

    Returns what `run` takes for further calls with tensors of these sizes, strides and alignment on this device, None
    where q was copied or there was nothing to do.

    Raises BackendUnavailable where the device cannot run the kernels, and InvalidArgument for a tile that they do not
    have; under WAVEFILL_CHECK=1, which waits for the device, also for negative lengths, lengths past the capacity and
    page ids out of range in slots that are read.
    """
    index = q.device.index
    if env.flag("WAVEFILL_CHECK") and not torch.cuda.is_current_stream_capturing():
        _hold_device(index)
        _check_values(seq_lens, block_table, k_cache, window)
    copied = bool(q.data_ptr() % 4 or q.stride(0) % 2 or q.stride(1) % 2)
    if copied:
        q = q.clone(memory_format=torch.contiguous_format)
    # One look-up for all that sizes, strides, alignment and options decide.
    key = (index, q.shape, q.stride(), q.dtype, k_cache.shape, k_cache.stride(), v_cache.shape, v_cache.stride(),
           None if block_table is None else (block_table.shape, block_table.stride()), out.stride(), lse.stride(),
           (k_cache.data_ptr() | v_cache.data_ptr()) % 16, scale, window, schedule, sm_budget)
    call = _calls.get(key)
    if call is None:
        _hold_device(index)
        if not q.shape[0]:
            return None
        if len(_calls) >= MOST_CALLS:
            _calls.clear()
        call = _calls[key] = _plan(q, k_cache, v_cache, block_table, out, lse, scale, window, schedule, sm_budget)
    if torch.cuda.current_device() == index:
        run(call, q, k_cache, v_cache, seq_lens, block_table, out, lse)
    else:
        with torch.cuda.device(index):
            run(call, q, k_cache, v_cache, seq_lens, block_table, out, lse)
    return None if copied else call


#: Calls by all that decides how they run, and how many are kept.
_calls: dict[tuple[object, ...], Call] = {}
MOST_CALLS = 4096


def _hold_device(index: int) -> None:
    gap = device_gap(index)
    if gap is not None:
        raise BackendUnavailable(complaint("impl", "the GPU backend cannot run here", f"cuda:{index}", gap + "."))


def _plan(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor | None, out: Tensor, lse: Tensor,
          scale: float, window: int | None, schedule: Schedule, sm_budget: int | None) -> Call:
    index, D, DV, item = q.device.index, k_cache.shape[3], v_cache.shape[3], q.element_size()
    copies = ""
    if is_hopper(index) and item == 2 and not (k_cache.data_ptr() | v_cache.data_ptr()) % 16:
        paged = block_table is not None
        capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
        both = (launch.copies_of(k_cache.shape, k_cache.stride(), paged),
                launch.copies_of(v_cache.shape, v_cache.stride(), paged))
        copies = "" if "" in both or capacity >= MAX_HOPPER_TOKENS else max(both)
    config = config_of(D, DV, q.shape[1] // k_cache.shape[2], item, schedule, copies=copies,
                       alone=sm_budget is not None)
    sms = launch.sm_count(index)
    workers = (sms if sm_budget is None else min(sm_budget, sms)) * config.ctas
    return launch.plan(q, k_cache, v_cache, block_table, out, lse, scale=scale, window=window, schedule=schedule,
                       config=config, workers=workers)


def config_of(D: int, DV: int, G: int, item: int, schedule: Schedule, *, copies: str, alone: bool = False) -> Config:
    """How a shape is run.

    item:   bytes of an element.
    copies: how the Hopper kernel can read the caches (`launch.copies_of`), "" where it cannot.
    alone:  whether a program must have its SM for itself.
    """
    config = configs.hopper(D, DV, G, copies) if copies else configs.portable(max(D, DV), G, item)
    if alone:
        config = replace(config, ctas=1, alone=True)
    if isinstance(schedule, StreamK) and schedule.tile is not None:
        config = with_tile(config, schedule.tile, (D + DV) * item)
    return config


def with_tile(config: Config, tile: int, token_bytes: int) -> Config:
    """The configuration with another tile, and as many stages as then fit; `token_bytes` of K and V of one head."""
    if tile not in TILES:
        raise invalid("StreamK.tile", f"must be one of {', '.join(map(str, TILES))} on a GPU", tile,
                      "Leave it out for the measured choice.")
    if config.copies:
        return replace(config, tile=tile)
    return replace(config, tile=tile, stages=max(min(_PORTABLE_BYTES // config.ctas // (tile * token_bytes), 8), 1))


def _check_values(seq_lens: Tensor, block_table: Tensor | None, k_cache: Tensor, window: int | None) -> None:
    """Raises for values that the kernels would read past; waits for the device."""
    pages, page_size = k_cache.shape[:2]
    lengths = seq_lens.tolist()
    table = None if block_table is None else block_table.cpu()
    max_pages = 1 if table is None else table.shape[1]
    capacity = page_size * max_pages
    for request, length in enumerate(lengths):
        fault, value, slot = 0, length, 0
        if length < 0:
            fault = 1
        elif length > capacity:
            fault = 2
        elif table is not None and length:
            first = max(length - window, 0) // page_size if window is not None else 0
            read = table[request, first : -(-length // page_size)]
            wrong = ((read < 0) | (read >= pages)).nonzero()
            if len(wrong):
                fault, slot = 3, first + int(wrong[0])
                value = int(table[request, slot])
        if fault:
            raise value_error(fault, request, value, slot, capacity=capacity, pages=pages, tokens=len(lengths))

"""The GPU backend: kernels that derive their work from lengths in device memory.

Callers (ops.py) have checked shapes, dtypes and devices. Values in tensors (lengths, offsets, page ids) are on the
device and are not looked at, unless WAVEFILL_CHECK=1 asks for it: a length past the cache's capacity is cut to it, as
are offsets past the query tokens, and page ids out of range in slots that are read are undefined behaviour.

Importing this module needs no compiler; the first call does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from wavefill import env
from wavefill.backends.gpu import configs, inspection, launch, libraries, many, nvrtc
from wavefill.backends.gpu.configs import Config
from wavefill.backends.gpu.launch import Call as Call
from wavefill.backends.gpu.launch import run as run
from wavefill.prefill import MAX_GROUP as MAX_GROUP
from wavefill.prefill import MAX_HEAD_DIM as MAX_HEAD_DIM
from wavefill.scores import NONE, Options
from wavefill.spec import (
    AttentionSpec,
    BackendUnavailable,
    Invariant,
    Schedule,
    StreamK,
    complaint,
    invalid,
)

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
            return nvrtc.compiler_gap()
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
    cu_seqlens_q: Tensor | None,
    out: Tensor,
    lse: Tensor,
    *,
    scale: float,
    causal: bool,
    window: int | None,
    schedule: Schedule,
    sm_budget: int | None = None,
    max_seq_len: int | None = None,
    max_q_len: int | None = None,
    options: Options = NONE,
    auto: bool = False,
) -> Call | None:
    """Attention of packed query tokens over a KV cache, written into `out` and `lse` on q's device and current stream.

    Nothing is synchronised, and nothing that is launched depends on lengths or offsets.

    q:            [T, HQ, D], fp32, fp16 or bf16; its last stride is 1.
    k_cache:      [pages, page_size, KH, D] with a block table, else [B, S, KH, D]; q's dtype, any strides.
    v_cache:      the same with DV.
    seq_lens:     [B] int32, contiguous: keys of each request, this step's included.
    block_table:  [B, max_pages] int32 with unit last stride, or None.
    cu_seqlens_q: [B + 1] int32, contiguous, or None for one query token a request.
    out, lse:     [T, HQ, DV] with unit last stride; [T, HQ] float32.
    sm_budget:    at most this many SMs are used; None: all.
    max_seq_len:  changes nothing here.
    max_q_len:    most query tokens of a request; a kernel then takes fewer at once, other than under `invariant`.
                  Where it is too small the result is the same.
    options:      soft cap, sinks, ALiBi and the mask of drafts; a mask needs cu_seqlens_q.
    auto:         whether `schedule` is what "auto" stands for: prompts may then go to a library (`libraries`).

    Returns what `run` takes for further calls with tensors of these sizes, strides and alignment on this device, None
    where q was copied, there was nothing to do, or there are options or cu_seqlens_q.

    Raises BackendUnavailable where the device cannot run the kernels, and InvalidArgument for a tile that they do not
    have; under WAVEFILL_CHECK=1, which waits for the device, also for what `inspection.check` finds in the tensors.
    """
    index = q.device.index
    if env.flag("WAVEFILL_CHECK"):
        with torch.cuda.device(index):
            capturing = torch.cuda.is_current_stream_capturing()
        if not capturing:
            _hold_device(index)
            inspection.check(seq_lens, block_table, cu_seqlens_q, k_cache, window, q.shape[0], options)
    vectors = 1 if cu_seqlens_q is None else 4  # of 4 bytes, that rows of q are read in
    copied = bool(q.data_ptr() % (4 * vectors) or q.stride(0) % (2 * vectors) or q.stride(1) % (2 * vectors))
    if copied:
        q = q.clone(memory_format=torch.contiguous_format)
    if isinstance(schedule, Invariant):
        max_q_len = None  # the bits of a request may not depend on others
    special = None
    if cu_seqlens_q is not None or options is not NONE:
        mask = options.mask
        special = (None if cu_seqlens_q is None else (seq_lens.shape[0], causal, max_q_len), options.softcap,
                   options.sinks is None, options.alibi_slopes is None,
                   None if mask is None else (mask.shape, mask.stride()))
    # One look-up for all that sizes, strides, alignment and options decide.
    key = (index, q.shape, q.stride(), q.dtype, k_cache.shape, k_cache.stride(), v_cache.shape, v_cache.stride(),
           None if block_table is None else (block_table.shape, block_table.stride()), out.stride(), lse.stride(),
           (k_cache.data_ptr() | v_cache.data_ptr()) % 16, scale, window, schedule, sm_budget, special)
    call = _calls.get(key)
    if call is None:
        _hold_device(index)
        if not q.shape[0]:
            return None
        if len(_calls) >= MOST_CALLS:
            _calls.clear()
        call = _calls[key] = _plan(
            q, k_cache, v_cache, block_table, out, lse, scale, causal, window, schedule, sm_budget,
            None if cu_seqlens_q is None else seq_lens.shape[0], max_q_len, options)
    attend: Callable[..., None] = run
    if (auto and cu_seqlens_q is not None and block_table is None and window is None and options is NONE
            and sm_budget is None and q.element_size() == 2):
        attend = libraries.choose(call, q, k_cache, v_cache, scale, causal, is_hopper(index)) or run
    if torch.cuda.current_device() == index:
        attend(call, q, k_cache, v_cache, seq_lens, block_table, out, lse, starts=cu_seqlens_q, options=options)
    else:
        with torch.cuda.device(index):
            attend(call, q, k_cache, v_cache, seq_lens, block_table, out, lse, starts=cu_seqlens_q, options=options)
    return None if copied or special is not None else call


#: Calls by all that decides how they run, and how many are kept.
_calls: dict[tuple[object, ...], Call] = {}
MOST_CALLS = 4096


def _hold_device(index: int) -> None:
    gap = device_gap(index)
    if gap is not None:
        raise BackendUnavailable(complaint("impl", "the GPU backend cannot run here", f"cuda:{index}", gap + "."))


def _plan(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor | None, out: Tensor, lse: Tensor,
          scale: float, causal: bool, window: int | None, schedule: Schedule, sm_budget: int | None,
          requests: int | None, max_q_len: int | None, options: Options) -> Call:
    index, D, DV, item = q.device.index, k_cache.shape[3], v_cache.shape[3], q.element_size()
    copies, G = "", q.shape[1] // k_cache.shape[2]
    if is_hopper(index) and item == 2 and not (k_cache.data_ptr() | v_cache.data_ptr()) % 16:
        paged = block_table is not None
        capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
        both = (launch.copies_of(k_cache.shape, k_cache.stride(), paged),
                launch.copies_of(v_cache.shape, v_cache.stride(), paged))
        copies = "" if "" in both or capacity >= MAX_HOPPER_TOKENS else max(both)
        if requests is not None:
            copies = copies_of_several(copies, D, DV, G, schedule, max_q_len)
    config = config_of(D, DV, G, item, schedule, copies=copies,
                       alone=sm_budget is not None, several=requests is not None, max_q_len=max_q_len,
                       optional=options is not NONE)
    sms = launch.sm_count(index)
    workers = (sms if sm_budget is None else min(sm_budget, sms)) * config.ctas
    return launch.plan(q, k_cache, v_cache, block_table, out, lse, scale=scale, window=window, schedule=schedule,
                       config=config, workers=workers, requests=requests, causal=causal, options=options)


def copies_of_several(copies: str, D: int, DV: int, G: int, schedule: Schedule, max_q_len: int | None) -> str:
    """How the Hopper kernels read caches where requests have several query tokens: "many", or "" where none can."""
    own = configs.many(G, max_q_len).tile
    asked = schedule.tile if isinstance(schedule, StreamK) else None
    return "many" if copies == "boxes" and D == DV and D in many.HEAD_SIZES and asked in (None, own) else ""


def config_of(D: int, DV: int, G: int, item: int, schedule: Schedule, *, copies: str, alone: bool = False,
              several: bool = False, max_q_len: int | None = None, optional: bool = False) -> Config:
    """How a shape is run.

    item:     bytes of an element.
    copies:   how the Hopper kernel can read the caches (`launch.copies_of`), "many" for that of several query
              tokens, "" where neither can.
    alone:    whether a program must have its SM for itself.
    several:  whether requests have several query tokens, `max_q_len` at most if that is known.
    optional: whether there are options.
    """
    if copies == "many":
        config = configs.many(G, max_q_len)
    elif copies:
        config = configs.hopper(D, DV, G, copies)
    elif several:
        config = configs.portable_several(max(D, DV), G, item, max_q_len)
    else:
        config = configs.portable(max(D, DV), G, item, optional)
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

"""The CPU backend: worker threads walk their tiles of the KV cache in compiled code.

The extension `_core` knows nothing of torch: this file turns tensors into pointers and strides. Callers (ops.py) have
checked shapes, dtypes and devices; values in tensors (lengths, page ids, offsets) are checked here on every call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wavefill.backends.values import slot_error, value_error
from wavefill.hardware import CPU_MAX_HEAD_DIM, CPU_TILE, cpu_gap
from wavefill.schedule import resolve
from wavefill.scores import NONE, Options
from wavefill.spec import (
    MAX_LENGTH,
    AttentionSpec,
    Fixed,
    Schedule,
    StreamK,
)

try:
    from wavefill.backends.cpu import _core
except ImportError as error:  # pragma: no cover - a broken install
    raise ImportError(
        f"wavefill's compiled core did not load: {error}. Reinstall it: pip install --force-reinstall wavefill"
    ) from error

import torch

if TYPE_CHECKING:
    from torch import Tensor

MAX_HEAD_DIM = CPU_MAX_HEAD_DIM
DTYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
#: How the core calls caches that do not hold numbers of q's dtype.
_CODES = {torch.float8_e4m3fn: 1, torch.uint8: 1, torch.int8: 2}


def capability(spec: AttentionSpec) -> str | None:
    """Why this backend cannot serve `spec`, or None when it can."""
    return cpu_gap(spec)


def attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    block_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    out: Tensor,
    lse: Tensor | None,
    *,
    scale: float,
    causal: bool,
    window: int | None,
    schedule: Schedule,
    options: Options = NONE,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    threads: int | None = None,
    workers: int | None = None,
) -> None:
    """Attention of packed query tokens over a KV cache, written into `out` and `lse`.

    q:            [T, HQ, D], fp32, fp16 or bf16; its last stride is 1.
    k_cache:      [pages, page_size, KH, D] with a block table, else [B, S, KH, D]; q's dtype, any strides. Or codes:
                  float8_e4m3fn, which may come as uint8, or int8.
    v_cache:      the same with DV.
    seq_lens:     [B] int32, contiguous: keys of each request, this step's included.
    block_table:  [B, max_pages] int32 with unit last stride, or None.
    cu_seqlens_q: [B + 1] int32, contiguous, or None for one query token a request.
    out, lse:     [T, HQ, DV] with unit last stride; [T, HQ] float32 or None.
    options:      soft cap, sinks, ALiBi and the mask of drafts; a mask needs cu_seqlens_q.
    k_scale, v_scale: what codes are multiplied by: [] or [KH] float32, or one a token and head, in the cache's shape
                  without the head size, float32 or float16; None: 1.
    threads:      at most this many threads run; None: torch's own number.
    workers:      workers of the schedule; None: one a thread. Their number changes `fixed` and `stream_k` splits.

    Raises InvalidArgument for negative lengths, lengths past the cache's capacity, page ids out of range in slots that
    are read, offsets that do not start at 0, decrease, or end past T, masks with fewer bits than a request has query
    tokens, and scales of heads that are NaN or infinite.
    """
    if threads is None:
        threads = torch.get_num_threads()
    if workers is None:
        workers = threads
    if window is not None:
        causal = True  # a window ends at the query's own position, so nothing later is seen
        window = min(window, MAX_LENGTH)  # sees all that a longer one would, and the core may subtract it
    tile = schedule.tile if isinstance(schedule, StreamK) and schedule.tile else CPU_TILE
    T, HQ, D = q.shape
    KH, DV = k_cache.shape[2], v_cache.shape[3]
    B = seq_lens.shape[0]
    starts: list[int] = []
    stops: list[int] = []
    if isinstance(schedule, Fixed) and schedule.splits is None and schedule.chunk is None:
        starts, stops = _key_ranges(seq_lens, cu_seqlens_q, HQ // KH, causal, window)
    kind, param = resolve(schedule, starts, stops, KH, workers, tile)
    if block_table is None:
        table, pages, max_pages, table_stride = 0, B, 1, 1
    else:
        table, pages = block_table.data_ptr(), k_cache.shape[0]
        max_pages, table_stride = block_table.shape[1], block_table.stride(0)
    fault = _core.attention(
        q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr(), 0 if lse is None else lse.data_ptr(),
        seq_lens.data_ptr(), table, 0 if cu_seqlens_q is None else cu_seqlens_q.data_ptr(),
        T, B, HQ, KH, D, DV, k_cache.shape[1], pages, max_pages, table_stride,
        *q.stride()[:2], *k_cache.stride(), *v_cache.stride(), *out.stride()[:2],
        *((0, 0) if lse is None else lse.stride()),
        DTYPE_CODES[q.dtype], scale, causal, window or 0, tile, kind, param, workers, threads,
        *(_NO_OPTIONS if options is NONE else _options(options)),
        _CODES.get(k_cache.dtype, 0), _scales(k_scale), _scales(v_scale),
    )
    if fault is not None:
        raise value_error(*fault, capacity=k_cache.shape[1] * max_pages, pages=pages, tokens=T)


#: What stands for `NONE` in a call of the core.
_NO_OPTIONS = (0.0, 0, 0, 0, 0)


def _options(options: Options) -> tuple[float, int, int, int, int]:
    """Soft cap, the addresses of sinks, slopes and mask, and the mask's words; 0 for what is not there."""
    mask = options.mask
    sinks, slopes, bits = (0 if x is None else x.data_ptr() for x in (options.sinks, options.alibi_slopes, mask))
    return options.softcap or 0.0, sinks, slopes, bits, 0 if mask is None else mask.shape[1]


#: What stands for scales that are all 1.
_NO_SCALES = (0, False, False, 0, 0, 0)


def _scales(scale: Tensor | None) -> tuple[int, bool, bool, int, int, int]:
    """Address, whether they are float16, whether each token has one, and the strides of pages, tokens and heads."""
    if scale is None:
        return _NO_SCALES
    if scale.dim() < 3:
        return scale.data_ptr(), False, False, 0, 0, scale.stride(0) if scale.dim() else 0
    page, token, head = scale.stride()
    return scale.data_ptr(), scale.dtype == torch.float16, True, page, token, head


def _key_ranges(
    seq_lens: Tensor, cu_seqlens_q: Tensor | None, group: int, causal: bool, window: int | None
) -> tuple[list[int], list[int]]:
    lengths = seq_lens.tolist()
    offsets = range(len(lengths) + 1) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    rows = _core.rows(lengths, list(offsets), group, causal, window or 0)
    return [r[3] for r in rows], [r[4] for r in rows]


def append(
    k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor, k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write the keys and values of N tokens into a cache, as codes where it holds codes.

    k, v:  [N, KH, D] and [N, KH, DV], any strides, fp32, fp16 or bf16: the caches' dtype unless those hold codes.
    slots: [N] int64, contiguous: page * page_size + offset of each token; a negative slot is skipped.
    k_scale, v_scale: as `attention` takes them; those of tokens are made from their values and written.

    Raises InvalidArgument when a slot lies past the cache; nothing is written then.
    """
    bad = _core.append(
        (k.data_ptr(), k_cache.data_ptr(), *k.shape[1:], *k.stride(), *k_cache.stride()[1:]),
        (v.data_ptr(), v_cache.data_ptr(), *v.shape[1:], *v.stride(), *v_cache.stride()[1:]),
        k_cache.stride(0), v_cache.stride(0), slots.data_ptr(), slots.shape[0], k.element_size(),
        k_cache.shape[1], k_cache.shape[0], DTYPE_CODES[k.dtype], _CODES.get(k_cache.dtype, 0), _scales(k_scale),
        _scales(v_scale), torch.get_num_threads(),
    )
    if bad >= 0:
        raise slot_error(bad, int(slots[bad]), pages=k_cache.shape[0], page_size=k_cache.shape[1])


def merge(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge N partial states, in order, into `out` and `lse`; all contiguous.

    outs: [N, ..., DV]; lses: [N, ...] float32, natural logarithm; out: [..., DV]; lse: [...] float32.
    """
    if out.numel() == 0 and lse.numel() == 0:
        return
    n, d = outs.shape[0], outs.shape[-1]
    _core.merge(outs.data_ptr(), lses.data_ptr(), out.data_ptr(), lse.data_ptr(), n, lse.numel(), d,
                DTYPE_CODES[outs.dtype], torch.get_num_threads())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias for a few rows, [..., N]; the weights are read once, sums are in float32.

    x: [..., K]; weight: [N, K], read in place where its last stride is 1; bias: [N] or None. One dtype of fp32, fp16
    and bf16.
    """
    outs, size = weight.shape
    rows, weight = _unit(x.reshape(-1, size)), _unit(weight)
    if bias is not None:
        bias = bias.contiguous()
    out = rows.new_empty(rows.shape[0], outs)
    _core.linear(
        rows.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), rows.shape[0],
        size, outs, rows.stride(0), weight.stride(0), out.stride(0), DTYPE_CODES[x.dtype], torch.get_num_threads(),
    )
    return out.view(*x.shape[:-1], outs)


def _unit(x: Tensor) -> Tensor:
    """The tensor with unit last stride."""
    return x if x.stride(-1) == 1 else x.contiguous()


def read_bandwidth(buffer: Tensor, threads: int | None = None) -> float:
    """Bytes per second of one pass over a contiguous buffer with every thread reading."""
    return float(_core.read_bandwidth(buffer.data_ptr(), buffer.numel() * buffer.element_size(),
                                      threads or torch.get_num_threads()))

"""`append` and `merge_states` on a GPU: one launch each, on the current stream, without a synchronisation.

Callers (ops.py) have checked shapes, dtypes and devices. Values are on the device and are not looked at, unless
WAVEFILL_CHECK=1 asks for it: slots past the cache are skipped like negative ones, and an LSE of NaN or +inf makes a row
NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from wavefill import env
from wavefill.backends.gpu import _hold_device, kernels, launch
from wavefill.backends.gpu.kernels import Variant, constants
from wavefill.backends.gpu.launch import Shape, vectors_fit
from wavefill.backends.gpu.variants import _power
from wavefill.backends.values import slot_error
from wavefill.spec import DTYPE_BYTES

#: Elements of K, and of V, that a program of `append.write` moves: 16 bytes a thread of 16-bit elements.
APPEND_ELEMENTS, APPEND_WARPS = 1024, 4
#: Columns of a program of `states.join_states`, at most.
STATE_COLUMNS = 256

_Grid = tuple[int, int, int]


def looks(index: int) -> bool:
    """Whether WAVEFILL_CHECK=1 asks to look at values on a device and no graph is captured there."""
    if not env.flag("WAVEFILL_CHECK"):
        return False
    with torch.cuda.device(index):
        return not torch.cuda.is_current_stream_capturing()


def append(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor, *, interpret: bool = False) -> None:
    """Write the keys and values of N tokens into a cache.

    k_cache, v_cache: [pages, page_size, KH, D] and [pages, page_size, KH, DV], any strides.
    k, v:             [N, KH, D] and [N, KH, DV], any strides, the caches' dtype.
    slots:            [N] int64, contiguous: page * page_size + offset of each token; one below 0 or past the cache is
                      skipped. Of tokens with the same slot any may be the one that stays, K of one and V of another
                      included.

    Raises InvalidArgument for a slot past the cache, with nothing written, where `looks`.
    """
    if not interpret and looks(k_cache.get_device()):
        bad = (slots >= k_cache.shape[0] * k_cache.shape[1]).nonzero()
        if len(bad):
            at = int(bad[0])
            raise slot_error(at, int(slots[at]), pages=k_cache.shape[0], page_size=k_cache.shape[1])
    if not (k.numel() or v.numel()) or not k_cache.shape[0] * k_cache.shape[1]:
        return
    every = k_cache, v_cache, k, v
    aligned = not (k_cache.data_ptr() | v_cache.data_ptr() | k.data_ptr() | v.data_ptr()) % 16
    call = _append_call(launch._DTYPE_NAMES[k.dtype], k_cache.shape, v.shape, *(x.stride() for x in every), aligned)
    _launch(*call, (*every, slots), interpret)


def merge(outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor, *, interpret: bool = False) -> None:
    """Merge N partial states, in order, into `out` and `lse`; all contiguous.

    outs: [N, ..., DV]; lses: [N, ...] float32, natural logarithm; out: [..., DV]; lse: [...] float32.
    """
    if lse.numel():
        aligned = not (outs.data_ptr() | out.data_ptr()) % 16
        call = _merge_call(launch._DTYPE_NAMES[outs.dtype], outs.shape[0], lse.numel(), outs.shape[-1], aligned)
        _launch(*call, (outs, lses, out, lse), interpret)


@lru_cache(maxsize=1024)
def _append_call(dtype: str, cache: Shape, v: Shape, k_cache_strides: Shape, v_cache_strides: Shape, k_strides: Shape,
                 v_strides: Shape, aligned: bool) -> tuple[Variant, _Grid, tuple[int, ...]]:
    """The kernel, its grid and its arguments after the addresses. `cache` is the shape of K's, `v` that of the new."""
    (pages, page_size, KH, D), (N, _, DV) = cache, v
    every = k_cache_strides, v_cache_strides, k_strides, v_strides
    aligned &= all(vectors_fit(strides, DTYPE_BYTES[dtype]) for strides in every)
    rows = _append_rows(D, DV)
    grid = -(-N * KH // rows), 1, 1
    wide = max(pages * page_size, grid[0] * rows) >= 1 << 31
    return (append_variant(dtype, D, DV, aligned=aligned, wide=wide), grid,
            (N, KH, pages, page_size, *(stride for strides in every for stride in strides)))


@lru_cache(maxsize=1024)
def _merge_call(dtype: str, N: int, rows: int, DV: int,
                aligned: bool) -> tuple[Variant, _Grid, tuple[int, ...]]:
    variant = merge_variant(dtype, DV, aligned=aligned)
    columns = dict(variant.constants)["COLUMNS"]
    return variant, (rows, max(-(-DV // columns), 1), 1), (N, rows)


def append_variant(dtype: str, D: int, DV: int, *, aligned: bool = True, wide: bool = False) -> Variant:
    """The kernel that writes tokens of a shape.

    aligned: rows of all tensors are read and written in vectors. wide: see `append.write`.
    """
    pointers = "K", "V", "NEW_K", "NEW_V"
    strides = [f"s_{tensor}{axis}" for tensor, axes in (("k", "pth"), ("v", "pth"), ("n", "th"), ("m", "th"))
               for axis in axes]
    return Variant("write", dtype, constants({
        "D": D, "DP": _power(D), "DV": DV, "DVP": _power(DV), "ROWS": _append_rows(D, DV), "WIDE": wide,
        "UNIT": aligned,
    }), APPEND_WARPS, aligned=tuple(strides) if aligned else (),
                   unaligned=("SLOTS",) if aligned else ("SLOTS", *pointers))


def merge_variant(dtype: str, DV: int, *, aligned: bool = True) -> Variant:
    """The kernel that joins states of a width; aligned: outputs begin at a multiple of 16 bytes."""
    return Variant("join_states", dtype, constants({"DV": DV, "COLUMNS": min(max(_power(DV), 32), STATE_COLUMNS)}), 1,
                   unaligned=("LSES", "LSE", *(() if aligned else ("OUTS", "OUT"))))


def _append_rows(D: int, DV: int) -> int:
    """Heads of tokens that a program writes."""
    return max(APPEND_ELEMENTS // _power(max(D, DV)), 1)


def _launch(variant: Variant, grid: _Grid, args: tuple[int, ...], tensors: Sequence[Tensor], interpret: bool) -> None:
    """One launch on the device of the tensors, or in Triton's interpreter."""
    more: tuple[Any, ...] = (*args, *kernels.values(variant))
    if interpret:
        launch._interpreted(variant)(grid, 0, *tensors, *more)
        return
    index = tensors[0].get_device()
    _hold_device(index)
    addresses = [x.data_ptr() for x in tensors]
    if torch.cuda.current_device() == index:
        kernels.compiled(variant, index)(grid, torch._C._cuda_getCurrentRawStream(index), *addresses, *more)
    else:
        with torch.cuda.device(index):
            kernels.compiled(variant, index)(grid, torch._C._cuda_getCurrentRawStream(index), *addresses, *more)

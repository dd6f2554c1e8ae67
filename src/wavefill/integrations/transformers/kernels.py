"""The two calls that every layer makes each step, straight to the backend.

The public functions check shapes, dtypes, overlaps and options on every call: 40 us a layer for both calls, as much as
the kernels themselves take on a short context. Here a step's tables are made by our own cache, so what is left to
check for a layer is that its K, V and queries are what the cache was made for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from wavefill import checks, ops
from wavefill.backends import cpu, gpu
from wavefill.backends.gpu import operators
from wavefill.cache import KVPages
from wavefill.scores import Options
from wavefill.spec import Schedule, invalid, invalid_type

#: Writes K and V into pages, at slots: arguments as those of `append`.
Put: TypeAlias = Callable[[KVPages, Tensor, Tensor, Tensor], None]


def append(pages: KVPages, key: Tensor, value: Tensor, slots: Tensor, put: Put | None = None) -> None:
    """Write K [N, KH, D] and V [N, KH, DV] into the slots [N] int64 of a layer's pages, by `put` where it is given.

    Raises `InvalidType` or `InvalidArgument` when they are not what the pages hold.
    """
    for name, new, held in (("key", key, pages.k), ("value", value, pages.v)):
        if new.device != held.device:
            raise _elsewhere(name, new, held)
        if new.dtype != held.dtype:
            raise _other_dtype(name, new, held)
        if new.shape[1:] != held.shape[2:]:
            raise invalid(name, f"must have the cache's heads and head size {list(held.shape[2:])}",
                          list(new.shape[1:]), "Make a new cache for this model.")
    if put is not None:
        put(pages, key, value, slots)
        return
    write = operators.append if pages.k.is_cuda else cpu.append
    write(pages.k, pages.v, key, value, slots)


def attention(
    query: Tensor,
    pages: KVPages,
    seq_lens: Tensor,
    block_table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    *,
    scale: float,
    window: int | None,
    options: Options,
    max_q_len: int,
    schedule: Schedule | None = None,
) -> Tensor:
    """Causal attention of packed queries [T, HQ, D] over a layer's pages, [T, HQ, DV]; rows align at their ends.

    pages: of the layer, or with block_table None its K and V of each row, [B, S, KH, D] and [B, S, KH, DV].
    seq_lens: [B] int32; block_table: [B, max_pages] int32; cu_seqlens_q: [B + 1] int32, or None for one query a row.
    options: soft cap and sinks. max_q_len: most queries of a row. schedule: None for what "auto" stands for.

    On a GPU nothing is synchronised, and what is launched depends on sizes alone.
    """
    if query.device != pages.k.device:
        raise _elsewhere("query", query, pages.k)
    if query.dtype != pages.k.dtype:
        raise _other_dtype("query", query, pages.k)
    T, HQ, D = query.shape
    KH, DV = pages.k.shape[2], pages.v.shape[3]
    out, dtype = query.new_empty(T, HQ, DV), checks.DTYPE_NAMES[query.dtype]
    if query.stride(2) != 1:
        query = query.contiguous()
    if query.is_cuda:
        gpu.attention(
            query, pages.k, pages.v, seq_lens, block_table, cu_seqlens_q, out,
            query.new_empty(T, HQ, dtype=torch.float32), scale=scale, causal=True, window=window,
            schedule=schedule or ops.gpu_schedule(HQ, KH, D, DV, dtype), max_q_len=max_q_len, options=options,
            auto=schedule is None,
        )
    else:
        cpu.attention(
            query, pages.k, pages.v, seq_lens, block_table, cu_seqlens_q, out, None, scale=scale, causal=True,
            window=window, schedule=schedule or ops.cpu_schedule(HQ, KH, D, DV, dtype), options=options,
        )
    return out


def _elsewhere(name: str, new: Tensor, held: Tensor) -> Exception:
    return invalid(name, f"must be on the device of the cache ({held.device})", new.device,
                   "Make a new cache after moving a model.")


def _other_dtype(name: str, new: Tensor, held: Tensor) -> TypeError:
    return invalid_type(name, f"must have the dtype of the cache ({held.dtype})", new.dtype,
                        "Load the model in one dtype and run it without autocast.")

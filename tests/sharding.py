"""A request's keys shared out over ranks, and what a caller of today's functions does about several query tokens."""

from __future__ import annotations

from dataclasses import replace

import torch

from helpers import Case


def rank_of(case: Case, rank: int, ranks: int, interleave: int) -> Case:
    """What a rank calls `decode_attention` with: its keys, and a row of its own for each query token.

    Position p of a request is on rank p // interleave % ranks. A query token sees a prefix of a rank's keys, whose
    length is not that of another token less one, so that no offsets say it; lengths do. `case` is causal, paged,
    without a window, and has no NaN where keys are.
    """
    assert case.block_table is not None
    assert case.cu_seqlens_q is not None
    page, lens = case.k_cache.shape[1], case.seq_lens.tolist()
    counts = case.cu_seqlens_q.diff()
    own = [torch.tensor([p for p in range(n) if p // interleave % ranks == rank], dtype=torch.int64) for n in lens]
    used = [-(-len(positions) // page) for positions in own]
    table = torch.zeros(len(lens), max(*used, 1), dtype=torch.int32)
    k, v = (torch.full((sum(used) + 1, *cache.shape[1:]), torch.nan, dtype=cache.dtype)
            for cache in (case.k_cache, case.v_cache) if cache is not None)
    first = 0
    for b, positions in enumerate(own):
        table[b, : used[b]] = torch.arange(first, first + used[b])
        at = torch.arange(len(positions))
        slots = case.block_table[b, positions // page].long(), positions % page
        for cache, whole in ((k, case.k_cache), (v, case.v_cache)):
            assert whole is not None
            cache[first + at // page, at % page] = whole[slots]
        first += used[b]
    seen = [torch.searchsorted(own[b], torch.arange(lens[b] - n, lens[b]), right=True)
            for b, n in enumerate(counts.tolist())]
    return replace(case, k_cache=k, v_cache=v, seq_lens=torch.cat(seen).int(), cu_seqlens_q=None,
                   block_table=table.repeat_interleave(counts, dim=0), sinks=case.sinks if rank == 0 else None)

"""PagedKVCache.reserve: the slots that a caller writes itself are those that append would have written."""

from __future__ import annotations

import pytest
import torch

import wavefill
from wavefill import OutOfPages

KH, D, PAGE = 3, 8, 4


def caches(layers: int = 2) -> tuple[wavefill.PagedKVCache, wavefill.PagedKVCache]:
    made = [
        wavefill.PagedKVCache(24, layers=layers, page_size=PAGE, kv_heads=KH, head_dim=D, dtype=torch.float32,
                              device=torch.get_default_device())
        for _ in range(2)
    ]
    return made[0], made[1]


def held(cache: wavefill.PagedKVCache, request: int, layer: int) -> torch.Tensor:
    table = cache.block_table(request)[0]
    return torch.stack([
        cache.view(layer).k[table[at // PAGE], at % PAGE] for at in range(cache.length(request))
    ]) if cache.length(request) else torch.zeros(0, KH, D)


def test_reserved_slots_are_those_of_append() -> None:
    appended, reserved = caches()
    rows, others = appended.add(3), reserved.add(3)
    for counts in ((5, 0, 2), (1, 1, 1), (3, 9, 0)):
        k, v = torch.randn(sum(counts), KH, D), torch.randn(sum(counts), KH, D)
        slots = reserved.reserve(others, counts)
        for layer in range(2):
            appended.append(rows, k + layer, v, counts=counts, layer=layer)
            pages = reserved.view(layer)
            torch.ops.wavefill.append(pages.k, pages.v, k + layer, v, slots)
    for row, other in zip(rows, others, strict=True):
        assert appended.length(row) == reserved.length(other)
        for layer in range(2):
            assert torch.equal(held(appended, row, layer), held(reserved, other, layer))


def test_a_forked_row_gets_its_own_copy_and_truncate_takes_the_room_back() -> None:
    cache, _ = caches(layers=1)
    (row,) = cache.add()
    k = torch.randn(6, KH, D)
    cache.append(row, k, k)
    (twin,) = cache.fork(row)
    free = cache.free_pages
    slots = cache.reserve([row, twin], (1, 1))
    pages = cache.view()
    new = torch.randn(2, KH, D)
    torch.ops.wavefill.append(pages.k, pages.v, new, new, slots)
    assert torch.equal(held(cache, row, 0), torch.cat([k, new[:1]]))
    assert torch.equal(held(cache, twin, 0), torch.cat([k, new[1:]]))
    for request in (row, twin):
        cache.truncate(request, 6)
        assert torch.equal(held(cache, request, 0), k)
    cache.free([row, twin])
    assert cache.free_pages == 24 > free


def test_a_reserve_that_is_refused_changes_nothing() -> None:
    cache, _ = caches(layers=1)
    rows = cache.add(2)
    cache.append(rows, torch.randn(4, KH, D), torch.randn(4, KH, D))
    before = (cache.free_pages, cache.seq_lens(rows).tolist(), cache.block_table(rows).tolist())
    with pytest.raises(OutOfPages):
        cache.reserve(rows, (90, 90))
    with pytest.raises(wavefill.InvalidArgument, match="counts"):
        cache.reserve(rows, (1,))
    with pytest.raises(wavefill.InvalidArgument, match="counts"):
        cache.reserve(rows, (1, -1))
    with pytest.raises(wavefill.InvalidArgument, match="distinct"):
        cache.reserve([rows[0], rows[0]], (1, 1))
    assert before == (cache.free_pages, cache.seq_lens(rows).tolist(), cache.block_table(rows).tolist())

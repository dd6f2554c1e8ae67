"""PagedKVCache.restore: back to what there was, from wherever Ctrl-C stopped a call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from interrupting import run
from test_cache import append, assert_holds, make, read, tokens
from wavefill import InvalidArgument, InvalidType, PagedKVCache

#: Steps of the interpreter between two places where a call is interrupted; a prime, so that loops are hit everywhere.
STRIDE = 7


def filled() -> tuple[PagedKVCache, dict[int, list[int]]]:
    """Requests that share pages, full ones and not, and free pages of both kinds: given back, and never taken."""
    cache = make(16, layers=2)
    a, b = cache.add(2)
    append(cache, [a, b], [[1, 2, 3, 4, 5, 6], [7, 8, 9]])
    c, d = cache.fork(a, 2)
    append(cache, [c], [[10, 11, 12, 13, 14]])
    cache.truncate(c, 7)
    gone = cache.add()
    append(cache, gone, [[15] * 9])
    cache.free(gone)
    return cache, {a: [1, 2, 3, 4, 5, 6], b: [7, 8, 9], c: [1, 2, 3, 4, 5, 6, 10], d: [1, 2, 3, 4, 5, 6]}


def assert_pages_are_counted(cache: PagedKVCache) -> None:
    """Every page has as many holders as are counted, and can be taken when it has none."""
    table = cache.block_table(cache.requests)
    holders = np.bincount(table[table >= 0].cpu().numpy(), minlength=cache.num_pages)
    assert cache.free_pages == int((holders == 0).sum())
    (more,) = cache.add()
    slots = cache.reserve(more, [cache.free_pages * cache.page_size])
    taken = sorted({int(slot) // cache.page_size for slot in slots})
    assert taken == np.flatnonzero(holders == 0).tolist()
    cache.free(more)


def steps(cache: PagedKVCache, ids: list[int]) -> dict[str, Callable[[], Any]]:
    a, b, c, d = ids
    k, v = tokens([90, 91, 92, 93, 94, 95, 96])
    return {
        "append": lambda: cache.append([b, a, d, c], k, v, counts=[2, 3, 1, 1], layer=0),
        "append-all": lambda: append(cache, [c, d, a], [[90, 91], [92], [93, 94, 95, 96, 97]]),
        "reserve": lambda: cache.reserve([d, c, b, a], [1, 5, 0, 2]),
        "fork": lambda: cache.fork(c, 3),
        "add": lambda: cache.add(3),
        "grow": lambda: cache.grow(20),
    }


@pytest.mark.parametrize("name", steps(make(), [0, 1, 2, 3]))
def test_an_interrupted_call_is_undone_from_wherever_it_had_come(name: str) -> None:
    start, model = filled()
    ids = list(model)
    lengths = {i: len(values) for i, values in model.items()}
    whole = run(steps(copy.deepcopy(start), ids)[name], 0)
    assert whole > STRIDE
    for stop in range(1, whole + 1, STRIDE):
        cache = copy.deepcopy(start)
        cache.seq_lens(ids)
        cache.block_table(ids)
        run(steps(cache, ids)[name], stop)
        cache.restore(lengths)
        assert cache.requests == ids
        for i, values in model.items():
            assert_holds(cache, i, values)
        assert_pages_are_counted(cache)
        append(cache, ids, [[21], [22, 23, 24], [], [25]])
        for i, more in zip(ids, ([21], [22, 23, 24], [], [25]), strict=True):
            assert_holds(cache, i, model[i] + more)
        cache.grow(24)
        assert_pages_are_counted(cache)


def test_requests_cut_short_or_left_out() -> None:
    cache, model = filled()
    a, b, c, d = model
    cache.append([a, b], *tokens([90, 91], 1), layer=1)
    cache.restore({c: 5, a: 6, d: 0})
    assert cache.requests == [a, c, d]
    assert_holds(cache, a, [1, 2, 3, 4, 5, 6])
    assert_holds(cache, c, [1, 2, 3, 4, 5])
    assert_holds(cache, d, [])
    assert_pages_are_counted(cache)
    cache.restore({})
    assert (cache.requests, cache.free_pages) == ([], 16)


def test_what_can_t_be_restored_is_refused() -> None:
    cache, model = filled()
    a, b, *_ = model
    for lengths, error, message in (
        ({a: 7}, InvalidArgument, r"lengths: must be at most the request's length \(6\); got 7 for request 0"),
        ({a: 6, 99: 1}, InvalidArgument, "request: must be an id .*got 99"),
        ({a: -1}, InvalidArgument, "lengths: must be at least 0"),
        ({a: 1.0}, InvalidType, "lengths: must be an int"),
        ([a, b], InvalidType, r"lengths: must be a dict .*got \[0, 1\]"),
    ):
        with pytest.raises(error, match=message):
            cache.restore(lengths)  # type: ignore[arg-type]
    for i, values in model.items():
        assert_holds(cache, i, values)
    assert torch.isfinite(read(cache, a)[0]).all()

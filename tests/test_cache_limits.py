"""What a PagedKVCache refuses: arguments of every wrong kind, and more than there is room for, at no cost."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch

from test_cache import KH, D, append, assert_holds, make, state, tokens
from wavefill import (
    BackendUnavailable,
    InvalidArgument,
    InvalidType,
    OutOfPages,
    PagedKVCache,
    WavefillError,
    checks,
    decode_attention,
)

HUGE = 2**70


@pytest.mark.parametrize(("options", "error", "message"), [
    *[({name: value}, InvalidArgument, rf"{name}: must be at most \d+; got {value}") for value in (HUGE, 2**31)
      for name in ("num_pages", "layers", "page_size", "kv_heads", "head_dim", "head_dim_v")],
    ({"head_dim": 577, "head_dim_v": 1}, InvalidArgument, "head_dim: must be at most 576; got 577"),
    ({"head_dim_v": 577}, InvalidArgument, "head_dim_v: must be at most 576; got 577"),
    ({"page_size": 64.0}, InvalidType, "page_size: must be an int; got 64.0"),
    ({"kv_heads": "2"}, InvalidType, "kv_heads: must be an int; got '2'"),
    ({"num_pages": None}, InvalidType, "num_pages: must be an int; got None"),
    ({"dtype": "float32"}, InvalidType, "dtype: must be one of .*; got float32"),
    ({"dtype": []}, InvalidType, r"dtype: must be one of .*; got \[\]"),
    ({"layout": ["HND"]}, InvalidArgument, r"layout: .*; got \['HND'\]"),
    ({"layout": np.array(["NHD", "HND"])}, InvalidArgument, "layout: must be"),
    *[({"device": value}, InvalidArgument, 'device: must be "cpu"') for value in ("foo", "cpu:x", None, 1.5, [])],
    ({"device": "meta"}, BackendUnavailable, "device: .*got meta"),
])
def test_bad_construction(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(**{"num_pages": 0, **options})


def test_the_number_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_available", True), ("device_count", 2), ("current_device", 1)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert checks.known_device("cuda") == checks.known_device(torch.device("cuda:1")) == torch.device("cuda", 1)
    assert checks.known_device("cpu:0") == torch.device("cpu")
    with pytest.raises(InvalidArgument, match=r"device: must be one of the 2 GPUs that torch finds; got cuda:2\."):
        make(device="cuda:2")


@pytest.mark.parametrize("options", [
    {"num_pages": 2**31 - 1, "page_size": 2**31 - 1, "kv_heads": 2**31 - 1},  # past 64 bits
    {"num_pages": 0, "page_size": 2**31 - 1, "kv_heads": 2**31 - 1},  # the strides are
    {"num_pages": 2**31 - 1, "page_size": 2**16, "layers": 2},
])
def test_more_memory_than_there_is(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument, match=rf"num_pages: must be pages .*; got {options['num_pages']} of \d+ bytes"):
        make(**options)


def test_many_pages_take_no_time_until_they_are_used() -> None:
    start = time.perf_counter()
    cache = PagedKVCache(10**8, page_size=1, kv_heads=1, head_dim=1, dtype=torch.float16)
    (a,) = cache.add()
    cache.append(a, torch.ones(2, 1, 1).half(), torch.ones(2, 1, 1).half())
    assert time.perf_counter() - start < 1  # a list of the pages would take more, and gigabytes
    assert cache.free_pages == 10**8 - 2


def test_a_default_device_of_torch_is_not_the_cache_s() -> None:
    with torch.device("meta"):
        cache = PagedKVCache(2, page_size=4, kv_heads=1, head_dim=1, dtype=torch.float32)
        a, b = cache.add(2)
        k = torch.ones(3, 1, 1, device="cpu")
        cache.append(a, k, k)
        cache.grow(4)
        (c,) = cache.fork(a)
        cache.append([a, b, c], k, k)
        assert cache.seq_lens([a, b, c]).tolist() == [4, 1, 4]
        assert cache.view().k[cache.block_table(c)[0, 0].long(), :4].tolist() == [[[1.0]]] * 4


# ---- requests, counts, indices


class Name(IntEnum):
    FIRST = 0


@pytest.mark.parametrize("bad", [[0], [[0]], (0.0, 1.0), [True, False], [None], "01", 1.5, None, True, {0: 1}.items(),
                                 torch.tensor([0.0]), torch.tensor([True]), torch.tensor([[0]]), np.array([[0]])])
def test_what_names_no_requests_is_refused_everywhere(bad: Any) -> None:
    cache = make()
    append(cache, cache.add(2), [[1, 2, 3], [4]])
    k, v = tokens([5])
    before = state(cache)
    one: list[Callable[[], Any]] = [lambda: cache.truncate(bad, 0), lambda: cache.fork(bad), lambda: cache.length(bad)]
    several = [lambda: cache.append(bad, k, v), lambda: cache.reserve(bad, [1]), lambda: cache.free(bad),
               lambda: cache.seq_lens(bad), lambda: cache.block_table(bad), lambda: cache.reorder(bad, [0])]
    for call in one if bad == [0] else one + several:
        with pytest.raises(InvalidType, match=r"requests?: must (be|hold) .*; got .*add, fork or reorder"):
            call()
    assert state(cache) == before


@pytest.mark.parametrize("good", [
    np.array([0, 1]), torch.tensor([0, 1]), [np.int32(0), np.int64(1)], range(2), (i for i in (0, 1)), [Name.FIRST, 1],
], ids=["ndarray", "tensor", "NumPy ints", "range", "generator", "IntEnum"])
def test_whole_numbers_of_every_kind_name_requests(good: Any) -> None:
    cache = make()
    append(cache, cache.add(2), [[1, 2], [3]])
    assert cache.seq_lens(good).tolist() == [2, 1]
    assert cache.length(np.int64(1)) == 1
    assert cache.length(Name.FIRST) == 2


@pytest.mark.parametrize(("counts", "error"), [
    (1, InvalidType), (None, InvalidType), ([1.0], InvalidType), ([True], InvalidType), ([[1]], InvalidType),
    (torch.tensor([1.0]), InvalidType), ("1", InvalidType), ([-1], InvalidArgument), ([-HUGE], InvalidArgument),
    ([], InvalidArgument), ([1, 1], InvalidArgument), ([HUGE], InvalidArgument), ([2**31], InvalidArgument),
    ([2**31 - 1], OutOfPages),
])
def test_counts_that_are_none(counts: Any, error: type[WavefillError]) -> None:
    cache = make()
    (a,) = cache.add()
    append(cache, [a], [[1]])
    cache.truncate(a, 0)
    before = state(cache)
    with pytest.raises(error, match=r"counts: must|requests: this append needs"):
        cache.reserve(a, counts)
    if counts is not None:
        with pytest.raises(WavefillError, match="counts: must"):
            cache.append(a, *tokens([2, 3, 4]), counts=counts)
    assert state(cache) == before


@pytest.mark.parametrize("index", [0, None, [0.0], [True], [[0]], "0", [None], torch.tensor([0.5]), torch.ones(1, 1)])
def test_an_index_of_no_positions(index: Any) -> None:
    cache = make()
    requests = cache.add(2)
    with pytest.raises(InvalidType, match=r"index: must (be|hold)"):
        cache.reorder(requests, index)
    for outside in ([2], [-1], [HUGE], torch.tensor([5]), np.array([-2])):
        with pytest.raises(InvalidArgument, match="index: must hold numbers from 0 to 1; got"):
            cache.reorder(requests, outside)
    assert cache.reorder(requests, np.array([1, 0])) == requests[::-1]


def test_a_cache_without_pages_has_no_range_of_page_ids() -> None:
    cache = make(0)
    assert cache.block_table(cache.add()).tolist() == [[-1]]
    one = torch.ones(1, 1, dtype=torch.int32)
    with pytest.raises(InvalidArgument, match=r"block_table\[0, 0\]: must not be read, as there are no pages; got 1"):
        decode_attention(torch.ones(1, KH, D), cache.view(), None, one[0], one)


def test_nothing_to_pick_from() -> None:
    cache = make()
    with pytest.raises(InvalidArgument, match="index: must be empty, as there are none to pick; got 0"):
        cache.reorder([], [0])
    assert cache.reorder([], []) == []


@pytest.mark.parametrize("layer", [True, 0.0, "0", [0], np.int64(0)])
def test_a_layer_that_is_no_int(layer: Any) -> None:
    cache = make(layers=2)
    (a,) = cache.add()
    for call in (lambda: cache.view(layer), lambda: cache.append(a, *tokens([1]), layer=layer)):
        with pytest.raises(InvalidType, match="layer: must be an int; got"):
            call()


@pytest.mark.parametrize("value", [HUGE, -HUGE, 1.0, True, None, "1", [1]])
def test_other_numbers(value: Any) -> None:
    cache = make()
    (a,) = cache.add()
    append(cache, [a], [[1, 2]])
    before = state(cache)
    calls: dict[str, Callable[[], Any]] = {
        "n": lambda: cache.add(value), "length": lambda: cache.truncate(a, value),
        "num_pages": lambda: cache.grow(value), "lengths": lambda: cache.restore({a: value}),
    }
    for name, call in calls.items():
        with pytest.raises(WavefillError, match=rf"{name}: must be"):
            call()
    with pytest.raises(WavefillError, match=r"n: must be"):
        cache.fork(a, value)
    assert state(cache) == before


# ---- out of pages, out of memory


@pytest.mark.parametrize("held", [0, 3])
def test_too_large_a_step_is_refused_before_its_tokens_are_looked_at(held: int) -> None:
    cache = make()
    requests = cache.add(3)
    append(cache, requests[:1], [list(range(held))])
    cache.fork(requests[0])
    before = state(cache)
    start = time.perf_counter()
    for counts in ([10**9, 1, 0], [1, 1, 10**9], [10**9] * 3):
        with pytest.raises(OutOfPages, match="this append needs"):
            cache.reserve(requests, counts)
    assert time.perf_counter() - start < 0.5
    assert state(cache) == before


def test_a_page_of_many_tokens_costs_as_much_as_what_is_appended() -> None:
    cache = PagedKVCache(2, page_size=2**28, kv_heads=1, head_dim=1, dtype=torch.float16)
    (a,) = cache.add()
    start = time.perf_counter()
    k = torch.ones(2, 1, 1).half()
    cache.append(a, k, k)
    assert time.perf_counter() - start < 0.5


@pytest.mark.parametrize("number", [1, 3, 5, 8])
def test_a_grow_that_finds_too_little_memory_changes_nothing(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The number-th buffer of 8 fails, as when the machine runs out of memory halfway."""
    cache = make(2, layers=4)
    (a,) = cache.add()
    append(cache, [a], [[1, 2, 3, 4, 5, 6]])
    before, shapes, view = state(cache), [x.shape for x in cache._store.each()], cache.view(3)
    resize, calls = torch.Tensor.resize_, []

    def failing(self: torch.Tensor, *size: Any) -> torch.Tensor:
        calls.append(size)
        return resize(self, (2**40, *self.shape[1:]) if len(calls) == number else size[0])

    monkeypatch.setattr(torch.Tensor, "resize_", failing)
    with pytest.raises(InvalidArgument, match=r"num_pages: must be pages that there is memory for; got 5 of \d+ bytes"):
        cache.grow(5)
    monkeypatch.undo()
    assert len(calls) == number
    assert state(cache) == before
    assert [x.shape for x in cache._store.each()] == shapes
    assert cache.view(3) is view
    with pytest.raises(OutOfPages):
        cache.reserve(a, [3])
    cache.grow(3)
    append(cache, [a], [[7, 8, 9]])
    assert_holds(cache, a, [1, 2, 3, 4, 5, 6, 7, 8, 9])
    assert float(view.v[1, 1, 0, 0]) == -(600 + 30_000), "a view taken before still sees the pages"


def test_a_grow_to_more_than_any_memory() -> None:
    cache = make(2)
    before = state(cache)
    with pytest.raises(InvalidArgument, match="num_pages: must be pages"):
        PagedKVCache(0, page_size=2**20, kv_heads=64, head_dim=576, dtype=torch.float32).grow(2**31 - 1)
    with pytest.raises(InvalidArgument, match="num_pages: must be at most"):
        cache.grow(2**31)
    assert state(cache) == before

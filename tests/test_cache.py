"""PagedKVCache against a plain list of tokens for each request, and what it promises when it refuses."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

import wavefill
from wavefill import BackendUnavailable, InvalidArgument, InvalidType, OutOfPages, PagedKVCache

KH, D, DV = 2, 4, 3


def make(num_pages: int = 8, **options: Any) -> PagedKVCache:
    """A small cache on the default device of torch whose memory is NaN until it is written."""
    options = {"page_size": 4, "kv_heads": KH, "head_dim": D, "head_dim_v": DV, "dtype": torch.float32,
               "device": torch.get_default_device(), **options}
    cache = PagedKVCache(num_pages, **options)
    poison(cache)
    return cache


def poison(cache: PagedKVCache) -> None:
    for layer in range(cache.layers):
        cache.view(layer).k.fill_(torch.nan)
        cache.view(layer).v.fill_(torch.nan)


def tokens(values: list[int], layer: int = 0) -> tuple[Tensor, Tensor]:
    """K [n, KH, D] and V [n, KH, DV] that tell from which token, head and column each number comes."""
    base = torch.tensor(values, dtype=torch.float32).view(-1, 1, 1) * 100 + layer * 10_000
    heads = torch.arange(KH).view(1, KH, 1) * 10
    return base + heads + torch.arange(D), -(base + heads + torch.arange(DV))


def read(cache: PagedKVCache, request: int, layer: int = 0) -> tuple[Tensor, Tensor]:
    """All tokens of a request, gathered the way the kernels do."""
    n, pages = int(cache.seq_lens(request)[0]), cache.view(layer)
    position = torch.arange(n)
    page = cache.block_table(request)[0, position // cache.page_size].long()
    return pages.k[page, position % cache.page_size], pages.v[page, position % cache.page_size]


def assert_holds(cache: PagedKVCache, request: int, values: list[int]) -> None:
    assert cache.length(request) == len(values)
    for layer in range(cache.layers):
        for found, expected in zip(read(cache, request, layer), tokens(values, layer), strict=True):
            assert torch.equal(found, expected), f"layer {layer}: {found[:, 0, 0].tolist()}"


def append(cache: PagedKVCache, requests: list[int], values: list[list[int]]) -> None:
    """One step in every layer; values[i] are the tokens of requests[i]."""
    flat = [x for some in values for x in some]
    for layer in range(cache.layers):
        k, v = tokens(flat, layer)
        cache.append(requests, k, v, counts=[len(some) for some in values], layer=layer)


def state(cache: PagedKVCache) -> dict[str, Any]:
    """All that a refused call must leave alone: bookkeeping, and the contents of pages that are held."""
    held = {i: (cache.length(i), cache.block_table(i).tolist()) for i in cache.requests}
    used = sorted({page for _, table in held.values() for page in table[0] if page >= 0})
    views = [cache.view(layer) for layer in range(cache.layers)]
    contents = [x[used].cpu().numpy().tobytes() for view in views for x in (view.k, view.v)]
    return {"held": held, "free": cache.free_pages, "pages": cache.num_pages, "contents": contents}


def test_a_step_of_several_requests_and_layers() -> None:
    cache = make(layers=3)
    a, b, c = cache.add(3)
    append(cache, [a, b, c], [[1, 2, 3, 4, 5], [], [6]])
    append(cache, [c, a], [[7], [8]])
    assert_holds(cache, a, [1, 2, 3, 4, 5, 8])
    assert_holds(cache, b, [])
    assert_holds(cache, c, [6, 7])
    assert cache.seq_lens([c, b, a]).tolist() == [2, 0, 6]
    assert cache.seq_lens([c, b, a]).dtype == cache.block_table([c, b, a]).dtype == torch.int32
    assert cache.free_pages == 8 - 3


def test_all_layers_at_once() -> None:
    cache = make(layers=2)
    requests = cache.add(2)
    k, v = (torch.stack(x) for x in zip(tokens([1, 2, 3, 4], 0), tokens([1, 2, 3, 4], 1), strict=True))
    cache.append(requests, k, v)
    assert_holds(cache, requests[0], [1, 2])
    assert_holds(cache, requests[1], [3, 4])


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_attention_over_the_cache_equals_attention_over_a_packed_one(layout: str, page_size: int) -> None:
    cache = make(64, layout=layout, page_size=page_size, head_dim_v=D, layers=2)
    requests = cache.add(2)
    k, v = torch.randn(2, 21, KH, D), torch.randn(2, 21, KH, D)
    cache.append(requests, k, v, counts=[18, 3])
    q = torch.randn(2, 4, D)
    for layer in range(2):
        lens, table = cache.seq_lens(requests), cache.block_table(requests)
        found = wavefill.decode_attention(q, cache.view(layer), None, lens, table)
        for b, part in enumerate((slice(0, 18), slice(18, 21))):
            one = wavefill.decode_attention(q[b : b + 1], k[layer, None, part], v[layer, None, part], lens[b : b + 1])
            torch.testing.assert_close(found[b : b + 1], one)


def test_tensors_of_a_step_are_shared_by_its_layers_and_outlive_it() -> None:
    cache = make(layers=2)
    a, b = cache.add(2)
    append(cache, [a, b], [[1, 2, 3], [4]])
    lens, table = cache.seq_lens([a, b]), cache.block_table([a, b])
    assert cache.seq_lens((a, b)) is lens
    assert cache.block_table([a, b]) is table
    append(cache, [a], [[5]])
    assert cache.seq_lens([a, b]).tolist() == [4, 1]
    assert cache.block_table([a, b]) is table, "no page was added"
    append(cache, [a], [[6]])
    assert cache.block_table([a, b]) is not table
    assert lens.tolist() == [3, 1], "what was handed out must not change"


def test_a_fork_shares_full_pages_and_copies_the_last_one_on_append_by_either_side() -> None:
    cache = make(layers=2)
    (parent,) = cache.add()
    append(cache, [parent], [[1, 2, 3, 4, 5, 6]])
    child, other = cache.fork(parent, 2)
    assert cache.free_pages == 6, "forking takes no page"
    append(cache, [parent], [[7]])
    assert cache.free_pages == 5
    append(cache, [child], [[8, 9]])
    assert cache.free_pages == 4
    append(cache, [other], [[10]])
    assert cache.free_pages == 4, "the last holder writes in place"
    assert_holds(cache, parent, [1, 2, 3, 4, 5, 6, 7])
    assert_holds(cache, child, [1, 2, 3, 4, 5, 6, 8, 9])
    assert_holds(cache, other, [1, 2, 3, 4, 5, 6, 10])
    assert len(set(cache.block_table([parent, child, other])[:, 0].tolist())) == 1
    cache.free([parent, child])
    assert_holds(cache, other, [1, 2, 3, 4, 5, 6, 10])
    cache.free(other)
    assert cache.free_pages == 8


def test_a_step_in_which_all_holders_of_a_page_append_copies_it_once_less() -> None:
    cache = make()
    (a,) = cache.add()
    append(cache, [a], [[1, 2]])
    family = [a, *cache.fork(a, 2)]
    append(cache, family, [[3], [4], [5]])
    assert cache.free_pages == 8 - 3
    for request, last in zip(family, (3, 4, 5), strict=True):
        assert_holds(cache, request, [1, 2, last])


def test_truncating_into_a_shared_page_does_not_harm_the_other_side() -> None:
    cache = make()
    (a,) = cache.add()
    append(cache, [a], [[1, 2, 3, 4, 5, 6, 7, 8]])
    (b,) = cache.fork(a)
    cache.truncate(b, 2)
    append(cache, [b], [[9]])
    assert_holds(cache, a, [1, 2, 3, 4, 5, 6, 7, 8])
    assert_holds(cache, b, [1, 2, 9])
    cache.truncate(a, 4)
    cache.truncate(a, 4)
    assert_holds(cache, a, [1, 2, 3, 4])
    assert cache.free_pages == 8 - 2


def test_reorder_forks_who_is_picked_twice_and_frees_who_is_not_picked() -> None:
    cache = make()
    beams = cache.add(3)
    append(cache, beams, [[1, 2, 3, 4, 5], [6], [7]])
    beams = cache.reorder(beams, torch.tensor([2, 0, 0]))
    assert len(set(beams)) == 3
    assert cache.free_pages == 8 - 3, "two pages of the first, shared, and one of the third"
    append(cache, beams, [[8], [9], [10]])
    for request, expected in zip(beams, ([7, 8], [1, 2, 3, 4, 5, 9], [1, 2, 3, 4, 5, 10]), strict=True):
        assert_holds(cache, request, expected)
    assert cache.reorder(beams, [0, 1, 2]) == beams


def test_growing_keeps_ids_contents_and_earlier_views() -> None:
    cache = make(2, layers=2)
    (a,) = cache.add()
    append(cache, [a], [[1, 2, 3, 4, 5]])
    early, table = cache.view(1), cache.block_table(a)
    cache.grow(5)
    assert (cache.num_pages, cache.free_pages) == (5, 3)
    append(cache, [a], [[6]])
    assert torch.equal(cache.block_table(a), table)
    assert_holds(cache, a, [1, 2, 3, 4, 5, 6])
    assert float(early.k[table[0, 1], 1, 0, 0]) == 600 + 10_000, "a view taken before sees what is written after"


@pytest.mark.parametrize("inference", [False, True])
def test_a_cache_made_under_inference_mode_lives_on_outside(inference: bool) -> None:
    with torch.inference_mode(inference):
        cache = make(1)
        (a,) = cache.add()
        append(cache, [a], [[1, 2]])
    (b,) = cache.fork(a)
    cache.grow(4)
    append(cache, [a, b], [[3], [4]])
    with torch.inference_mode():
        append(cache, [a, b], [[5], [6]])
    assert_holds(cache, a, [1, 2, 3, 5])
    assert_holds(cache, b, [1, 2, 4, 6])


# ---- refusals change nothing


def test_running_out_of_pages_says_how_many_and_changes_nothing() -> None:
    cache = make(4, layers=2)
    a, b = cache.add(2)
    append(cache, [a, b], [[1, 2, 3, 4, 5, 6], [7]])
    (c,) = cache.fork(a)
    before = state(cache)
    k, v = tokens([1] * 8)
    # a: a copy and one page more; c: the last holder stays; b: nothing.
    with pytest.raises(OutOfPages, match=r"needs 3 free pages of 4 tokens; got 1 free of 4.*grow\(6\)"):
        cache.append([a, b, c], k, v, counts=[3, 2, 3], layer=0)
    assert state(cache) == before
    assert cache.seq_lens([a, b, c]).tolist() == [6, 1, 6]
    cache.grow(6)
    append(cache, [a, b, c], [[11, 12, 13], [14, 15], [16, 17, 18]])
    assert_holds(cache, a, [1, 2, 3, 4, 5, 6, 11, 12, 13])
    assert_holds(cache, b, [7, 14, 15])
    assert_holds(cache, c, [1, 2, 3, 4, 5, 6, 16, 17, 18])


def _bad_appends() -> dict[str, tuple[Callable[[PagedKVCache, list[int]], None], type[Exception], str]]:
    k, v = tokens([1, 2])
    return {
        "dtype": (lambda c, r: c.append(r, k.half(), v.half(), layer=0), InvalidType, r"k: dtype must be.*float32"),
        "v-dtype": (lambda c, r: c.append(r, k, v.double(), layer=0), InvalidType, r"v: dtype must be.*float32"),
        "heads": (lambda c, r: c.append(r, k[:, :1], v, layer=0), InvalidArgument, r"k: .*\[2, 2, 4\].*\[2, 1, 4\]"),
        "head-size": (lambda c, r: c.append(r, k, v[..., :2], layer=0), InvalidArgument, r"v: .*\[2, 2, 3\]"),
        "dims": (lambda c, r: c.append(r, k[0], v[0], layer=0), InvalidArgument, r"k: .*\[2, 4\]"),
        "no-layer": (lambda c, r: c.append(r, k, v), InvalidArgument, r"\[2 layers, tokens, KH, D\] without layer="),
        "list": (lambda c, r: c.append(r, k.tolist(), v, layer=0), InvalidType, "k: must be a torch.Tensor; got list"),
        "layer": (lambda c, r: c.append(r, k, v, layer=2), InvalidArgument, "layer: must be from 0 to 1; got 2"),
        "counts": (lambda c, r: c.append(r, k, v, counts=[1, 2], layer=0), InvalidArgument, "counts: .*up to the 2"),
        "negative": (lambda c, r: c.append(r, k, v, counts=[3, -1], layer=0), InvalidArgument, "counts: .*0 or more"),
        "few-counts": (lambda c, r: c.append(r, k, v, counts=[2], layer=0), InvalidArgument, "counts: .*2 requests"),
        "ragged": (lambda c, r: c.append(r[:1] + c.add(2), k, v, layer=0), InvalidArgument, "k: .*each of 3 requests"),
        "twice": (lambda c, r: c.append([r[0], r[0]], k, v, layer=0), InvalidArgument, "requests: must be distinct"),
        "unknown": (lambda c, r: c.append([r[0], 99], k, v, layer=0), InvalidArgument, "request: .*got 99"),
        "meta": (lambda c, r: c.append(r, k.to("meta"), v, layer=0), InvalidArgument, "k: must be on the device"),
        "own-memory": (lambda c, r: c.append(r, c.view(0).k[0, :2], v, layer=0), InvalidArgument, "share no memory"),
    }


@pytest.mark.parametrize("kind", _bad_appends())
def test_a_refused_append_changes_nothing(kind: str) -> None:
    call, error, message = _bad_appends()[kind]
    cache = make(layers=2)
    requests = cache.add(2)
    append(cache, requests, [[1, 2], [3]])
    # A shared page, so that a plan would copy.
    cache.fork(requests[0])
    before = state(cache)
    with pytest.raises(error, match=message):
        call(cache, requests)
    after = state(cache)
    after["held"] = {i: x for i, x in after["held"].items() if i in before["held"]}
    assert after == before
    append(cache, requests, [[4], [5]])
    assert_holds(cache, requests[0], [1, 2, 4])


def test_freed_and_unknown_requests_are_refused_everywhere() -> None:
    cache = make()
    a, b = cache.add(2)
    cache.free(a)
    for call in (cache.free, cache.fork, cache.length, cache.seq_lens, cache.block_table,
                 lambda i: cache.truncate(i, 0), lambda i: cache.reorder([b, i], [0]),
                 lambda i: cache.append(i, *tokens([1]))):
        with pytest.raises(InvalidArgument, match=rf"request: must be an id .*got {a}\."):
            call(a)
    with pytest.raises(InvalidArgument, match="distinct"):
        cache.free([b, b])
    assert cache.requests == [b]
    assert a not in cache.add(3), "a stale id must never name another's data"


def test_other_refusals() -> None:
    cache = make()
    (a,) = cache.add()
    append(cache, [a], [[1, 2, 3]])
    before = state(cache)
    for call, message in (
        (lambda: cache.truncate(a, 4), r"length: must be at most the request's length \(3\); got 4"),
        (lambda: cache.truncate(a, -1), "length: must be at least 0; got -1"),
        (lambda: cache.grow(7), r"num_pages: must be at least the present number \(8\); got 7"),
        (lambda: cache.reorder([a], [1]), "index: must hold numbers from 0 to 0; got 1"),
        (lambda: cache.add(-1), "n: must be at least 0"),
        (lambda: cache.view(1), "layer: must be from 0 to 0"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            call()
    assert state(cache) == before


@pytest.mark.parametrize(("options", "error", "message"), [
    ({"num_pages": -1}, InvalidArgument, "num_pages: must be at least 0; got -1"),
    ({"num_pages": 1.5}, InvalidType, "num_pages: must be an int; got 1.5"),
    ({"page_size": 0}, InvalidArgument, "page_size: must be at least 1"),
    ({"layers": True}, InvalidType, "layers: must be an int; got True"),
    ({"dtype": torch.int8}, InvalidType, "dtype: must be one of float32, bfloat16, float16; got torch.int8"),
    ({"layout": "DHN"}, InvalidArgument, 'layout: must be "NHD" or "HND"; got \'DHN\''),
    ({"device": "xpu"}, BackendUnavailable, "device: .*cpu and cuda alone; got xpu"),
    ({"device": "cuda"}, BackendUnavailable, r"device: must be a GPU that torch can use; got cuda\."),
    ({"device": torch.device("cuda", 1)}, BackendUnavailable, r"device: must be a GPU that torch can use; got cuda:1"),
])
def test_bad_construction(options: dict[str, Any], error: type[Exception], message: str,
                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(error, match=message):
        make(**{"num_pages": 1, **options})


# ---- steps over layers


def test_an_unfinished_step_blocks_what_would_tear_it_and_can_be_cancelled() -> None:
    cache = make(layers=3)
    a, b = cache.add(2)
    append(cache, [a, b], [[1, 2, 3, 4], [5]])
    before = state(cache)["held"]
    k, v = tokens([6, 7])
    cache.append([a, b], k, v, layer=1)
    assert cache.seq_lens([a, b]).tolist() == [5, 2], "a layer attends to the step's tokens as soon as it wrote them"
    one = tokens([8])
    for call in (
        lambda: cache.append([a, b], k, v, layer=1),
        lambda: cache.append([b, a], k, v, layer=0),
        lambda: cache.append([a], *one, layer=0),
        lambda: cache.append([a, b], k, v, counts=[2, 0], layer=0),
        lambda: cache.fork(a), lambda: cache.free(b), lambda: cache.truncate(a, 0), lambda: cache.reorder([b], [0]),
    ):
        with pytest.raises(InvalidArgument, match=r"layer: layers \[1\] have written .*layers \[0, 2\] missing"):
            call()
    (c,) = cache.add()
    cache.free(c)
    cache.cancel_step()
    cache.cancel_step()
    assert state(cache)["held"] == before
    assert_holds(cache, a, [1, 2, 3, 4])
    append(cache, [a, b], [[9], [10]])
    assert_holds(cache, a, [1, 2, 3, 4, 9])
    assert_holds(cache, b, [5, 10])


# ---- strides (an append that honours only the outer stride corrupts the cache)


def _doubled(x: Tensor) -> Tensor:
    """The same numbers with token, head and column strides doubled."""
    wide = torch.full([2 * n for n in x.shape], torch.nan, dtype=x.dtype)
    wide[::2, ::2, ::2] = x
    return wide[::2, ::2, ::2]


def _heads_first(x: Tensor) -> Tensor:
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def _columns_first(x: Tensor) -> Tensor:
    return x.permute(2, 0, 1).contiguous().permute(1, 2, 0)


def _reversed_buffer(x: Tensor) -> Tensor:
    return x.flip(0).flip(0)[: len(x)]


@pytest.mark.parametrize("stride", [_doubled, _heads_first, _columns_first, _reversed_buffer])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_strided_append_is_bit_equal_and_leaves_neighbours_alone(
    stride: Callable[[Tensor], Tensor], layout: str, dtype: torch.dtype
) -> None:
    def filled(view: Callable[[Tensor], Tensor]) -> PagedKVCache:
        cache = make(dtype=dtype, layout=layout)
        a, b = cache.add(2)
        k, v = torch.randn(9, KH, D, generator=rng()).to(dtype), torch.randn(9, KH, DV, generator=rng()).to(dtype)
        cache.append([a, b], view(k), view(v), counts=[3, 6])
        cache.append([b], view(k[:2]), view(v[:2]))
        return cache

    def rng() -> torch.Generator:
        return torch.Generator(torch.get_default_device()).manual_seed(1)

    packed, strided = filled(torch.Tensor.contiguous), filled(stride)
    for x, y in ((packed.view().k, strided.view().k), (packed.view().v, strided.view().v)):
        assert torch.equal(x.isnan(), y.isnan()), "wrote where no token belongs"
        assert torch.equal(x.nan_to_num(), y.nan_to_num())
    assert int((~packed.view().k.isnan()).sum()) == 11 * KH * D


# ---- a model


class CacheMachine(RuleBasedStateMachine):
    """Any order of calls leaves every request with the tokens that a plain list of them would hold."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = make(10, layers=2, page_size=3)
        self.model: dict[int, list[int]] = {}
        self.next_token = 0

    def pick(self, seed: int, at_least: int = 1) -> list[int]:
        ids = list(self.model)
        return random.Random(seed).sample(ids, min(len(ids), at_least + seed % 3))

    @rule(n=st.integers(0, 2))
    def add(self, n: int) -> None:
        self.model |= {i: [] for i in self.cache.add(n)}

    @precondition(lambda self: self.model)
    @rule(seed=st.integers(0, 999), counts=st.lists(st.integers(0, 7), min_size=3, max_size=3))
    def append(self, seed: int, counts: list[int]) -> None:
        ids = self.pick(seed)
        values = []
        for n in counts[: len(ids)]:
            values.append(list(range(self.next_token, self.next_token + n)))
            self.next_token += n
        before = state(self.cache)
        try:
            append(self.cache, ids, values)
        except OutOfPages:
            assert state(self.cache) == before
            return
        for i, some in zip(ids, values, strict=True):
            self.model[i] = self.model[i] + some

    @precondition(lambda self: self.model)
    @rule(seed=st.integers(0, 999), n=st.integers(0, 2))
    def fork(self, seed: int, n: int) -> None:
        (parent,) = self.pick(seed)[:1]
        self.model |= dict.fromkeys(self.cache.fork(parent, n), self.model[parent])

    @precondition(lambda self: self.model)
    @rule(seed=st.integers(0, 999), share=st.floats(0, 1))
    def truncate(self, seed: int, share: float) -> None:
        (i,) = self.pick(seed)[:1]
        length = int(share * len(self.model[i]))
        self.cache.truncate(i, length)
        self.model[i] = self.model[i][:length]

    @precondition(lambda self: self.model)
    @rule(seed=st.integers(0, 999))
    def free(self, seed: int) -> None:
        ids = self.pick(seed)
        self.cache.free(ids)
        for i in ids:
            del self.model[i]

    @precondition(lambda self: self.model)
    @rule(seed=st.integers(0, 999))
    def reorder(self, seed: int) -> None:
        ids = self.pick(seed)
        index = [random.Random(seed + at).randrange(len(ids)) for at in range(len(ids) + seed % 2)]
        values = [self.model[ids[at]] for at in index]
        for i in ids:
            del self.model[i]
        self.model |= dict(zip(self.cache.reorder(ids, index), values, strict=True))

    @precondition(lambda self: self.cache.num_pages < 16)
    @rule()
    def grow(self) -> None:
        self.cache.grow(self.cache.num_pages + 2)

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        assert set(self.cache.requests) == set(self.model)
        for i, values in self.model.items():
            assert_holds(self.cache, i, values)

    @invariant()
    def every_page_is_free_or_counted(self) -> None:
        table = self.cache.block_table(list(self.model))
        holders = np.bincount(table[table >= 0].cpu().numpy(), minlength=self.cache.num_pages)
        assert self.cache.free_pages == int((holders == 0).sum())


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

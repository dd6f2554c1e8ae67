"""Copies of a PagedKVCache, pickled, saved, sent or deep: whole, apart from the original, and views that see writes."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from test_cache import append, assert_holds, make, state, tokens
from wavefill import InvalidArgument, PagedKVCache

Copy = Callable[[PagedKVCache], PagedKVCache]


def saved(cache: PagedKVCache) -> PagedKVCache:
    file = io.BytesIO()
    torch.save({"cache": cache}, file)
    file.seek(0)
    loaded: PagedKVCache = torch.load(file, weights_only=False)["cache"]
    return loaded


def sent(cache: PagedKVCache) -> PagedKVCache:
    """As through a queue of torch.multiprocessing, which puts tensors where both processes can write them."""
    received: PagedKVCache = pickle.loads(ForkingPickler.dumps(cache))
    return received


def pickled(protocol: int) -> Copy:
    return lambda cache: pickle.loads(pickle.dumps(cache, protocol))


COPIES = {"deepcopy": copy.deepcopy, "save": saved, "sent": sent, **{f"pickle-{n}": pickled(n) for n in range(2, 6)}}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_copy_and_its_original_go_on_apart(how: str, layout: str) -> None:
    cache = make(8, layers=2, layout=layout)
    a, b = cache.add(2)
    append(cache, [a, b], [[1, 2, 3, 4, 5], [6]])
    (c,) = cache.fork(a)
    # Tensors that the cache keeps for its layers.
    cache.seq_lens([a, b, c])
    cache.block_table([a, b, c])
    other = COPIES[how](cache)
    assert state(other) == state(cache)
    append(cache, [a, b, c], [[11], [12, 13], []])
    append(other, [a, b, c], [[], [21], [22, 23, 24, 25]])
    other.grow(12)
    append(other, other.add(), [[26] * 20])
    cache.free(b)
    append(cache, cache.add(), [[14] * 9])
    assert_holds(cache, a, [1, 2, 3, 4, 5, 11])
    assert_holds(cache, c, [1, 2, 3, 4, 5])
    assert_holds(other, a, [1, 2, 3, 4, 5])
    assert_holds(other, b, [6, 21])
    assert_holds(other, c, [1, 2, 3, 4, 5, 22, 23, 24, 25])


@pytest.mark.parametrize("how", COPIES)
def test_a_step_that_some_layers_have_written_goes_on_in_the_copy(how: str) -> None:
    cache = make(layers=2)
    a, b = cache.add(2)
    append(cache, [a], [[1, 2]])
    cache.append([a, b], *tokens([3, 4], 1), layer=1)
    other, undone = COPIES[how](cache), COPIES[how](cache)
    other.append([a, b], *tokens([3, 4], 0), layer=0)
    undone.cancel_step()
    assert_holds(other, a, [1, 2, 3])
    assert_holds(other, b, [4])
    assert_holds(undone, a, [1, 2])
    assert (cache.free_pages, undone.free_pages) == (6, 7)


def test_what_is_sent_to_another_process_is_not_written_by_it() -> None:
    cache = make()
    (a,) = cache.add()
    append(cache, [a], [[1, 2]])
    other = sent(cache)
    for one in (cache, other):
        assert not one.view().k.is_shared()
    (again,) = cache.fork(a)
    append(cache, [a, again], [[3], [4]])
    assert_holds(other, a, [1, 2])


def test_pages_never_taken_are_not_copied() -> None:
    """They hold what was in memory before, and may be nearly all of the cache."""
    cache = make(100_000, page_size=16)
    (a,) = cache.add()
    append(cache, [a], [[1, 2, 3]])
    assert len(pickle.dumps(cache)) < 1_000_000


@pytest.mark.parametrize("inference", [False, True])
def test_a_copy_made_under_inference_mode_lives_on_outside(inference: bool) -> None:
    cache = make()
    (a,) = cache.add()
    append(cache, [a], [[1, 2]])
    for how in COPIES.values():
        with torch.inference_mode(inference):
            other = how(cache)
        append(other, [a], [[3, 4, 5]])
        other.grow(9)
        assert_holds(other, a, [1, 2, 3, 4, 5])


def test_a_shallow_copy_is_refused() -> None:
    """It would have the pages of the other, and counts of its own after the first change."""
    with pytest.raises(InvalidArgument, match=r"cache: can't be copied shallowly.*copy.deepcopy"):
        copy.copy(make())

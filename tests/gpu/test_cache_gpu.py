"""PagedKVCache, `append` and `merge_states` on a GPU: as on the CPU, without waiting for the device, and in graphs."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import test_cache
import wavefill
from test_cache import (
    append,
    assert_holds,
    make,
    state,
    test_a_fork_shares_full_pages_and_copies_the_last_one_on_append_by_either_side,  # noqa: F401
    test_a_step_in_which_all_holders_of_a_page_append_copies_it_once_less,  # noqa: F401
    test_a_step_of_several_requests_and_layers,  # noqa: F401
    test_a_strided_append_is_bit_equal_and_leaves_neighbours_alone,  # noqa: F401
    test_all_layers_at_once,  # noqa: F401
    test_an_unfinished_step_blocks_what_would_tear_it_and_can_be_cancelled,  # noqa: F401
    test_growing_keeps_ids_contents_and_earlier_views,  # noqa: F401
    test_reorder_forks_who_is_picked_twice_and_frees_who_is_not_picked,  # noqa: F401
    test_running_out_of_pages_says_how_many_and_changes_nothing,  # noqa: F401
    test_tensors_of_a_step_are_shared_by_its_layers_and_outlive_it,  # noqa: F401
    test_truncating_into_a_shared_page_does_not_harm_the_other_side,  # noqa: F401
    tokens,
)
from test_cache_reserve import (
    test_a_forked_row_gets_its_own_copy_and_truncate_takes_the_room_back,  # noqa: F401
    test_reserved_slots_are_those_of_append,  # noqa: F401
)
from test_cache_restore import test_requests_cut_short_or_left_out  # noqa: F401
from wavefill import InvalidArgument, PagedKVCache, reference

DEVICE = "cuda"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True, scope="module")
def _on_gpu() -> Iterator[None]:
    """Caches of `make` and tensors without a device of their own are the GPU's."""
    with torch.device(DEVICE):
        yield


class TestCacheMachineOnGpu(test_cache.TestCacheMachine):
    """Any order of calls, as on the CPU."""


# ---- devices


@pytest.mark.parametrize("device", ["cuda", "cuda:0", torch.device("cuda"), torch.device("cuda", 0)])
def test_all_that_it_gives_out_is_on_the_gpu(device: Any) -> None:
    cache = make(device=device)
    (a,) = cache.add()
    append(cache, [a], [[1, 2]])
    (b,) = cache.fork(a)
    given = (cache.reserve([a, b], [1, 1]), cache.seq_lens([a, b]), cache.block_table([a, b]), cache.view().k,
             cache.view().v)
    assert {x.device for x in given} == {cache.device}
    assert cache.device.type == "cuda"
    assert cache.device.index is not None


def test_other_devices() -> None:
    with pytest.raises(InvalidArgument, match=r"device: must be one of the \d+ GPUs that torch finds; got cuda:99"):
        make(device="cuda:99")
    cache = make()
    before = state(cache)
    k, v = tokens([1])
    for wrong in ((k.cpu(), v.cpu()), (k, v.cpu())):
        with pytest.raises(InvalidArgument, match=r"must be on the device of the other tensors \(cuda:0\)"):
            cache.append(cache.add(), *wrong)
    assert state(cache)["contents"] == before["contents"]
    with pytest.raises(InvalidArgument, match="num_pages: must be pages that there is memory for"):
        make(2**31 - 1, page_size=1024)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")
def test_a_cache_of_another_gpu_than_the_current_one() -> None:
    with torch.device("cuda:1"):
        cache = make()
        a, b = cache.add(2)
        append(cache, [a, b], [[1, 2, 3, 4, 5], [6]])
        append(cache, [b, a], [[7], [8]])
        assert_holds(cache, a, [1, 2, 3, 4, 5, 8])
        assert_holds(cache, b, [6, 7])
    assert torch.cuda.current_device() == 0


# ---- without waiting, in graphs


def test_a_step_does_not_wait_for_the_device() -> None:
    cache = PagedKVCache(64, layers=2, kv_heads=2, head_dim=64, dtype=torch.bfloat16, device=DEVICE)
    requests = cache.add(2)

    def step() -> None:
        for layer in range(2):
            cache.append(requests, new, new, layer=layer)
            cache.seq_lens(requests)
            cache.block_table(requests)
        cache.fork(requests[0])  # so that the next step copies a page
        cache.reserve(cache.add(), [3])

    new = torch.randn(4, 2, 64).bfloat16()
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
        wavefill.merge_states(torch.zeros(2, 3, 8), torch.zeros(2, 3))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_append_follows_its_slots() -> None:
    cache = PagedKVCache(8, page_size=4, kv_heads=2, head_dim=16, dtype=torch.float32, device=DEVICE)
    pages, (a,) = cache.view(), cache.add()
    cache.append(a, torch.randn(3, 2, 16), torch.randn(3, 2, 16))
    k, v, q = torch.randn(1, 2, 16), torch.randn(1, 2, 16), torch.randn(1, 4, 16)
    slots, lens = torch.full((1,), -1), torch.zeros(1, dtype=torch.int32)
    table = torch.full((1, 8), -1, dtype=torch.int32)

    def step() -> Tensor:
        torch.ops.wavefill.append(pages.k, pages.v, k, v, slots)
        return wavefill.decode_attention(q, pages, None, lens, table)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
        with pytest.raises(InvalidArgument, match="cache: can't make a step's tensors while a CUDA graph is captured"):
            cache.append(a, k, v)
    other = copy.deepcopy(cache)
    for _ in range(6):
        k.normal_()
        v.normal_()
        slots.copy_(cache.reserve(a, [1]))
        lens.copy_(cache.seq_lens(a))
        found = cache.block_table(a)
        table[:, : found.shape[1]].copy_(found)
        graph.replay()
        other.append(a, k, v)
        expected = wavefill.decode_attention(q, other.view(), None, other.seq_lens(a), other.block_table(a))
        torch.testing.assert_close(out, expected)
    for x, y in zip(test_cache.read(cache, a), test_cache.read(other, a), strict=True):
        assert torch.equal(x, y)


# ---- append


@pytest.mark.parametrize("fused", [False, True], ids=["of their own", "part of a projection"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [(128, 128), (80, 24), (5, 576)], ids=str)
def test_it_writes_the_bytes_that_the_cpu_writes(sizes: tuple[int, int], dtype: torch.dtype, layout: str,
                                                 fused: bool) -> None:
    D, DV = sizes
    ints = torch.int32 if dtype == torch.float32 else torch.int16
    limits = torch.iinfo(ints)
    caches = [PagedKVCache(40, page_size=16, kv_heads=3, head_dim=D, head_dim_v=DV, dtype=dtype, layout=layout,
                           device=device) for device in ("cpu", DEVICE)]
    noise = torch.randint(limits.min, limits.max + 1, (300, 3, 4 * (D + DV)), dtype=ints, device="cpu").view(dtype)
    k, v = noise[..., :D], noise[..., -DV:]
    if not fused:
        k, v = k.contiguous(), v.contiguous()
    moved = noise.to(DEVICE)
    slots = torch.randperm(40 * 16, device="cpu")[:300]
    slots[::7] = -1
    for cache, new, where in ((caches[0], (k, v), "cpu"), (caches[1], (moved[..., :D], moved[..., -DV:]), DEVICE)):
        pages = cache.view()
        pages.k.zero_()
        pages.v.zero_()
        torch.ops.wavefill.append(pages.k, pages.v, *(new if fused else [x.contiguous() for x in new]),
                                  slots.to(where))
    for name in ("k", "v"):
        expected, found = (getattr(cache.view(), name).cpu().contiguous().view(ints) for cache in caches)
        assert torch.equal(found, expected)


def test_slots_past_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    room = torch.full((3, 4, 2, 1, 8), 7.0)
    k = torch.ones(4, 1, 8)
    slots = torch.tensor([8, 3, 2**40, 2**63 - 1])
    torch.ops.wavefill.append(room[1], torch.zeros(4, 2, 1, 8), k, k, slots)
    assert (room[1, 1, 1] == 1).all()
    room[1, 1, 1] = 7.0
    assert (room == 7).all()
    monkeypatch.setenv("WAVEFILL_CHECK", "1")
    with pytest.raises(InvalidArgument, match=r"slots\[0\]: must be below pages x page_size = 8; got 8\."):
        torch.ops.wavefill.append(room[1], torch.zeros(4, 2, 1, 8), k, k, slots)
    assert (room == 7).all()
    torch.ops.wavefill.append(room[1], torch.zeros(4, 2, 1, 8), k[:1], k[:1], slots[1:2])
    assert (room[1, 1, 1] == 1).all()


def test_attention_over_the_cache_is_that_of_the_cpu() -> None:
    torch.manual_seed(0)
    found = []
    for device in ("cpu", DEVICE):
        generator = torch.Generator("cpu").manual_seed(0)
        cache = PagedKVCache(64, page_size=16, kv_heads=2, head_dim=64, dtype=torch.float32, device=device)
        requests = cache.add(3)
        for counts in ((100, 1, 0), (1, 1, 1)):
            new = torch.randn(2, sum(counts), 2, 64, generator=generator, device="cpu").to(device)
            cache.append(requests, new[0], new[1], counts=counts)
        q = torch.randn(3, 8, 64, generator=generator, device="cpu").to(device)
        found.append(wavefill.decode_attention(q, cache.view(), None, cache.seq_lens(requests),
                                               cache.block_table(requests)).cpu())
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


# ---- copies


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "save", "to the CPU"])
def test_a_copy_and_its_original_go_on_apart(how: str) -> None:
    cache = make(8, layers=2)
    a, b = cache.add(2)
    append(cache, [a, b], [[1, 2, 3, 4, 5], [6]])
    cache.append([a], *tokens([7], 1), layer=1)
    if how == "deepcopy":
        other = copy.deepcopy(cache)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(cache))
    else:
        file = io.BytesIO()
        torch.save(cache, file)
        file.seek(0)
        other = torch.load(file, weights_only=False, map_location="cpu" if how == "to the CPU" else None)
    where = torch.device("cpu") if how == "to the CPU" else cache.device
    assert other.device == other.view().k.device == other.seq_lens(a).device == where
    for one, values in ((cache, [8]), (other, [9, 10])):
        with torch.device(one.device):
            one.append([a], *tokens([7], 0), layer=0)
            append(one, [a], [values])
            assert_holds(one, a, [1, 2, 3, 4, 5, 7, *values])
            assert_holds(one, b, [6])


# ---- merge_states


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3,), (5, 4)], ids=str)
@pytest.mark.parametrize("n", [0, 1, 3, 7])
def test_merge_of_any_number_of_states(n: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for width in (24, 128, 300):
        outs, lses = torch.randn(n, *shape, width).to(dtype), 5 * torch.randn(n, *shape)
        lses[torch.rand(lses.shape) < 0.3] = -math.inf
        outs[lses == -math.inf] = torch.nan
        out, lse = wavefill.merge_states(outs, lses)
        assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((*shape, width), dtype, shape, torch.float32)
        expected = reference.merge_states(outs.cpu(), lses.cpu())
        on_cpu = wavefill.merge_states(outs.cpu(), lses.cpu())
        for wide, narrow in (expected, on_cpu):
            torch.testing.assert_close(out.cpu().double(), wide.double(), atol=1e-6, rtol=2 * torch.finfo(dtype).eps)
            torch.testing.assert_close(lse.cpu().double(), narrow.double(), atol=1e-6, rtol=1e-6)


def test_merge_of_what_is_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    outs, lses = torch.zeros(2, 3, 8), torch.tensor([[math.nan, math.inf, 0.0], [0.0, 0.0, 0.0]])
    out, lse = wavefill.merge_states(outs, lses)
    assert lse.isnan().tolist() == [True, True, False]
    assert out.isnan().all(-1).tolist() == [True, True, False]
    monkeypatch.setenv("WAVEFILL_CHECK", "1")
    with pytest.raises(InvalidArgument, match="lses: must hold finite"):
        wavefill.merge_states(outs, lses)
    wavefill.merge_states(outs, lses.nan_to_num(posinf=0.0))


def test_a_captured_merge() -> None:
    outs, lses = torch.randn(3, 4, 64), torch.randn(3, 4)
    wavefill.merge_states(outs, lses)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = wavefill.merge_states(outs, lses)
    outs.normal_()
    lses.normal_()
    graph.replay()
    expected = reference.merge_states(outs.cpu(), lses.cpu())
    torch.testing.assert_close(out.cpu().double(), expected[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(lse.cpu().double(), expected[1], atol=1e-6, rtol=1e-6)

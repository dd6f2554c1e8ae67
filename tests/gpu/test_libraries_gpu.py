"""Prompts that a library computes on a GPU, held to the float64 reference; one that is not there is skipped."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_several_gpu import on_gpu, run

import wavefill
from helpers import Case, make_case, same_bits
from wavefill import prefill
from wavefill.backends.gpu import launch, libraries
from wavefill.bench import gpu_peer_setup

#: Keys and query tokens of each request.
BATCHES = {
    "prompts": ([700, 33, 513], [700, 33, 513]),
    "chunks": ([900, 640, 1300], [200, 1, 650]),
    "more queries than keys": ([0, 400, 3, 0], [4, 400, 90, 0]),
    "one": ([1300], [1300]),
}


@pytest.fixture(params=["fa3", "flash"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Names a library, with no regard to how small the call is; and holds that it is asked."""
    name: str = request.param
    if name == "fa3":
        gpu_peer_setup.fa3()  # loads vLLM's build from the folder of peers, if it is there
        if torch.cuda.get_device_capability() != (9, 0) or libraries.fa3_operator() is None:
            pytest.skip("FlashAttention-3 is not there")
    elif not libraries.flash_is_torchs():
        pytest.skip("this PyTorch has no FlashAttention-2 of its own")
    monkeypatch.setenv("WAVEFILL_PREFILL", name)
    monkeypatch.setattr(libraries, "attend", counted(libraries.attend))
    return name


def counted(attend: Any) -> Any:
    def counting(*args: Any, **kwargs: Any) -> None:
        counting.calls += 1  # type: ignore[attr-defined]
        attend(*args, **kwargs)

    counting.calls = 0  # type: ignore[attr-defined]
    return counting


def calls() -> int:
    return libraries.attend.calls  # type: ignore[attr-defined,no-any-return]


def check(case: Case, **kwargs: Any) -> None:
    there, before = on_gpu(case), calls()
    out, lse = run(there, torch.full(case.out_shape, math.nan, dtype=case.q.dtype, device="cuda"), **kwargs)
    case.expected.check(out.cpu(), lse.cpu())
    assert calls() == before + 1


@pytest.mark.parametrize("poison", [0.0, math.nan])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.usefixtures("library")
def test_batches(name: str, causal: bool, poison: float) -> None:
    lens, q_lens = BATCHES[name]
    for layout in ("nhd", "hnd"):
        check(make_case(lens, q_lens=q_lens, HQ=8, KH=2, D=128, dtype=torch.bfloat16, capacity=1400, causal=causal,
                        poison=poison, layout=layout))


@pytest.mark.parametrize("D", [64, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("library")
def test_head_sizes(D: int, dtype: torch.dtype) -> None:
    check(make_case([513, 700], q_lens=[513, 300], HQ=4, KH=4, D=D, dtype=dtype, scale=0.2))


@pytest.mark.usefixtures("library")
def test_one_value_that_is_no_number_wherever_a_tile_reaches() -> None:
    case = make_case([700, 33, 513], q_lens=[700, 33, 513], HQ=8, KH=2, D=128, dtype=torch.bfloat16, capacity=1400,
                     poison=0.0)
    assert case.v_cache is not None
    for request, after in ((0, 0), (1, 63), (1, 94), (2, 126), (2, 190), (0, 255)):
        v = case.v_cache.clone()
        v[request, int(case.seq_lens[request]) + after, 1, 100] = math.nan
        check(replace(case, v_cache=v))


@pytest.mark.usefixtures("library")
def test_tokens_of_no_request() -> None:
    case = make_case([700, 33], q_lens=[650, 33], HQ=8, KH=2, D=128, dtype=torch.bfloat16, capacity=1400)
    there = on_gpu(case)
    used = len(case.q)
    nothing = torch.full((300, *case.q.shape[1:]), math.nan, device="cuda", dtype=case.q.dtype)
    out, lse = run(replace(there, q=torch.cat([there.q, nothing])), torch.cat([there.q, nothing]) * math.nan)
    case.expected.check(out[:used].cpu(), lse[:used].cpu())
    assert bool((out[used:] == 0).all())
    assert bool((lse[used:] == -math.inf).all())
    before = torch.cat([nothing, there.q])
    assert there.cu_seqlens_q is not None
    out, lse = run(replace(there, q=before, cu_seqlens_q=there.cu_seqlens_q + 300), before * math.nan)
    case.expected.check(out[300:].cpu(), lse[300:].cpu())
    assert bool((out[:300] == 0).all())
    assert bool((lse[:300] == -math.inf).all())


@pytest.mark.usefixtures("library")
def test_wrong_lengths_stay_within_the_cache() -> None:
    """A length past the capacity is cut to it."""
    case = make_case([1400, 33], q_lens=[650, 33], HQ=8, KH=2, D=128, dtype=torch.bfloat16, capacity=1400)
    there = on_gpu(case)
    there.seq_lens[0] = 2**31 - 1
    out, lse = run(there)
    case.expected.check(out.cpu(), lse.cpu())


@pytest.mark.usefixtures("library")
def test_a_graph_serves_other_lengths_and_values() -> None:
    case = make_case([700, 33, 513], q_lens=[700, 33, 513], HQ=8, KH=2, D=128, dtype=torch.bfloat16, capacity=1400)
    there = on_gpu(case)
    out = torch.full(case.out_shape, math.nan, device="cuda", dtype=case.q.dtype)
    lens, starts = there.seq_lens.clone(), there.cu_seqlens_q.clone()
    there.seq_lens.zero_()
    run(there, out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = run(there, out)
    there.seq_lens.copy_(lens)
    for poison in (math.nan, 0.0):
        for cache in (there.k_cache, there.v_cache):
            for b, n in enumerate(lens.tolist()):
                cache[b, n:] = poison
        for now in (starts, starts.clamp(max=733)):
            there.cu_seqlens_q.copy_(now)
            out.fill_(math.nan)
            graph.replay()
            used = int(now[-1])
            replace(case, q=case.q[:used], cu_seqlens_q=now.cpu()).expected.check(out[:used].cpu(), lse[:used].cpu())
            assert bool((out[used:] == 0).all())
            assert bool((lse[used:] == -math.inf).all())


@pytest.mark.usefixtures("library")
def test_repeats_give_the_same_bits() -> None:
    case = on_gpu(make_case([700, 513], q_lens=[700, 513], HQ=8, KH=2, D=128, dtype=torch.bfloat16))
    first = run(case)
    for _ in range(10):
        assert all(same_bits(a.cpu(), b.cpu()) for a, b in zip(first, run(case), strict=True))


@pytest.mark.usefixtures("library")
def test_other_calls_stay_with_our_kernels() -> None:
    lens = [700, 513]
    shape: dict[str, Any] = {"q_lens": lens, "HQ": 8, "KH": 2, "D": 128, "dtype": torch.bfloat16}
    for case, how in (
        (make_case(lens, page_size=16, **shape), {}), (make_case(lens, **shape), {"schedule": "invariant"}),
        (make_case(lens, **shape), {"schedule": "stream_k"}), (make_case(lens, **shape), {"sm_budget": 66}),
        (make_case(lens, sinks=True, **shape), {}), (make_case(lens, window=100, **shape), {}),
        (make_case(lens, softcap=3.0, **shape), {}), (make_case(lens, **shape | {"dtype": torch.float32}), {}),
        (make_case(lens, DV=64, **shape), {}),
    ):
        out, lse = run(on_gpu(case), **how)
        case.expected.check(out.cpu(), lse.cpu())
    assert calls() == 0


def test_by_itself_it_takes_what_explain_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is long enough, with what is there; held to our own kernels, which others hold to the reference."""
    monkeypatch.delenv("WAVEFILL_PREFILL", raising=False)
    gpu_peer_setup.fa3()
    monkeypatch.setattr(libraries, "attend", counted(libraries.attend))
    T = 4096
    q = torch.randn(T, 32, 128, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(1, T, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    lens, starts = (torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([T], [0, T]))
    out, lse = wavefill.attention(q, k, v, lens, cu_seqlens_q=starts, return_lse=True)
    if torch.cuda.get_device_capability() == (9, 0):
        told = wavefill.explain([T], HQ=32, KH=8, D=128, page_size=None, q_lens=[T], device="h200").kernel
        assert calls() == told.startswith(prefill.FA3)
    own, own_lse = wavefill.attention(q, k, v, lens, cu_seqlens_q=starts, return_lse=True, schedule="stream_k")
    assert (out.float() - own.float()).abs().max().item() < 0.02
    assert (lse - own_lse).abs().max().item() < 1e-3


def test_a_gate_shuts_our_own_kernels_out() -> None:
    """Without a library: the same call with the gate open and shut, for each of our kernels of several query tokens."""
    for D, heads, lens, q_lens in ((128, 8, [700, 33], [650, 33]), (64, 32, [1100, 1100], [1100, 1100]),
                                   (80, 8, [700, 33], [650, 33])):
        case = make_case(lens, q_lens=q_lens, HQ=heads, KH=heads, D=D, dtype=torch.bfloat16)
        there = on_gpu(case)
        seen: list[Any] = []
        real = launch.run

        def noted(*args: Any, real: Any = real, seen: list[Any] = seen, **kwargs: Any) -> None:
            seen.append((args, kwargs))
            real(*args, **kwargs)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("wavefill.backends.gpu.run", noted)
            run(there, schedule="stream_k")
        (args, kwargs), = seen
        call, *tensors, out, lse = args
        for gate, written in ((0, False), (1, True)):
            out.fill_(7.0), lse.fill_(7.0)
            launch.run(call, *tensors, out, lse, **kwargs, gate=torch.tensor([gate], dtype=torch.int32, device="cuda"))
            if written:
                case.expected.check(out.cpu(), lse.cpu())
            assert written or (bool((out == 7).all()) and bool((lse == 7).all()))

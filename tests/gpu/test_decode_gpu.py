"""decode_attention on a GPU against the float64 oracle: shapes, layouts, lengths, schedules, graphs, determinism."""

from __future__ import annotations

import threading

import pytest
import torch
from gpu_inputs import hold, problem

import wavefill
from wavefill import Fixed, Invariant, StreamK

SCHEDULES = ("auto", "stream_k", "fixed", "invariant", Fixed(splits=3), Fixed(chunk=100),
             Fixed(rule="flashdecoding"), Invariant(chunk=64), StreamK(tile=32))


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_schedules(schedule: object) -> None:
    p = problem([0, 1, 17, 0, 300, 5000, 33], 32, 8, 128)
    hold(p, p.run(schedule=schedule))


@pytest.mark.parametrize("D", [16, 32, 48, 64, 80, 96, 112, 128, 192, 256])
def test_head_sizes(D: int) -> None:
    p = problem([333, 1, 2000], 8, 2, D)
    hold(p, p.run())


@pytest.mark.parametrize("G", [1, 2, 3, 5, 6, 7, 8, 12, 16, 17, 32, 40, 64, 128])
def test_groups(G: int) -> None:
    p = problem([333, 1, 2000], 2 * G, 2, 128)
    hold(p, p.run())


@pytest.mark.parametrize("G", [5, 16])
@pytest.mark.parametrize(("D", "DV"), [(192, 128), (128, 64), (64, 128), (96, 64), (16, 48)])
def test_value_sizes(D: int, DV: int, G: int) -> None:
    p = problem([333, 1, 900], 2 * G, 2, D, DV=DV)
    hold(p, p.run())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_dtypes(dtype: torch.dtype) -> None:
    p = problem([333, 1, 2000], 8, 2, 128, dtype=dtype)
    hold(p, p.run())


@pytest.mark.parametrize("page", [1, 2, 3, 7, 16, 32, 48, 64, 256, None])
@pytest.mark.parametrize("order", ["HND", "NHD", "KV"])
def test_layouts(page: int | None, order: str) -> None:
    p = problem([333, 1, 0, 1000], 8, 2, 64, page=page, order=order)
    hold(p, p.run())


@pytest.mark.parametrize("window", [1, 15, 16, 17, 64, 128, 1000, 2**40])
def test_window(window: int) -> None:
    p = problem([2048, 130, 128, 127, 1, 0], 8, 2, 128)
    for b, n in enumerate(p.lens.tolist()):  # pages that no query sees are not read
        assert p.table is not None
        for page in range(max(n - window, 0) // 16):
            p.k[p.table[b, page]] = p.v[p.table[b, page]] = float("nan")
            p.table[b, page] = -1
    fresh = problem([2048, 130, 128, 127, 1, 0], 8, 2, 128)
    hold(fresh, p.run(window=window), window=min(window, 4096))


def test_every_length() -> None:
    """B 64 at a time: every length from 0 to 1,279."""
    for first in range(0, 1280, 64):
        p = problem(list(range(first, first + 64)), 4, 1, 64, seed=first)
        hold(p, p.run())


@pytest.mark.parametrize("B", [1023, 1024, 1025, 5000])
def test_many_requests(B: int) -> None:
    p = problem([i % 37 for i in range(B)], 2, 1, 64)
    for schedule in ("stream_k", "fixed", "invariant"):
        hold(p, p.run(schedule=schedule))


def test_same_bits_every_time() -> None:
    """No float atomics, nobody's partial state missed: cold and warm caches, many times."""
    flush = torch.empty(1 << 26, device="cuda")
    for HQ, KH, D in ((32, 8, 128), (8, 2, 256), (64, 8, 64), (8, 2, 192), (40, 1, 128)):
        p = problem([300, 5000], HQ, KH, D)
        for schedule in ("stream_k", "invariant"):
            first, lse = p.run(schedule=schedule)
            hold(p, (first, lse))
            for turn in range(20):
                if turn % 2:
                    flush.zero_()
                again, again_lse = p.run(schedule=schedule)
                assert torch.equal(first, again)
                assert torch.equal(lse, again_lse)


@pytest.mark.parametrize(("HQ", "KH", "D"), [(8, 2, 256), (8, 2, 192), (32, 8, 128), (64, 8, 64), (40, 1, 128)])
def test_few_workers_refill_every_stage(HQ: int, KH: int, D: int) -> None:
    """A worker that walks many tiles overwrites stages: reads on their way must not meet the copy (seen at D 256)."""
    p = problem([300, 5000], HQ, KH, D)
    first = p.run(sm_budget=3)
    hold(p, first)
    for _ in range(30):
        torch.cuda.synchronize()
        assert torch.equal(first[0], p.run(sm_budget=3)[0])


def test_invariant_rows_do_not_depend_on_their_batch() -> None:
    p = problem([900, 1000, 120, 500], 8, 2, 128, width=1000)
    together, _ = p.run(schedule="invariant")
    for b in range(4):
        assert p.table is not None
        alone = wavefill.decode_attention(p.q[b : b + 1], p.k, p.v, p.lens[b : b + 1], p.table[b : b + 1, :64],
                                          schedule="invariant")
        assert torch.equal(alone[0], together[b])


def test_one_graph_for_any_lengths() -> None:
    """Captured short, replayed long, ragged, empty and short again."""
    p = problem([4000, 4096, 3000, 4090], 32, 8, 128)
    assert p.table is not None
    lens, out = p.lens.clone(), torch.empty_like(p.q)
    lens.fill_(1)
    wavefill.decode_attention(p.q, p.k, p.v, lens, p.table, out=out)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _, lse = wavefill.decode_attention(p.q, p.k, p.v, lens, p.table, out=out, return_lse=True)
    for now in ([4000, 4096, 3000, 4090], [0, 4096, 0, 1], [1, 2, 3, 4], [0, 0, 0, 0], [4000, 17, 3000, 0]):
        lens.copy_(torch.tensor(now, dtype=torch.int32))
        out.fill_(float("nan"))
        graph.replay()
        p.lens = lens
        hold(p, (out, lse))


def test_lengths_past_the_capacity_are_cut_to_it() -> None:
    p = problem([160, 160], 8, 2, 128)
    exact = p.run()
    p.lens = torch.tensor([161, 2**31 - 1], dtype=torch.int32, device="cuda")
    assert torch.equal(p.run()[0], exact[0])


def test_values_are_checked_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAVEFILL_CHECK", "1")
    p = problem([160, 10], 8, 2, 128)
    p.run()
    p.lens[1] = 161
    with pytest.raises(ValueError, match=r"seq_lens\[1\]: must be at most the cache's capacity of 160"):
        p.run()
    p.lens[1] = -1
    with pytest.raises(ValueError, match=r"seq_lens\[1\]: must not be negative"):
        p.run()
    p.lens[1] = 17  # its second slot leads out of the cache
    with pytest.raises(ValueError, match=r"block_table\[1, 1\]: must be a page id"):
        p.run()


def test_lengths_and_batches_compile_nothing_more() -> None:
    from wavefill.backends.gpu import kernels

    for lens in ([100], [17] * 40, [9000, 5], [3] * 300):  # each merge shape once
        p = problem(lens, 8, 2, 128)
        p.run()
    count = kernels.compiled_count
    for lens, width in (([5], 7), ([1000] * 3, 100), ([64] * 33, None), ([0, 4000], 999), ([2] * 299, 50)):
        p = problem(lens, 8, 2, 128, width=width)
        hold(p, p.run())
    assert kernels.compiled_count == count


def test_strides_and_offsets() -> None:
    p = problem([333, 20], 8, 2, 128)
    exact, _ = p.run()
    wide = torch.randn(2, 8, 3 * 128 + 1, device="cuda", dtype=torch.bfloat16)
    wide[..., 1:129] = p.q
    for q in (wide[..., 1:129], p.q.transpose(0, 1).contiguous().transpose(0, 1)):
        assert torch.equal(wavefill.decode_attention(q, p.k, p.v, p.lens, p.table), exact)
    out = torch.full((2, 8, 129), 7.0, device="cuda", dtype=torch.bfloat16)
    wavefill.decode_attention(p.q, p.k, p.v, p.lens, p.table, out=out[..., 1:])
    assert torch.equal(out[..., 1:], exact)
    assert bool((out[..., 0] == 7).all())


@pytest.mark.parametrize("shape", [(0, 16, 2, 64), (3, 0, 2, 64)], ids=str)
def test_caches_without_a_token(shape: tuple[int, int, int, int]) -> None:
    q, lens = torch.randn(3, 8, 64, device="cuda").bfloat16(), torch.zeros(3, dtype=torch.int32, device="cuda")
    cache = torch.empty(shape, device="cuda", dtype=torch.bfloat16)
    table = torch.zeros(3, 4, dtype=torch.int32, device="cuda") if shape[0] == 0 else None
    out, lse = wavefill.decode_attention(q, cache, cache, lens, table, return_lse=True)
    assert bool((out == 0).all())
    assert bool(torch.isneginf(lse).all())


def test_inductor_with_its_own_graphs() -> None:
    """Graph trees warm up in a pool of memory that they take back."""
    p = problem([333, 3000], 8, 1, 128)
    exact, _ = p.run()
    compiled = torch.compile(lambda: wavefill.decode_attention(p.q, p.k, p.v, p.lens, p.table) * 1,
                             mode="reduce-overhead")
    for _ in range(4):
        assert torch.equal(compiled().clone(), exact)


def test_a_thread_that_has_not_called_cuda() -> None:
    p = problem([333, 20], 24, 2, 112)
    results: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: results.append(p.run()[0]))
    thread.start()
    thread.join()
    assert torch.equal(results[0], p.run()[0])


def test_compile_and_opcheck() -> None:
    p = problem([333, 20], 8, 2, 128)
    compiled = torch.compile(lambda: wavefill.decode_attention(p.q, p.k, p.v, p.lens, p.table), fullgraph=True)
    assert torch.equal(compiled(), p.run()[0])
    torch.library.opcheck(torch.ops.wavefill.attention, (p.q, p.k, p.v, p.lens, p.table))


def test_side_streams() -> None:
    p = problem([3000, 20], 8, 2, 128)
    exact, _ = p.run()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    results = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(wavefill.decode_attention(p.q, p.k, p.v, p.lens, p.table))
    torch.cuda.synchronize()
    assert all(torch.equal(result, exact) for result in results)


def test_graphs_side_by_side() -> None:
    """Two graphs of one capture stream, replayed at once: their merges must not count each other's parts."""
    p = problem([30_000], 8, 1, 128)  # one unit, which all teams share
    exact, _ = p.run()
    capture, graphs, outs = torch.cuda.Stream(), [], []
    for _ in range(2):
        out = torch.empty_like(p.q)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=capture):
            wavefill.decode_attention(p.q, p.k, p.v, p.lens, p.table, out=out)
        graphs.append(graph)
        outs.append(out)
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(50):
        for graph, out, stream in zip(graphs, outs, streams, strict=True):
            with torch.cuda.stream(stream):
                out.fill_(float("nan"))
                graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, exact) for out in outs)


@pytest.mark.parametrize(("call", "match"), [
    (lambda p: p.run(impl="cpu"), "impl"), (lambda p: p.run(schedule=StreamK(tile=48)), "StreamK.tile"),
    (lambda p: p.run(sm_budget=0), "sm_budget"),
])
def test_refusals(call: object, match: str) -> None:
    with pytest.raises((ValueError, wavefill.BackendUnavailable), match=match):
        call(problem([20], 8, 2, 128))  # type: ignore[operator]


def test_head_sizes_past_the_kernels_are_refused() -> None:
    p = problem([20], 2, 1, 288)
    with pytest.raises(wavefill.BackendUnavailable, match="D is 288"):
        p.run()

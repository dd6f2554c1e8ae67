"""What of the GPU benchmark can be told without a GPU: what is rotated, what is refused a time, what passes a bar."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from wavefill import cli, spec
from wavefill.bench import (
    bars,
    gpu,
    gpu_peer_setup,
    gpu_peers,
    gpu_read,
    gpu_report,
    gpu_timing,
    inputs,
    suites,
    verify,
)
from wavefill.bench.timing import Samples

runner = CliRunner()
RAGGED = suites.Row("tiny-ragged", "R", HQ=6, KH=2, D=16, lens=(64, 16, 32, 16), cpu=True)
UNIFORM = suites.Row("tiny", "S", HQ=4, KH=2, D=16, lens=(48, 48), cpu=True)


# ---- copies and calls


@pytest.mark.parametrize(("kv_bytes", "copies"), [
    (4_194_304, 72), (134_217_728, 3), (150_000_000, 2), (300_000_000, 2), (3_758_096_384, 2),
])
def test_copies_make_up_the_rotated_bytes_and_are_two_at_least(kv_bytes: int, copies: int) -> None:
    assert gpu_timing.rotation(kv_bytes, 140 * 2**30, kv_bytes * 2) == copies


def test_copies_leave_half_of_the_free_memory_alone() -> None:
    assert gpu_timing.rotation(4_000_000, 80_000_000, 4_000_000) == 10
    assert gpu_timing.rotation(4_000_000_000, 5_000_000_000, 8_000_000_000) == 1


@pytest.mark.parametrize("kv_bytes", [4_194_304, 33_554_432, 536_870_912, 3_758_096_384])
def test_a_graph_holds_whole_rotations_and_lasts(kv_bytes: int) -> None:
    copies = gpu_timing.rotation(kv_bytes, 140 * 2**30, kv_bytes)
    calls = gpu_timing.calls_of(kv_bytes, copies)
    assert calls % copies == 0
    assert calls <= max(gpu_timing.MOST_CALLS, copies)
    assert calls * (kv_bytes / 4.8e12 + 3e-6) >= 500e-6


def test_host_time_is_that_of_the_calls_and_not_of_the_wait() -> None:
    now = [0.0]

    def call(copy: int) -> None:
        now[0] += 1e-6 * (1 + copy)

    def wait() -> None:
        now[0] += 1.0

    assert gpu_timing.host_seconds(call, 2, wait, lambda: now[0]) == pytest.approx(1.5e-6)


# ---- the read floor


@pytest.mark.parametrize(("page_bytes", "words"), [(4096, 1024), (16384, 2048), (2048, 512), (16 * 80 * 2, 128),
                                                   (16 * 60 * 2, 0), (6, 0)])
def test_a_page_is_read_in_pieces_of_a_power_of_two(page_bytes: int, words: int) -> None:
    assert gpu_read.unit_words(page_bytes) == words
    assert not words or page_bytes % (words * gpu_read.WORD) == 0


@pytest.mark.parametrize("order", inputs.ORDERS)
def test_the_pieces_cover_the_tables_pages_once(order: str) -> None:
    made = inputs.build(RAGGED, "bfloat16", "paged", 8, order=order, peers=False, count=1)
    cache, parts = made.copies[0].k, 2
    words = gpu_read._words(cache).view(-1, 8 * 16 * 2 // gpu_read.WORD // parts)
    assert made.block_table is not None
    pieces = gpu_read.units(made.block_table, RAGGED.KH, parts)
    assert sorted(pieces.tolist()) == list(range(len(words)))
    page = int(made.block_table[0, 0])
    if order == "HND":  # the first pieces are the first page of the first request's first head
        assert torch.equal(words[pieces[:parts].long()].view(torch.bfloat16).flatten(), cache[page, :, 0].flatten())


def test_programs_fit_the_shared_memory_and_the_work() -> None:
    staged = gpu_read.Config(2, 4, 4, 4)
    assert staged.programs(10**6, 1024, 132) == 3 * 132
    assert staged.programs(10**6, 2048, 132) == 132
    assert staged.programs(5, 1024, 132) == 5
    assert gpu_read.Config(1, 1, 4, None).programs(777, 1024, 132) == 777
    assert len({config.name for config in gpu_read.CONFIGS}) == len(gpu_read.CONFIGS)


# ---- inputs and the oracle


def test_pages_that_do_not_share_out_make_a_batch_even_to_a_page() -> None:
    row = replace(RAGGED, lens=(64, 16, 24))
    made = inputs.build(row, "float32", "paged", 8, peers=False, count=1)
    assert made.even is not None
    table, lens = made.even
    assert lens.tolist() == [40, 32, 32]
    assert sorted(table[table >= 0].tolist()) == list(range(13))
    assert [int((line >= 0).sum()) for line in table] == [5, 4, 4]


def test_the_oracle_of_some_requests_is_a_part_of_the_whole() -> None:
    for layout in inputs.LAYOUTS:
        made = inputs.build(RAGGED, "bfloat16", layout, 8, peers=False, count=1)
        assert torch.equal(verify.oracle(made, [0, 2]), verify.oracle(made)[[0, 2]])


def test_the_worst_requests_are_always_checked() -> None:
    lens = [10] * 100
    lens[17], lens[71] = 1000, 1
    sample = verify.sample(lens, 8)
    assert {0, 99, 17, 71} <= set(sample)
    assert len(sample) == 8
    assert verify.sample([1, 2, 3], 8) == [0, 1, 2]


# ---- peers


@pytest.fixture
def _looked_up_again() -> Any:
    caches = (gpu_peer_setup.flashinfer, gpu_peer_setup.fa3)
    for cached in caches:
        cached.cache_clear()
    yield
    for cached in caches:
        cached.cache_clear()


@pytest.mark.usefixtures("_looked_up_again")
def test_peers_that_are_not_here_say_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu_peer_setup.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("WAVEFILL_PEERS", raising=False)
    by_name = {peer.name: peer for peer in gpu_peers.PEERS}
    assert "no fa3.so" in str(by_name["fa3"].gap(UNIFORM))
    assert "WAVEFILL_PEERS names no folder" in str(by_name["xqa"].gap(RAGGED))
    gpu_peer_setup.flashinfer.cache_clear()
    monkeypatch.setenv("WAVEFILL_PEERS", str(tmp_path))
    assert str(tmp_path / "site") in str(by_name["flashinfer"].gap(UNIFORM))
    assert gpu_peer_setup.precompile([UNIFORM], ["xqa"], 16, torch.bfloat16) == []


@pytest.mark.usefixtures("_looked_up_again")
def test_a_library_that_does_not_load_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "fa3.so").write_bytes(b"no library")
    monkeypatch.setenv("WAVEFILL_PEERS", str(tmp_path))
    assert "fa3.so does not load" in str(gpu_peer_setup.fa3())


def test_contiguous_peers_take_no_ragged_batch() -> None:
    for peer in gpu_peers.PEERS:
        assert (peer.gap(RAGGED) == "takes no ragged batch") == (not peer.paged)
    assert set(bars.PAGED) == set(gpu_peers.PAGED)


def test_a_batch_as_flashinfer_takes_it() -> None:
    made = inputs.build(replace(RAGGED, lens=(64, 17, 32, 1)), "bfloat16", "paged", 16, peers=False, count=1)
    csr = gpu_peers._Csr.of(made)
    assert csr.indptr.tolist() == [0, 4, 6, 8, 9]
    assert csr.last.tolist() == [16, 1, 16, 1]
    assert made.block_table is not None
    assert csr.indices[4:6].tolist() == made.block_table[1, :2].tolist()
    assert int(gpu_peers._table(made).min()) >= 0
    k, _ = gpu_peers._pages(made)[0]
    assert k.is_contiguous()
    assert k.shape == (9, RAGGED.KH, 16, RAGGED.D)


def test_sdpa_as_a_peer_computes_the_same_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    made = inputs.build(UNIFORM, "bfloat16", "paged", 8, peers=True, count=2)
    exact = verify.oracle(made)
    for folded in (False, True):
        call = gpu_peers._sdpa("MATH", folded=folded)(made).call
        assert verify.error(call(1), exact) <= verify.peer_bound(exact, torch.bfloat16)


def test_choosing_peers() -> None:
    assert "flex" not in [peer.name for peer in gpu.choose_peers(None)]
    assert [peer.name for peer in gpu.choose_peers("xqa, fa3,xqa")] == ["xqa", "fa3"]
    assert gpu.choose_peers("none") == ()
    assert gpu.choose_peers("all") == gpu_peers.PEERS
    with pytest.raises(spec.InvalidArgument, match="--peers: takes all, none"):
        gpu.choose_peers("fa2")


# ---- a run, with a clock in place of the GPU


class Clock:
    """A timer that runs the calls and says that each takes as long as its variant's name."""

    def __init__(self, count: int, calls: int) -> None:
        self.graphs: dict[str, Any] = {}

    def add(self, variants: dict[str, Callable[[int], object]]) -> None:
        for name, call in variants.items():
            call(0)
            self.graphs[name] = call

    def measure(self, seconds: float) -> gpu_timing.Measurement:
        return gpu_timing.Measurement({name: Samples((len(name) * 1e-6,)) for name in self.graphs}, {}, ("xqa",))

    def close(self) -> None:
        self.graphs.clear()


@pytest.fixture
def _no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "require", lambda: None)
    monkeypatch.setattr(gpu, "Timer", Clock)
    monkeypatch.setattr(gpu, "_read", lambda made, timer, variants, absent: (None, {}))
    monkeypatch.setattr(gpu, "facts", lambda: {"gpu": "a made-up GPU", "driver": None, "cuda": "13.0"})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (UNIFORM.kv_bytes("bfloat16") * 12, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


def _peer(name: str, call: Callable[[inputs.Inputs, int], torch.Tensor], *, paged: bool = True) -> gpu_peers.GpuPeer:
    return gpu_peers.GpuPeer(name, paged, lambda: None,
                             lambda made: gpu_peers.Prepared(lambda copy: call(made, copy), 1e-4))


def _right(made: inputs.Inputs, copy: int) -> torch.Tensor:
    kv = made.copies[copy]
    return verify.reference.attention(made.q, kv.k, kv.v, made.lens, made.block_table)[0].to(made.q.dtype)


@pytest.mark.usefixtures("_no_gpu_needed")
def test_a_row_times_what_is_right_and_says_what_is_not() -> None:
    def breaks(made: inputs.Inputs, copy: int) -> torch.Tensor:
        raise RuntimeError("no kernel\nfor this")

    peers = [_peer("fa3", _right), _peer("xqa", lambda made, copy: _right(made, copy) * 1.1),
             _peer("flashinfer", breaks), _peer("cudnn", _right, paged=False),
             _peer("flex", lambda made, copy: _right(made, copy) if copy == 0 else _right(made, copy) * math.nan)]
    (result,), notes = gpu.run([RAGGED], dtype="bfloat16", page_size=8, schedules=("auto", "flashdecoding"),
                               peers=peers)
    assert not notes
    assert set(result.times) == {"wavefill", "wavefill:flashdecoding", "wavefill:even", "fa3"}
    assert "wrong result" in result.absent["xqa"]
    assert result.absent["flashinfer"] == "failed: RuntimeError: no kernel"
    assert result.absent["cudnn"] == "takes no ragged batch"
    assert "wrong result: error inf" in result.absent["flex"]  # right on the first copy, wrong on the last
    assert result.correct
    assert result.host_s.keys() == {"wavefill", "fa3"}
    assert result.plan_s == {"fa3": 1e-4}
    found = result.to_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["plan_us"]["fa3"] == pytest.approx(100)


@pytest.mark.usefixtures("_no_gpu_needed")
def test_a_call_that_leaves_its_output_as_it_was_is_wrong() -> None:
    outs: list[torch.Tensor] = []

    def once(made: inputs.Inputs, copy: int) -> torch.Tensor:
        if not outs:
            outs.append(_right(made, copy))
        return outs[0]

    (result,), _ = gpu.run([UNIFORM], dtype="bfloat16", page_size=8, schedules=("auto",), peers=[_peer("fa3", once)])
    assert "wrong result" in result.absent["fa3"]


@pytest.mark.usefixtures("_no_gpu_needed")
def test_a_schedule_that_is_wrong_or_fails_gets_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    right = gpu._attend

    def attend(made: inputs.Inputs, out: torch.Tensor, schedule: spec.ScheduleArg, copy: int) -> torch.Tensor:
        if schedule == "fixed":
            raise RuntimeError("out of registers")
        result = right(made, out, schedule, copy)
        if schedule == "auto":
            result[-1, -1, -1] = math.nan  # one element that the kernel left out
        return result

    monkeypatch.setattr(gpu, "_attend", attend)
    (result,), _ = gpu.run([UNIFORM], dtype="bfloat16", page_size=8, schedules=("auto", "fixed", "stream_k"))
    assert set(result.times) == {"wavefill:stream_k"}
    assert "wrong result" in result.absent["wavefill"]
    assert result.absent["wavefill:fixed"] == "failed: RuntimeError: out of registers"
    assert not result.correct
    bar = bars.evaluate([result])[0]
    assert bar.ok is False
    assert "wavefill wrong result" in gpu_report.line(result)


@pytest.mark.usefixtures("_no_gpu_needed")
def test_a_row_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    right, dead = gpu.build, False

    def build(row: suites.Row, *arguments: Any, **options: Any) -> inputs.Inputs:
        if row.name == "huge":
            raise torch.OutOfMemoryError("CUDA out of memory")
        return right(row, *arguments, **options)

    def synchronize() -> None:
        if dead:
            raise RuntimeError("an illegal memory access")

    monkeypatch.setattr(gpu, "build", build)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    rows = [replace(UNIFORM, name="huge"), UNIFORM]
    results, notes = gpu.run(rows, dtype="bfloat16", page_size=8, schedules=("auto",))
    assert results[0].absent == {"wavefill": "failed: OutOfMemoryError: CUDA out of memory"}
    assert "wavefill" in results[1].times
    assert not notes
    dead = True
    results, notes = gpu.run(rows, dtype="bfloat16", page_size=8, schedules=("auto",))
    assert len(results) == 1
    assert "ended after huge: failed: RuntimeError: an illegal memory access" in notes[0]


@pytest.mark.usefixtures("_no_gpu_needed")
def test_the_command_on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(suites, "load", lambda: suites.Suite(8, (UNIFORM, replace(RAGGED, cpu=False))))
    file, picture = tmp_path / "gpu.json", tmp_path / "new" / "gpu.png"
    done = runner.invoke(cli.app, ["bench", "kernels", "--device", "cuda", "--no-peers", "--seconds", "0",
                                   "--output", str(file), "--plot", str(picture)])
    assert done.exit_code == 0, done.output
    assert "a made-up GPU" in done.stdout
    assert "host time of a call" in done.stdout
    assert "tiny-ragged: read none, wavefill 8.0 us" in done.stderr
    found = json.loads(file.read_text())
    assert [row["row"] for row in found["results"]] == ["tiny", "tiny-ragged"]
    assert found["schedule"] == "auto"
    assert "wavefill:flashdecoding" in found["results"][0]["times_us"]
    assert {bar["bar"] for bar in found["bars"]} >= {"host time of a call", "no row behind the best paged peer"}
    assert picture.read_bytes().startswith(b"\x89PNG")


# ---- the command line without a GPU


@pytest.mark.parametrize(("options", "words"), [
    (["--device", "cuda"], "--device: cuda needs a GPU that PyTorch can use"),
    (["--device", "gpu"], "--device: must be cpu or cuda"),
    (["--device", "cuda", "--layout", "contiguous"], "--layout: must be paged on a GPU"),
    (["--device", "cuda", "--dtype", "float32"], "--dtype: must be bfloat16 or float16 on a GPU"),
    (["--device", "cuda", "--schedules", "lean"], "flashdecoding, unsplit"),
    (["--device", "cuda", "--peers", "fa2"], "--peers: takes all, none"),
    (["--schedules", "flashdecoding"], "--schedules: takes all, or some of auto, stream_k, fixed, invariant;"),
    (["--quick"], "--quick: is for --device cuda"), (["--peers", "fa3"], "--peers: must be all or none on a CPU"),
])
def test_options_that_do_not_go_together(monkeypatch: pytest.MonkeyPatch, options: list[str], words: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    done = runner.invoke(cli.app, ["bench", "kernels", *options])
    assert done.exit_code == 2, done.output
    assert words in done.stderr


# ---- bars, tables


def _result(size: str = "S", floor: float = 10.0, ours: float | None = 12.0, D: int = 128, name: str = "row",
            lens: tuple[int, ...] = (64, 64), **others: float) -> gpu.GpuResult:
    times = {"read": floor, **others} if ours is None else {"read": floor, "wavefill": ours, **others}
    row = suites.Row(name, size, 8, 2, D, lens, cpu=False)
    return gpu.GpuResult(row, "bfloat16", 48_000_000,
                         {n.replace("__", ":"): Samples((us * 1e-6,)) for n, us in times.items()}, {}, {},
                         {"wavefill": 2e-5})


@pytest.mark.parametrize(("size", "D", "floor", "most"), [
    ("S", 128, 10, 12.5), ("M", 128, 20, 23.5), ("M", 128, 100, 112), ("L", 128, 200, 210), ("L", 64, 200, 220),
    ("R", 128, 200, 212),
])
def test_each_class_has_its_limit(size: str, D: int, floor: float, most: float) -> None:
    for ours, ok in ((most - 0.01, True), (most + 0.01, False)):
        bar = bars.evaluate([_result(size, floor, ours, D)])[0]
        assert bar.ok is ok
        assert bar.limit == pytest.approx(most * 1e-6)


def test_a_bar_shows_its_worst_row() -> None:
    found = {bar.name: bar for bar in bars.evaluate([
        _result(name="good", ours=11.0, fa3=20.0, xqa=15.0), _result(name="bad", ours=14.0, fa3=13.5, sdpa_flash=5.0)])}
    floor = found["S: each row near its read floor"]
    assert (floor.where, floor.ok) == ("bad", False)
    mean = found["S: best paged peer over wavefill, mean"]
    assert mean.value == pytest.approx(math.sqrt(15 / 11 * 13.5 / 14))
    assert mean.ok is False
    behind = found["no row behind the best paged peer"]
    assert (behind.where, behind.ok) == ("bad", False)
    assert behind.value == pytest.approx(14 / 13.5)  # sdpa reads contiguous KV and is no bar


def test_ragged_rows_are_held_against_even_ones_and_invariant_against_auto() -> None:
    found = {bar.name: bar for bar in bars.evaluate([
        _result("R", 100, 104, name="r", lens=(64, 16), wavefill__even=100.0, fa3=120.0),
        _result("R", 100, 101, name="uniform"),
        _result("L", 100, 101, name="l", wavefill__invariant=112.0)])}
    assert found["R: each row near an even batch"].value == pytest.approx(1.04)
    assert found["R: each row near an even batch"].ok is True
    assert found["R: best paged peer over wavefill, mean"].value == pytest.approx(120 / 104)
    assert found["L: invariant over the first schedule"].ok is False


def test_what_was_not_measured_passes_nothing() -> None:
    found = bars.evaluate([_result("R", ours=None), _result("L", ours=None)], {"a": 3e-5, "b": 1e-5})
    assert [bar.ok for bar in found if bar.name != "host time of a call"] == [None] * (len(found) - 1)
    host = found[-1]
    assert (host.where, host.ok) == ("a", False)
    assert json.loads(json.dumps([bar.to_dict() for bar in found]))


def test_the_summary_is_of_geometric_means() -> None:
    line, = bars.summary([_result(ours=10, fa3=20, wavefill__fixed=20, wavefill__stream_k=10),
                          _result(ours=20, fa3=80, wavefill__fixed=20, wavefill__stream_k=40)])
    assert line["read_share"] == pytest.approx(math.sqrt(0.5))
    assert line["best_paged_ratio"] == pytest.approx(math.sqrt(8))
    assert line["fixed_over_stream_k"] == pytest.approx(1.0)
    assert line["invariant_over_first"] is None


def test_the_tables_and_the_notes() -> None:
    result = replace(_result(ours=12.5, fa3=20.04, xqa=25.0, wavefill__fixed=13.0),
                     absent={"cudnn": "failed: no engine", "wavefill:invariant": "wrong result: error 1"},
                     plan_s={"fa3": 2e-4}, apart=("xqa",))
    other = replace(_result(name="other", ours=1500.0, floor=1400.0), absent={"cudnn": "failed: no engine"})
    header, cells = gpu_report.table([result, other])
    row = dict(zip(header, cells[0], strict=True))
    assert row["read floor"] == "10.0 us"
    assert row["wavefill"] == "12.5 us"
    assert row["of read"] == "80%"
    assert row["GB/s"] == "3,840"
    assert row["fa3"] == "20.0 us"
    assert row["best paged / ours"] == "1.60x"
    assert row["fixed"] == "13.0 us"
    assert row["invariant"] == "WRONG"
    assert row["host"] == "20.0 us"
    assert dict(zip(header, cells[1], strict=True))["wavefill"] == "1.5 ms"
    notes = gpu_report.notes([result, other])
    assert "cudnn: failed: no engine (all rows)" in notes
    assert any("xqa: a kernel between the calls" in note and "(row)" in note for note in notes)
    assert any("fa3: its host step" in note and "200.0 us" in note for note in notes)
    verdicts = [line[1] for line in gpu_report.bar_table(bars.evaluate([result, other]))[1]]
    assert {"pass", "FAIL", "not measured"} >= set(verdicts)
    assert "FAIL" in verdicts

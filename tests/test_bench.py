"""The benchmark's own logic: what is rotated, what a median is, what is refused a time. No time is asserted."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from wavefill import cli, spec
from wavefill.bench import cpu, inputs, overhead, peers, probing, report, suites, timing, verify
from wavefill.bench.divergence import compare

UNIFORM = suites.Row("tiny", "S", HQ=4, KH=2, D=16, lens=(40, 40), cpu=True)
RAGGED = suites.Row("tiny-ragged", "R", HQ=6, KH=2, D=8, lens=(64, 16, 16), cpu=True)
runner = CliRunner()


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three copies of the uniform row in place of a gigabyte, and no compiling."""
    monkeypatch.setattr(timing, "ROTATED_BYTES", 3 * UNIFORM.kv_bytes("bfloat16"))
    monkeypatch.setattr(peers, "flex", lambda: "not run in this test")
    monkeypatch.setattr(cpu, "flex", lambda: "not run in this test")


def test_the_suite_is_whole() -> None:
    suite = suites.load()
    assert suite.page_size == 16
    assert len(suite.rows) == 22
    by_name = {row.name: row for row in suite.rows}
    ragged = by_name["llama8b-ragged-two-long"]
    assert len(ragged.lens) == 16
    assert ragged.tokens == 131072 + 65536 + 14 * 4096
    assert ragged.ragged
    assert not by_name["llama8b-b16-8k"].ragged
    assert by_name["llama8b-b1-64k"].kv_bytes("bfloat16") == 65536 * 8 * 2 * 128 * 2
    for row in suite.rows:
        row.spec("bfloat16", suite.page_size)
        if row.size != "R":
            megabytes = row.kv_bytes("bfloat16") / 1e6
            assert row.size == ("S" if megabytes < 40 else "M" if megabytes <= 300 else "L")


def test_selecting_rows() -> None:
    suite = suites.load()
    assert [row.name for row in suite.select() if not row.cpu] == []
    assert len(suite.select()) == 8
    assert [row.name for row in suite.select(["llama8b-b1-8k"])] == ["llama8b-b1-8k"]
    assert [row.name for row in suite.select(["gpt-oss", "gpt-oss-b8-16k"])] == ["gpt-oss-b8-16k", "gpt-oss-b8-32k"]
    with pytest.raises(spec.InvalidArgument, match="rows: must be among"):
        suite.select(["llama9"])


@pytest.mark.parametrize(("nbytes", "count"), [
    (1 << 30, 1), (1 << 31, 1), ((1 << 30) - 1, 2), (1 << 22, 256), (0, 1 << 30),
])
def test_copies_make_up_the_rotated_bytes(monkeypatch: pytest.MonkeyPatch, nbytes: int, count: int) -> None:
    monkeypatch.setattr(timing, "ROTATED_BYTES", 1 << 30)
    assert timing.copies(nbytes) == count


def test_between_two_uses_of_a_copy_all_others_are_used() -> None:
    used: list[int] = []
    calls: dict[str, Callable[[int], object]] = dict.fromkeys("abc", used.append)
    samples = timing.interleave(calls, 4, budget=0.0)
    assert all(len(s.seconds) == timing.MIN_ROUNDS for s in samples.values())
    assert len(used) == 3 * (timing.MIN_ROUNDS + 1)
    for i in range(4, len(used)):
        assert sorted(used[i - 4:i]) == [0, 1, 2, 3]


def test_each_variant_gets_its_own_times() -> None:
    now = [0.0]

    def takes(seconds: float) -> Callable[[int], object]:
        def call(_: int) -> None:
            now[0] += seconds
        return call

    samples = timing.interleave({"fast": takes(1.0), "slow": takes(3.0)}, 2, budget=40.0, clock=lambda: now[0])
    assert samples["fast"].median == pytest.approx(1.0)
    assert samples["slow"].median == pytest.approx(3.0)
    assert len(samples["fast"].seconds) == 10  # 40 s at 4 s a round


def test_median_and_spread() -> None:
    samples = timing.Samples((1.0, 2.0, 3.0, 4.0, 100.0))
    assert samples.median == 3.0
    assert samples.spread == pytest.approx((52.0 - 1.5) / 2 / 3.0)
    assert timing.Samples((2.0, 2.0)).spread == 0.0


@pytest.mark.parametrize("row", [UNIFORM, RAGGED], ids=lambda row: row.name)
@pytest.mark.parametrize("order", inputs.ORDERS)
@pytest.mark.parametrize("layout", inputs.LAYOUTS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_every_variant_computes_the_same_attention(row: suites.Row, layout: str, order: str, dtype: str) -> None:
    made = inputs.build(row, dtype, layout, 8, order=order, peers=True)
    assert len(made.copies) == timing.copies(row.kv_bytes(dtype))
    exact = verify.oracle(made)
    for copy in made.copies:
        assert verify.error(peers.sdpa(made, copy), exact) <= verify.peer_bound(exact, made.q.dtype)
    assert sum(s.numel() for s in made.copies[0].spans(made.lens, made.block_table)) * made.q.itemsize \
        == row.kv_bytes(dtype)
    for i in range(len(made.copies)):
        result = cpu._attend(made, i, "stream_k")
        assert verify.error(result, exact) <= verify.bound(exact, made.q.dtype, None)


def test_pages_are_shuffled_and_slots_past_the_end_are_no_pages() -> None:
    table = inputs.build(RAGGED, "float32", "paged", 8, peers=False).block_table
    assert table is not None
    assert table.shape == (3, 8)
    assert sorted(table[table >= 0].tolist()) == list(range(12))
    assert table[table >= 0].tolist() != list(range(12))
    assert (table[1, 2:] == -1).all()


def test_the_even_batch_reads_the_same_pages() -> None:
    made = inputs.build(RAGGED, "float32", "paged", 8, peers=False)
    assert made.even is not None
    table, lens = made.even
    assert lens.tolist() == [32, 32, 32]
    assert sorted(table.flatten().tolist()) == list(range(12))
    assert inputs.build(UNIFORM, "float32", "paged", 8, peers=False).even is None
    assert inputs.build(RAGGED, "float32", "contiguous", 8, peers=False).even is None


def test_a_run_times_all_variants() -> None:
    result, = cpu.run([RAGGED], dtype="bfloat16", layout="paged", page_size=8, schedules=cpu.SCHEDULES, seconds=0.0)
    assert set(result.times) == {"wavefill", "wavefill:stream_k", "wavefill:fixed", "wavefill:invariant",
                                 "wavefill:even", "sdpa", "sdpa G as rows", "read"}
    assert result.absent == {"flex": "not run in this test"}
    assert result.correct
    found = result.to_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["speedup"]["sdpa"] == pytest.approx(
        found["times_us"]["sdpa"]["median"] / found["times_us"]["wavefill"]["median"])


def test_a_wrong_result_gets_no_time_and_no_speedup(monkeypatch: pytest.MonkeyPatch) -> None:
    right = cpu._attend
    monkeypatch.setattr(cpu, "_attend", lambda made, copy, schedule: right(made, copy, schedule) * 1.1)
    result, = cpu.run([UNIFORM], dtype="bfloat16", layout="paged", page_size=8, seconds=0.0)
    assert "wavefill" not in result.times
    assert "wrong result" in result.absent["wavefill"]
    assert not result.correct
    assert result.speedup("sdpa") is None
    assert result.read_share() is None
    header, (cells,) = report.kernel_table([result])
    assert cells[header.index("wavefill")] == "WRONG"
    assert cells[header.index("speed-up")] == "-"


@pytest.mark.parametrize("fault", ["nan", "raises", "wrong"])
def test_a_peer_that_fails_is_absent_with_a_reason(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    def call(made: inputs.Inputs, copy: inputs.Copy) -> torch.Tensor:
        if fault == "raises":
            raise RuntimeError("no kernel for this\nand more")
        return torch.full_like(made.q, math.nan if fault == "nan" else 1.0)

    monkeypatch.setattr(cpu, "sdpa", call)
    result, = cpu.run([UNIFORM], dtype="float32", layout="contiguous", page_size=8, seconds=0.0)
    assert "sdpa" not in result.times
    reason = "failed: RuntimeError: no kernel for this" if fault == "raises" else "wrong result"
    assert reason in result.absent["sdpa"]
    assert result.correct  # a peer's fault is not wavefill's


def test_flex_gives_its_reason_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr("wavefill.bench.peers.sys.platform", "linux")
    monkeypatch.setattr("wavefill.bench.peers.shutil.which", lambda name: None)
    assert "C++ compiler" in str(peers.flex())


@pytest.mark.parametrize(("seconds", "text"), [
    (2.5e-6, "2.5 us"), (0.00098, "980 us"), (0.0123, "12.3 ms"), (2.0, "2,000 ms"),
])
def test_durations(seconds: float, text: str) -> None:
    assert report.duration(seconds) == text


def _result(**changes: Any) -> cpu.RowResult:
    times = {name: timing.Samples((value,)) for name, value in (("wavefill", 0.002), ("read", 0.0015), ("sdpa", 0.008))}
    values = {"row": RAGGED, "dtype": "bfloat16", "kv_bytes": 30_000_000, "times": times, "errors": {"wavefill": 1e-4},
              "absent": {"flex": "no compiler"}}
    return cpu.RowResult(**{**values, **changes})


def test_the_table_states_bandwidth_floor_and_speedups() -> None:
    header, (cells,) = report.kernel_table([_result()])
    row = dict(zip(header[:7], cells, strict=False))
    assert row == {"row": "tiny-ragged", "KV": "29 MB", "wavefill": "2 ms", "GB/s": "15.0", "of read": "75%",
                   "read floor": "1.5 ms", "sdpa": "8 ms"}
    assert cells[7] == "4.00x"
    notes = report.kernel_notes([_result()])
    assert any("flex: no compiler (all rows)" in note for note in notes)
    assert any("once a request" in note for note in notes)


def test_markdown() -> None:
    text = report.markdown(["row", "time"], [["a", "1 us"], ["b", "2 us"]])
    assert text == "| row | time |\n| --- | ---: |\n| a | 1 us |\n| b | 2 us |\n"


def test_provenance_says_where_numbers_come_from() -> None:
    facts = probing.provenance(2)
    assert facts["threads"] == 2
    assert facts["versions"]["torch"] == torch.__version__
    for key in ("command", "cpu", "cores", "isa", "system"):
        assert facts[key], key


@pytest.fixture
def _suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suites, "load", lambda: suites.Suite(8, (UNIFORM, RAGGED)))


@pytest.mark.usefixtures("_suite")
def test_bench_kernels_on_the_command_line(tmp_path: Path) -> None:
    file = tmp_path / "results" / "kernels.md"
    result = runner.invoke(cli.app, ["bench", "kernels", "--seconds", "0", "--json", "--output", str(file)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [row["row"] for row in found["results"]] == ["tiny", "tiny-ragged"]
    assert found["page_size"] == 8
    assert found["layout"] == "paged"
    assert "| tiny-ragged |" in file.read_text()
    text = runner.invoke(cli.app, ["bench", "kernels", "--seconds", "0", "--rows", "tiny-r", "--schedules", "all"])
    assert "invariant" in text.stdout
    assert "not run in this test" in text.stdout


@pytest.mark.usefixtures("_suite")
def test_bench_without_a_subcommand_runs_the_kernels() -> None:
    result = runner.invoke(cli.app, ["bench"])
    assert result.exit_code == 0, result.output
    assert "tiny-ragged" in result.stdout


@pytest.mark.usefixtures("_suite")
def test_a_wrong_result_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_attend", lambda made, copy, schedule: torch.zeros_like(made.q))
    result = runner.invoke(cli.app, ["bench", "kernels", "--seconds", "0"])
    assert result.exit_code == 1
    assert "WRONG" in result.stdout
    assert "wavefill gave a wrong result" in result.stderr


def test_bench_overhead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overhead, "CALLS", 2)
    monkeypatch.setattr(overhead, "REPEATS", 2)
    monkeypatch.setattr(overhead, "REQUESTS", 100)
    monkeypatch.setattr(overhead, "LONG_REPEATS", 1)
    result = runner.invoke(cli.app, ["bench", "overhead", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["results"]
    assert rows[0]["call"] == "decode_attention, paged"
    assert all(row["us"] > 0 for row in rows)


class TestDivergence:
    """Tokens of wavefill and sdpa on logits that differ by rounding, or by more."""

    EPS = torch.finfo(torch.float32).eps

    def _compare(self, mine: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor) -> Any:
        same = torch.tensor([0.0, 3.0, 1.0])
        logits = ([same, mine], [same + 1e-6, theirs])
        tokens = tuple([int(step.argmax()) for step in steps] for steps in logits)
        return compare(tokens, logits, lambda index: exact if index == 1 else pytest.fail("asked elsewhere"),  # type: ignore[arg-type]
                       self.EPS)

    def test_identical(self) -> None:
        step = torch.tensor([2.0, 1.0, 0.0])
        result = self._compare(step, step - 2e-6, step)
        assert result.identical
        assert result.acceptable
        assert result.first_difference is None
        assert result.max_logit_difference == pytest.approx(2e-6, rel=0.1)

    def test_a_tie_within_rounding(self) -> None:
        exact = torch.tensor([2.0, 2.0 + 3e-7, 0.0], dtype=torch.float64)
        mine, theirs = torch.tensor([2.0 + 5e-7, 2.0, 0.0]), torch.tensor([2.0, 2.0 + 5e-7, 0.0])
        first = self._compare(mine, theirs, exact).first_difference
        assert first.index == 1
        assert first.tokens == (0, 1)
        assert first.within_rounding
        assert first.gaps[0] > 0 < first.gaps[1]

    def test_a_fault_of_ours_is_more_than_rounding(self) -> None:
        exact = torch.tensor([2.0, 2.1, 0.0], dtype=torch.float64)
        result = self._compare(torch.tensor([2.2, 2.1, 0.0]), torch.tensor([2.0, 2.1, 0.0]), exact)
        assert not result.first_difference.within_rounding
        assert not result.acceptable

    def test_a_fault_of_theirs_is_not_rounding_either(self) -> None:
        exact = torch.tensor([2.5, 2.0, 0.0], dtype=torch.float64)
        result = self._compare(torch.tensor([2.5, 2.0, 0.0]), torch.tensor([2.0, 2.1, 0.0]), exact)
        assert result.first_difference.errors[0] < 1e-6
        assert result.first_difference.exact_gap == pytest.approx(0.5)
        assert not result.acceptable

    def test_the_verdict_in_words(self) -> None:
        step = torch.tensor([2.0, 1.0, 0.0])
        assert "all 2 tokens are identical" in report.verdict({"tokens": self._compare(step, step, step).to_dict()})
        far = self._compare(torch.tensor([2.2, 2.1, 0.0]), torch.tensor([2.0, 2.1, 0.0]), torch.tensor([2.0, 2.1, 0.0]))
        assert "MORE THAN ROUNDING" in report.verdict({"tokens": far.to_dict(), "sdpa": {"attention": "sdpa"}})



"""What of the GPU benchmark of several query tokens can be told without a GPU: work, cases, checks, bars, tables."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from wavefill import reference
from wavefill.bench import (
    gpu,
    gpu_several,
    gpu_several_cases,
    gpu_several_peers,
    gpu_several_report,
    gpu_timing,
    suites,
)
from wavefill.bench.gpu_several import Outcome
from wavefill.bench.gpu_several_cases import Group, Plan, Section
from wavefill.bench.gpu_several_peers import Case, Library
from wavefill.bench.timing import Samples
from wavefill.spec import InvalidArgument

TINY = suites.Row("tiny", "L", HQ=4, KH=2, D=16, lens=(64, 64), cpu=False)


class Clock:
    """A timer that runs the calls and says that each takes as many microseconds as its name has letters."""

    def __init__(self, count: int, calls: int) -> None:
        self._names: list[str] = []

    def add(self, variants: dict[str, Callable[[int], object]]) -> None:
        for name, call in variants.items():
            call(0)
            self._names.append(name)

    def measure(self, seconds: float) -> gpu_timing.Measurement:
        return gpu_timing.Measurement({name: Samples((len(name) * 1e-6,)) for name in self._names})

    def close(self) -> None:
        self._names.clear()


@pytest.fixture
def _no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "DEVICE", "cpu")
    monkeypatch.setattr(gpu, "_read", lambda made, timer, variants, absent: variants.update(read=lambda copy: None))
    monkeypatch.setattr(gpu_several, "Timer", Clock)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 20, 0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)


# ---- work


@pytest.mark.parametrize("window", [None, 1, 5, 9, 12, 100])
@pytest.mark.parametrize(("n", "q_len"), [(9, 1), (9, 4), (9, 9), (12, 7)])
def test_pairs_and_keys_are_those_that_are_seen(n: int, q_len: int, window: int | None) -> None:
    position = torch.arange(n - q_len, n).unsqueeze(1)
    seen = torch.arange(n) <= position
    if window is not None:
        seen &= torch.arange(n) > position - window
    assert gpu_several_cases.pairs(n, q_len, window) == int(seen.sum())
    assert gpu_several_cases.keys_read(n, q_len, window) == int(seen.any(0).sum())


def test_the_work_of_a_prompt() -> None:
    row = replace(TINY, HQ=32, KH=8, D=128, lens=(8192,))
    assert gpu_several_cases.flops(row, 8192, None) == 4 * 32 * 128 * 8192 * 8193 // 2
    assert gpu_several_cases.read_row(row, 256, 4096).lens == (4351,)


# ---- sections


def test_drafts_are_rows_whose_tokens_share_one_tile() -> None:
    rows = gpu_several_cases.draft_rows()
    assert {row.size for row in rows} == {"M", "L"}
    lens = {row.name: gpu_several_cases.draft_lens(row) for row in rows}
    assert lens["llama8b-b16-8k"] == (1, 4, 8)
    assert lens["qwen3-235b-tp4-b16-16k"] == (1, 4)


def test_sections_name_libraries_that_there_are_and_bars_their_cases() -> None:
    every = gpu_several_cases.sections()
    assert gpu_several_cases.choose(None) == tuple(every) == ("drafts", "prompts", "chunks", "windows", "libraries")
    assert gpu_several_cases.choose("windows,drafts,windows") == ("windows", "drafts")
    known = {library.name for library in gpu_several_peers.LIBRARIES}
    assert all(known.issuperset(section.libraries) for section in every.values())
    assert set(gpu_several_report.PROMPTS) == set(gpu_several_cases.PROMPTS)
    assert set(gpu_several_report.CHUNKS) == set(gpu_several_cases.CHUNK_WINDOWS)
    with pytest.raises(InvalidArgument, match="--sections: takes some of drafts, prompts"):
        gpu_several_cases.choose("draft")


def test_libraries_by_name() -> None:
    assert [library.name for library in gpu_several_peers.choose("cudnn,fa3")] == ["cudnn", "fa3"]
    assert gpu_several_peers.choose("none") == ()
    assert "flashinfer_fa3" not in {library.name for library in gpu_several_peers.choose(None)}
    assert len(gpu_several_peers.choose("all")) == len(gpu_several_peers.LIBRARIES)
    with pytest.raises(InvalidArgument, match="--peers: takes all, none"):
        gpu_several_peers.choose("fa2")


@pytest.mark.usefixtures("_no_gpu_needed")
def test_copies_of_a_long_context_differ_where_it_is_read() -> None:
    made = gpu_several_cases.ends(TINY, 20, 3, 2)
    assert made.block_table is not None
    tables = made.block_table
    assert sorted(tables.flatten().tolist()) == list(range(8))  # every page belongs to one place of one request
    read, rest = tables[:, -2:], tables[:, :-2]
    at = [{copy.k[page].data_ptr() for page in read.flatten().tolist()} for copy in made.copies]
    assert len(at[0] | at[1] | at[2]) == 3 * 4
    assert int(rest.max()) < int(read.min())
    with pytest.raises(InvalidArgument, match="keys: must be at most the row's"):
        gpu_several_cases.ends(TINY, 65, 1, 1)


@pytest.mark.usefixtures("_no_gpu_needed")
@pytest.mark.parametrize("make", [gpu_several_cases._prompt, gpu_several_cases._chunk, gpu_several_cases._window,
                                  gpu_several_cases._dense, gpu_several_cases._drafts])
def test_groups_hold_what_their_cases_say(make: Callable[..., Group], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_several_cases, "CHUNK", (32, 256))
    monkeypatch.setattr(gpu_several_cases, "WINDOW_KEYS", 256)
    arguments = {"_prompt": (64,), "_chunk": (48,), "_window": (2, 32), "_dense": (32, 2, 64), "_drafts": (TINY,)}
    group = make(*arguments[make.__name__])
    for case in group.cases:
        made = case.inputs
        assert made.q.shape == (len(made.row.lens) * case.q_len, made.row.HQ, made.row.D)
        assert len(made.copies) == group.count
        where, exact = gpu_several.checked(case)
        result = gpu_several_peers.wavefill(case)(0)
        assert torch.isfinite(result).all()
        assert float((result[where] - exact).abs().max()) < 0.05
        assert case.whole == (made.block_table is None)
    reads = {gpu_several_cases.read_row(c.inputs.row, c.q_len, c.window).kv_bytes("bfloat16") for c in group.cases}
    if group.floor is None:
        assert make is gpu_several_cases._dense
    else:
        assert reads == {group.floor.row.kv_bytes("bfloat16")}
        assert len(group.floor.copies) == group.count
    assert group.calls % group.count == 0


# ---- checks and runs


@pytest.mark.usefixtures("_no_gpu_needed")
def test_the_oracle_of_some_tokens_is_a_part_of_the_whole() -> None:
    for page in (None, 16):
        made = gpu_several_cases._tokens(gpu_several_cases._inputs(TINY, page, 1), 40)
        case = Case("case", made, 40, 30)
        where, exact = gpu_several.checked(case)
        whole = reference.attention(made.q, made.copies[0].k, made.copies[0].v, made.lens, made.block_table,
                                    cu_seqlens_q=case.cu_seqlens_q, window=30)[0]
        assert {0, 39, 40, 79} <= set(where.tolist())
        torch.testing.assert_close(exact, whole[where])  # sums of other widths round otherwise


def _library(name: str, prepare: Any, gap: str | None = None) -> Library:
    return Library(name, lambda case: gap, prepare)


def _broken(case: Case) -> Any:
    raise RuntimeError("no kernel\nand more")


@pytest.mark.usefixtures("_no_gpu_needed")
def test_a_run_times_what_is_right_and_says_what_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = (Plan("tiny", (), lambda: gpu_several_cases._drafts(TINY)),
             Plan("huge", (), lambda: _broken(None)))  # type: ignore[arg-type]
    monkeypatch.setattr(gpu_several, "sections", lambda: {
        "drafts": Section(plans, "GB/s", ("right", "wrong", "broken", "away"))})
    libraries = [_library("right", gpu_several_peers.wavefill), _library("broken", _broken),
                 _library("wrong", lambda case: lambda copy: torch.zeros_like(case.inputs.q)),
                 _library("away", _broken, "is not here"), _library("of another section", _broken)]
    seen: list[Outcome] = []
    outcomes, notes = gpu_several.run("drafts", libraries, done=seen.append)
    assert seen == outcomes
    assert [outcome.q_len for outcome in outcomes] == [1, 4, 8]
    assert notes == ["drafts, huge: failed: RuntimeError: no kernel"]
    for outcome in outcomes:
        assert set(outcome.times) == {"wavefill", "right"}
        assert outcome.absent["broken"] == "failed: RuntimeError: no kernel"
        assert outcome.absent["away"] == "is not here"
        assert "wrong result" in outcome.absent["wrong"]
        assert outcome.floor == pytest.approx(4e-6)
        assert outcome.kv_bytes == TINY.kv_bytes("bfloat16")
        assert json.loads(json.dumps(outcome.to_dict()))["layout"] == "page 16"
    assert any("away: is not here (3 of 3 cases, first tiny, 1 tokens)" in why
               for why in gpu_several_report.reasons(outcomes))
    assert "right 7.0 us" in gpu_several_report.line(outcomes[0])


@pytest.mark.usefixtures("_no_gpu_needed")
def test_libraries_of_torch_get_whole_prompts_alone() -> None:
    group = gpu_several_cases._dense(32, 2, 64)
    case, = group.cases
    by_name = {library.name: library for library in gpu_several_peers.LIBRARIES}
    flash = by_name["sdpa_flash"]
    assert flash.gap(case) is None
    where, exact = gpu_several.checked(case)
    result = gpu_several_peers.packed(flash.prepare(case)(0))
    assert float((result[where] - exact).abs().max()) < 0.05
    part = replace(case, inputs=replace(case.inputs, row=replace(case.inputs.row, lens=(60, 60))))
    assert by_name["cudnn"].gap(part) == "takes no lengths"
    assert by_name["torch_flash"].gap(part) is None
    paged = replace(case, inputs=gpu_several_cases._inputs(case.inputs.row, 16, 1))
    assert by_name["torch_flash"].gap(paged) == "takes no such pages"
    assert by_name["flashinfer"].gap(case) == "is run on pages without a window"


def test_what_lies_past_the_end_is_probed() -> None:
    def leaky(case: Case) -> Any:
        return lambda copy: case.inputs.copies[0].k.sum() + case.inputs.q

    found = gpu_several_peers.probe([_library("leaky", leaky), _library("broken", _broken)], 16, "cpu", S=48,
                                    unused=10, tokens=8)
    cells = gpu_several_report.probe_table(found)
    assert cells[0] == ["NaN past the end", "in", "D 16"]
    assert cells[1] == [
        ["wavefill", "V", "clean"], ["leaky", "V", "clean"], ["broken", "V", "failed: RuntimeError: no kernel"],
        ["wavefill", "K and V", "clean"], ["leaky", "K and V", "NaN"],
        ["broken", "K and V", "failed: RuntimeError: no kernel"]]


# ---- bars and tables


def _outcome(section: str, q_len: int, *, window: int | None = None, lens: tuple[int, ...] = (8192,),
             floor: float | None = 10.0, **us: float) -> Outcome:
    row = suites.Row("row", "L", 32, 8, 128, lens, cpu=False)
    return Outcome(section, "group", "case", row, "page 16", q_len, window, 2, 4, floor and floor * 1e-6,
                   {name: Samples((value * 1e-6,)) for name, value in us.items()}, {"wavefill": 1e-3})


def _verdicts(*outcomes: Outcome) -> dict[str, bool | None]:
    return {bar.name: bar.ok for _, bar in gpu_several_report.evaluate(outcomes)}


@pytest.mark.parametrize(("ours", "fa3", "one", "peer"), [(114, 130, True, True), (116, 130, False, True),
                                                          (114, 119, True, False)])
def test_drafts_are_held_against_one_token_and_the_best_library(ours: float, fa3: float, one: bool,
                                                                peer: bool) -> None:
    found = _verdicts(_outcome("drafts", 1, wavefill=100, fa3=90),
                      _outcome("drafts", 4, wavefill=ours, fa3=fa3, flashinfer=500))
    assert found == {"over one token": one, "best peer / ours": peer}


def test_prompts_are_held_against_known_rates() -> None:
    work = 4 * 32 * 128 * 8192 * 8193 / 2 / 1e6  # microseconds at 1 TFLOP/s
    assert _verdicts(_outcome("prompts", 8192, wavefill=work / 528)) == {"TFLOP/s": True}
    assert _verdicts(_outcome("prompts", 8192, wavefill=work / 527)) == {"TFLOP/s": False}


def test_chunks_and_windows_have_their_bars() -> None:
    assert _verdicts(_outcome("chunks", 256, wavefill=100, fa3=86)) == {"fa3 / ours": True}
    assert _verdicts(_outcome("chunks", 256, window=4096, wavefill=100, fa3=109)) == {"fa3 / ours": False}
    few = _outcome("windows", 1, lens=(1024,), wavefill=10)
    assert _verdicts(few, _outcome("windows", 1, window=1024, wavefill=12.1)) == {"over as many keys": False}
    assert _verdicts(_outcome("libraries", 8192, wavefill=1, fa3=1)) == {}


def test_what_was_not_measured_passes_nothing() -> None:
    first = _outcome("drafts", 1, wavefill=100)
    assert _verdicts(first, _outcome("drafts", 4, wavefill=101)) == {"over one token": True, "best peer / ours": None}
    wrong = replace(_outcome("drafts", 4, fa3=100), absent={"wavefill": "wrong result: error 1"})
    assert _verdicts(first, wrong) == {"over one token": False, "best peer / ours": False}
    header, cells = gpu_several_report.table([first, wrong], gpu_several_report.evaluate([first, wrong]), "GB/s")
    row = dict(zip(header, cells[1], strict=True))
    assert row["wavefill (GB/s)"] == "WRONG"
    assert row["bars"] == "over one token not measured, best peer / ours not measured"


def test_the_table_shows_times_rates_and_missed_bars() -> None:
    outcomes = [_outcome("drafts", 1, wavefill=12.5, fa3=10), _outcome("drafts", 4, wavefill=20, fa3=25.04)]
    header, cells = gpu_several_report.table(outcomes, gpu_several_report.evaluate(outcomes), "GB/s")
    first, second = (dict(zip(header, line, strict=True)) for line in cells)
    assert first["wavefill (GB/s)"] == "12.5 us (2,684)"
    assert first["of read"] == "80%"
    assert first["bars"] == first["over first"] == "-"
    assert "window" not in header
    assert second["over first"] == "1.60x"
    assert second["fa3 (GB/s)"] == "25.0 us (1,340)"
    assert second["best peer / ours"] == "1.25x"
    assert second["bars"] == "over one token FAIL"
    header, cells = gpu_several_report.table(outcomes, [], "TFLOP/s")
    assert dict(zip(header, cells[0], strict=True))["read floor"] == "10.0 us"


# ---- the script


@pytest.mark.usefixtures("_no_gpu_needed")
def test_the_script_writes_tables_and_results(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                                              capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "tools"))
    script, session = importlib.import_module("gpu_several"), importlib.import_module("gpu_session")
    monkeypatch.setattr(session, "take_core", lambda: None)
    monkeypatch.setattr(gpu, "require", lambda: None)
    monkeypatch.setattr(gpu, "facts", lambda: {"gpu": "a made-up GPU"})
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 0)
    monkeypatch.setattr(gpu_several_cases, "SIZES", (16,))
    every = {"libraries": Section((Plan("tiny", (), lambda: gpu_several_cases._dense(16, 1, 32)),), "TFLOP/s",
                                  ("sdpa_flash",))}
    monkeypatch.setattr(gpu_several_cases, "sections", lambda: every)
    monkeypatch.setattr(gpu_several, "sections", lambda: every)
    monkeypatch.setattr("os.environ", {})
    monkeypatch.setattr("sys.argv", ["gpu_several.py", "--peers", "sdpa_flash", "--no-warmup", "--peers-from",
                                     str(tmp_path / "none"), "--output", str(tmp_path / "new" / "several.json")])
    assert script.main() == 0
    printed = capsys.readouterr().out
    assert "D 16, 1 x 32, contiguous, 32 tokens: wavefill 10.0 us, sdpa_flash 12.0 us" in printed
    assert "NaN past the end" in printed
    found = json.loads((tmp_path / "new" / "several.json").read_text())
    assert found["results"][0]["times_us"]["sdpa_flash"]["median"] == pytest.approx(12.0)
    assert {probe["library"] for probe in found["nan_past_the_end"]} == {"wavefill", "sdpa_flash"}
    assert "| NaN past the end | in | D 16 |" in (tmp_path / "new" / "several.md").read_text()
    assert found["command"].startswith("gpu_several.py --peers sdpa_flash")

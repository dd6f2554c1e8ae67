"""Choosing a schedule, explaining it, and the pictures and command that show it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import wavefill
from counting import calls_of
from wavefill import hardware, select
from wavefill.cli import app
from wavefill.schedule import row_ranges
from wavefill.spec import AttentionSpec, BackendUnavailable, Fixed, InvalidArgument, InvalidType, Invariant, StreamK
from wavefill.timeline import to_html, to_text, write_png
from wavefill.timeline.lanes import color, picture

LLAMA = {"HQ": 32, "KH": 8, "D": 128}
WAVE_PLUS_ONE = [8192] * 17
RAGGED = [131072, 65536] + [4096] * 14


def explain(lens, **kwargs):
    return wavefill.explain(lens, **LLAMA | kwargs)


# ----------------------------------------------------------------------------------------------------- choosing


def test_cpu_takes_stream_k_with_equal_threads():
    choice = explain(RAGGED, workers=2)
    assert (choice.schedule, choice.kind, choice.device, choice.tile) == (StreamK(), "stream_k", "cpu", 32)
    assert choice.tiles == 8 * sum(RAGGED) // 32
    assert choice.makespan == choice.tiles // 2
    assert choice.fill == 1.0
    assert choice.floor_us is None
    assert "wavefill bench" in choice.floor_note
    assert choice.workers == 2
    assert explain(RAGGED).workers == hardware.this_cpu().cores


def test_gpu_defaults_and_floor():
    choice = explain([65536], device="h200")
    assert (choice.workers, choice.tile, choice.device) == (132, 64, "H200")
    kv = 65536 * 8 * 256 * 2
    assert choice.traffic.kv == kv
    assert choice.floor_us == pytest.approx((kv + 2 * 32 * 128 * 2) / 4.575e12 * 1e6)
    assert "4.58 TB/s (measured)" in choice.floor_note
    given_bandwidth = explain([65536], device="h200", read_bandwidth=4e12)
    assert given_bandwidth.floor_us == pytest.approx(choice.floor_us * 4.575 / 4)


def test_the_floor_of_prompts_is_computing():
    """Blocks of query tokens read the keys of their request again, but from caches: memory gives them once."""
    prompt = explain([8192, 0], q_lens=[8192, 0], device="h200", page_size=None)
    assert prompt.floor_us == pytest.approx(prompt.flops / 989.5e12 * 1e6)
    assert "TFLOP/s" in prompt.floor_note
    draft = explain([8192, 0, 70], q_lens=[64, 0, 64], HQ=8, KH=8, device="h200", dtype="bfloat16")
    once = (8192 + 70) * 8 * 256 * 2 + 128 * 8 * 256 * 2
    assert draft.floor_us == pytest.approx(once / 4.575e12 * 1e6)


def test_the_filled_last_wave():
    """One request more than a wave holds: a fixed split leaves half the GPU idle, stream_k nothing."""
    choice = explain(WAVE_PLUS_ONE, device="h100", workers=132)
    lines = choice.timelines()
    assert next(iter(lines)) == choice.label == "stream_k"
    whole = lines["fixed (FlashDecoding's rule, 1 split)"]
    assert lines["stream_k"].makespan == 132
    assert whole.makespan == 256
    assert whole.waves == 2
    assert whole.fill == pytest.approx(0.515, abs=0.001)
    assert choice.reason.startswith("stream_k ends after 132 tiles with 132 workers 100% filled")
    assert choice.runner_up.label in choice.reason


def test_a_batch_that_fills_the_gpu_evenly_needs_no_merge():
    """132 equal units on 132 workers: every schedule ends together, so the one without cuts does."""
    choice = wavefill.explain([4096] * 132, HQ=8, KH=1, D=128, device="h200", workers=132)
    assert choice.partials == 0
    assert choice.fill == 1.0


def test_an_explicit_schedule_is_described_and_compared():
    choice = explain(RAGGED, device="h200", schedule=Fixed(splits=4))
    assert choice.schedule == Fixed(splits=4)
    assert choice.label == "fixed (4 splits)"
    assert choice.reason.startswith("as asked: fixed (4 splits)")
    assert choice.runner_up.kind == "stream_k"
    assert explain(RAGGED, schedule="invariant").schedule == Invariant()
    assert explain(RAGGED, schedule=StreamK(tile=128)).tile == 128


def test_auto_is_never_invariant_and_choose_agrees_with_explain():
    spec = AttentionSpec(**LLAMA, DV=128)
    for lens in ([1], [256] * 4, [8192], WAVE_PLUS_ONE, RAGGED, [1024] * 256, []):
        for name in ("cpu", "h200", "a100"):
            device = hardware.lookup(name)
            choice = explain(lens, device=name)
            rows = row_ranges(lens)
            decision = select.choose(spec, rows.start, rows.stop, device.workers, device.tile(128), device=device)
            assert decision.schedule == choice.schedule
            assert not isinstance(choice.schedule, Invariant)
            assert decision.reason


@pytest.mark.parametrize("rows", [1, 100_000])
def test_choosing_for_the_cpu_does_not_look_at_the_rows(rows):
    """So it costs the same for any batch: `wavefill bench overhead` measures how much."""
    spec = AttentionSpec(**LLAMA, DV=128)
    starts, stops = [0] * rows, [100] * rows
    assert calls_of(lambda: select.choose(spec, starts, stops, 2, 64)) <= 12


@given(st.lists(st.integers(0, 3000), max_size=6), st.data(), st.none() | st.integers(1, 500),
       st.sampled_from(["auto", "fixed", "stream_k", "invariant"]), st.sampled_from(["cpu", "h200"]),
       st.integers(1, 40))
def test_explain_of_any_batch_is_consistent(lens, data, window, schedule, device, workers):
    q_lens = data.draw(st.none() | st.lists(st.integers(0, 90), min_size=len(lens), max_size=len(lens)))
    choice = explain(lens, q_lens=q_lens, window=window, schedule=schedule, device=device, workers=workers)
    assert choice.tiles == choice.option.table.tiles
    assert choice.makespan * workers * choice.fill == pytest.approx(choice.tiles)
    assert choice.bytes == choice.traffic.total >= choice.traffic.least
    assert json.loads(json.dumps(choice.to_dict()))["tiles"] == choice.tiles
    labels = list(choice.timelines())
    assert len(labels) == len(set(labels))
    assert to_text(choice, width=60).plain


def test_pictures_of_a_large_batch_stay_small():
    choice = explain(np.random.default_rng(0).integers(1, 4096, 30_000), device="h200")
    assert len(to_text(choice).plain) < 20_000
    assert len(to_html(choice)) < 12_000_000


@pytest.mark.parametrize(("change", "words"), [
    ({"device": "h300"}, "device: must be one of cpu, A100"),
    ({"schedule": "lean"}, "schedule: must be one of"),
    ({"KH": 5}, "HQ: must be a multiple of KH (5); got 32"),
    ({"dtype": "int3"}, "dtype: must be one of"),
    ({"workers": 0}, "workers: must be at least 1; got 0"),
    ({"tile": 0}, "tile: must be at least 1; got 0"),
    ({"tile": 64, "schedule": StreamK(tile=32)}, "tile: must equal the schedule's own (32)"),
    ({"window": 0}, "window: must be at least 1; got 0"),
    ({"q_lens": [1, 2]}, "q_lens: must have one entry a request (1); got 2"),
    ({"lens": [-1]}, "seq_lens: must not be negative; got -1"),
    ({"read_bandwidth": 0.0}, "read_bandwidth: must be at least 1, and finite; got 0.0"),
    ({"read_bandwidth": float("inf")}, "read_bandwidth: must be finite in float32; got inf"),
    ({"tile": 2**16 + 1}, "tile: must be at most 65536; got 65537"),
    ({"tile": 10**30}, "tile: must be at most 65536"),
    ({"workers": 10**30}, "workers: must be at most 1048576"),
    ({"window": 10**30}, "window: must be at most 9223372036854775807"),
    ({"page_size": 10**30}, "page_size: must be at most 9223372036854775807"),
    ({"lens": [2**31]}, "seq_lens: must be at most 2147483647; got 2147483648"),
    ({"lens": [2**63]}, "seq_lens: must be at most 2147483647"),
    ({"lens": [10**30]}, "seq_lens: must be at most 2147483647"),
    ({"lens": [-(10**30)]}, "seq_lens: must be at least 0"),
    ({"q_lens": [2**31]}, "q_lens: must be at most 2147483647"),
    ({"q_lens": [2**31 - 1], "lens": [2**31 - 1]}, "schedule: can be described with at most 16,777,216 rows"),
    ({"lens": [2**31 - 1], "schedule": Fixed(chunk=1)}, "schedule: can be described with at most 16,777,216 segments"),
    ({"HQ": 2**62, "KH": 2**62}, "schedule: can be described with at most 4,398,046,511,104 tiles"),
])
def test_bad_arguments_are_named(change, words):
    with pytest.raises(InvalidArgument) as caught:
        explain(**{"lens": [100]} | change)
    assert words in str(caught.value)


@pytest.mark.parametrize(("change", "words"), [
    ({"lens": [1.5]}, "seq_lens: must hold integers; got float64"),
    ({"lens": [True]}, "seq_lens: must hold integers; got bool"),
    ({"lens": [None]}, "seq_lens: must hold integers; got object"),
    ({"lens": ["4096"]}, "seq_lens: must hold integers"),
    ({"lens": [[1], [1, 2]]}, "seq_lens: must be a list of whole numbers; got what NumPy refuses"),
    ({"workers": True}, "workers: must be an int; got True"),
    ({"tile": 32.0}, "tile: must be an int; got 32.0"),
    ({"HQ": "32"}, "HQ: must be an int; got '32'"),
    ({"KH": None}, "KH: must be an int; got None"),
    ({"latent": "no"}, "latent: must be a bool; got 'no'"),
    ({"read_bandwidth": "fast"}, "read_bandwidth: must be a float or None; got str"),
])
def test_what_has_another_type_is_named(change, words):
    with pytest.raises(InvalidType) as caught:
        explain(**{"lens": [100]} | change)
    assert words in str(caught.value)


@pytest.mark.parametrize("dtype", [["bfloat16"], None, 16], ids=repr)
def test_a_dtype_is_a_name(dtype):
    with pytest.raises(InvalidArgument, match="dtype: must be one of"):
        explain([100], dtype=dtype)


def test_numbers_of_numpy_are_numbers():
    numpy = {name: np.int32(n) for name, n in LLAMA.items()}
    options = {"workers": 3, "tile": 16, "window": 50, "page_size": 8}
    choice = wavefill.explain(np.array([100], dtype=np.uint16), **numpy, read_bandwidth=np.float32(1e9),
                              **{name: np.int64(n) for name, n in options.items()})
    assert json.dumps(choice.to_dict()) == json.dumps(explain([100], **options, read_bandwidth=1e9).to_dict())


def test_the_longest_context_is_described():
    choice = explain([2**31 - 1], workers=2, window=2**63 - 1)
    assert choice.tiles == 8 * 2**26
    assert choice.makespan == 4 * 2**26


def test_a_shape_without_a_kernel_is_refused_as_the_kernel_would():
    with pytest.raises(BackendUnavailable, match=r"device: .*; got D is 5000; the CPU backend takes head sizes up"):
        explain([100], D=5000)
    with pytest.raises(BackendUnavailable, match=r"got DV is 577"):
        explain([100], DV=577)
    assert explain([100], D=576, DV=576).kind == "stream_k"
    assert explain([100], D=5000, device="h200").tiles == 8 * 4


@pytest.mark.parametrize("device", ["cpu", *(gpu.name for gpu in hardware.GPUS)])
def test_mla_is_described_on_every_device(device):
    """DeepSeek's shape: one KV head of 576 columns, 512 of which are V as well."""
    choice = wavefill.explain([4096, 100], HQ=128, KH=1, D=576, DV=512, latent=True, device=device)
    assert choice.traffic.kv == 4196 * 576 * 2
    assert choice.flops == 2 * 4196 * 128 * (576 + 512)
    assert choice.to_dict()["shape"]["latent"] is True
    assert (choice.floor_us is None) == (device == "cpu")


def test_explain_needs_no_torch():
    code = ("import sys, wavefill\nfrom wavefill.timeline import to_html, to_text\nimport wavefill.cli.explain\n"
            "c = wavefill.explain([4096], HQ=32, KH=8, D=128, device='h200')\nto_text(c), to_html(c)\n"
            "assert 'torch' not in sys.modules and 'matplotlib' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)


# ----------------------------------------------------------------------------------------------------- pictures


def test_text_shows_the_idle_half_of_the_last_wave():
    text = to_text(explain(WAVE_PLUS_ONE, device="h100", workers=132), width=100).plain
    lean, whole = text.split("\n\n")[:2]
    assert lean.splitlines()[0] == "stream_k: done after 132 tiles, 100% filled"
    assert "░" not in lean
    lines = whole.splitlines()
    assert lines[0] == "fixed (FlashDecoding's rule, 1 split): done after 256 tiles, 52% filled"
    assert re.search(r"A+Q+│$", lines[1])  # worker 0 also takes one of the four items of the second wave
    assert all(re.search(r"[A-Q]+░{40,}│$", line) for line in lines[2:13])
    assert lines[13].strip() == "12 of 132 workers shown, evenly spaced"
    assert all(len(line) <= 100 for line in text.splitlines())
    assert "A  to Q  requests 0 to 16, 8,192 keys each" in text


def test_text_in_ascii_has_the_same_places():
    choice = explain(WAVE_PLUS_ONE, device="h100", workers=132)
    plain, text = (to_text(choice, width=100, ascii_only=ascii_only) for ascii_only in (True, False))
    assert plain.plain.isascii()
    assert plain.plain == text.plain.replace("░", ".").replace("│", "|")
    assert plain.spans == text.spans


def test_every_lane_ends_where_its_worker_does():
    choice = explain([5000, 300, 0, 70], device="h200", workers=50)
    for max_spans in (None, 10_000):
        drawn = picture(choice, max_lanes=50, columns=200, max_spans=max_spans)
        for panel in drawn.panels:
            for lane in panel.lanes:
                assert lane.end == panel.timeline.busy[lane.worker]
                times = [t for span in lane.spans for t in (span.t0, span.t1)]
                assert times == sorted(times)
                if lane.spans:
                    assert times[-1] == pytest.approx(lane.end, abs=drawn.horizon / 200)


def test_colours_of_neighbours_differ():
    assert len({color(request, 0) for request in range(200)}) > 190
    assert color(3, 0) != color(3, 1)


def test_html_is_self_contained_and_well_formed():
    page = to_html(explain(RAGGED, device="h200"))
    assert "http" not in page
    assert "<script" not in page
    drawings = re.findall(r"<svg viewBox=.*?</svg>", page, re.DOTALL)
    assert len(drawings) == 4
    for drawing in drawings:
        ET.fromstring(drawing)
    assert "fixed (FlashDecoding&#x27;s rule, 1 split): done after 2,048 tiles, 12% filled" in page


def test_html_escapes_and_takes_an_empty_batch():
    assert "done after 0 tiles" in to_html(explain([]))


@pytest.mark.parametrize("lens", [RAGGED, [], [0, 5]], ids=["ragged", "no-requests", "short"])
def test_png(tmp_path, lens):
    pytest.importorskip("matplotlib")
    path = tmp_path / "timeline.png"
    write_png(explain(lens, device="h200"), path)
    assert path.read_bytes().startswith(b"\x89PNG")


def test_png_without_matplotlib_says_what_to_install(tmp_path, monkeypatch):
    for name in [*sys.modules]:
        if name.partition(".")[0] == "matplotlib":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BackendUnavailable, match=r"pip install 'wavefill\[bench\]'"):
        write_png(explain([100]), tmp_path / "x.png")


# ------------------------------------------------------------------------------------------------------ command


def run(*args, code=0):
    result = CliRunner().invoke(app, ["explain", *args], env={"COLUMNS": "120"})
    assert result.exit_code == code, result.output
    return result


def test_command_shows_the_choice_and_the_timelines():
    out = run("--lens", "131072,65536,14x4096", "--device", "h200").stdout
    assert "stream_k ends after 241 tiles with 132 workers 100% filled" in out
    assert "31,744 of 64 tokens" in out
    assert "227.4 us at H200's 4.58 TB/s (measured)" in out
    assert "invariant (chunks that grow with the request): done after 256 tiles" in out
    assert "done after" not in run("--lens", "4096", "--no-timeline").stdout


def test_command_takes_prompts_and_names_the_kernel(monkeypatch):
    monkeypatch.setenv("WAVEFILL_PREFILL", "own")
    prompt = ("--lens", "2x512", "--q-lens", "all", "--contiguous", "--device", "h200")
    assert re.search(r"kernel +wavefill, tensor-core kernel of compute", run(*prompt, "--no-timeline").stdout)
    shown = json.loads(run(*prompt, "--json").stdout)
    assert shown["kernel"] == "wavefill, tensor-core kernel of compute capability 9.0"
    assert shown["shape"]["page_size"] is None
    assert shown["shape"]["rows"] == 2 * 512 // 16
    chunk = json.loads(run("--lens", "2x512", "--q-lens", "16,1", "--device", "a100", "--json").stdout)
    assert (chunk["kernel"], chunk["shape"]["rows"]) == ("wavefill, portable Triton kernel", 2)
    decode = json.loads(run("--lens", "512", "--device", "h200", "--json").stdout)
    assert decode["kernel"].endswith("for one query token")
    assert "--q-lens: must be lengths or COUNTxLENGTH" in run(*prompt[:2], "--q-lens", "few", code=2).stderr
    assert "--emulate: replays one query token a request" in run(*prompt, "--emulate", code=2).stderr


def test_command_prints_json_alone():
    shown = json.loads(run("--batch", "17", "--context", "8192", "--schedule", "fixed:flashdecoding", "--device",
                           "h100", "--workers", "132", "--json").stdout)
    assert shown["schedule"] == {"name": "fixed", "rule": "flashdecoding"}
    assert shown["makespan"] == 256
    assert shown["runner_up"]["kind"] == "stream_k"
    assert shown["bytes"]["kv"] == 17 * 8192 * 4096


@pytest.mark.parametrize(("text", "schedule"), [
    ("fixed:splits=3", {"name": "fixed", "splits": 3}), ("fixed:chunk=100", {"name": "fixed", "chunk": 100}),
    ("invariant:chunk=64", {"name": "invariant", "chunk": 64}), ("invariant", {"name": "invariant"}),
    ("stream_k:tile=16", {"name": "stream_k", "tile": 16}),
])
def test_command_reads_schedules(text, schedule):
    assert json.loads(run("--lens", "999", "--schedule", text, "--json").stdout)["schedule"] == schedule


def test_command_writes_pictures(tmp_path):
    pytest.importorskip("matplotlib")
    html, png = tmp_path / "new" / "t.html", tmp_path / "t.png"
    out = run("--lens", "4096", "--html", str(html), "--png", str(png)).stdout
    assert html.exists()
    assert png.exists()
    assert f"wrote {html}" in out.replace("\n", "")


def test_command_draws_as_many_panels_as_asked(tmp_path):
    html = tmp_path / "t.html"
    shape = ("--lens", "17x8192", "--device", "h200", "--workers", "132", "--html", str(html))
    drawn = [run(*shape, "--panels", panels).stdout.count("done after") for panels in ("1", "2", "9")]
    assert drawn == [1, 2, 4]
    run(*shape, "--panels", "2")
    assert html.read_text().count('role="img"') == 2


def test_command_emulates():
    pytest.importorskip("torch")
    args = ("--lens", "700,0,130", "--hq", "4", "--kh", "2", "--d", "16", "--dv", "8", "--workers", "3", "--tile", "32",
            "--window", "300", "--emulate")
    assert "largest deviation from one softmax" in run(*args).stdout
    replay = json.loads(run(*args, "--json").stdout)["emulation"]
    assert replay["deviation"] < 1e-5
    assert sum(replay["tiles_per_worker"]) == 2 * (10 + 5)  # the window leaves 300 of 700 keys


@pytest.mark.parametrize("more", [
    ("--page-size", str(2**62)), ("--latent",), ("--page-size", "1", "--latent"),
], ids=" ".join)
def test_command_emulates_any_page_and_latent_caches(more):
    pytest.importorskip("torch")
    for lens in ("70,0,13", "0"):
        shown = run("--lens", lens, "--hq", "4", "--kh", "2", "--d", "16", "--dv", "8", "--emulate", "--json", *more)
        assert json.loads(shown.stdout)["emulation"]["deviation"] < 1e-5


@pytest.mark.parametrize(("args", "words"), [
    ([], "--lens: is needed, or --context"),
    (["--lens", "4x"], "--lens: must be lengths or COUNTxLENGTH"),
    (["--lens", "10", "--context", "3"], "not both"),
    (["--lens", "10", "--device", "h300"], "--device: must be one of"),
    (["--lens", "10", "--schedule", "fixed:tile=3"], "--schedule: takes auto, "),
    (["--lens", "10", "--schedule", "lean"], "--schedule: takes auto, "),
    (["--lens", "10", "--batch", "2"], "--batch: goes with --context, and must be left out with --lens; got 2"),
    (["--lens", "64x131072", "--emulate"], "--emulate: replays at most 50,000 tiles"),
    (["--lens", "1", "--hq", "100000000000", "--kh", "1", "--emulate"], "--emulate: replays at most 2,147,483,6"),
    (["--lens", "9" * 5000], "--lens: must be lengths or COUNTxLENGTH"),
    (["--lens", f"{2**64}x4"], "--lens: must be lengths or COUNTxLENGTH"),
    (["--lens", "1048570x4,7x4"], "--lens: may count at most 1,048,576 requests; got 1,048,577"),
    (["--context", "4", "--batch", "-1"], "--batch: must be at least 0; got -1"),
    (["--context", "4", "--batch", str(2**70)], "--batch: must be at most 1048576"),
    (["--context", str(2**70)], "--context: must be at most 2147483647"),
    (["--context", f"-{2**70}"], "--context: must be at least 0"),
    (["--lens", "4", "--tile", str(2**70)], "--tile: must be at most 65536"),
    (["--lens", "4", "--schedule", "stream_k:tile=65537"], "--schedule: must be at most 65536"),
    (["--lens", "4294967296"], "--lens: must be at most 2147483647"),
    (["--lens", "4", "--workers", str(2**70)], "--workers: must be at most 1048576"),
    (["--lens", "4", "--hq", str(2**70)], "--hq: must be at most"),
    (["--lens", "4", "--window", str(2**70)], "--window: must be at most"),
    (["--lens", "4", "--page-size", str(2**70)], "--page-size: must be at most"),
    (["--lens", "4", "--schedule", f"fixed:splits={2**70}"], "--schedule: takes auto, "),
    (["--lens", "4", "--schedule", "fixed:splits=" + "9" * 5000], "--schedule: takes auto, "),
    (["--lens", "4", "--schedule", f"fixed:splits={2**63}"], "--schedule: must be at most"),
    (["--lens", "4", "--read-gbs", "nan"], "--read-gbs: must be 1e-06 to 1e+09; got nan"),
    (["--lens", "4", "--read-gbs", "inf"], "--read-gbs: must be 1e-06 to 1e+09; got inf"),
    (["--lens", "4", "--read-gbs", "-1"], "--read-gbs: must be 1e-06 to 1e+09; got -1"),
    (["--lens", "4", "--d", "5000"], "--device: the CPU backend cannot serve this call; got D is 5000"),
])
def test_command_errors_are_one_message(args, words):
    result = run(*args, code=2)
    assert words in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""

"""What of `wavefill bench e2e` can be told without a GPU: cases, skipping, arithmetic, tables, and a run on the CPU."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from wavefill import cli
from wavefill.bench import decoding, e2e, e2e_gpu, e2e_gpu_cases, e2e_gpu_report, shapes
from wavefill.bench.e2e_gpu import Outcome
from wavefill.bench.e2e_gpu_cases import Case
from wavefill.spec import InvalidArgument

pytestmark = pytest.mark.transformers

TINY: dict[str, Any] = {"vocab_size": 311, "hidden_size": 96, "intermediate_size": 80, "num_attention_heads": 6,
                        "num_key_value_heads": 2}
runner = CliRunner()


def meta(name: str, dtype: torch.dtype = torch.bfloat16) -> e2e_gpu_cases.Size:
    shape = shapes.find(name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(shape.config(), dtype=dtype, attn_implementation=shape.attention)
    return e2e_gpu_cases.size_of(model)


def outcome(case: Case, way: str = "wavefill", step: float = 0.01, first: float = 1.0, **more: Any) -> Outcome:
    return Outcome(case, way, first, (9.0,) * 8 + (step,) * (case.new - 9), 1e9, 4e12, **more)


# ---- options


def test_numbers_of_tokens() -> None:
    assert e2e_gpu_cases.tokens("4k, 100,4096", "--contexts") == [4096, 100]
    for wrong in ("", "0", "4m", "-1", "1,,2"):
        with pytest.raises(InvalidArgument, match="--contexts"):
            e2e_gpu_cases.tokens(wrong, "--contexts")


def test_ratios_and_ways() -> None:
    assert e2e_gpu_cases.ratio_list("32:1,1:4") == [(32, 1), (1, 4)]
    for wrong in ("", "3", "0:1", "1:0"):
        with pytest.raises(InvalidArgument, match="--ratios"):
            e2e_gpu_cases.ratio_list(wrong)
    assert e2e_gpu_cases.ways("all", "cpu") == list(e2e_gpu_cases.WAYS)
    assert e2e_gpu_cases.ways("sdpa,wavefill,sdpa", "cuda") == ["sdpa", "wavefill"]
    with pytest.raises(InvalidArgument, match="--ways"):
        e2e_gpu_cases.ways("vllm", "cuda")


def test_a_context_is_that_of_the_last_token() -> None:
    cases = e2e_gpu_cases.grid([4096, 16384], [1, 8], 64)
    assert [(c.prompt, c.new, c.batch, c.context) for c in cases][:2] == [(4032, 64, 1, 4096), (4032, 64, 8, 4096)]
    assert len(cases) == 4


def test_requests_are_measured_at_their_beginning_and_once_at_the_end() -> None:
    cases = list(e2e_gpu_cases.requests([(31, 1), (1, 1)], 1024, 64, 2, whole=False))
    assert [(c.prompt, c.new, c.request) for c in cases] == [
        (992, 32, (992, 32)), (512, 64, (512, 512)), (960, 64, (1024, 0))]
    whole = list(e2e_gpu_cases.requests([(31, 1), (1, 1)], 1024, 64, 2, whole=True))
    assert [(c.prompt, c.new) for c in whole] == [(992, 32), (512, 512)]


# ---- sizes


def test_what_a_step_of_llama_reads() -> None:
    size = meta("llama-3.1-8b")
    assert size.weights == 2 * 8030261248
    assert size.always == 2 * (8030261248 - 128256 * 4096)
    assert size.kv_token == 32 * 8 * 2 * 128 * 2
    assert size.read_by_step(1000, 3) == size.always + 3 * 1000 * size.kv_token


def test_tied_embeddings_are_read_as_the_head() -> None:
    assert meta("qwen3-4b").always == 2 * 4022468096


def test_a_token_reads_its_experts_and_a_batch_more_of_them() -> None:
    size = meta("gpt-oss-20b")
    assert (size.taken, size.there) == (4, 32)
    assert size.always + size.experts == size.weights - 2 * 201088 * 2880
    steps = [size.read_by_step(0, batch) - size.always for batch in (1, 8, 10_000)]
    assert steps[0] == pytest.approx(size.experts / 8)
    assert steps[0] < steps[1] < steps[2] == pytest.approx(size.experts)


def test_windows_bound_what_is_read() -> None:
    size = meta("gemma-2-9b")
    assert size.read_by_step(8000, 1) - size.always == size.kv_token / 42 * (21 * 8000 + 21 * 4096)


def test_layers_without_keys_read_none() -> None:
    model = meta("llama-3.1-8b").model
    model.config.layer_types = ["full_attention", "linear_attention"] * 16
    assert e2e.windows(model.config) == (None,) * 16


def test_what_does_not_fit_or_takes_too_long_is_skipped() -> None:
    size, h200 = meta("llama-3.1-8b"), 150_000_000_000

    def why(context: int, batch: int, way: str = "wavefill", limit: float = 20.0) -> str | None:
        return e2e_gpu_cases.skipped(size, Case(context - 64, 64, batch), way, "cuda", memory=h200, bandwidth=4.2e12,
                                     limit=limit)

    assert why(4096, 1) is why(16384, 8) is why(131072, 1) is None
    assert why(16384, 8, "sdpa") is why(65536, 1, "sdpa") is None
    assert "over --limit-s 20" in str(why(131072, 1, "sdpa"))
    assert "does not fit" in str(why(131072, 8, limit=1000))
    assert "does not fit" in str(why(131072, 32, limit=1000))
    assert "over --limit-s 20" in str(why(65536, 8))
    assert "over --limit-s 20" in str(why(65536, 1, "static"))
    assert "131,072 positions" in str(why(131073, 1))
    assert "no room for a prompt" in str(why(64, 1))


def test_prompts_are_read_in_pieces_where_memory_asks_for_it() -> None:
    size = meta("llama-3.1-8b")
    assert size.chunk(Case(4032, 64, 1), 150_000_000_000) == 4032
    chunk = size.chunk(Case(16320, 64, 32), 150_000_000_000)
    assert chunk is not None
    assert chunk % e2e_gpu_cases.LEAST_CHUNK == 0
    assert 0 < chunk < 16320
    assert size.chunk(Case(4032, 64, 1), 16_000_000_000) is None


# ---- outcomes


def test_figures_of_an_outcome() -> None:
    case = Case(4032, 64, 8)
    found = replace(outcome(case), steps=(9.0,) * 8 + (0.02,) * 27 + (0.01,) * 27 + (0.05,))
    assert found.p50 == 0.02
    assert found.p99 == 0.05
    assert found.tokens_per_s == pytest.approx(8 * 55 / (27 * 0.03 + 0.05))
    assert found.rate == pytest.approx(5e10)
    assert found.roofline == pytest.approx(5e10 / 4e12)
    assert found.to_dict()["itl_ms"] == {"p50": 20.0, "p99": 50.0}
    assert replace(found, bandwidth=None).to_dict()["roofline"] is None


def test_requests_are_put_together_along_a_line() -> None:
    begin = outcome(Case(512, 64, 1, (512, 512)), step=0.010)
    end = outcome(Case(960, 64, 1, (1024, 0)), step=0.020)
    short = outcome(Case(992, 32, 1, (992, 32)), step=0.018)
    whole, composed = e2e_gpu.whole_requests([short, begin, end])
    assert (whole.composed, composed.composed) == (False, True)
    assert whole.seconds == pytest.approx(short.first + sum(short.steps))
    at = 0.010 + 0.010 * (576 + 224 - 512 - 35.5) / 448
    assert composed.seconds == pytest.approx(begin.first + sum(begin.steps) + 448 * at)
    assert not e2e_gpu.whole_requests([begin, replace(end, absent="no")])


def test_kernels_of_attention() -> None:
    profile = e2e_gpu.profile_of({"decode": 2e-3, "nvjet_tst_64x8": 5e-3, "void flash_fwd_splitkv<X>": 1e-3,
                                  "decode_rope": 1e-3}, 0.01, 9e-3)
    assert profile.busy == pytest.approx(9e-3)
    assert profile.attention == pytest.approx(3e-3)
    assert profile.kernels[0] == ("nvjet_tst_64x8", 5e-3)
    assert profile.to_dict()["attention_share_of_step"] == pytest.approx(0.3)


def test_a_profile_sums_up_what_ran_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    class Trace:
        def __init__(self, activities: list[Any]) -> None: ...

        def __enter__(self) -> Trace:
            return self

        def __exit__(self, *_: object) -> None: ...

        def events(self) -> list[Any]:
            kinds = torch.autograd.DeviceType
            return [SimpleNamespace(name=name, device_type=kind, self_device_time_total=end - start,
                                    time_range=SimpleNamespace(start=start, end=end))
                    for name, kind, start, end in (("attend", kinds.CUDA, 10, 50), ("aten::mm", kinds.CPU, 0, 7),
                                                   ("gemm", kinds.CUDA, 30, 150), ("gemm", kinds.CUDA, 160, 180))]

    monkeypatch.setattr("torch.profiler.profile", Trace)
    bench = object.__new__(e2e_gpu.Bench)
    monkeypatch.setattr(bench, "_generate", lambda *_, **__: None, raising=False)
    found = bench._profile_of(SimpleNamespace(sequences=None, past_key_values=()), 1e-3, "wavefill")
    assert (found.busy, found.attention) == (pytest.approx(40e-6), pytest.approx(10e-6))
    assert found.kernels[0] == ("gemm", pytest.approx(35e-6))


def test_tables_lines_and_notes() -> None:
    case, other = Case(4032, 64, 1), Case(65472, 64, 8)
    outcomes = [outcome(case, peak=20_000_000_000), outcome(case, "sdpa", 0.03, first=2.0),
                Outcome(other, "sdpa", absent="does not fit"), Outcome(other, "wavefill", absent="does not fit")]
    header, cells = e2e_gpu_report.table(outcomes)
    assert header == ["case", "way", "TTFT", "ITL P50", "P99", "tokens/s", "GB/s", "of roofline", "stock / this",
                      "TTFT: stock / this", "peak memory"]
    assert cells[0] == ["context 4,096, batch 1", "wavefill", "1 s", "10.00 ms", "10.00 ms", "100.0", "100", "2%",
                        "3.00x", "2.00x", "20.0 GB"]
    assert cells[1][8] == cells[1][9] == "-"
    assert e2e_gpu_report.line(outcomes[2]) == "context 65,536, batch 8, sdpa: does not fit"
    assert e2e_gpu_report.notes(outcomes, []) == ["sdpa: does not fit (context 65,536, batch 8)",
                                                  "wavefill: does not fit (context 65,536, batch 8)"]


# ---- times


class _Time:
    """A clock of its own: the host's work and the device's, in seconds."""

    def __init__(self) -> None:
        self.now = self.device_done = 0.0

    def host(self, seconds: float) -> None:
        self.now += seconds

    def launch(self, seconds: float) -> None:
        """Work of a device that does one thing after the other."""
        self.device_done = max(self.device_done, self.now) + seconds

    def wait(self) -> None:
        self.now = max(self.now, self.device_done)


class _Generating:
    """What generate() does: asks for the prompt in pieces of 16 tokens, then for each token, and waits once a step."""

    def __init__(self, time: _Time, host: float, prompt: float, step: float) -> None:
        self.time, self.costs = time, (host, prompt, step)

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **kwargs: Any) -> int:
        return input_ids.shape[1]

    def generate(self, ids: torch.Tensor, new: int) -> None:
        host, prompt, step = self.costs
        for piece in torch.split(ids, 16, dim=1):
            self._forward(piece, host, prompt)
        for _ in range(new - 1):
            self.time.wait()
            ids = torch.cat([ids, ids[:, :1]], 1)
            self._forward(ids, host, step)
        self.time.wait()

    def _forward(self, ids: torch.Tensor, host: float, device: float) -> None:
        assert self.prepare_inputs_for_generation(ids) == ids.shape[1]
        self.time.host(host)
        self.time.launch(device)


@pytest.mark.parametrize("host", [1.0, 10.0], ids=["device decides", "host decides"])
def test_tokens_are_timed_when_the_host_has_them(host: float, monkeypatch: pytest.MonkeyPatch) -> None:
    times, counts = _Time(), list[int]()
    monkeypatch.setattr(decoding, "time", SimpleNamespace(perf_counter=lambda: times.now))
    model = _Generating(times, host, prompt=100.0, step=6.0)
    clock = decoding.StepClock(counts.append)
    times.now = 9.0
    with clock.watch(model, 40):
        model.generate(torch.ones(2, 40, dtype=torch.long), 4)
    assert clock.seconds == [host + 300, *[host + 6] * 3]  # the device has read three pieces before the first token
    assert counts == [1, 2, 3, 4]
    assert "prepare_inputs_for_generation" not in model.__dict__


def test_what_fails_is_timed_no_further_and_leaves_the_model_as_it_was() -> None:
    model, clock = _Generating(_Time(), 1, 1, 1), decoding.StepClock()
    model.prepare_inputs_for_generation = own = model.prepare_inputs_for_generation  # type: ignore[method-assign]
    with pytest.raises(ZeroDivisionError), clock.watch(model, 3):
        raise ZeroDivisionError
    assert clock.seconds == []
    assert model.__dict__["prepare_inputs_for_generation"] is own


# ---- a run


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = shapes.build

    def small(shape: shapes.Shape, dtype: str, seed: int, device: str) -> Any:
        model = whole(shape, dtype, seed, device, **TINY)
        model.generation_config.eos_token_id = list(range(311))  # a model's own end of text must not end a measurement
        return model

    monkeypatch.setattr(shapes, "build", small)
    monkeypatch.setattr("wavefill.bench.timing.ROTATED_BYTES", 1 << 20)


@pytest.mark.usefixtures("_small")
def test_the_command_measures_both_ways_and_writes_what_it_has(tmp_path: Path) -> None:
    output = tmp_path / "e2e.json"
    result = runner.invoke(cli.app, [
        "bench", "e2e", "--config", "llama-3.1-8b", "--layers", "2", "--contexts", "48,64", "--batches", "2",
        "--new-tokens", "16", "--ways", "wavefill,wavefill-fused,sdpa,flash", "--ratios", "1:1", "--total", "64",
        "--request-batches", "1", "--output", str(output)])
    assert result.exit_code == 0, result.output
    assert "context 64, batch 2" in result.stdout
    assert "flash: flash_attn needs a GPU" in result.stdout
    found = json.loads(output.read_text())
    assert {"commit", "command", "versions", "weight_bytes", "kv_bytes_a_token", "read_bandwidth_gbs"} <= found.keys()
    assert found["clock"] == "streamer"
    by_way = {(r["way"], r["context"], r["request"] is None): r for r in found["results"]}
    for way in ("wavefill", "sdpa"):
        for context in (48, 64):
            one = by_way[way, context, True]
            assert len(one["steps_ms"]) == 15
            assert one["prompt"] == context - 16
            assert one["itl_ms"]["p50"] <= one["itl_ms"]["p99"]
            assert one["notes"] == []
    assert {(r["way"], r["batch"], r["composed"]) for r in found["requests"]} >= {
        ("wavefill", 1, True), ("sdpa", 1, True)}
    assert {r["batch"] for r in found["results"] if r["request"]} == {1}


@pytest.mark.usefixtures("_small")
def test_a_family_without_sdpa_is_compared_with_eager() -> None:
    result = runner.invoke(cli.app, ["bench", "e2e", "--config", "qwen3-4b", "--layers", "1", "--contexts", "40",
                                     "--new-tokens", "16", "--json", "--ways", "sdpa"])
    assert [r["way"] for r in json.loads(result.stdout)["results"]] == ["sdpa"]
    model = shapes.build(shapes.find("gemma-2-9b", layers=1), "float32", 0, "cpu")
    (found,) = e2e_gpu.Bench(model).run([Case(24, 16, 1)], ["sdpa"])
    assert (found.way, found.absent) == ("eager", None)


def test_a_folder_of_a_family_without_sdpa_is_loaded_with_eager(tmp_path: Path) -> None:
    for name, attention in (("gemma-2-9b", "eager"), ("qwen3-4b", "sdpa")):
        shapes.build(shapes.find(name, layers=1), "float32", 0, **TINY).save_pretrained(tmp_path / name)
        assert e2e.load(tmp_path / name, "float32").config._attn_implementation == attention


@pytest.mark.usefixtures("_small")
def test_a_way_that_fails_leaves_the_others_and_the_model_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    model = shapes.build(shapes.find("llama-3.1-8b", layers=1), "float32", 0, "cpu")

    def broken(model: Any, **options: Any) -> Any:
        raise RuntimeError("no kernel\nmore")

    monkeypatch.setattr("wavefill.integrations.transformers.enable", broken)
    seen: list[Outcome] = []
    outcomes = e2e_gpu.Bench(model).run([Case(24, 16, 1)], ["wavefill", "sdpa"], done=seen.append)
    assert [o.absent for o in outcomes] == ["failed: RuntimeError: no kernel", None]
    assert seen == outcomes
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.usefixtures("_small")
def test_the_models_own_end_stops_no_case() -> None:
    model = shapes.build(shapes.find("llama-3.1-8b", layers=1), "float32", 0, "cpu")
    model.generation_config.eos_token_id = ends = list(range(model.config.vocab_size))
    (found,) = e2e_gpu.Bench(model).run([Case(24, 16, 1)], ["wavefill"])
    assert (len(found.steps), found.notes, found.absent) == (15, (), None)
    assert model.generation_config.eos_token_id == ends


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("way", ["wavefill", "sdpa"])
@pytest.mark.parametrize("stream", [False, True])
def test_every_token_is_timed_with_a_streamer_and_without(way: str, stream: bool,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    model = shapes.build(shapes.find("llama-3.1-8b", layers=1), "float32", 0, "cpu")
    monkeypatch.setattr(e2e_gpu_cases.Size, "chunk", lambda *_: 7)  # a prompt in pieces
    joules = iter((3.0, 3.0 + 2 * 8 * 0.5))
    bench = e2e_gpu.Bench(model, stream=stream)
    monkeypatch.setattr(bench, "_meter", lambda: next(joules))
    monkeypatch.setattr(bench, "_memory", lambda: 1 << 40)
    streamers: list[Any] = []
    generate = model.generate

    def seen(*args: Any, streamer: Any, **kwargs: Any) -> Any:
        streamers.append(streamer)
        return generate(*args, streamer=streamer, **kwargs)

    model.generate = seen
    start = time.perf_counter()
    (found,) = bench.run([Case(24, 16, 2)], [way])
    assert (len(found.steps), found.chunk, found.joules) == (15, 7, 0.5)
    assert found.first + sum(found.steps) < time.perf_counter() - start
    assert all((streamer is not None) == stream for streamer in streamers)
    assert ("streamer" in bench.clock) == stream
    assert "prepare_inputs_for_generation" not in model.__dict__


@pytest.mark.usefixtures("_small")
def test_a_run_that_ends_early_is_timed_as_far_as_it_came() -> None:
    model = shapes.build(shapes.find("llama-3.1-8b", layers=1), "float32", 0, "cpu")
    bench = e2e_gpu.Bench(model)
    generate = model.generate

    def shortened(ids: torch.Tensor, generation_config: Any, **kwargs: Any) -> Any:
        generation_config.max_new_tokens = min(generation_config.max_new_tokens, 12)
        return generate(ids, generation_config=generation_config, **kwargs)

    model.generate = shortened
    (found,) = bench.run([Case(24, 16, 1)], ["wavefill"])
    assert len(found.steps) == 11
    assert found.notes == ("context 40, batch 1, wavefill: stopped after 11 of 15 steps",)


@pytest.mark.usefixtures("_small")
def test_nothing_is_begun_after_the_end() -> None:
    model = shapes.build(shapes.find("llama-3.1-8b", layers=1), "float32", 0, "cpu")
    (found,) = e2e_gpu.Bench(model, stop_after=-1).run([Case(24, 16, 1)], ["sdpa"])
    assert found.absent == "the time of --stop-after was over"


@pytest.mark.parametrize(("arguments", "named"), [
    (["--device", "tpu"], "--device"), (["--dtype", "int8"], "--dtype"), (["--whole"], "--whole"),
    (["--config", "llama-3.1-8b", "--model", "x"], "--model"), (["--ways", "x"], "--ways"),
    (["--model", "smollm2", "--layers", "2"], "--layers"), (["--energy"], "--energy"), (["--profile"], "--profile"),
    (["--stream"], "--stream"), (["--request-batches", "1"], "--request-batches"),
    (["--ratios", "1:1", "--request-batches", "0"], "--request-batches"),
])
def test_what_the_command_refuses(arguments: list[str], named: str) -> None:
    result = runner.invoke(cli.app, ["bench", "e2e", *arguments])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {named}")

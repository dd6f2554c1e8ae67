"""What the advisor computes: the guide's figures, the table of measured rows, memory, and the command."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from wavefill import hardware
from wavefill.advise import Formats, Load, Machine, advise, components, least_gpus, load
from wavefill.advise.components import Component, attention, linears, touched
from wavefill.advise.models import Attention, Latent, Linear
from wavefill.cli import app
from wavefill.spec import InvalidArgument

ROOT = Path(__file__).parents[1]
H200 = Machine.named("h200")
#: As the guide counts: one byte an element of Q, K, V and O.
GUIDE = Formats("fp8", "fp8", activations=1)


def call(mixer, batch, queries, keys, formats=GUIDE, causal=True, machine=H200) -> Component:
    return attention(mixer, 1, Load(batch, queries, keys, causal), formats, machine)


# ------------------------------------------------------------------------------------------ the guide's figures


@pytest.mark.parametrize("G", [1, 2, 4, 8, 16])
def test_arithmetic_intensity(G):
    mixer = Attention(8 * G, 8, 128, 128)
    assert call(mixer, 3, 1, 131072).intensity == pytest.approx(2 * G, rel=0.001)
    for length in (4096, 32768):
        found = call(mixer, 3, length, length, causal=False)
        assert found.intensity == pytest.approx(2 * length / (1 + 1 / G), rel=1e-9)
        assert [found.gemms[0].flops, found.gemms[1].flops] == [found.flops / 2] * 2


def test_head_size_does_not_change_the_intensity():
    assert len({round(call(Attention(32, 8, D, D), 1, 1, 65536).intensity, 9) for D in (64, 128, 256)}) == 1


def test_prompts_grow_as_the_square_of_their_length_and_decoding_in_proportion():
    mixer = Attention(32, 8, 128, 128)
    prompt = [call(mixer, 1, n, n).seconds for n in (65536, 131072)]
    assert prompt[1] / prompt[0] == pytest.approx(4, rel=0.01)
    step = [call(mixer, 16, 1, n).seconds for n in (65536, 131072)]
    assert step[1] / step[0] == pytest.approx(2, rel=0.01)


def test_twice_the_group_halves_decoding_and_leaves_prompts():
    """32 query heads, fp8, as long as KV bytes rule."""
    steps = [call(Attention(32, KH, 128, 128), 64, 1, 131072) for KH in (32, 16, 8, 4)]
    assert all(step.limit == "memory" for step in steps)
    for one, half in pairwise(steps):
        assert one.seconds / half.seconds == pytest.approx(2, rel=0.01)
    prompts = [call(Attention(32, KH, 128, 128), 1, 32768, 32768).seconds for KH in (32, 16, 8, 4)]
    assert max(prompts) / min(prompts) < 1.02


def test_prompts_grow_less_than_the_head_size_and_decoding_in_proportion():
    prompts = [call(Attention(32, 8, D, D), 1, 32768, 32768).seconds for D in (64, 128, 256)]
    assert prompts[1] / prompts[0] < 1.75
    assert prompts[2] / prompts[1] < 1.75
    steps = [call(Attention(32, 8, D, D), 64, 1, 131072).seconds for D in (64, 128, 256)]
    assert steps[1] / steps[0] == pytest.approx(2, rel=0.01)
    assert steps[2] / steps[1] == pytest.approx(2, rel=0.01)


@pytest.mark.parametrize("gpu", ["H100", "H200", "B200", "GB200", "GB300"])
def test_deepseek_r1_s_share_of_attention_in_prompts(gpu):
    """18 % at 4K and 85 % at 128K, in fp8, with as many tokens at a time in both."""
    found = [advise("deepseek-r1", gpu, context=context, batch=131072 // context, kv="fp8", weights="fp8",
                    phase="prefill").share("prefill") for context in (4096, 131072)]
    assert found == pytest.approx([0.18, 0.85], abs=0.04)


def test_one_h100_does_not_decode_70b_at_64k_in_6_ms():
    model, h100 = load("llama-3.1-70b"), hardware.lookup("h100")
    assert model.parameters / h100.bandwidth > 0.021  # its weights alone, at one byte
    least = {formats: least_gpus(model, h100, 0.006, Load(1, 1, 65536), Formats(*formats))
             for formats in (("bf16", "bf16"), ("bf16", "fp8"), ("fp8", "fp8"))}
    assert least == {("bf16", "bf16"): 8, ("bf16", "fp8"): 5, ("fp8", "fp8"): 4}
    report = advise("llama-3.1-70b", "h100", context=65536, phase="decode")
    assert not report.memory.holds(1)
    assert report.seconds("decode") > 0.04


# -------------------------------------------------------------------------------- predictions and measurements


def test_decode_attention_is_within_12_percent_of_what_was_measured():
    """On 90 % of the even rows of docs/gpu-backend.md, and within 14 % on all of them."""
    rows = json.loads((ROOT / "benchmarks/results/gpu-kernels.json").read_text(encoding="utf-8"))["results"]
    even = [row for row in rows if len(set(row["lens"])) == 1]
    ratios = []
    for row in even:
        mixer = Attention(row["HQ"], row["KH"], row["D"], row["D"])
        found = call(mixer, len(row["lens"]), 1, row["lens"][0], Formats())
        ratios.append(found.seconds * 1e6 / row["times_us"]["wavefill"]["median"])
    assert len(even) == 19
    assert sum(abs(ratio - 1) <= 0.12 for ratio in ratios) >= 0.9 * len(even)
    assert all(abs(ratio - 1) <= 0.14 for ratio in ratios)


@pytest.mark.parametrize(("D", "batch", "length", "measured"), [
    (64, 1, 8192, 499), (64, 1, 32768, 556), (64, 8, 4096, 453), (96, 1, 8192, 581), (96, 1, 32768, 678),
    (96, 8, 4096, 516), (128, 1, 8192, 671), (128, 1, 32768, 730), (128, 8, 4096, 610), (256, 1, 8192, 740),
    (256, 1, 32768, 793), (256, 8, 4096, 680),
])
def test_attention_of_prompts_is_near_what_was_measured(D, batch, length, measured):
    """TFLOP/s of docs/gpu-backend.md, "Prompts as libraries run them"."""
    found = call(Attention(32, 8, D, D), batch, length, length, Formats())
    assert found.flops / found.seconds / 1e12 == pytest.approx(measured, rel=0.2)


@pytest.mark.parametrize(("batch", "context", "measured"), [
    (1, 4096, 4.36), (8, 4096, 5.50), (32, 4096, 8.86), (1, 16384, 4.69), (8, 16384, 8.29), (1, 65536, 6.25),
    (1, 131072, 8.07)])
def test_a_step_of_llama_8b_is_within_12_percent_of_what_was_measured(batch, context, measured):
    """Milliseconds of docs/transformers.md, fuse=True."""
    report = advise("llama-3.1-8b", "h200", batch=batch, context=context, phase="decode")
    assert report.seconds("decode") * 1e3 == pytest.approx(measured, rel=0.12)


# ------------------------------------------------------------------------------------------------- components


@pytest.mark.parametrize("window", [None, 1, 7, 100])
@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 50), (5, 50), (50, 50)])
def test_pairs_are_counted_as_a_loop_counts_them(queries, keys, window):
    seen = [min(keys - queries + 1 + i, window or keys) for i in range(queries)]
    found = Load(1, queries, keys)
    assert found.pairs(window) == sum(seen)
    assert Load(1, queries, keys, causal=False).pairs(window) == queries * min(keys, window or keys)
    first = min(max(0, keys - queries + 1 + i - (window or keys)) for i in range(queries))
    assert found.seen(window) == keys - first


def test_latents_are_attended_to_as_they_are_in_decoding_and_expanded_in_prompts():
    mixer = Latent(128, 512, 1536, 128, 64, 128)
    step, prompt = call(mixer, 2, 1, 4096, Formats()), call(mixer, 2, 4096, 4096, Formats())
    assert [(g.batch, g.M, g.N, g.K) for g in step.gemms] == [(2, 128, 4096, 576), (2, 128, 512, 4096)]
    assert [(g.batch, g.M, g.N, g.K) for g in prompt.gemms] == [(256, 4096, 4096, 192), (256, 4096, 128, 4096)]
    assert step.kv == 2 * 4096 * 576 * 2
    assert {linear.name for linear in mixer.linears(7168, True)} - {linear.name for linear in mixer.linears(7168)} == {
        "W_UK", "W_UV"}
    assert (sum(linear.weights for linear in mixer.linears(7168, True))
            == sum(linear.weights for linear in mixer.linears(7168)))


def test_experts_that_a_step_touches():
    experts = Linear("experts", 10, 20, 256, 8)
    assert touched(experts, 1) == pytest.approx(8)
    assert touched(experts, 16) == pytest.approx(256 * (1 - (248 / 256) ** 16))
    assert touched(experts, 100000) == pytest.approx(256)
    assert touched(Linear("dense", 10, 20), 5) == 1
    found = linears("experts", [experts], 1, 16, Formats(), H200)
    assert found.flops == pytest.approx(2 * 16 * 8 * 10 * 20)


def test_many_gpus_share_bytes_and_flops():
    one, eight = (call(Attention(64, 8, 128, 128), 64, 1, 131072, machine=Machine.named("h200", n)) for n in (1, 8))
    assert (one.seconds - one.fixed) / (eight.seconds - eight.fixed) == pytest.approx(8)


@pytest.mark.parametrize(("kv", "nbytes"), [
    ("bf16", 8 * 256 * 2), ("fp8", 8 * 256), ("int8", 8 * (256 + 2 * 2)),
])
def test_bytes_of_kv_are_those_of_the_formats(kv, nbytes):
    assert Formats(kv).kv_bytes(Attention(32, 8, 128, 128), 1000) == 1000 * nbytes


def test_memory_counts_windows_states_and_the_16_bits_of_new_tokens():
    llama = advise("llama-3.1-8b", "h200", context=131072, phase="decode").memory
    assert llama.request == 131072 * 131072
    assert llama.token == 131072
    assert llama.requests == (int(141 * 2**30 * 0.9) - llama.weights) // llama.request == 6
    gemma = advise("gemma-3-27b", "h200", context=131072, phase="decode").memory
    assert gemma.request == (10 * 131072 + 52 * 1024) * 16 * 256 * 2
    nemotron = advise("nemotron-h-8b", "h200", context=1024, phase="decode").memory
    assert nemotron.request == 24 * 128 * 64 * 128 * 4 + 4 * 1024 * 8 * 256 * 2
    mixer = Attention(32, 8, 128, 128)
    assert Formats("int4").kv_bytes(mixer, 64) == Formats().kv_bytes(mixer, 64)


def test_a_step_s_times_add_up_and_every_component_has_a_limit():
    report = advise("nemotron-h-8b", "mi300x", batch=4)
    for phase, parts in report.phases.items():
        assert report.seconds(phase) == pytest.approx(sum(part.seconds for part in parts))
        assert {part.limit for part in parts} <= {"memory", "tensor cores", "exponentials", "fixed"}
    again = components(report.model, Load(4, 1, report.context), report.formats, report.machine)
    assert again == report.phases["decode"]


@pytest.mark.parametrize(("arguments", "words"), [
    ({"gpu": "h300"}, "gpu: must be one of A100"), ({"gpu": "cpu"}, "gpu: must be one of"), ({"gpus": 0}, "gpus: must"),
    ({"batch": 0}, "batch: must be at least 1"), ({"context": 0}, "context: must be at least 1"),
    ({"kv": "int3"}, "kv: must be one of bf16"), ({"weights": "int4"}, "weights: must be one of"),
    ({"phase": "train"}, "phase: must be one of decode"),
])
def test_mistakes_are_named(arguments, words):
    with pytest.raises(InvalidArgument, match=words):
        advise(**{"config": "llama-3.1-8b", "gpu": "H200"} | arguments)


# ------------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize("arguments", [
    ("llama-3.1-8b", "--batch", "64"),
    ("deepseek-r1", "--gpus", "8", "--kv", "fp8", "--weights", "fp8", "--batch", "16"),
    ("nemotron-h-8b", "--context", "1m", "--gpu", "rtx4090"), ("gemma-3-27b", "--kv", "int4", "--gpu", "gb300"),
    ("llama-3.1-405b", "--phase", "prefill", "--context", "4k", "--gpu", "mi250x"), ("kimi-k2", "--batch", "256"),
], ids=" ".join)
def test_the_report_fits_a_screen(arguments):
    done = CliRunner().invoke(app, ["advise", *arguments], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in done.stdout


def test_json_has_what_the_api_has():
    done = CliRunner().invoke(app, ["advise", "qwen3-8b", "--gpu", "b200", "--context", "64k", "--kv", "fp8", "--json"])
    assert json.loads(done.stdout) == json.loads(json.dumps(
        advise("qwen3-8b", "B200", context=65536, kv="fp8").to_dict()))


def test_a_gpu_of_one_s_own(tmp_path):
    file = tmp_path / "mine.json"
    fields = {"name": "Mine", "sms": 100, "bandwidth": 1e12, "memory": 2**36, "l2": 2**24, "shared_memory": 2**16,
              "bf16_flops": 1e14, "fp8_flops": None, "exps": 1e12, "source": "me"}
    file.write_text(json.dumps(fields), encoding="utf-8")
    assert hardware.gpu_file(file) == hardware.Gpu(**fields)
    done = CliRunner().invoke(app, ["advise", "llama-3.1-8b", "--gpu", str(file), "--context", "4k"])
    assert done.exit_code == 0, done.output
    assert "Mine" in done.stdout
    for wrong, words in (({"sms": "many"}, "sms must be a number"), ({"name": 3}, "name must be text"),
                         ({"cores": 3}, "must be a JSON object"), ({"bandwidth": -1}, "bandwidth must be")):
        file.write_text(json.dumps(fields | wrong), encoding="utf-8")
        with pytest.raises(InvalidArgument, match=words):
            hardware.gpu_file(file)
    with pytest.raises(InvalidArgument, match="gpu: must be a JSON object"):
        hardware.gpu_file(tmp_path / "none.json")


@pytest.mark.parametrize("gpu", hardware.GPUS, ids=lambda gpu: gpu.name)
def test_exponentials_are_of_the_right_size(gpu):
    """16 a clock and SM, 32 on Blackwell Ultra, at clocks of 1.4 to 2.6 GHz."""
    assert 1.4e9 <= gpu.exps / gpu.sms / (32 if gpu.name == "GB300" else 16) <= 2.6e9

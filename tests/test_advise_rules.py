"""Findings, each held against the model run by hand with its change; tiles and waves; sweeps."""

from __future__ import annotations

import json
import re
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from wavefill import hardware, schedule
from wavefill.advise import Formats, Machine, advise, load
from wavefill.advise.components import padded_head
from wavefill.advise.models import Attention, Latent
from wavefill.advise.plans import compare
from wavefill.advise.setups import Setup
from wavefill.advise.sweeps import SWEEPS, sweep
from wavefill.advise.tiles import tiles
from wavefill.cli import app
from wavefill.spec import Fixed, InvalidArgument

LLAMA = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
         "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}


def findings(config, gpu="h200", **options):
    report = advise(config, gpu, **{"context": 131072, "batch": 4} | options)
    return {each.rule: each for each in report.findings}


def decode(config, **options):
    return advise(config, "h200", **{"context": 131072, "batch": 4, "phase": "decode"} | options).seconds("decode")


# -------------------------------------------------------------------------------------------------------- rules


def test_a_larger_group_is_the_model_with_half_the_kv_heads():
    found = findings(LLAMA)["group"]
    assert found.before == pytest.approx(decode(LLAMA))
    assert found.after == pytest.approx(decode(LLAMA | {"num_key_value_heads": 4}))
    assert "G 4 (HQ 32, KH 8)" in found.seen
    assert "G 8, KH 4" in found.change
    assert "group" not in findings(LLAMA | {"num_key_value_heads": 1})


def test_a_smaller_format_of_kv():
    found = findings(LLAMA)["KV format"]
    assert found.after == pytest.approx(decode(LLAMA, kv="fp8"))
    assert findings(LLAMA, kv="fp8")["KV format"].after == pytest.approx(decode(LLAMA, kv="int4"))
    assert findings(LLAMA, "a100")["KV format"].change == "KV in int8"
    assert "KV format" not in findings(LLAMA, kv="int4")


def test_a_hybrid_of_windows():
    found = findings(LLAMA)["hybrid layers"]
    config = LLAMA | {"model_type": "gemma3_text", "sliding_window": 1024, "head_dim": 128, "vocab_size": 128256,
                      "tie_word_embeddings": False}
    assert found.after == pytest.approx(decode(config))
    assert "hybrid layers" not in findings("gemma-3-27b")
    assert "hybrid layers" not in findings("nemotron-h-8b")


def test_latents_in_place_of_k_and_v():
    found = findings(LLAMA)["latents"]
    assert "131.1 KB" in found.seen
    assert f"{32 * 576 * 2 / 1e3:,.4g} KB" in found.change
    assert found.after < found.before
    assert not {"latents", "group"} & {*findings("deepseek-r1", kv="fp8", weights="fp8")}


def test_drafts_share_what_a_step_reads():
    found = findings(LLAMA)["drafts"]
    assert found.before == pytest.approx(decode(LLAMA))
    assert found.after == pytest.approx(found.before / 2.533, rel=0.01)  # 1 + 0.7 + 0.49 + 0.343, KV and weights rule
    experts = findings("deepseek-r1", context=2048, kv="fp8", weights="fp8", batch=8).get("drafts")
    assert experts is None or experts.saved < 0.5  # more tokens touch more experts


def test_more_tp_than_kv_heads_is_priced_against_the_fastest_other_plan():
    found = findings("llama-3.1-70b", gpus=16, batch=16)["TP > KH"]
    plans = compare(load("llama-3.1-70b"), hardware.lookup("h200"), 16, 131072, 16, Formats())
    every = plans.by_interactivity()
    tp = next(each.step for each in plans.choices if each.step.plan.tp == 16)
    best = next(each for each in every if each.copies == 1)
    assert (found.before, found.after) == (tp.seconds, best.seconds)
    assert found.change == best.plan.name
    assert "on 2 GPUs" in found.seen
    assert "687 GB" in found.cost
    assert "TP > KH" not in findings("llama-3.1-70b", gpus=8)


def test_a_short_context_names_what_rules_and_a_long_one_does_not():
    found = findings(LLAMA, context=2048)["short context"]
    assert "MLP" in found.cost
    assert found.change == "weights in fp8"
    assert found.after == pytest.approx(decode(LLAMA, context=2048, weights="fp8"))
    again = findings(LLAMA, context=2048, weights="fp8")["short context"]
    assert again.change == "a batch of 8"
    assert again.after == pytest.approx(decode(LLAMA, context=2048, weights="fp8", batch=8) / 2)
    half = int(float(re.search(r"about ([\d.]+) thousand", found.seen)[1]) * 1000)
    assert advise(LLAMA, "h200", context=half, batch=4).share("decode") == pytest.approx(0.5, abs=0.01)
    assert "short context" not in findings(LLAMA)


def test_heads_of_64_are_held_against_heads_of_128():
    small = LLAMA | {"head_dim": 64, "num_attention_heads": 64, "num_key_value_heads": 16}
    found = findings(small)["head size"]
    options = {"context": 131072, "batch": 4, "phase": "prefill"}
    assert found.before == pytest.approx(advise(small, "h200", **options).seconds("prefill"))
    assert found.after == pytest.approx(advise(LLAMA, "h200", **options).seconds("prefill"))
    assert found.seen == "D 64 of tiles of 128"
    assert "head size" not in findings(LLAMA)
    assert "head size" not in findings(LLAMA | {"head_dim": 256})


def test_a_head_of_80_pays_for_more():
    assert [padded_head(D) for D in (64, 80, 96, 128, 192, 256, 320)] == [64, 96, 96, 128, 192, 256, 320]
    found = findings(LLAMA | {"head_dim": 80, "hidden_size": 2560, "num_key_value_heads": 8})["head size"]
    assert found.seen == "D 80 of tiles of 128, computed as 96"
    assert "HQ 20, KH 5" in found.change


def test_large_pages_waste_half_of_the_last_one():
    found = findings(LLAMA, context=4096, page=512)["page"]
    assert found.before - found.after == pytest.approx(4 * 131072 * (511 - 15) / 2)
    assert "page" not in findings(LLAMA, page=512)
    with pytest.raises(InvalidArgument, match="page: must be at least 1"):
        findings(LLAMA, page=0)


def test_small_pages_cost_prompts():
    found = findings(LLAMA)["page and tile"]
    report = advise(LLAMA, "h200", context=131072, batch=4, phase="prefill")
    attention = report.seconds("prefill") * report.share("prefill")
    assert found.before - found.after == pytest.approx(attention * (625 / 526 - 1))
    assert "page and tile" not in findings(LLAMA, page=64)
    assert "page and tile" not in findings(LLAMA, "b200")  # was not measured there


def test_flashdecoding_s_rule_is_priced_by_the_schedules():
    found = findings(LLAMA, batch=9, context=65536)["waves"]
    table = schedule.make_table(Fixed(rule="flashdecoding"), [0] * 9, [65536] * 9, KH=8, workers=132, tile=64)
    longer = schedule.Timeline(table).makespan / -(-9 * 8 * 1024 // 132)
    report = advise(LLAMA, "h200", batch=9, context=65536, phase="decode")
    part = report.phases["decode"][0].seconds
    assert found.before - found.after == pytest.approx(part * (longer - 1))


def test_memory_that_is_too_small_comes_first():
    report = advise("llama-3.1-70b", "h100", context=65536)
    assert report.findings[0].rule == "memory"
    assert report.findings[0].change == "3 GPUs at least"
    assert advise("llama-3.1-70b", "h100", gpus=3, context=65536).memory.holds(1)
    assert findings("llama-3.1-70b", "h100", gpus=2, context=65536, batch=1)["memory"].change == "3 GPUs at least"


@pytest.mark.parametrize("name", ["llama-3.1-8b", "deepseek-r1", "gemma-3-27b", "gpt-oss-20b", "nemotron-h-8b",
                                  "kimi-k2", "qwen3-235b-a22b"])
@pytest.mark.parametrize("options", [{}, {"gpus": 8, "context": 1024, "kv": "fp8"}, {"phase": "prefill", "context": 9}])
@pytest.mark.parametrize("gpu", ["a100", "gb300"])
def test_every_finding_has_its_numbers(name, options, gpu):
    found = advise(name, gpu, **{"batch": 8} | options).findings
    assert found == tuple(sorted(found, key=lambda each: (each.rule != "memory", -each.saved)))
    for each in found:
        assert 0.01 <= each.saved < 1
        assert all(re.search(r"\d", text) for text in (each.seen + each.cost, each.gain)), each
        assert each.phase in ("memory", *(("decode", "prefill") if "phase" not in options else ("prefill",)))


# ------------------------------------------------------------------------------------------------ tiles, waves


def test_rows_and_columns_that_are_paid_for():
    h200, b200 = hardware.lookup("h200"), hardware.lookup("b200")
    found = tiles(Attention(28, 4, 80, 80), 1, 1000, h200)
    assert (found.rows, found.columns, found.prompt_rows) == ((7, 8), (80, 128), (126, 128))
    assert (found.tokens, found.tiles, found.last) == (64, 16, 1000 - 15 * 64)
    assert tiles(Attention(28, 4, 64, 64), 1, 1000, b200).rows == (7, 16)
    assert tiles(Attention(28, 4, 64, 64), 1, 1000, b200).columns == (64, 128)
    assert tiles(Latent(128, 512, 1536, 128, 64, 128), 1, 1000, h200).columns == (576, 640)


def test_tensor_memory_of_blackwell():
    needed = {D: tiles(Attention(32, 8, D, D), 1, 1000, hardware.lookup("gb200")).tensor_memory for D in (64, 128, 256)}
    assert needed == {64: (384, 512), 128: (512, 512), 256: (768, 512)}
    assert tiles(Attention(32, 8, 128, 128), 1, 1000, hardware.lookup("h200")).tensor_memory is None
    done = CliRunner().invoke(app, ["advise", "gemma-2-9b", "--gpu", "b200"], env={"COLUMNS": "80"})
    assert "tensor memory 768 of 512" in " ".join(done.stdout.split())


def test_waves_are_those_of_the_schedules():
    """133 pairs on 132 SMs: FlashDecoding's rule leaves a second wave with one piece."""
    stream, split = tiles(Attention(7, 1, 128, 128), 133, 4096, hardware.lookup("h200")).schedules
    assert (split.splits, split.items, split.waves, split.makespan) == (1, 133, 2, 128)
    assert split.last == pytest.approx(1 / 132)
    assert split.fill == pytest.approx(133 / 264)
    assert (stream.waves, stream.makespan) == (1, 65)
    dealt = tiles(Attention(64, 8, 128, 128), 133, 4096, hardware.lookup("h200"), gpus=8).schedules
    assert dealt == (stream, split)  # a KV head each
    assert not tiles(Attention(7, 1, 128, 128), 1 << 18, 4096, hardware.lookup("h200")).schedules


# ------------------------------------------------------------------------------------------------------- sweeps


def points(over, model="llama-3.1-8b", **options):
    setup = Setup(load(model), Machine.named("h200"), Formats(**options), 16, 131072)
    return sweep(setup, over)


@pytest.mark.parametrize("over", SWEEPS)
def test_a_sweep_passes_the_model_s_own_point(over):
    here = [each for each in points(over) if each.here]
    report = advise("llama-3.1-8b", "h200", batch=16)
    assert len(here) == 1
    assert here[0].step == pytest.approx(report.seconds("decode"))
    assert here[0].prompts == pytest.approx(report.seconds("prefill"))
    assert here[0].request == report.memory.request


def test_groups_and_head_sizes():
    by_g = points("g")
    assert [each.value for each in by_g] == ["1", "2", "4", "8", "16", "32"]
    for one, half in pairwise(by_g[:5]):
        assert one.step_attention / half.step_attention == pytest.approx(2, rel=0.02)
        assert one.prompt_attention == pytest.approx(half.prompt_attention, rel=0.02)
    by_d = {each.value: each for each in points("hsz")}
    assert by_d["256"].step_attention / by_d["128"].step_attention == pytest.approx(2, rel=0.01)
    assert by_d["80"].prompt_attention == by_d["96"].prompt_attention
    assert points("g", "deepseek-r1") == points("hsz", "deepseek-r1") == ()


def test_lengths_and_formats():
    by_length = {each.value: each for each in points("length")}
    assert by_length["1,048,576"].prompt_attention / by_length["524,288"].prompt_attention == pytest.approx(4, rel=0.01)
    assert by_length["1,048,576"].step_attention / by_length["524,288"].step_attention == pytest.approx(2, rel=0.01)
    assert [each.value for each in points("kv")] == ["bf16", "fp8", "int8", "int4"]
    with pytest.raises(InvalidArgument, match="sweep: must be one of g, hsz"):
        points("depth")


# ------------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize("option", [("--findings",), *(("--sweep", name) for name in SWEEPS)], ids=" ".join)
def test_tables_fit_a_screen(option):
    done = CliRunner().invoke(app, ["advise", "llama-3.1-70b", "--gpus", "16", *option], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in done.stdout


def test_a_sweep_that_the_model_has_no_layers_for_is_a_sentence():
    done = CliRunner().invoke(app, ["advise", "deepseek-r1", "--sweep", "g"])
    assert done.exit_code != 0
    assert "grouped-query" in done.output + done.stderr


def test_json_has_findings_tiles_and_sweeps():
    found = json.loads(CliRunner().invoke(app, ["advise", "gpt-oss-20b", "--json"]).stdout)
    report = advise("gpt-oss-20b", "h200")
    assert [each["rule"] for each in found["findings"]] == [each.rule for each in report.findings]
    assert {*found["sweeps"]} == {*SWEEPS}
    assert [each["schedules"][0]["schedule"] for each in found["tiles"]] == ["stream_k", "stream_k"]

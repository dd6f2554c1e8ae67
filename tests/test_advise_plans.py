"""Parallel plans: what each GPU has, what is exchanged, and which plans are best."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
from typer.testing import CliRunner

from wavefill import hardware
from wavefill.advise import Formats, advise, load
from wavefill.advise.exchanges import LINK_SHARE, NETWORK_LATENCY, Links, distinct
from wavefill.advise.layouts import Plan, held, kv_tokens, plans
from wavefill.advise.plans import Planner, compare
from wavefill.cli import app
from wavefill.spec import InvalidArgument

BF16 = Formats()
H200, GB200 = hardware.lookup("h200"), hardware.lookup("gb200")


def step(model, plan, *, gpu=H200, batch=16, context=131072, formats=BF16):
    return Planner(load(model), gpu, plan, formats, context).step(batch)


def tp(n):
    return Plan(tp=n, ffn_tp=n)


def attention(found):
    return sum(each.seconds for each in found.components if each.kind == "attention")


# -------------------------------------------------------------------------------------------- TP and KV heads


def test_past_the_kv_heads_tp_copies_kv_and_attention_gets_no_faster():
    """Llama-3.1-70B has 8 KV heads: 16 GPUs hold each twice, and each reads as much as one of 8."""
    eight, sixteen = step("llama-3.1-70b", tp(8)), step("llama-3.1-70b", tp(16))
    assert (eight.copies, eight.copied, eight.copied_seconds) == (1, 0, 0)
    assert sixteen.copies == 2
    assert sixteen.kv == eight.kv == 16 * 131072 * 80 * 2 * 128 * 2
    assert sixteen.copied == 8 * sixteen.kv
    assert sixteen.weights < eight.weights
    assert attention(sixteen) == pytest.approx(attention(eight), rel=0.001)
    read = 80 * next(each.kv for each in sixteen.components if each.kind == "attention")
    assert sixteen.copied_seconds == pytest.approx(read / 2 / H200.measured_read)


def test_two_kv_heads_are_on_four_gpus_each_of_tp_8():
    """Nemotron-3's, the guide's example; its states are dealt out and not copied."""
    one, eight = (step("nemotron-3-nano-30b-a3b", plan) for plan in (Plan(), Plan(tp=8, ep=8)))
    assert eight.copies == 4
    kv, states = 16 * 6 * 131072 * 2 * 2 * 128 * 2, 16 * 23 * 4096 * 128 * 4
    assert (one.kv, eight.kv) == (kv + states, kv // 2 + states // 8)
    assert eight.copied == 8 * kv // 2 * 3 // 4


def test_a_latent_cache_is_whole_on_every_gpu_of_tp():
    one, eight = step("deepseek-r1", Plan()), step("deepseek-r1", Plan(tp=8, ep=8))
    assert eight.kv == one.kv
    assert eight.copies == 8
    assert step("deepseek-r1", Plan(adp=8, ep=8)).kv == one.kv / 8


def test_kvp_halves_what_a_gpu_reads_where_tp_cannot():
    sixteen, helix = step("llama-3.1-70b", tp(16)), step("llama-3.1-70b", Plan(kvp=2, tp=8, ffn_tp=16))
    assert helix.copies == 1
    assert helix.kv == sixteen.kv / 2
    assert attention(helix) < 0.55 * attention(sixteen)


@pytest.mark.parametrize(("plan", "microseconds"), [(tp(8), 128), (tp(64), 128), (Plan(kvp=8, tp=8, ffn_tp=64), 16)])
def test_kv_reads_are_those_of_helix_s_figure_1(plan, microseconds):
    """B 8, HQ 128, KH 8, D 128, 1M tokens at half a byte an element and 8 TB/s: 128, 128 and 16 us a layer."""
    found = step("llama-3.1-405b", plan, gpu=GB200, batch=8, context=1_000_000, formats=Formats("fp8", "fp8"))
    kv = next(each.kv for each in found.components if each.kind == "attention") / 2  # fp8 has twice the bytes
    assert kv / 8e12 * 1e6 == pytest.approx(microseconds, rel=0.001)


def test_a_window_is_dealt_out_like_the_rest():
    """Gemma-3's 1,024 tokens over 8 GPUs: 128 of each request, 16 KV heads."""
    found = step("gemma-3-27b", Plan(kvp=8, ffn_tp=8), gpu=GB200)
    windowed = next(each for each in found.components if each.name == "attention, window")
    assert windowed.kv == 16 * 128 * 16 * 2 * 128 * 2
    assert found.kv == 16 * (52 * 128 + 10 * 131072 // 8) * 16 * 2 * 128 * 2


def test_kv_blocks_are_dealt_out_in_turn():
    assert [kv_tokens(n, 4) for n in (1, 32, 33, 128, 129, 1024)] == [1, 32, 32, 32, 64, 256]
    assert kv_tokens(1000, 1) == 1000


# ---------------------------------------------------------------------------------------------------- exchanges


def sent(found, name):
    return sum(each.sent for each in found.exchanges if name in each.name)


@pytest.mark.parametrize("model", ["llama-3.1-405b", "deepseek-r1", "gemma-3-27b"])
def test_helix_s_volume_does_not_depend_on_the_context(model):
    plan = Plan(kvp=8, tp=1, ffn_tp=8)
    found = [step(model, plan, gpu=GB200, context=context) for context in (4096, 131072, 1 << 20)]
    assert len({each.exchanges for each in found}) == 1
    assert found[0].exchanging > 0
    for short, long in pairwise(found):
        assert long.seconds > short.seconds


def test_helix_s_volume_is_that_of_outputs_and_lse():
    """16 requests, 128 query heads over TP 8, D 128 in 2 bytes and 8 bytes of LSE; a quarter stays."""
    found = step("llama-3.1-405b", Plan(kvp=4, tp=8, ffn_tp=32), gpu=GB200)
    assert sent(found, "outputs and LSE") == 16 * 16 * (128 * 2 + 8) * 3 / 4


def test_all_reduce_in_one_round_and_in_two():
    links, rate = Links(H200), 450e9 * LINK_SHARE
    small, large = links.all_reduce("x", 3, 8, 1e4), links.all_reduce("x", 3, 8, 1e8)
    assert small.sent == 7e4
    assert small.seconds == pytest.approx(3 * (7.2e-6 + 7e4 / rate))
    assert large.sent == pytest.approx(2 * 7 / 8 * 1e8)
    assert large.seconds == pytest.approx(3 * (14.4e-6 + 1.75e8 / rate))
    apart = links.all_reduce("x", 3, 8, 1e4, apart=True)  # an MLP between the two rounds
    assert apart.seconds == pytest.approx(3 * (14.4e-6 + 1.75e4 / rate))


def test_what_leaves_the_domain_goes_through_the_network():
    links, network = Links(H200), 50e9 * LINK_SHARE
    near, far = links.all_to_all("x", 1, 8, 1e7), links.all_to_all("x", 1, 16, 1e7)
    assert near.seconds == pytest.approx(7.2e-6 + 7 / 8 * 1e7 / (450e9 * LINK_SHARE))
    assert far.seconds == pytest.approx(NETWORK_LATENCY + 8 / 16 * 1e7 / network)
    assert links.all_reduce("x", 1, 16, 1e8).sent == pytest.approx(1.75e8 + 2 / 2 * 1e8 / 8)
    assert Links(GB200).all_to_all("x", 1, 16, 1e7).seconds < near.seconds


def test_kv_parallel_gpus_are_apart_by_tp():
    """TP fills a domain of 8, so that the other GPUs of KVP are in other ones: outputs go through the network."""
    network = 50e9 * LINK_SHARE
    for kvp, tp, far in ((2, 8, 1 / 2), (4, 4, 2 / 4), (8, 1, 0)):
        found = step("llama-3.1-70b", Plan(kvp=kvp, tp=tp, ffn_tp=kvp * tp))
        outputs = next(each for each in found.exchanges if "LSE" in each.name)
        held = 16 * 64 / tp * (128 * 2 + 8)
        assert outputs.sent == pytest.approx(held * (kvp - 1) / kvp)
        if far:
            assert outputs.seconds == pytest.approx(80 * max(NETWORK_LATENCY + far * held / network, 7.2e-6))
        else:
            assert outputs.seconds < 80 * NETWORK_LATENCY


def test_dispatch_sends_a_token_once_to_each_gpu_that_has_an_expert_of_it():
    assert distinct(1, 8) == 1
    assert distinct(72, 1) == pytest.approx(1)
    assert distinct(8, 8) == pytest.approx(8 * (1 - (7 / 8) ** 8))
    found = step("deepseek-r1", Plan(adp=8, ep=8), batch=32, formats=Formats("fp8", "fp8"))
    tokens = 4 * distinct(8, 8) * 7168 * 7 / 8
    assert sent(found, "dispatch") == pytest.approx(tokens)
    assert sent(found, "combine") == pytest.approx(2 * tokens)
    assert sent(step("deepseek-r1", Plan(adp=8, ep=8), batch=32), "dispatch") == pytest.approx(2 * tokens)
    assert {each.layers for each in found.exchanges if "experts" in each.name} == {58}


def test_tp_sums_after_attention_and_after_mlp():
    found = step("llama-3.1-70b", tp(8))
    assert {each.name: each.layers for each in found.exchanges} == {
        "all-reduce after attention": 80, "all-reduce after MLP": 80}
    assert not step("llama-3.1-8b", Plan(replicas=8), batch=8).exchanges


def test_request_parallel_attention_gathers_and_scatters_around_a_shared_mlp():
    found = step("llama-3.1-8b", Plan(adp=8, ffn_tp=8), batch=8)
    (only,) = found.exchanges
    assert only.sent == pytest.approx(2 * 7 / 8 * 8 * 4096 * 2)
    assert only.seconds > 32 * 14.4e-6
    assert not step("gpt-oss-20b", Plan(adp=8, ep=8), batch=8).exchanges[0].name.startswith("all-")


def test_a_gpu_without_known_links_has_no_plan_of_several():
    own = replace(H200, link=None)
    assert compare(load("llama-3.1-8b"), own, 1, 4096, 1, Formats()).choices
    with pytest.raises(InvalidArgument, match="gpu: needs link"):
        compare(load("llama-3.1-8b"), own, 2, 4096, 1, Formats())


# -------------------------------------------------------------------------------------------------------- plans


@pytest.mark.parametrize(("model", "gpus"), [
    ("llama-3.1-70b", 16), ("deepseek-r1", 72), ("gpt-oss-20b", 6), ("nemotron-h-8b", 8), ("qwen3-235b-a22b", 8)])
def test_plans_use_all_gpus_once(model, gpus):
    found = list(plans(load(model), GB200, gpus))
    assert len({*found}) == len(found)
    assert all(plan.replicas * plan.gpus == gpus and plan.ffn_tp * plan.ep == plan.gpus for plan in found)
    assert len({plan.name for plan in found}) == len(found)


def test_kvp_never_meets_copies_of_kv_heads():
    for name, KH in (("llama-3.1-70b", 8), ("deepseek-r1", 1), ("qwen3-235b-a22b", 4)):
        assert all(plan.tp <= KH for plan in plans(load(name), GB200, 64) if plan.kvp > 1)


def test_instances_fill_domains():
    """24 GPUs of 8 a domain: an instance of 24 or smaller ones, none of 12, which would be a domain and a half."""
    assert {plan.gpus for plan in plans(load("llama-3.1-8b"), H200, 24)} == {24, 8, 6, 4, 3, 2, 1}


def test_named_plans():
    assert Plan(adp=8, ep=8).name == "Wide EP: ADP8 | EP8"
    assert Plan(kvp=4, tp=2, ep=8).name == "Helix: KVP4 TP2 | EP8"
    assert Plan(2, 1, 2, 1, 2, 1).name == "2 x (Helix: KVP2 | TP2)"
    assert Plan(tp=4, ffn_tp=4).name == "TP4 | TP4"
    assert Plan(replicas=8).name == "8 x (1 GPU)"
    names = {plan.named for plan in plans(load("deepseek-r1"), GB200, 8)}
    assert names == {None, "Wide EP", "Helix"}
    assert "Wide EP" not in {plan.named for plan in plans(load("llama-3.1-70b"), GB200, 8)}


@pytest.mark.parametrize(("model", "gpus"), [("llama-3.1-70b", 8), ("deepseek-r1", 8), ("nemotron-h-8b", 4),
                                             ("gpt-oss-120b", 8)])
def test_parts_of_all_gpus_make_the_model(model, gpus):
    """What a plan spreads over all GPUs adds up; what it copies is more, never less."""
    found = load(model)
    for plan in plans(found, GB200, gpus):
        total = plan.replicas * plan.gpus * held(found, plan).weights(found.tied)
        assert total >= found.parameters * plan.replicas * 0.9999, plan
        if plan.tp == plan.gpus == gpus and not model.startswith("deepseek"):
            assert total == pytest.approx(found.parameters, rel=0.03)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gemma-3-27b", "nemotron-h-8b", "deepseek-r1", "gpt-oss-20b"])
def test_one_gpu_is_what_the_report_says(model):
    report = advise(model, "h200", batch=8, context=65536, phase="decode")
    found = step(model, Plan(), batch=8, context=65536)
    assert found.seconds == pytest.approx(report.seconds("decode"), rel=0.002)
    assert found.kv == 8 * report.memory.request
    assert found.weights == report.memory.weights


@pytest.mark.parametrize("model", ["llama-3.1-70b", "deepseek-r1", "qwen3-235b-a22b"])
def test_no_plan_beats_even_shares_without_communication(model):
    least = advise(model, "h200", gpus=8, batch=32, context=65536, phase="decode").seconds("decode")
    for plan in plans(load(model), H200, 8):
        assert step(model, plan, batch=32, context=65536).seconds > 0.999 * least, plan


def test_helix_is_fastest_for_one_long_request_of_few_kv_heads():
    """One request of 1M tokens on 64 GPUs: nothing else splits its KV over all of them."""
    found = compare(load("llama-3.1-405b"), GB200, 64, 1 << 20, 1, Formats("fp8", "fp8")).by_interactivity()
    assert found[0].plan.named == "Helix"
    assert found[0].plan.kvp * found[0].plan.tp == 64
    best_tp = next(each for each in found if each.plan.kvp == 1)
    assert found[0].per_user > 1.2 * best_tp.per_user


def test_ranks():
    found = compare(load("deepseek-r1"), H200, 16, 131072, 64, Formats("fp8", "fp8"), target=30)
    best = found.by_throughput()
    assert all(each.fits and each.per_user >= 30 for each in best)
    assert all(one.per_gpu >= two.per_gpu for one, two in pairwise(best))
    assert all(one.per_user >= two.per_user for one, two in pairwise(found.by_interactivity()))
    assert {each.batch for each in found.by_interactivity()} == {64}
    front = found.pareto
    assert all(one.per_user > two.per_user and one.per_gpu < two.per_gpu for one, two in pairwise(front))
    assert all(each.fits for each in front)


@pytest.mark.parametrize("target", [20, 60])
def test_the_best_batch_is_the_largest_that_keeps_the_target(target):
    model, formats = load("llama-3.1-8b"), Formats()
    for choice in compare(model, H200, 4, 32768, 1, formats, target).choices:
        plan, best = choice.step.plan, choice.best
        unit = plan.adp * plan.replicas
        every = [Planner(model, H200, plan, formats, 32768).step(n * unit) for n in range(1, 161)]
        good = [each for each in every if each.fits and each.per_user >= target]
        assert best is not None
        assert best.batch == max(each.batch for each in good)
        assert best.per_gpu == pytest.approx(max(each.per_gpu for each in good))


def test_memory_that_does_not_fit_is_said():
    found = compare(load("llama-3.1-70b"), H200, 8, 131072, 16, Formats())
    alone = next(each for each in found.choices if each.step.plan == Plan(replicas=8))
    assert alone.best is None
    assert not alone.step.fits
    assert alone.step not in found.by_interactivity()


def test_a_target_that_is_none():
    for target in (0, -1, float("inf"), float("nan")):
        with pytest.raises(InvalidArgument, match="target: must be above 0"):
            advise("llama-3.1-8b", "h200", gpus=2, plans=True, target=target)


# ------------------------------------------------------------------------------------------------- the command


@pytest.mark.parametrize("arguments", [
    ("llama-3.1-405b", "--gpus", "64", "--gpu", "gb200", "--batch", "8", "--kv", "fp8", "--context", "1m"),
    ("deepseek-r1", "--gpus", "72", "--gpu", "gb300", "--kv", "fp8", "--weights", "fp8"),
    ("llama-3.1-70b", "--gpus", "1"),
], ids=" ".join)
def test_the_table_fits_a_screen(arguments):
    done = CliRunner().invoke(app, ["advise", *arguments, "--plans"], env={"COLUMNS": "80"})
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in done.stdout


def test_json_has_all_plans():
    done = CliRunner().invoke(app, ["advise", "llama-3.1-70b", "--gpus", "8", "--plans", "--target", "25", "--json"])
    found = json.loads(done.stdout)["plans"]
    assert found["target"] == 25
    names = {each["plan"]["name"] for each in found["by_interactivity"] + found["do_not_fit"]}
    assert names == {plan.name for plan in plans(load("llama-3.1-70b"), H200, 8)}
    assert json.loads(CliRunner().invoke(app, ["advise", "llama-3.1-70b", "--json"]).stdout)["plans"] is None

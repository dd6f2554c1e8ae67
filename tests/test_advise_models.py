"""Shapes of models as the advisor reads them, from shipped names, files and objects."""

from __future__ import annotations

import json

import pytest

from wavefill.advise import models
from wavefill.advise.models import Attention, Latent, Mlp, State
from wavefill.spec import InvalidArgument, InvalidType, UnsupportedModel

LLAMA = {"model_type": "llama", "vocab_size": 100, "hidden_size": 64, "intermediate_size": 128,
         "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize("name", models.shipped())
def test_parameters_are_the_published_ones(name):
    shape = models.shipped()[name]
    assert models.load(name).parameters == pytest.approx(shape["parameters"], rel=0.0005)
    assert shape["model"]
    assert shape.get("source") or shape.get("copy")


def test_the_issue_s_models_are_there():
    assert {*models.shipped()} >= {
        "llama-3.1-8b", "llama-3.1-70b", "llama-3.1-405b", "qwen3-8b", "qwen3-32b", "qwen3-235b-a22b", "deepseek-r1",
        "gpt-oss-20b", "gpt-oss-120b", "gemma-3-27b", "mistral-7b", "kimi-k2", "nemotron-h-8b",
        "nemotron-3-nano-30b-a3b"}


@pytest.mark.parametrize(("name", "active"), [
    ("qwen3-235b-a22b", 22), ("deepseek-r1", 37), ("kimi-k2", 32), ("gpt-oss-120b", 5.1), ("gpt-oss-20b", 3.6),
    ("nemotron-3-nano-30b-a3b", 3.2),
])
def test_active_parameters_are_those_of_the_model_cards(name, active):
    assert models.load(name).active / 1e9 == pytest.approx(active, rel=0.025)


def test_layers_and_their_kinds():
    assert models.load("llama-3.1-70b").mixers() == {Attention(64, 8, 128, 128): 80}
    assert models.load("gemma-3-27b").mixers() == {
        Attention(32, 16, 128, 128, 1024): 52, Attention(32, 16, 128, 128): 10}
    assert models.load("gpt-oss-20b").mixers() == {Attention(64, 8, 64, 64, 128): 12, Attention(64, 8, 64, 64): 12}
    assert models.load("nemotron-h-8b").mixers() == {State(128, 64, 128, 8, 4): 24, Attention(32, 8, 128, 128): 4}
    r1 = models.load("deepseek-r1")
    assert r1.mixers() == {Latent(128, 512, 1536, 128, 64, 128): 61}
    assert r1.mlps() == {Mlp(18432): 3, Mlp(2048, 3, 256, 8, 2048): 58}


def test_a_file_a_folder_and_an_object_are_one(tmp_path):
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA), encoding="utf-8")
    assert models.load(folder) == models.load(str(folder / "config.json"))
    assert models.load(folder).layers == models.load(LLAMA).layers
    assert models.load({"model_type": "some_vision", "text_config": LLAMA}).layers == models.load(LLAMA).layers


def test_a_mamba_and_experts_pattern():
    found = models.load({"model_type": "nemotron_h", "vocab_size": 100, "hidden_size": 64, "num_attention_heads": 4,
                         "num_key_value_heads": 2, "head_dim": 16, "hybrid_override_pattern": "ME*E",
                         "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 32, "n_groups": 2,
                         "conv_kernel": 4, "moe_intermediate_size": 48, "n_routed_experts": 8,
                         "num_experts_per_tok": 2, "moe_shared_expert_intermediate_size": 96})
    assert found.mlps() == {Mlp(48, 2, 8, 2, 96): 2}
    assert found.mixers() == {State(8, 16, 32, 2, 4): 1, Attention(4, 2, 16, 16): 1}
    experts = found.layers[1].linears(64)
    assert sum(linear.weights for linear in experts) == 64 * 8 + 8 * 2 * 64 * 48 + 2 * 64 * 96


@pytest.mark.parametrize(("config", "words"), [
    ({**LLAMA, "model_type": "mpt"}, ["model_type must be one of", "'mpt'", "deepseek_v3"]),
    ({}, ["model_type must be one of", "None"]),
])
def test_other_families_are_refused_by_name(config, words):
    with pytest.raises(UnsupportedModel) as caught:
        models.load(config)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(("config", "words"), [
    ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "needs hidden_size"),
    ({**LLAMA, "num_key_value_heads": 3}, "must be a multiple of num_key_value_heads"),
    ({**LLAMA, "num_hidden_layers": 10**9}, "config.num_hidden_layers: must be at most"),
    ({**LLAMA, "layer_types": ["full_attention"]}, "must name 2 layers"),
    ("no/such/model", "llama-3.1-8b"),
])
def test_mistakes_are_named(config, words):
    with pytest.raises(InvalidArgument, match=words):
        models.load(config)


def test_a_file_that_is_no_config(tmp_path):
    for text, words in (("{", "must be JSON"), ("[]", "must hold an object")):
        (tmp_path / "config.json").write_text(text, encoding="utf-8")
        with pytest.raises(InvalidArgument, match=words):
            models.load(tmp_path)
    with pytest.raises(InvalidType, match="config: must be a dict, a path or a name"):
        models.load(3)

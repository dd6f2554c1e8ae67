"""What an enabled model doesn't serve exactly is refused by name, with the next step, before any token."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

pytest.importorskip("transformers.generation")

import torch
import transformers
from tiny import (
    CACHE,
    fresh,
    one_thread,  # noqa: F401
    plain,
    stock,
    tokens,
)
from transformers import DynamicCache, StaticCache

from wavefill import InvalidArgument, InvalidType, UnsupportedModel, WavefillError
from wavefill.integrations.transformers import WavefillCache, enable
from wavefill.integrations.transformers.cache import adopt

pytestmark = pytest.mark.transformers

_SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}
#: model class -> (configuration besides, what the message must name).
UNSERVED: dict[str, tuple[dict[str, Any], str]] = {
    "Gemma2ForCausalLM": ({"attn_logit_softcapping": 0.0}, "a soft cap that is not above 0"),
    "Gemma3ForCausalLM": ({"use_bidirectional_attention": True}, "attention that is not causal"),
    "Gemma3ForConditionalGeneration": ({}, "images, whose tokens see each other both ways"),
    "BloomForCausalLM": ({"n_head": 4, "n_layer": 2}, "ALiBi"),
    "DeepseekV3ForCausalLM": ({"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
                               "v_head_dim": 8, "n_routed_experts": 4, "num_experts_per_tok": 1, "n_group": 1,
                               "topk_group": 1}, "MLA"),
    "Qwen3NextForCausalLM": ({"num_experts": 2, "num_experts_per_tok": 1, "layer_types": ["linear_attention"] * 2,
                              "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
                              "linear_value_head_dim": 8}, "no layer with attention"),
    "Lfm2MoeForCausalLM": ({"num_experts": 2, "num_experts_per_tok": 1, "num_dense_layers": 1,
                            "layer_types": ["conv", "full_attention"]}, "without attention"),
    "FalconH1ForCausalLM": ({"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4},
                            "without attention"),
    "MambaForCausalLM": ({"state_size": 4}, "without attention"),
    "T5ForConditionalGeneration": ({"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 4,
                                    "decoder_start_token_id": 0}, "encoder or cross-attention"),
    "GPT2LMHeadModel": ({"n_embd": 32, "n_layer": 1, "n_head": 4}, "tested families"),
    "OlmoForCausalLM": ({}, "tested families"),
    "Qwen3MoeForCausalLM": ({"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16},
                            "tested families"),
}


@pytest.mark.parametrize("name", UNSERVED)
def test_models_that_are_not_served_are_refused_by_name(name: str) -> None:
    extra, reason = UNSERVED[name]
    kind = getattr(transformers, name)
    small = _SMALL
    if name == "Gemma3ForConditionalGeneration":
        tower = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                 "image_size": 16, "patch_size": 8}
        small = {"text_config": _SMALL, "vision_config": tower, "mm_tokens_per_image": 4}
    config = kind.config_class(**{**small, **extra})
    model = kind(config).eval()
    before = model.config._attn_implementation
    with pytest.raises(UnsupportedModel, match=rf"{name} .*{reason}.*Run it with its own attention"):
        enable(model)
    assert model.config._attn_implementation == before
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_changed_attention_of_a_served_family_is_refused() -> None:
    model = fresh("llama")

    class Capped(type(model.model.layers[0].self_attn)):  # type: ignore[misc]
        pass

    model.model.layers[1].self_attn.__class__ = Capped
    with pytest.raises(UnsupportedModel, match="Capped in place of LlamaAttention"):
        enable(model)


@pytest.mark.parametrize("kept", [(0, 1), (0, 2), (2, 0, 1), (0, 0, 1)], ids=str)
def test_layers_that_are_not_numbered_in_order_are_refused(kept: tuple[int, ...]) -> None:
    """As when layers were dropped or repeated by hand: the cache would count a forward as never finished."""
    model = fresh("llama")
    model.model.layers = torch.nn.ModuleList([model.model.layers[index] for index in kept])
    with pytest.raises(UnsupportedModel, match=r"layer_idx .* be \[0, 1, 2\], .*_hidden_layers .*; got \[.*Set config"):
        enable(model)
    for index, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = index
    model.config.num_hidden_layers = len(kept)
    if len(set(kept)) == len(kept):
        want = tokens(model, plain(), 6)
        assert torch.equal(tokens(enable(model), plain(), 6), want)


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_an_attention_that_goes_past_wavefill_is_refused(layer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A forward patched onto a layer gets the new tokens alone from the cache, so it must not go unnoticed."""
    model = enable(fresh("llama"))
    attention = model.model.layers[layer].self_attn

    def patched(hidden_states: torch.Tensor, **arguments: Any) -> tuple[torch.Tensor, None]:
        shape = (*hidden_states.shape[:-1], -1, attention.head_dim)
        key, value = (project(hidden_states).view(shape).transpose(1, 2)
                      for project in (attention.k_proj, attention.v_proj))
        key, value = arguments[CACHE].update(key, value, attention.layer_idx)
        return torch.zeros_like(hidden_states), None

    monkeypatch.setattr(attention, "forward", patched)
    refused = r"disable\(model\)" if layer == 2 else r"each layer once and in order"
    for _ in range(2):
        with torch.no_grad(), pytest.raises(WavefillError, match=refused):
            tokens(model, plain(), 2)
    monkeypatch.undo()
    assert torch.equal(tokens(model, plain(), 6), tokens(stock("llama"), plain(), 6))


def test_a_model_that_was_moved_to_another_dtype_since_enable() -> None:
    model = enable(fresh("llama"))
    with pytest.raises(InvalidType, match=r"model: must compute in .*float64.*Call model\.to\(torch\.float32\)"):
        tokens(model.double(), plain(), 2)
    assert torch.equal(tokens(model.float(), plain(), 6), tokens(stock("llama"), plain(), 6))
    tokens(model.half(), plain(), 2)


def test_layers_dropped_since_enable_are_noticed() -> None:
    model = enable(fresh("llama"))
    layers, model.model.layers = model.model.layers, model.model.layers[:2]
    cache = WavefillCache(model)
    refused = r"all its 3 layers with attention .* got 2 .*Undo .*disable\("
    for _ in range(2):
        with torch.no_grad(), pytest.raises(UnsupportedModel, match=refused):
            model(plain(), **{CACHE: cache})
        assert cache.get_seq_length() == 0
    model.model.layers = layers
    with torch.no_grad():
        assert torch.equal(model(plain(), **{CACHE: cache}).logits, stock("llama")(plain()).logits)


def test_models_outside_of_the_cpu_or_the_dtypes_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="float64"):
        enable(fresh("llama").to(torch.float64))
    with pytest.raises(UnsupportedModel, match=r"on meta.*CPU"):
        enable(fresh("llama").to("meta"))
    with torch.device("meta"):
        config = transformers.LlamaConfig(**{**_SMALL, "head_dim": 640})
        wide = transformers.LlamaForCausalLM(config)
    with pytest.raises(UnsupportedModel, match="CPU"):
        enable(wide)
    bidirectional = fresh("llama")
    bidirectional.config.is_causal = False
    with pytest.raises(UnsupportedModel, match="not causal"):
        enable(bidirectional)
    turned = fresh("llama")
    turned.model.layers[2].self_attn.is_causal = False
    with pytest.raises(UnsupportedModel, match="not causal"):
        enable(turned)
    flexible = fresh("llama")
    flexible.set_attn_implementation("flex_attention")
    with pytest.raises(UnsupportedModel, match="flex_attention"):
        enable(flexible)
    with pytest.raises(InvalidType, match="model"):
        enable(torch.nn.Linear(2, 2))  # type: ignore[type-var]


@pytest.mark.parametrize("version", ["5.16.1", "4.57.6", "5.9.0"])
def test_older_releases_are_refused_at_import(version: str) -> None:
    code = f"import transformers; transformers.__version__ = {version!r}; import wavefill.integrations.transformers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"needs transformers 5.17 or newer: found {version}. Run pip" in done.stderr


@pytest.mark.parametrize("kv_format", ["int8", "fp8", "", None])
def test_kv_formats_other_than_the_models_own_are_refused(kv_format: Any) -> None:
    with pytest.raises(InvalidArgument, match="kv_format"):
        enable(fresh("llama"), kv_format=kv_format)


@pytest.mark.parametrize("name", ["static", "offloaded", "offloaded_static"])
def test_other_cache_implementations_are_refused(name: str) -> None:
    model = enable(fresh("llama"))
    kind = {"static": "StaticCache", "offloaded": "offloaded cache", "offloaded_static": "offloaded cache"}[name]
    with pytest.raises(InvalidArgument, match=rf"past_key_values: .*{kind}.*disable\(model\)"):
        model.generate(plain(), max_new_tokens=3, cache_implementation=name, disable_compile=True)


def test_other_caches_of_the_caller_are_refused() -> None:
    model = enable(fresh("llama"))
    with torch.no_grad():
        filled = stock("llama")(plain(), use_cache=True)[CACHE]
        caches = [
            (StaticCache(model.config, max_cache_len=40), "StaticCache"),
            (filled, "DynamicCache with 13 tokens"),
        ]
        for cache, name in caches:
            with pytest.raises(InvalidArgument, match=f"past_key_values: .*{name}"):
                model(plain(1), use_cache=True, **{CACHE: cache})
            with pytest.raises(InvalidArgument, match=f"past_key_values: .*{name}"):
                model.generate(plain(14), max_new_tokens=3, **{CACHE: cache})
    assert filled.get_seq_length() == 13

    class Mine(DynamicCache):
        pass

    with pytest.raises(InvalidArgument, match="Mine"):
        adopt(Mine(), stock("llama").config)
    with pytest.raises(InvalidType, match="tuple"):
        adopt((), stock("llama").config)


@pytest.mark.parametrize("previous", ["sdpa", "eager"])
def test_attention_weights_are_refused_wherever_they_are_asked_for(previous: str) -> None:
    model = fresh("llama")
    model.set_attn_implementation(previous)
    enable(model)
    rule = r"output_attentions: must be false.*disable\(model\)"
    with torch.no_grad():
        with pytest.raises(InvalidArgument, match=rf"^{rule}"):
            model(plain(), output_attentions=True)
        with pytest.raises(InvalidArgument, match=rf"^{rule}"):
            tokens(model, plain(), 2, output_attentions=True, return_dict_in_generate=True)
        # What a model has that was loaded with eager and output_attentions=True; later on the configuration refuses it.
        model.config._output_attentions = True
        for run in (lambda: model(plain()), lambda: model.model(plain()), lambda: tokens(model, plain(), 2)):
            with pytest.raises(InvalidArgument, match=rf"^config\.{rule}"):
                run()
        assert torch.equal(model(plain(), output_attentions=False).logits, stock("llama")(plain()).logits)
        weights = model(plain(), use_cache=False).attentions
    assert len(weights or ()) == (3 if previous == "eager" else 0), "without a cache the model runs as it came"


def test_options_that_the_kernels_lack_are_refused() -> None:
    model = enable(fresh("llama"))
    with torch.no_grad(), pytest.raises(InvalidArgument, match="is_causal"):
        model(plain(), use_cache=True, is_causal=False)
    dropping = enable(fresh("llama"))
    for layer in dropping.model.layers:
        layer.self_attn.attention_dropout = 0.1
    with torch.no_grad(), pytest.raises(InvalidArgument, match="attention_dropout"):
        dropping.train()(plain(), use_cache=True)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), pytest.raises(InvalidType, match="autocast"):
        enable(fresh("llama"))(plain(), use_cache=True)

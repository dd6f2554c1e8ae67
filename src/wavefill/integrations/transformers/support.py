"""Which models the integration serves, decided before anything is changed.

A model is served only when every part of its attention is one that the kernels compute exactly: the features are read
from the configuration and from the attention modules, and the class must be of a family that the tests run. Everything
else is refused with the class, the feature and the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, Gemma2Model
from transformers.models.gemma3.modeling_gemma3 import Gemma3Attention, Gemma3TextModel
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssAttention, GptOssModel
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import (
    GraniteMoeHybridAttention,
    GraniteMoeHybridModel,
)
from transformers.models.lfm2.modeling_lfm2 import Lfm2Attention, Lfm2Model
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaModel
from transformers.models.mistral.modeling_mistral import MistralAttention, MistralModel
from transformers.models.phi3.modeling_phi3 import Phi3Attention, Phi3Model
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3Model
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextAttention, Qwen3NextModel

from wavefill.backends import cpu, gpu
from wavefill.checks import DTYPE_NAMES
from wavefill.spec import AttentionSpec, UnsupportedModel, invalid_type

if TYPE_CHECKING:
    from transformers import PretrainedConfig

#: Decoder class -> attention class of the families that the tests run.
FAMILIES: dict[type, type] = {
    LlamaModel: LlamaAttention,
    Qwen2Model: Qwen2Attention,
    Qwen3Model: Qwen3Attention,
    MistralModel: MistralAttention,
    Phi3Model: Phi3Attention,
    Gemma2Model: Gemma2Attention,
    Gemma3TextModel: Gemma3Attention,
    GptOssModel: GptOssAttention,
    Qwen3NextModel: Qwen3NextAttention,
    Lfm2Model: Lfm2Attention,
    GraniteMoeHybridModel: GraniteMoeHybridAttention,
}
#: Those of them with layers that have a state in place of K and V, which stay as they are.
HYBRIDS = (Qwen3NextModel, Lfm2Model, GraniteMoeHybridModel)
FAMILY_NAMES = ("Llama, Qwen2, Qwen3, Mistral, Phi-3, Gemma-2, Gemma-3 (text), gpt-oss, Qwen3-Next, LFM2 and "
                "Granite 4 (hybrid)")

#: Kinds of layers, as `layer_types` of a configuration names them, that keep K and V.
_WITH_KEYS = ("full_attention", "sliding_attention")

#: Attention implementations that an enabled model may come from (and goes back to).
PREVIOUS = ("sdpa", "eager")


def decoder_of(model: object) -> PreTrainedModel:
    """The stack of decoder layers of `model` (`LlamaModel` of a `LlamaForCausalLM`).

    Raises `InvalidType` when `model` is no transformers model.
    """
    if not isinstance(model, PreTrainedModel):
        raise invalid_type("model", "must be a transformers PreTrainedModel", type(model).__name__,
                           "Load it with AutoModelForCausalLM.from_pretrained(...).")
    return model.base_model


def layers_with_keys(config: PretrainedConfig) -> tuple[int, ...]:
    """Numbers of a decoder's layers that keep K and V: all but those with linear attention or a convolution."""
    count = int(config.num_hidden_layers)
    kinds = getattr(config, "layer_types", None)
    return tuple(range(count)) if kinds is None else tuple(
        number for number, kind in enumerate(kinds[:count]) if kind in _WITH_KEYS
    )


def check_model(model: object) -> PreTrainedModel:
    """Return the decoder of `model`, or raise `UnsupportedModel` with the class, the feature and the next step."""
    decoder = decoder_of(model)
    name = type(model).__name__
    config = decoder.config.get_text_config(decoder=True)
    for feature, present in _FEATURES.items():
        if present(config, decoder):
            raise _refusal(name, f"uses {feature}, which wavefill doesn't compute in transformers yet")
    attention = FAMILIES.get(type(decoder))
    if attention is None:
        raise _refusal(name, f"is of none of the tested families ({FAMILY_NAMES})")
    _check_layers(name, attention, config, decoder)
    device = _check_storage(name, model, decoder)
    _check_shapes(name, config, decoder, device)
    return decoder


def _refusal(name: str, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"model: {name} {what}. Run it with its own attention, or use a model of the {FAMILY_NAMES} families."
    )


def _check_layers(name: str, attention: type, config: PretrainedConfig, decoder: PreTrainedModel) -> None:
    numbers = list(layers_with_keys(config))
    if not numbers:
        raise _refusal(name, "has no layer with attention, so there is nothing to do for wavefill")
    for layer in decoder.layers:
        module = getattr(layer, "self_attn", None)
        if module is not None and type(module) is not attention:
            raise _refusal(name, f"has {type(module).__name__} in place of {attention.__name__}")
    # The cache takes K and V of each layer once and in order; layers that were dropped or moved keep their numbers.
    layers = decoder.layers[: config.num_hidden_layers]
    there = [(at, layer.self_attn.layer_idx) for at, layer in enumerate(layers)
             if getattr(layer, "self_attn", None) is not None]
    if there != [(number, number) for number in numbers]:
        places, indices = map(list, zip(*there, strict=True)) if there else ([], [])
        raise UnsupportedModel(
            f"model: layer_idx of its layers with attention must be {numbers}, as num_hidden_layers and layer_types "
            f"say; got {indices} in places {places}. Set config.num_hidden_layers and config.layer_types, and each "
            "layer.self_attn.layer_idx, to what is there."
        )


def _check_storage(name: str, model: Any, decoder: PreTrainedModel) -> torch.device:
    """The device that all of a model is on."""
    # Offloaded and not yet loaded weights are on "meta".
    devices: list[torch.device] = sorted({parameter.device for parameter in model.parameters()}, key=str)
    if len(devices) != 1 or devices[0].type not in ("cpu", "cuda"):
        raise _refusal(name, f"is on {' and '.join(map(str, devices))}, and wavefill runs on the CPU or on one GPU "
                             "(model.to('cpu'), model.to('cuda'))")
    if decoder.dtype not in DTYPE_NAMES:
        raise _refusal(name, f"computes in {decoder.dtype}, and the kernels take {', '.join(DTYPE_NAMES.values())}")
    return devices[0]


def _check_shapes(name: str, config: PretrainedConfig, decoder: PreTrainedModel, device: torch.device) -> None:
    # The head size that the modules use, since configurations spell it in three ways.
    size = int(decoder.layers[layers_with_keys(config)[0]].self_attn.head_dim)
    heads, kv_heads = int(config.num_attention_heads), int(config.num_key_value_heads)
    if heads % kv_heads:
        raise _refusal(name, f"has {heads} query heads over {kv_heads} KV heads, which don't divide evenly")
    spec = AttentionSpec(HQ=heads, KH=kv_heads, D=size, DV=size, dtype=DTYPE_NAMES[decoder.dtype])
    if device.type == "cpu":
        where, reason = "CPU", cpu.capability(spec)
    else:
        where, reason = "GPU", gpu.capability(spec) or gpu.device_gap(device.index)
    if reason is not None:
        raise _refusal(name, f"can't run on the {where} backend: {reason}")


def _has(config: Any, *names: str) -> bool:
    return any(getattr(config, name, None) not in (None, False, 0) for name in names)


def _layer_types(config: Any) -> set[str]:
    return set(getattr(config, "layer_types", None) or ())


def _modules_have(decoder: PreTrainedModel, *names: str) -> bool:
    return any(getattr(module, name, None) is not None for module in decoder.modules() for name in names)


#: Feature, in words -> whether a model has it. Read before the family, so that the message names the real obstacle.
_FEATURES: dict[str, Callable[[Any, PreTrainedModel], bool]] = {
    "an encoder or cross-attention": lambda config, decoder: (
        _has(config, "is_encoder_decoder", "add_cross_attention") or _modules_have(decoder, "encoder_attn")
    ),
    "images, whose tokens see each other both ways": lambda config, decoder: _modules_have(decoder, "vision_tower"),
    "attention that is not causal": lambda config, decoder: (
        getattr(config, "is_causal", True) is False or _has(config, "use_bidirectional_attention")
        or any(getattr(module, "is_causal", True) is False for module in decoder.modules())
    ),
    "a soft cap that is not above 0, or not finite": lambda config, decoder: (
        (cap := getattr(config, "attn_logit_softcapping", None)) is not None and not 0 < cap < inf
    ),
    "ALiBi": lambda config, decoder: (
        _has(config, "alibi") or getattr(config, "model_type", None) in ("bloom", "mpt")
        or getattr(config, "position_embedding_type", None) == "alibi"
    ),
    "latent KV (MLA)": lambda config, decoder: _has(config, "kv_lora_rank"),
    "chunked attention": lambda config, decoder: _has(config, "attention_chunk_size"),
    "layers that share their KV": lambda config, decoder: _has(config, "num_kv_shared_layers"),
    "layers without attention (linear attention, state space) that no test has seen": lambda config, decoder: (
        type(decoder) not in HYBRIDS and (
            bool(_layer_types(config) - {*_WITH_KEYS, "chunked_attention"})
            or _has(config, "state_size", "mamba_d_state", "ssm_state_size")
        )
    ),
}

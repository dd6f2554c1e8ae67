"""Decoder layers whose decoding steps take few launches on a GPU: two merged products, and one kernel between each two.

A few rows on a GPU of compute capability 9.0 take less yet: products that norm, gate and add by themselves.

A layer is switched by its class and nothing else. Weights that are multiplied with the same input are put behind each
other in one tensor, of which the modules' parameters become views: names, values and identities of parameters stay, and
nothing is kept besides them. Each call looks at the modules and at where the weights are, so whatever becomes of a
layer later (another device or dtype, an adapter, a hook, weights of their own as in a deep copy) computes as it would
have, and `choose` merges it again.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama as llama
from transformers.models.mistral import modeling_mistral as mistral
from transformers.models.phi3 import modeling_phi3 as phi3
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3 import modeling_qwen3 as qwen3
from transformers.utils import output_capturing

from wavefill.backends.gpu import flat, rotary
from wavefill.backends.gpu import layer as kernels
from wavefill.cache import KVPages
from wavefill.integrations.transformers import continuous
from wavefill.integrations.transformers.cache import CACHE_NAMES
from wavefill.integrations.transformers.kernels import append
from wavefill.integrations.transformers.linears import FlatLinear, _watched
from wavefill.integrations.transformers.step import Step
from wavefill.integrations.transformers.support import decoder_of
from wavefill.spec import UnsupportedModel, complaint

#: Rows of a call, batch x tokens, up to which a layer is fused.
MAX_ROWS = 64
#: Dtypes of a fused call; in float32 the products take so long that launches hardly count.
DTYPES = (torch.float16, torch.bfloat16)

_LINEARS, _SILU = (nn.Linear, FlatLinear), (SiLUActivation, nn.SiLU)
_logger = logging.getLogger("wavefill")


class FusedLayer(nn.Module):
    """In front of a family's decoder layer: calls of a few tokens at inference on a GPU go through the kernels."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """[B, T, hidden] to the same."""
        family = _FUSED.get(type(self))
        if family is not None and not args and _takes(hidden_states, kwargs):
            obstacle = _obstacle(self, family, call=(hidden_states, *kwargs["position_embeddings"]))
            if obstacle is None:
                return _forward(self, family, hidden_states, **kwargs)
            number = getattr(self.self_attn, "layer_idx", None)
            _say(f"{type(self).__name__} with layer_idx {number} runs unfused: {obstacle}")
        out: Tensor = super().forward(hidden_states, *args, **kwargs)
        return out


class FusedLlamaLayer(FusedLayer, llama.LlamaDecoderLayer):  # type: ignore[misc]
    """Of Llama."""


class FusedMistralLayer(FusedLayer, mistral.MistralDecoderLayer):  # type: ignore[misc]
    """Of Mistral."""


class FusedQwen2Layer(FusedLayer, qwen2.Qwen2DecoderLayer):  # type: ignore[misc]
    """Of Qwen2."""


class FusedQwen3Layer(FusedLayer, qwen3.Qwen3DecoderLayer):  # type: ignore[misc]
    """Of Qwen3."""


class FusedPhi3Layer(FusedLayer, phi3.Phi3DecoderLayer):  # type: ignore[misc]
    """Of Phi-3, whose weights are merged as they come."""


class Family(NamedTuple):
    """What a decoder layer is made of.

    plain, fused: its class, as transformers has it and as it is here.
    parts:        module in the layer -> the classes that it may be of.
    qkv, gate_up: the modules that are one product here, in the order of their rows.
    normed:       whether each head of q and k has a norm.
    windows:      what the attention module passes its function besides.
    """

    plain: type
    fused: type
    parts: dict[str, tuple[type, ...]]
    qkv: tuple[str, ...]
    gate_up: tuple[str, ...]
    normed: bool
    windows: Callable[[Any], dict[str, Any]]


def _family(plain: type, fused: type, attention: type, mlp: type, norm: type, windows: Callable[[Any], dict[str, Any]],
            *, merged: bool = False, normed: bool = False) -> Family:
    qkv = ("self_attn.qkv_proj",) if merged else tuple(f"self_attn.{x}_proj" for x in "qkv")
    gate_up = ("mlp.gate_up_proj",) if merged else ("mlp.gate_proj", "mlp.up_proj")
    activation = "mlp.activation_fn" if merged else "mlp.act_fn"
    norms = ("input_layernorm", "post_attention_layernorm", *(("self_attn.q_norm", "self_attn.k_norm") * normed))
    parts: dict[str, tuple[type, ...]] = {"self_attn": (attention,), "mlp": (mlp,), activation: _SILU}
    parts |= dict.fromkeys((*qkv, "self_attn.o_proj", *gate_up, "mlp.down_proj"), _LINEARS)
    parts |= dict.fromkeys(norms, (norm,))
    if merged:
        parts |= dict.fromkeys(("resid_attn_dropout", "resid_mlp_dropout"), (nn.Dropout,))
    return Family(plain, fused, parts, qkv, gate_up, normed, windows)


def _of_config(attention: Any) -> dict[str, Any]:
    return {"sliding_window": getattr(attention.config, "sliding_window", None)}


def _of_module(attention: Any) -> dict[str, Any]:
    return {"sliding_window": attention.sliding_window}


#: Decoder class -> its layers.
FAMILIES: dict[type, Family] = {
    llama.LlamaModel: _family(llama.LlamaDecoderLayer, FusedLlamaLayer, llama.LlamaAttention, llama.LlamaMLP,
                              llama.LlamaRMSNorm, lambda attention: {}),
    mistral.MistralModel: _family(mistral.MistralDecoderLayer, FusedMistralLayer, mistral.MistralAttention,
                                  mistral.MistralMLP, mistral.MistralRMSNorm, _of_config),
    qwen2.Qwen2Model: _family(qwen2.Qwen2DecoderLayer, FusedQwen2Layer, qwen2.Qwen2Attention, qwen2.Qwen2MLP,
                              qwen2.Qwen2RMSNorm, _of_module),
    qwen3.Qwen3Model: _family(qwen3.Qwen3DecoderLayer, FusedQwen3Layer, qwen3.Qwen3Attention, qwen3.Qwen3MLP,
                              qwen3.Qwen3RMSNorm, _of_module, normed=True),
    phi3.Phi3Model: _family(phi3.Phi3DecoderLayer, FusedPhi3Layer, phi3.Phi3Attention, phi3.Phi3MLP, phi3.Phi3RMSNorm,
                            _of_config, merged=True),
}
_FUSED: dict[type, Family] = {family.fused: family for family in FAMILIES.values()}


def check(model: object) -> Family:
    """What the layers of `model` are made of. Raises `UnsupportedModel` where they can't be fused."""
    decoder = decoder_of(model)
    family = FAMILIES.get(type(decoder))
    if family is None:
        raise UnsupportedModel(complaint(
            "fuse", "takes models of the Llama, Mistral, Qwen2, Qwen3 and Phi-3 families", type(decoder).__name__,
            "Leave fuse=True out: attention goes through wavefill all the same."))
    return family


@torch.inference_mode(False)  # weights made within one could not be trained after
@torch.no_grad()
def choose(model: PreTrainedModel, fuse: bool) -> None:
    """Fuse the decoder layers of `model`, or make them the family's own again, with weights of their own.

    Layers of which a part is not the family's own (adapters, quantised weights, hooks) are left as they are, and
    `report` says why. Either way takes the memory of one layer's weights besides, and moves weights: what holds their
    addresses (a CUDA graph) is void. `save_pretrained` copies all views before it writes them, and pickle, other than
    torch.save, writes the whole tensor for each.

    Raises `UnsupportedModel`, before anything is changed, where layers of the family can't be fused.
    """
    decoder: Any = decoder_of(model)
    layer: Any
    if not fuse:
        for layer in decoder.layers:
            if type(layer) in _FUSED:
                _part(layer, _FUSED[type(layer)])
        return
    family, tied = check(model), _tied(model)
    moved = False
    for layer in decoder.layers:
        if _left_alone(layer, family, tied) is None:
            for group in _groups(layer, family):
                if _stack(group) is None:
                    _merge(group)
                    moved = True
            layer.__class__ = family.fused
        elif type(layer) in _FUSED:
            _part(layer, family)
    if moved and model.device.type == "cuda":
        torch.cuda.empty_cache()  # the room of single weights is too small for merged ones


def report(model: PreTrainedModel) -> list[str]:
    """Which decoder layers of `model` are not fused, and why: a line each. Raises as `choose`."""
    family, tied = check(model), _tied(model)
    layers: Any = decoder_of(model).layers
    found = []
    for number, layer in enumerate(layers):
        reason = _left_alone(layer, family, tied)
        if reason is None:
            reason = _obstacle(layer, family, merged=True) if type(layer) is family.fused else "fuse=True was not given"
        if reason is not None:
            found.append(f"layers.{number}: {reason}")
    return found


def _left_alone(layer: Any, family: Family, tied: set[int]) -> str | None:
    """Why `choose` does not fuse a layer; None when it does."""
    if type(layer) not in (family.plain, family.fused):
        return f"it is {type(layer).__name__}, not {family.plain.__name__}"
    obstacle = _obstacle(layer, family)
    if obstacle is None and any(
        id(linear._parameters[name]) in tied for group in _groups(layer, family) if _stack(group) is None
        for linear in group for name in ("weight", "bias")
    ):
        return "a weight to merge is another module's too"
    return obstacle


def _tied(model: nn.Module) -> set[int]:
    """Ids of parameters whose memory another parameter of `model` has too, or that several modules have."""
    owners: dict[int, list[int]] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                owners.setdefault(parameter.data_ptr(), []).append(id(parameter))
    return {one for ids in owners.values() if len(ids) > 1 for one in ids}


@cache
def _say(text: str) -> None:
    """Once for each text."""
    _logger.debug(text)


# ---- weights


def _groups(layer: nn.Module, family: Family) -> Iterator[list[Any]]:
    """The linear layers of each merged product."""
    for paths in (family.qkv, family.gate_up):
        yield [_at(layer, path) for path in paths]


def _stack(group: Sequence[Any]) -> tuple[Tensor, Tensor | None] | None:
    """Weight and bias of linear layers as one product has them, or None where they do not stand in one tensor."""
    weight = _whole([linear._parameters["weight"] for linear in group])
    biases = [linear._parameters["bias"] for linear in group]
    if weight is None or biases[0] is None:
        return None if weight is None else (weight, None)
    bias = _whole(biases)
    return None if bias is None else (weight, bias)


def _whole(parts: Sequence[Tensor]) -> Tensor | None:
    """Contiguous tensors that stand behind each other in one storage, as one without a copy; None where they do not."""
    first = parts[0]
    if len(parts) == 1:
        return first
    storage = first.untyped_storage().data_ptr()
    if not storage or any(
        after.data_ptr() != before.data_ptr() + before.nbytes or after.untyped_storage().data_ptr() != storage
        for before, after in pairwise(parts)
    ):
        return None
    return first.detach().as_strided((sum(len(part) for part in parts), *first.shape[1:]), first.stride())


def _merge(group: Sequence[Any]) -> None:
    """Put the weights, and biases, of linear layers into one tensor."""
    for name in ("weight", "bias"):
        parts = [linear._parameters[name] for linear in group]
        if parts[0] is not None:
            whole = torch.cat([part.detach() for part in parts])
            start = 0
            for part in parts:
                part.data = whole[start : start + len(part)]
                start += len(part)


def _part(layer: nn.Module, family: Family) -> None:
    """Make a fused layer the family's own, and give its merged weights memory of their own, wherever they are now."""
    layer.__class__ = family.plain
    names = {path.rpartition(".")[2] for paths in (family.qkv, family.gate_up) if len(paths) > 1 for path in paths}
    for path, parameter in layer.named_parameters():
        # A view of more than itself, in or within (an adapter's base) one of the modules that were merged.
        if parameter.untyped_storage().nbytes() > parameter.nbytes and not names.isdisjoint(path.split(".")):
            parameter.data = parameter.detach().clone()


# ---- which layers and calls


def _takes(x: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call is one of a few tokens at inference on a GPU, and nothing has to see each operator."""
    if torch.compiler.is_compiling() or type(x) is not Tensor or not x.is_cuda or x.dtype not in DTYPES:
        return False
    if torch.is_grad_enabled() or kwargs.get("position_embeddings") is None:
        return False
    if x.dim() != 3 or not 0 < x.shape[0] * x.shape[1] <= MAX_ROWS:
        return False
    return not (torch.is_autocast_enabled("cuda") or _watched()
                or _has_any_global_hook()  # type: ignore[no-untyped-call]
                or continuous.is_paged_call(kwargs) or _collects_attentions())


def _collects_attentions() -> bool:
    """Whether transformers' hooks wait for the attention modules to return their weights."""
    return "attentions" in (output_capturing._active_collector.get() or ())


def _obstacle(layer: Any, family: Family, *, merged: bool = False,
              call: tuple[Tensor, Tensor, Tensor] | None = None) -> str | None:
    """Why `layer` can't be computed as one, the first reason found; None when it can.

    merged: whether weights must stand in one tensor already. call: input, cos and sin of a call to be made now.
    """
    like = layer.input_layernorm._parameters.get("weight") if call is None else call[0]
    if like is None:
        return "input_layernorm makes its weight of something else"
    for path, kinds in family.parts.items():
        module = _at(layer, path)
        if type(module) not in kinds:
            return f"{path} is {type(module).__name__}, not {kinds[0].__name__}"
        if "forward" in module.__dict__ or hooked(module):
            return f"{path} has hooks, or a forward of its own"
        if call is not None and module.training:
            return f"{path} is in training"
        if kinds is _LINEARS and not {"weight", "bias"} <= module._parameters.keys():
            return f"{path} makes its weight or bias of something else"
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if type(parameter) is not nn.Parameter or parameter.layout is not torch.strided or parameter.is_neg():
                return f"{path}.{name} is {type(parameter).__name__}, {parameter.layout}, not plain numbers"
            if not parameter.is_contiguous():
                return f"{path}.{name} is not contiguous"
            if parameter.dtype is not like.dtype or parameter.device != like.device:
                return (f"{path}.{name} is {parameter.dtype} on {parameter.device}, where others, or the input, are "
                        f"{like.dtype} on {like.device}")
    HQ, KH, D = _heads(layer.self_attn)
    shapes = [_at(layer, path).weight.shape for path in family.qkv]
    rows, hidden = sum(shape[0] for shape in shapes), shapes[0][1]
    if rows != (HQ + 2 * KH) * D:
        return f"q, k and v have {rows} rows together, where {HQ} + 2 x {KH} heads of {D} have others"
    if hidden > kernels.MAX_NORM:
        return f"its hidden size is {hidden}, and the kernels take up to {kernels.MAX_NORM}"
    for group in _groups(layer, family):
        if len({linear._parameters["bias"] is None for linear in group}) > 1:
            return "some of the weights to merge have a bias and others have none"
        if (merged or call is not None) and _stack(group) is None:
            return "its weights are not in one tensor (moved, replaced or copied since); fuse the model again"
    return None if call is None else _unlike(family, D, *call)


def _unlike(family: Family, D: int, x: Tensor, cos: Tensor, sin: Tensor) -> str | None:
    """Why the rotary embedding of a call is not one that the kernel takes, or None."""
    size = cos.shape[-1]
    if (cos.dtype is not x.dtype or sin.dtype is not x.dtype or cos.dim() != 3 or cos.stride() != sin.stride()
            or cos.shape != sin.shape or cos.stride(2) != 1 or cos.shape[0] not in (1, x.shape[0])
            or cos.shape[1] != x.shape[1] or size % 2 or size > D or (family.normed and size != D)):
        return f"cos and sin are {cos.dtype} {list(cos.shape)}, for {x.dtype} {list(x.shape)} and heads of {D}"
    return None


def hooked(module: nn.Module) -> bool:
    """Whether a module has hooks besides those that collect outputs for transformers, which stay for good."""
    return bool(module._forward_pre_hooks) or any(
        getattr(hook, "__module__", None) != output_capturing.__name__ for hook in module._forward_hooks.values())


def _at(layer: nn.Module, path: str) -> Any:
    """The module at a path of names, or None."""
    module: nn.Module | None = layer
    for name in path.split("."):
        module = None if module is None else module._modules.get(name)
    return module


def _heads(attention: Any) -> tuple[int, int, int]:
    """HQ, KH and D of an attention module."""
    HQ = int(attention.config.num_attention_heads)
    return HQ, HQ // int(attention.num_key_value_groups), int(attention.head_dim)


# ---- the layer

#: Weight [N, K] and bias [N] of a product; weight [K] and eps of a norm.
_Linear: TypeAlias = tuple[Tensor, Tensor | None]
_Norm: TypeAlias = tuple[Tensor, float]


class _Weights(NamedTuple):
    """Of a layer's products, merged ones among them, and of its norms: before attention, and after."""

    qkv: _Linear
    out: _Linear
    gate_up: _Linear
    down: _Linear
    first: _Norm
    second: _Norm


def _forward(layer: Any, family: Family, hidden_states: Tensor, **kwargs: Any) -> Tensor:
    """What the decoder layer returns, of [B, T, hidden], with the arguments that it gets."""
    batch, tokens, size = hidden_states.shape
    x = hidden_states.reshape(batch * tokens, size).contiguous()
    qkv, gate_up = map(_stack, _groups(layer, family))
    assert qkv is not None
    assert gate_up is not None
    out, down = ((one.weight, one.bias) for one in (layer.self_attn.o_proj, layer.mlp.down_proj))
    norms = ((one.weight, one.variance_epsilon) for one in (layer.input_layernorm, layer.post_attention_layernorm))
    weights = _Weights(qkv, out, gate_up, down, *norms)
    compute = _in_products if _few(x, weights) else _between_products

    def attend(qkv: Tensor) -> Tensor:
        return _attention(layer.self_attn, family, qkv, batch, tokens, kwargs)

    return compute(x, weights, attend).view(batch, tokens, size)


def _few(x: Tensor, weights: _Weights) -> bool:
    """Whether `flat` computes all products of a layer for the rows of x."""
    products = [weight for weight, _ in weights[:4]]
    if any(one.data_ptr() % 16 for one in (x, weights.first[0], weights.second[0], *products)):
        return False
    return all(flat.takes(len(x), len(weight), weight.shape[1], x.dtype, x.device, normed=normed)
               for weight, normed in zip(products, (True, False, True, False), strict=True))


def _in_products(x: Tensor, weights: _Weights, attend: Callable[[Tensor], Tensor]) -> Tensor:
    """The layer's result of x [rows, hidden]; `attend` takes q, k and v and returns all heads' outputs."""
    attended = attend(flat.linear(x, *weights.qkv, norm=weights.first))
    x = flat.linear(attended, *weights.out, residual=x)
    inner = flat.linear(x, *weights.gate_up, norm=weights.second, gated=True)
    return flat.linear(inner, *weights.down, residual=x)


def _between_products(x: Tensor, weights: _Weights, attend: Callable[[Tensor], Tensor]) -> Tensor:
    """The same for any rows and devices, by products of PyTorch and a kernel between each two."""
    linear = nn.functional.linear
    attended = attend(linear(kernels.rms_norm(x, *weights.first), *weights.qkv))
    x, normed = kernels.add_rms_norm(x, linear(attended, *weights.out), *weights.second)
    inner = kernels.silu_mul(linear(normed, *weights.gate_up))
    weight, bias = weights.down
    x.addmm_(inner, weight.t())  # x is new, and the sum is part of the product
    if bias is not None:
        x += bias
    return x


def _attention(attention: Any, family: Family, qkv: Tensor, batch: int, tokens: int, kwargs: dict[str, Any]) -> Tensor:
    """All heads' outputs [B * T, HQ * D], of q, k and v [B * T, (HQ + 2 * KH) * D] before rotation."""
    rest: dict[str, Any] = {"position_ids": None, "use_cache": False, **kwargs}
    cos, sin = rest.pop("position_embeddings")
    mask = rest.pop("attention_mask", None)
    past = [rest.pop(name, None) for name in CACHE_NAMES]
    HQ, KH, D = _heads(attention)
    norms = (
        {"q_weight": attention.q_norm.weight, "k_weight": attention.k_norm.weight,
         "eps": attention.q_norm.variance_epsilon} if family.normed else {}
    )

    def rotate_and_append(pages: KVPages, key: Tensor, value: Tensor, slots: Tensor) -> None:
        if rotary.takes(qkv, pages.k, pages.v):
            rotary.rotate_and_append(qkv, cos, sin, HQ, pages.k, pages.v, slots, **norms)
        else:
            kernels.rotate_(qkv, cos, sin, HQ, KH, D, **norms)
            append(pages, key, value, slots)

    # Attention of a decoding step reads k and v from the pages alone. In doubt it may yet turn out not to be one.
    if isinstance(mask, Step) and mask.is_decode and mask.doubt is None:
        mask.put = rotate_and_append
    else:
        kernels.rotate_(qkv, cos, sin, HQ, KH, D, **norms)
    heads = qkv.view(batch, tokens, HQ + 2 * KH, D).transpose(1, 2)
    query, key, value = heads[:, :HQ], heads[:, HQ : HQ + KH], heads[:, HQ + KH :]
    held = next((cache for cache in past if cache is not None), None)
    if held is not None:
        key, value = held.update(key, value, attention.layer_idx, kwargs=rest)
    interface = ALL_ATTENTION_FUNCTIONS.get_interface(
        attention.config._attn_implementation, sys.modules[type(attention).__module__].eager_attention_forward)
    out, _ = interface(attention, query, key, value, mask, dropout=0.0, scaling=attention.scaling,
                       **family.windows(attention), **rest)
    attended: Tensor = out.reshape(batch * tokens, -1).contiguous()
    return attended

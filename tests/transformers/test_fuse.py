"""Fused decoder layers without a GPU: which are fused, merged weights and their ways out, and what must not change.

Calls on the CPU are the family's own; what the kernels compute is tested beside them, and on a GPU.
"""

from __future__ import annotations

import copy
import io
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers.generation")

import torch
from safetensors import safe_open
from tiny import (
    build,
    expected,
    fresh,
    one_thread,  # noqa: F401
    padded,
    plain,
    tokens,
)
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from transformers import LlamaForCausalLM, PreTrainedModel

from wavefill import UnsupportedModel
from wavefill.integrations.transformers import disable, enable, fused

pytestmark = pytest.mark.transformers

FAMILIES = ("llama", "mistral-window", "qwen2", "qwen3", "phi3")
APART = tuple(family for family in FAMILIES if family != "phi3")


def fuse(model: PreTrainedModel) -> PreTrainedModel:
    fused.choose(model, True)
    return model


def is_fused(model: PreTrainedModel) -> list[bool]:
    return [isinstance(layer, fused.FusedLayer) for layer in model.base_model.layers]


def groups(model: PreTrainedModel, number: int = 0) -> list[list[Any]]:
    """Weights, and biases, that are merged in a layer."""
    layer = model.base_model.layers[number]
    linears = ([getattr(layer.self_attn, f"{x}_proj") for x in "qkv"], [layer.mlp.gate_proj, layer.mlp.up_proj])
    return [[getattr(linear, name) for linear in group] for group in linears for name in ("weight", "bias")
            if getattr(group[0], name) is not None]


def are_merged(model: PreTrainedModel) -> bool:
    found = [len({part.untyped_storage().data_ptr() for part in group}) == 1
             for number in range(len(model.base_model.layers)) for group in groups(model, number)]
    assert all(found) or not any(found)
    return all(found)


def own_their_memory(model: nn.Module) -> bool:
    return all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())


def same_state(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(x, b[name]) for name, x in a.items())


# ---- merging


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layer_is_fused_and_nothing_in_sight_changes(family: str) -> None:
    model = fresh(family)
    state = copy.deepcopy(model.state_dict())
    names, parameters = zip(*model.named_parameters(), strict=True)
    with torch.no_grad():
        before = model(plain()).logits
        fuse(model)
        assert torch.equal(model(plain()).logits, before)
    assert all(is_fused(model))
    assert fused.report(model) == []
    assert same_state(model.state_dict(), state)
    after = dict(model.named_parameters())
    assert list(after) == list(names)
    assert all(after[name] is parameter for name, parameter in zip(names, parameters, strict=True))


@pytest.mark.parametrize("family", APART)
def test_weights_of_a_product_are_one_tensor_in_order(family: str) -> None:
    model = fuse(fresh(family))
    assert are_merged(model)
    for group in groups(model):
        assert torch.equal(fused._whole(group), torch.cat(group))
        assert group[0].untyped_storage().nbytes() == sum(part.nbytes for part in group)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_comes_back(family: str) -> None:
    model = fresh(family)
    kinds, state = [type(module) for module in model.modules()], copy.deepcopy(model.state_dict())
    for _ in range(2):
        fuse(model)
        fused.choose(model, False)
        assert [type(module) for module in model.modules()] == kinds
        assert own_their_memory(model)
        assert same_state(model.state_dict(), state)
    fused.choose(model, False)
    assert fused.report(model) == [f"layers.{number}: fuse=True was not given" for number in range(3)]


def test_choosing_again_moves_nothing() -> None:
    model = fuse(fresh("llama"))
    addresses = [p.data_ptr() for p in model.parameters()]
    fuse(model)
    assert [p.data_ptr() for p in model.parameters()] == addresses


@pytest.mark.parametrize("family", FAMILIES)
def test_an_enabled_model_generates_as_before(family: str) -> None:
    run = lambda model: tokens(model, padded(), 12)  # noqa: E731
    model = fuse(enable(fresh(family)))
    assert torch.equal(run(model), expected(("fuse",), family, run))
    fused.choose(model, False)
    assert torch.equal(run(disable(model)), expected(("fuse",), family, run))


def test_a_training_step_goes_to_every_weight() -> None:
    models = [fresh("qwen2").train(), fuse(fresh("qwen2")).train()]
    for model in models:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(plain(), labels=plain()).loss.backward()
        optimizer.step()
    assert same_state(models[1].state_dict(), models[0].state_dict())
    assert are_merged(models[1])


def test_within_inference_mode_weights_stay_trainable() -> None:
    model = fresh("llama")
    with torch.inference_mode():
        fuse(model)
    model.train()(plain(), labels=plain()).loss.backward()
    with torch.inference_mode():
        fused.choose(model, False)
    model(plain(), labels=plain()).loss.backward()


def test_a_compiled_model_is_one_graph() -> None:
    model = fresh("llama")
    with torch.no_grad():
        before = model(plain()).logits
        assert torch.equal(torch.compile(fuse(model), backend="eager", fullgraph=True)(plain()).logits, before)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_gradient_checkpointing(checkpointed: bool) -> None:
    model = fuse(fresh("llama")).train()
    if checkpointed:
        model.gradient_checkpointing_enable()
    model(plain(), labels=plain(), use_cache=False).loss.backward()
    grad = model.model.layers[0].self_attn.k_proj.weight.grad
    key = ("fuse grad",)

    def run(stock: PreTrainedModel) -> Tensor:
        other = copy.deepcopy(stock).train()
        other(plain(), labels=plain(), use_cache=False).loss.backward()
        found: Tensor = other.model.layers[0].self_attn.k_proj.weight.grad
        return found

    torch.testing.assert_close(grad, expected(key, "llama", run))


# ---- ways out: each leaves a model that computes as it would have, and that can be fused again


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_folder_has_every_weight_once_and_loads(family: str, tmp_path: Path) -> None:
    model = fuse(fresh(family))
    model.save_pretrained(tmp_path)
    assert fused.report(model) == []
    files = list(tmp_path.glob("*.safetensors"))
    with safe_open(files[0], "pt") as held:
        names = list(held.keys())
    assert len(files) == 1
    assert sorted(names) == sorted(model.state_dict())
    assert files[0].stat().st_size < sum(p.nbytes for p in model.parameters()) + (1 << 16)
    again = type(model).from_pretrained(tmp_path)
    assert not any(is_fused(again))
    assert same_state(again.state_dict(), model.state_dict())
    assert all(is_fused(fuse(again)))


def test_torch_save_has_every_weight_once_and_loads_merged() -> None:
    model = fuse(fresh("qwen2"))
    file = io.BytesIO()
    torch.save(model, file)
    assert file.tell() < 1.5 * sum(p.nbytes for p in model.parameters()) + (1 << 17)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert same_state(again.state_dict(), model.state_dict())
    assert fused.report(again) == []
    fused.choose(again, False)
    assert own_their_memory(again)


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "to", "load assigning"])
def test_after_other_ways_it_says_so_and_is_fused_again(way: str) -> None:
    model = fuse(fresh("qwen2"))
    state = copy.deepcopy(model.state_dict())
    if way == "deepcopy":
        again = copy.deepcopy(model)
        assert are_merged(model)
    elif way == "pickle":
        again = pickle.loads(pickle.dumps(model))
    else:
        again = model
        if way == "to":
            again.to(torch.float64).to(torch.float32)
        else:
            again.load_state_dict({name: x.clone() for name, x in state.items()}, assign=True)
    assert same_state(again.state_dict(), state)
    text = "its weights are not in one tensor (moved, replaced or copied since); fuse the model again"
    assert fused.report(again) == [f"layers.{number}: {text}" for number in range(3)]
    fuse(again)
    assert are_merged(again)
    assert fused.report(again) == []
    assert same_state(again.state_dict(), state)
    fused.choose(again, False)
    assert own_their_memory(again)


def test_loading_into_it_keeps_it_merged() -> None:
    model, other = fuse(fresh("llama")), build("llama", seed=6)
    model.load_state_dict(other.state_dict())
    assert are_merged(model)
    assert same_state(model.state_dict(), other.state_dict())


def test_weights_side_by_side_by_chance_are_not_one() -> None:
    room = torch.arange(24.0)
    parts = [room[at : at + 8].view(2, 4) for at in (0, 8, 16)]
    assert torch.equal(fused._whole(parts), room.view(6, 4))
    assert fused._whole([parts[0], parts[2]]) is None
    assert fused._whole([parts[1], parts[0]]) is None
    assert fused._whole([parts[0], parts[1].clone()]) is None


# ---- layers that are left alone


class Adapter(nn.Module):
    """As PEFT's: the layer that was there within, and what is added to it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.Linear(base.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.base_layer(x) + self.lora_B(self.lora_A(x))
        return out


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


def adapted(layer: Any) -> None:
    layer.self_attn.q_proj = Adapter(layer.self_attn.q_proj)


def parametrized(layer: Any) -> None:
    parametrize.register_parametrization(layer.mlp.up_proj, "weight", Halved())


def hooked(layer: Any) -> None:
    layer.mlp.register_forward_hook(lambda module, args, out: out / 2)


def patched(layer: Any) -> None:
    layer.post_attention_layernorm.forward = lambda x: x


def other_activation(layer: Any) -> None:
    layer.mlp.act_fn = nn.GELU()


def other_dtype(layer: Any) -> None:
    layer.mlp.down_proj.to(torch.float64)


def one_bias(layer: Any) -> None:
    layer.self_attn.v_proj.bias = nn.Parameter(torch.zeros(layer.self_attn.v_proj.out_features))


def pruned(layer: Any) -> None:
    prune.identity(layer.mlp.down_proj, "weight")


CHANGES = {
    adapted: "self_attn.q_proj is Adapter, not Linear",
    parametrized: "mlp.up_proj is ParametrizedLinear, not Linear",
    hooked: "mlp has hooks, or a forward of its own",
    patched: "post_attention_layernorm has hooks, or a forward of its own",
    other_activation: "mlp.act_fn is GELU, not SiLUActivation",
    other_dtype: "mlp.down_proj.weight is torch.float64 on cpu, where others, or the input, are torch.float32 on cpu",
    one_bias: "some of the weights to merge have a bias and others have none",
    pruned: "mlp.down_proj has hooks, or a forward of its own",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_a_layer_with_other_parts_is_left_alone(change: Any, before: bool) -> None:
    """Changed before it is fused, or after, when the next choice makes it the family's own again."""
    model = fresh("llama")
    if not before:
        fuse(model)
    change(model.model.layers[1])
    if not before:
        assert all(is_fused(model))
        assert fused.report(model) == [f"layers.1: {CHANGES[change]}"]
    with torch.no_grad():
        out = None if change is other_dtype else model(plain()).logits
        fuse(model)
        assert is_fused(model) == [True, False, True]
        assert fused.report(model) == [f"layers.1: {CHANGES[change]}"]
        assert own_their_memory(model.model.layers[1])
        assert not own_their_memory(model.model.layers[0])
        assert out is None or torch.equal(model(plain()).logits, out)
    fused.choose(model, False)
    assert own_their_memory(model)


def test_tied_weights_stay_tied() -> None:
    model = fresh("llama")
    first, _, last = model.model.layers
    last.self_attn.k_proj.weight = first.self_attn.k_proj.weight
    last.mlp.up_proj.weight.data = first.mlp.up_proj.weight.data
    fuse(model)
    assert is_fused(model) == [False, True, False]
    assert fused.report(model) == [f"layers.{n}: a weight to merge is another module's too" for n in (0, 2)]
    assert last.mlp.up_proj.weight.data_ptr() == first.mlp.up_proj.weight.data_ptr()


def test_hooks_that_collect_hidden_states_do_not_count() -> None:
    """transformers leaves them in the attention modules for good."""
    model = fuse(fresh("llama"))
    with torch.no_grad():
        out = model(plain(), output_hidden_states=True)
    assert len(out.hidden_states) == 4
    assert model.model.layers[0].self_attn._forward_hooks
    assert fused.report(model) == []


@pytest.mark.parametrize("family", ["gemma2", "gpt-oss", "lfm2"])
def test_other_families_are_refused(family: str) -> None:
    model = fresh(family)
    with pytest.raises(UnsupportedModel, match=r"^fuse: takes models of the Llama, .*; got \w+Model\. Leave fuse=True"):
        fuse(model)
    assert not any(is_fused(model))
    fused.choose(model, False)


def test_a_bare_model_and_flat_layers_are_fused() -> None:
    model = LlamaForCausalLM(fresh("llama").config).model
    assert all(is_fused(fuse(enable(model, linear="flat"))))
    assert all(is_fused(fuse(enable(model))))


# ---- which calls


def test_calls_on_the_cpu_are_the_familys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_forward", None)
    model = fuse(fresh("llama")).to(torch.bfloat16)
    tokens(model, plain(), 3)


def test_a_call_that_stays_unfused_says_why_once(monkeypatch: pytest.MonkeyPatch,
                                                 caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(fused, "_takes", lambda x, kwargs: True)
    fused._say.cache_clear()
    model = fresh("llama")
    model.set_attn_implementation("eager")
    model = copy.deepcopy(fuse(model))
    with caplog.at_level(logging.DEBUG, "wavefill"):
        tokens(model, plain(), 3)
    texts = [record.getMessage() for record in caplog.records]
    assert texts == [f"FusedLlamaLayer with layer_idx {number} runs unfused: its weights are not in one tensor "
                     "(moved, replaced or copied since); fuse the model again" for number in range(3)]


def test_attentions_are_collected_from_the_familys_own_forward() -> None:
    model = fresh("llama")
    model.set_attn_implementation("eager")
    fuse(model)
    seen: list[bool] = []
    layer = model.model.layers[0]
    layer.register_forward_pre_hook(lambda module, args: seen.append(fused._collects_attentions()))
    with torch.no_grad():
        for asked in (False, True):
            out = model(plain(), output_attentions=asked)
            assert bool(out.attentions) is asked
    assert seen == [False, True]

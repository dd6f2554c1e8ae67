"""The contract of continuous batching is detected, by release and by shape, and held in every call; other models and
other uses of an enabled model are left as they were."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers.generation")

import torch
import transformers
from batching import batched, cheap, expected, fresh, generation, greedy, outputs, prompts, settings, stock  # noqa: F401
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.generation.continuous_batching import continuous_api, initialization
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs

from wavefill import BackendUnavailable, InvalidArgument
from wavefill.integrations.transformers import continuous, disable, enable
from wavefill.integrations.transformers.continuous import hooks
from wavefill.integrations.transformers.continuous.contract import Shape
from wavefill.integrations.transformers.continuous.detect import CONTRACTS, detect, gpu_releases

pytestmark = [pytest.mark.transformers, pytest.mark.usefixtures("cheap")]

_OLD = frozenset({"cache", "cu_seq_lens_q", "cu_seq_lens_k", "max_seqlen_q", "max_seqlen_k", "read_index",
                  "write_index", "block_table"})
_NEW = _OLD - {"max_seqlen_q", "max_seqlen_k"} | {"max_length_q", "max_length_k"}
_BEFORE, _AFTER = frozenset({"past_key_values"}), frozenset({"cache"})
_INDICES = frozenset({"read_index", "write_index"})
SHAPES = {
    (5, 17): Shape(_INDICES, _OLD, frozenset({"update"}), _BEFORE),
    (5, 18): Shape(_INDICES, _OLD, frozenset({"update", "get_cache_for_block_table"}), _BEFORE),
    (5, 19): Shape(frozenset({"kwargs"}), _NEW, frozenset({"update", "get_cache_for_block_table"}), _BEFORE),
    (5, 23): Shape(frozenset({"kwargs"}), _NEW, frozenset({"update", "get_cache_for_block_table"}), _BEFORE),
    (5, 24): Shape(frozenset({"kwargs"}), _NEW, frozenset({"update", "get_cache_for_block_table"}), _AFTER),
}


def _name(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


@pytest.mark.parametrize("release", SHAPES, ids=_name)
def test_detected(release: tuple[int, int]) -> None:
    """Each release has its contract, and a patch release of it too; no shape fits two contracts."""
    for version in (f"{_name(release)}.0", f"{_name(release)}.7", f"{_name(release)}.0.dev0"):
        assert detect(version, SHAPES[release]).covers(release)
    assert sum(contract.matches(SHAPES[release]) for contract in CONTRACTS) == 1


@pytest.mark.parametrize("release", [(4, 57), (5, 16), (5, 25), (6, 0)], ids=_name)
def test_release_outside_the_range(release: tuple[int, int]) -> None:
    """Refused with the range, whatever it looks like."""
    for shape in SHAPES.values():
        with pytest.raises(BackendUnavailable, match=rf"5\.17 to 5\.24; got transformers {_name(release)}\.0"):
            detect(f"{_name(release)}.0", shape)


@pytest.mark.parametrize("release", SHAPES, ids=_name)
def test_release_that_looks_like_another(release: tuple[int, int]) -> None:
    """A release whose parts are another contract's, or no known one's, is refused and not guessed at."""
    mine = next(c for c in CONTRACTS if c.covers(release))
    unknown = Shape(frozenset({"states"}), _NEW, frozenset(), _AFTER)
    for shape in (*SHAPES.values(), unknown):
        if not mine.matches(shape):
            with pytest.raises(BackendUnavailable, match="looks like"):
                detect(f"{_name(release)}.0", shape)


def test_installed_release() -> None:
    """What is installed is seen as what it is."""
    release = tuple(map(int, re.findall(r"\d+", transformers.__version__)[:2]))
    contract = hooks.contract_of(fresh("llama"))
    assert contract.covers(release)
    seen = hooks._shape(fresh("llama"))
    assert [c for c in CONTRACTS if c.matches(seen)] == [contract]


def test_newer_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    """`enable` and `generate` work with a release that is newer than the range; continuous batching is refused by
    every way in, before any token, and the model stays as it was."""
    monkeypatch.setattr(hooks, "installed", lambda: "5.99.1")
    model = enable(fresh("llama"))
    (prompt,) = prompts(9)
    assert greedy(model, prompt, 4) == expected("llama", prompt, 4)
    for way in (
        lambda: model.generate_batch([prompt], generation_config=generation(2)),
        lambda: model.init_continuous_batching(generation_config=generation(2)),
        lambda: model.continuous_batching_context_manager(generation_config=generation(2)).__enter__(),
    ):
        with pytest.raises(BackendUnavailable, match=r"5\.17 to 5\.24; got transformers 5\.99\.1.*disable\(model\)"):
            way()
    assert model.config._attn_implementation == "wavefill"


def test_gpu_with_an_untested_release(monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused by name, since batches there are made in another way; a release that was tested is not."""
    model = enable(fresh("llama"))
    contract = hooks.contract_of(model)
    monkeypatch.setattr(type(contract), "on_gpu", False)
    model.to("meta")
    with pytest.raises(BackendUnavailable, match=r"of transformers .* on a GPU; got .* on meta\. Install"):
        model.init_continuous_batching(generation_config=generation(2))
    assert model.config._attn_implementation == "wavefill"
    assert gpu_releases() in ("5.17", "")


def test_cuda_graphs_are_chosen() -> None:
    """Never on the CPU, whatever is asked; elsewhere the user's word, or off where a forward reads values. Batches
    are never prepared ahead."""
    model, experts, long = (fresh(family) for family in ("llama", "gpt-oss", "phi3"))
    long.config.rope_parameters = {"rope_type": "longrope", "rope_theta": 1e4}
    asked = settings(use_cuda_graph=True, use_async_batching=True)
    hooks._choose_graphs(model, asked)
    assert (asked.use_cuda_graph, asked.use_async_batching) == (False, False)
    for other, wanted in ((model, None), (experts, False), (long, False)):
        other.to("meta")
        config = settings()
        hooks._choose_graphs(other, config)
        assert (config.use_cuda_graph, config.use_async_batching) == (wanted, False)
        config.use_cuda_graph = True
        hooks._choose_graphs(other, config)
        assert config.use_cuda_graph is True
        config.use_async_batching = True
        with pytest.raises(InvalidArgument, match="use_async_batching: must be false for an enabled model on a GPU"):
            hooks._choose_graphs(other, config)


def _with(edit: Callable[[dict[str, Any]], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let transformers' own batches carry edited keyword arguments."""
    original = ContinuousBatchingIOs.get_model_kwargs

    def edited(self: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        result = dict(original(self, *args, **kwargs))
        edit(result)
        return result

    monkeypatch.setattr(ContinuousBatchingIOs, "get_model_kwargs", edited)


EDITS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "write_index is gone": lambda kw: kw.pop("write_index"),
    "block_table is gone": lambda kw: kw.pop("block_table"),
    "all indices are gone": lambda kw: [kw.pop(k) for k in ("read_index", "write_index", "block_table")],
    "lengths have another name": lambda kw: [kw.update({f"new_{k}": kw.pop(k)}) for k in list(kw) if k[:4] == "max_"],
    "lengths have both names": lambda kw: kw.update(max_seqlen_q=1, max_length_q=1),
    "cu_seq_lens_q is gone": lambda kw: kw.pop("cu_seq_lens_q"),
    "not causal": lambda kw: kw.update(is_causal=False),
}


@pytest.mark.parametrize("edit", EDITS)
def test_call_of_another_contract(edit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every request ends with an error that names continuous batching, and without a single token."""
    model = enable(fresh("llama"))
    _with(EDITS[edit], monkeypatch)
    for out in outputs(model, prompts(7, 12), 6, settings()):
        assert out.error is not None
        assert "must be" in out.error
        assert not list(out.generated_tokens)


@pytest.mark.parametrize("wrong", CONTRACTS, ids=lambda c: c.name)
def test_contract_of_another_release(wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code for one contract, run on another release: an error for each request, where it once gave wrong tokens."""
    model = enable(fresh("qwen2-mixed"))
    right = hooks.contract_of(model)
    if wrong is right:
        pytest.skip("is the installed one")
    monkeypatch.setitem(hooks._contracts, (hooks.installed(), type(model)), wrong)
    monkeypatch.setattr(type(wrong), "prefix", right.prefix)
    for out in outputs(model, prompts(7, 12), 6, settings()):
        assert out.error is not None
        assert not list(out.generated_tokens)


def test_paged_call_outside_a_pass() -> None:
    """A paged call that no enabled model's forward pass made is refused: its contract is unknown."""
    layer = stock("llama").model.layers[0].self_attn
    q, k = torch.zeros(1, 6, 3, 8), torch.zeros(1, 2, 3, 8)
    assert continuous.is_paged_call({"write_index": [torch.arange(3)]})
    with pytest.raises(InvalidArgument, match=r"enable\(model\)"):
        continuous.forward(layer, q, k, k, write_index=[torch.arange(3)])


def test_plain_forward_between_batches() -> None:
    """A plain forward of a model that a manager has switched is causal, padding included (case P2)."""
    model = enable(fresh("llama"))
    manager = model.init_continuous_batching(generation_config=generation(4), continuous_batching_config=settings())
    assert "flash" in model.config._attn_implementation
    ids = torch.tensor([[0, 0, *prompts(9)[0]], prompts(11)[0]])
    keep = torch.ones_like(ids)
    keep[0, :2] = 0
    positions = (keep.cumsum(1) - 1).clamp(min=0)
    for use_cache in (False, True):
        options = {"attention_mask": keep, "position_ids": positions, "use_cache": use_cache}
        with torch.no_grad():
            got, want = model(ids, **options).logits, stock("llama")(ids, **options).logits
        torch.testing.assert_close(got[keep.bool()], want[keep.bool()], atol=1e-4, rtol=1e-4)
    del manager


def test_disable_restores() -> None:
    """Everything on the model is as before, and a second `enable` starts over."""
    model = fresh("llama")
    before = set(vars(model))
    enable(enable(model))
    assert batched(model, prompts(6), 4) == [expected("llama", p, 4) for p in prompts(6)]
    disable(model)
    assert set(vars(model)) == before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert model.config._attn_implementation == "sdpa"
    assert batched(model, prompts(6), 4) == [expected("llama", p, 4) for p in prompts(6)]
    assert batched(enable(model), prompts(6), 4) == [expected("llama", p, 4) for p in prompts(6)]


def test_disable_while_generating() -> None:
    """Refused: the batches in flight could be finished by nothing else."""
    model = enable(fresh("llama"))
    with model.continuous_batching_context_manager(
        generation_config=generation(4), continuous_batching_config=settings()
    ) as manager:
        with pytest.raises(InvalidArgument, match="stop"):
            disable(model)
        manager.add_request(prompts(5)[0])
        out = manager.get_result(timeout=30)
    assert out is not None
    assert out.error is None
    disable(model)


def test_manager_from_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A persistent manager with masks, made before `enable`, is not taken over."""
    model = fresh("llama")
    model.generate_batch(prompts(5), generation_config=generation(2), persistent_manager=True,
                         continuous_batching_config=settings())
    enable(model)
    with pytest.raises(InvalidArgument, match="destroy_cached_continuous_batching_manager"):
        model.generate_batch(prompts(5), generation_config=generation(2))
    model.destroy_cached_continuous_batching_manager()
    assert batched(model, prompts(5), 4) == [expected("llama", p, 4) for p in prompts(5)]


def test_copy_of_an_enabled_model() -> None:
    """A deep copy is enabled too, by itself."""
    model = enable(fresh("llama"))
    twin = copy.deepcopy(model)
    disable(model)
    assert batched(twin, prompts(8), 4) == [expected("llama", p, 4) for p in prompts(8)]
    assert twin.config._attn_implementation == "wavefill"
    assert model.config._attn_implementation == "sdpa"


def test_attention_set_since() -> None:
    """A model that was set to another attention after `enable` is transformers' own business."""
    model = enable(fresh("llama"))
    model.set_attn_implementation("sdpa")
    assert batched(model, prompts(6), 4) == [expected("llama", p, 4) for p in prompts(6)]
    assert model.config._attn_implementation == "sdpa"


def test_other_models() -> None:
    """A stock model beside an enabled one, before, during and after, and nothing of transformers is replaced."""
    import transformers.modeling_flash_attention_utils as flash

    watched = (flash, initialization, continuous_api, continuous_api.ContinuousBatchingManager,
               continuous_api.ContinuousMixin)
    before = [dict(vars(module)) for module in watched]
    names = {k: v for k, v in AttentionInterface._global_mapping.items() if "wavefill" not in k}
    masks = {k: v for k, v in AttentionMaskInterface._global_mapping.items() if "wavefill" not in k}
    other, model = fresh("qwen3"), fresh("llama")
    inputs = prompts(8, 3)
    want = [expected("qwen3", p, 5) for p in inputs]
    assert batched(other, inputs, 5) == want
    enable(model)
    with model.continuous_batching_context_manager(
        generation_config=generation(5), continuous_batching_config=settings()
    ) as manager:
        manager.add_request(inputs[0])
        assert batched(other, inputs, 5) == want
        assert greedy(other, inputs[0], 5) == want[0]
        assert manager.get_result(timeout=30) is not None
    disable(model)
    assert batched(other, inputs, 5) == want
    assert [dict(vars(module)) for module in watched] == before
    assert {k: v for k, v in AttentionInterface._global_mapping.items() if "wavefill" not in k} == names
    assert {k: v for k, v in AttentionMaskInterface._global_mapping.items() if "wavefill" not in k} == masks

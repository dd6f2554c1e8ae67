"""A wavefill cache handed around: pickled, copied, given to another model, and called with arguments of every kind."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers.generation")

import torch
from tiny import (
    CACHE,
    build,
    fresh,
    one_thread,  # noqa: F401
    padded,
    plain,
    stock,
    tokens,
)
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from wavefill import InvalidArgument, InvalidType, WavefillError
from wavefill.integrations.transformers import WavefillCache, enable
from wavefill.integrations.transformers.cache import rows_of

pytestmark = pytest.mark.transformers


def forward(model: PreTrainedModel, ids: Any, cache: Any, mask: Any = None, **more: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(ids, attention_mask=mask, use_cache=True, **more, **{CACHE: cache}).logits
    return logits


def alike(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


# ---- copies


def saved(cache: WavefillCache) -> WavefillCache:
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    loaded: WavefillCache = torch.load(file, weights_only=False)
    return loaded


COPIES: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda cache: pickle.loads(pickle.dumps(cache)), "save": saved, "deepcopy": copy.deepcopy,
    "sent": lambda cache: pickle.loads(ForkingPickler.dumps(cache)),
}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("kind", ["own", "adopted"])
def test_a_prompt_cache_that_was_copied_is_continued_apart(how: str, kind: str) -> None:
    model, reference = enable(fresh("llama")), stock("llama")
    batch = padded(2, 70, (4, 0))
    kept = WavefillCache(model) if kind == "own" else DynamicCache()
    mask = batch["attention_mask"]
    forward(model, batch["input_ids"], kept, mask, position_ids=(mask.cumsum(1) - 1).clamp(0))  # as generate counts
    for seed in range(2):
        more = torch.randint(1, 200, (2, 3), generator=torch.Generator().manual_seed(seed))
        inputs = {"input_ids": torch.cat([batch["input_ids"], more], 1),
                  "attention_mask": torch.cat([mask, torch.ones_like(more)], 1)}
        copied = COPIES[how](kept)
        assert torch.equal(tokens(model, inputs, 8, **{CACHE: copied}), tokens(reference, inputs, 8))
        # The original goes on while the copy lives, and is then as it was.
        forward(model, more, kept, inputs["attention_mask"])
        kept.crop(-3)
    assert kept.get_seq_length() == 70


def test_a_shallow_copy_is_the_same_cache_under_another_name() -> None:
    """As of a DynamicCache: both have the same layers, and so the same pages and lengths."""
    model = enable(fresh("llama"))
    cache = WavefillCache(model)
    other = copy.copy(cache)
    for start, one in ((0, cache), (5, other), (9, cache)):
        assert cache.get_seq_length() == other.get_seq_length() == start
        got = forward(model, plain(14)[:, start:{0: 5, 5: 9, 9: 14}[start]], one)
    alike(got[:, -1], forward(stock("llama"), plain(14), DynamicCache())[:, -1])


# ---- another model


def test_an_empty_cache_serves_a_model_of_other_heads() -> None:
    """Also when the forward that came first has failed."""
    model, other = enable(fresh("llama")), enable(build("llama-g5"))
    want = forward(build("llama-g5"), plain(7), DynamicCache())
    cache = WavefillCache(model)
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forward(model, plain(9, 3), cache)
    handle.remove()
    alike(forward(other, plain(7), cache), want)
    with pytest.raises(InvalidArgument, match="heads and head size"):
        forward(model, plain(1), cache)
    assert cache.get_seq_length() == 7
    cache.reset()
    alike(forward(model, plain(7), cache), forward(stock("llama"), plain(7), DynamicCache()))


def test_a_layer_that_writes_out_of_turn_is_refused() -> None:
    model = enable(fresh("llama"))
    cache = WavefillCache(model)
    forward(model, plain(5), cache)
    for layer, number in ((1, 0), (1, 2), (0, 1)):
        model.model.layers[layer].self_attn.layer_idx = number
        with pytest.raises(InvalidArgument, match=f"each layer once and in order; got layer {number} after {layer}"):
            forward(model, plain(1), cache)
        model.model.layers[layer].self_attn.layer_idx = layer
        assert cache.get_seq_length() == 5
    alike(forward(model, plain(6)[:, 5:], cache)[:, -1], forward(stock("llama"), plain(6), DynamicCache())[:, -1])


@pytest.mark.parametrize("more", [{"output_attentions": True}, {"attention_mask": torch.ones(1, 1, 4, 4).bool()},
                                  {"attention_mask": torch.ones(1, 3)}, {"input_ids": torch.ones(4).long()}])
def test_a_call_that_is_refused_leaves_a_new_dynamic_cache_alone(more: dict[str, Any]) -> None:
    """The message may say to disable the model, whose own attention needs the cache's own layers."""
    model, cache = enable(fresh("llama")), DynamicCache(config=stock("llama").config)
    with pytest.raises(InvalidArgument), torch.no_grad():
        model(**{"input_ids": plain(4), **more, CACHE: cache})
    if more.get("attention_mask") is None or more["attention_mask"].dim() != 2:
        assert {type(layer) for layer in cache.layers} == {DynamicLayer}


# ---- arguments


IDS = plain(8, 2)


def filled() -> tuple[PreTrainedModel, WavefillCache]:
    model = enable(fresh("llama"))
    cache = WavefillCache(model)
    forward(model, IDS[:, :7], cache)
    return model, cache


BAD: dict[str, list[tuple[Any, type[WavefillError]]]] = {
    "crop": [(2, InvalidArgument), (True, InvalidType), (-1.5, InvalidType), (None, InvalidType), ("-1", InvalidType),
             (float("nan"), InvalidType), (torch.tensor([-2, -2]), InvalidType), (torch.tensor(-2.0), InvalidType)],
    "batch_repeat_interleave": [(-1, InvalidArgument), (True, InvalidType), (1.5, InvalidType), (None, InvalidType),
                                ("2", InvalidType), (torch.tensor([2, 2]), InvalidType)],
    "reorder_cache": [([0, 2], InvalidArgument), (torch.tensor([-1, 0]), InvalidArgument), (None, InvalidType),
                      (torch.tensor([0.5, 1]), InvalidType), (torch.tensor([True, False]), InvalidType),
                      (torch.tensor([[0, 1]]), InvalidType), (torch.tensor(1), InvalidType), (5, InvalidType)],
    "batch_select_indices": [(torch.tensor([0, 2]), InvalidArgument), (torch.tensor([-3]), InvalidArgument),
                             (torch.tensor([0.5]), InvalidArgument), (torch.tensor([True]), InvalidArgument),
                             (5, InvalidArgument), (None, InvalidType), (1, InvalidType),
                             (torch.tensor([[0, 1]]), InvalidType)],
}
NAMES = {"crop": "tokens_to_remove", "batch_repeat_interleave": "repeats", "reorder_cache": "beam_idx",
         "batch_select_indices": "indices"}


@pytest.mark.parametrize(("name", "value", "error"), [(name, *case) for name, cases in BAD.items() for case in cases])
def test_what_changes_a_batch_names_a_bad_argument_and_changes_nothing(
    name: str, value: Any, error: type[WavefillError]
) -> None:
    model, cache = filled()
    before = [layer.keys for layer in cache.layers]
    with pytest.raises(error, match=rf"^{NAMES[name]}: must .*; got "):
        getattr(cache, name)(value)
    assert cache.get_seq_length() == 7
    for layer, keys in zip(cache.layers, before, strict=True):
        assert torch.equal(layer.keys, keys)
    alike(forward(model, IDS[:, 7:], cache)[:, -1], forward(stock("llama"), IDS, DynamicCache())[:, -1])


@pytest.mark.parametrize(("name", "value", "rows", "slots"), [
    ("crop", torch.tensor(-2), [0, 1], 5), ("crop", np.int64(-2), [0, 1], 5), ("crop", -2**70, [], 0),
    ("batch_repeat_interleave", torch.tensor(2), [0, 0, 1, 1], 7), ("batch_repeat_interleave", 0, [], 7),
    ("reorder_cache", [1, 0], [1, 0], 7), ("reorder_cache", torch.tensor([1, 1], dtype=torch.int32), [1, 1], 7),
    ("batch_select_indices", [-1], [1], 7), ("batch_select_indices", torch.tensor([False, True]), [1], 7),
    ("batch_select_indices", torch.tensor([], dtype=torch.long), [], 7), ("batch_select_indices", slice(1), [0], 7),
])
def test_what_changes_a_batch_takes(name: str, value: Any, rows: list[int], slots: int) -> None:
    model, cache = filled()
    keys = cache.layers[2].keys
    getattr(cache, name)(value)
    assert cache.get_seq_length() == slots
    assert len(rows_of(cache).pages.requests) == len(rows)
    if slots:
        assert torch.equal(cache.layers[2].keys, keys[rows][:, :, :slots])
    if slots and not rows:
        # Rows of nothing are no rows to continue, whatever their length.
        with pytest.raises(InvalidArgument, match="input_ids: must have the 0 rows of the cache; got 2"):
            forward(model, plain(1, 2), cache)
        cache.reset()
        forward(model, plain(1, 2), cache)


@pytest.mark.parametrize(("ids", "mask", "message"), [
    (torch.ones(2).long(), None, r"input_ids: must be a tensor \[batch, tokens, ...\]; got \[2\]"),
    ([[1], [2]], None, "input_ids: must be a tensor .*; got list"),
    (torch.ones(3, 1).long(), None, "input_ids: must have the 2 rows of the cache; got 3"),
    (torch.ones(0, 1).long(), None, "input_ids: must have the 2 rows of the cache; got 0"),
    (torch.ones(2, 1).long(), torch.ones(2, 8, device="meta"), "attention_mask: must be on the CPU or a GPU; got meta"),
    (torch.ones(2, 1).long(), torch.ones(3, 8), r"attention_mask: must be \[2, 8\]"),
    (torch.ones(2, 1).long(), torch.ones(8), r"attention_mask: must be \[batch, tokens\]"),
    (torch.ones(2, 1).long(), [[1] * 8] * 2, "attention_mask: must be .*; got list"),
])
def test_inputs_that_do_not_continue_the_cache(ids: Any, mask: Any, message: str) -> None:
    model, cache = filled()
    with pytest.raises(InvalidArgument, match=message):
        forward(model, ids, cache, mask)
    assert cache.get_seq_length() == 7
    if isinstance(ids, Tensor) and ids.dim() == 1:
        with pytest.raises(InvalidArgument, match="inputs_embeds: must be a tensor"):
            forward(model, None, cache, inputs_embeds=ids.float())


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
@pytest.mark.parametrize("hole", [False, True])
def test_a_default_device_of_torch_is_not_the_cache_s(family: str, hole: bool) -> None:
    model, reference = enable(fresh(family)), stock(family)
    batch, first = padded(2, 30, (3, 0)), torch.tensor([1, 0])
    ids, mask = batch["input_ids"], batch["attention_mask"]
    mask[:, 10] = int(not hole)
    want = forward(reference, ids, DynamicCache(), mask)
    with torch.device("meta"):
        cache = WavefillCache(model)
        forward(model, ids[:, :20], cache, mask[:, :20])
        assert cache.layers[0].keys.device.type == "cpu"
        cache.crop(-2)
        for _ in range(2):
            cache.reorder_cache(first)
            cache.batch_select_indices(first)
        got = forward(model, ids[:, 18:], cache, mask)
    alike(got[:, -1], want[:, -1])

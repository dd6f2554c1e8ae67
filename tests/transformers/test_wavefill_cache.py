"""The cache of an enabled model: several turns, crop, beams by page sharing, copies, and what a stock cache offers."""

from __future__ import annotations

import copy
from typing import Any

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

from wavefill import InvalidArgument, PagedKVCache, WavefillError
from wavefill.integrations.transformers import WavefillCache, enable
from wavefill.integrations.transformers.cache import PagedLayer, rows_of

pytestmark = pytest.mark.transformers


def forward(model: PreTrainedModel, ids: Tensor, cache: Any = None, mask: Tensor | None = None) -> Any:
    with torch.no_grad():
        return model(ids, attention_mask=mask, use_cache=True, **{CACHE: cache})


def alike(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2-mixed"])
def test_three_turns_on_one_cache(family: str) -> None:
    model, reference = enable(fresh(family)), stock(family)
    cache = WavefillCache(model)
    text = plain(11)
    for extra in (3, 1, 17):
        want = tokens(reference, text, 9)
        assert torch.equal(tokens(model, text, 9, **{CACHE: cache}), want)
        assert cache.get_seq_length() == want.shape[1] - 1
        text = torch.cat([want, plain(extra) + 1], 1)


def test_a_turn_that_passes_only_its_new_tokens() -> None:
    model = enable(fresh("llama"))
    cache = WavefillCache(model)
    first = tokens(model, plain(11), 5, **{CACHE: cache})
    new = plain(4) + 2
    whole = torch.cat([first, new], 1)
    # The last token of the first turn is not in the cache yet.
    inputs = {"input_ids": whole[:, first.shape[1] - 1:], "attention_mask": torch.ones_like(whole)}
    got = tokens(model, inputs, 6, **{CACHE: cache})
    assert torch.equal(got[:, -6:], tokens(stock("llama"), whole, 6)[:, -6:])


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_forward_without_a_cache_gives_one_that_continues(family: str) -> None:
    model, reference = enable(fresh(family)), stock(family)
    ids = plain(20)
    out = forward(model, ids[:, :8])
    assert isinstance(out[CACHE], WavefillCache)
    for start, stop in ((8, 9), (9, 16), (16, 17), (17, 20)):
        out = forward(model, ids[:, start:stop], out[CACHE])
    alike(out.logits[:, -1], forward(reference, ids).logits[:, -1])


def test_a_new_dynamic_cache_of_the_caller_is_taken_over() -> None:
    for cache in (DynamicCache(), DynamicCache(config=stock("llama").config)):
        model = enable(fresh("llama"))
        assert forward(model, plain(5), cache)[CACHE] is cache
        assert all(isinstance(layer, PagedLayer) for layer in cache.layers)
        assert len(cache) == 3


@pytest.mark.parametrize("pads", [(0, 0, 0), (5, 0, 1)], ids=["unpadded", "padded"])
def test_crop_goes_back_to_any_earlier_token(pads: tuple[int, ...]) -> None:
    model, reference = enable(fresh("mistral-window")), stock("mistral-window")
    batch = padded(3, 19, pads)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    cache = WavefillCache(model)
    want = forward(reference, ids, mask=mask).logits[:, -1]
    forward(model, ids, cache, mask)
    for back in (0, 1, 7, 18, 30):
        cache.crop(-back)
        start = max(19 - back, 0)
        assert cache.get_seq_length() == start
        if start < 19:
            alike(forward(model, ids[:, start:], cache, mask).logits[:, -1], want)
    with pytest.raises(InvalidArgument, match="tokens_to_remove"):
        cache.crop(3)


def test_keys_and_values_are_those_of_a_stock_cache() -> None:
    batch = padded()
    ours, theirs = (forward(m, batch["input_ids"], mask=batch["attention_mask"])[CACHE]
                    for m in (enable(fresh("qwen3")), stock("qwen3")))
    real = batch["attention_mask"].bool()
    for (k, v, *_), (k0, v0, *_) in zip(ours, theirs, strict=True):
        for got, want in ((k, k0), (v, v0)):
            assert got.shape == want.shape
            # The second layer on has seen another rounding.
            alike(got.transpose(1, 2)[real], want.transpose(1, 2)[real])
            assert not got.transpose(1, 2)[~real].any()
    assert ours.batch_size == 3
    assert ours.get_max_length() == -1


def test_beams_share_pages() -> None:
    model = enable(fresh("llama"))
    ids = plain(150)
    out = model.generate(ids, num_beams=6, max_new_tokens=20, do_sample=False, return_dict_in_generate=True)
    reference = stock("llama").generate(ids, num_beams=6, max_new_tokens=20, do_sample=False)
    assert torch.equal(out.sequences, reference)
    pages = rows_of(out[CACHE]).pages
    size = pages.page_size
    before = -(-150 // size)
    # generate computes the prompt once a beam; from then on a beam takes at most the pages of its own last tokens.
    assert pages.num_pages - pages.free_pages <= 6 * before + 6 * 2
    cache = WavefillCache(model)
    forward(model, ids, cache)
    used = rows_of(cache).pages
    held = used.num_pages - used.free_pages
    cache.batch_repeat_interleave(6)
    assert used.num_pages - used.free_pages == held, "repeating rows copied pages"
    cache.reorder_cache(torch.tensor([5, 5, 0, 1, 2, 0]))
    assert used.num_pages - used.free_pages == held, "reordering copied pages"


def test_repeat_select_and_reorder_are_those_of_a_stock_cache() -> None:
    model, reference = enable(fresh("llama")), stock("llama")
    batch = padded()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    ours, theirs = (forward(m, ids, mask=mask)[CACHE] for m in (model, reference))
    rows = torch.arange(3)
    steps: list[tuple[str, Any, Tensor]] = [
        ("batch_repeat_interleave", 2, rows.repeat_interleave(2)),
        ("reorder_cache", torch.tensor([3, 3, 0, 5, 1, 2]), torch.tensor([3, 3, 0, 5, 1, 2])),
        ("batch_select_indices", torch.tensor([4, 0, 1, 1]), torch.tensor([4, 0, 1, 1])),
        ("batch_select_indices", torch.tensor([True, False, True, True]), torch.tensor([0, 2, 3])),
    ]
    for step, (name, argument, picked) in enumerate(steps):
        for cache in (ours, theirs):
            getattr(cache, name)(argument)
        mask = torch.cat([mask[picked], torch.ones(len(picked), 1, dtype=torch.long)], 1)
        new = torch.randint(1, 200, (len(picked), 1))  # rows part ways, so shared pages must be copied
        alike(forward(model, new, ours, mask).logits, forward(reference, new, theirs, mask).logits)
        assert ours.get_seq_length() == theirs.get_seq_length() == 20 + step


def test_a_prompt_cache_is_deep_copied_and_continued_apart() -> None:
    model, reference = enable(fresh("llama")), stock("llama")
    prompt = plain(70)
    kept = forward(model, prompt)[CACHE]
    for seed in range(3):
        torch.manual_seed(seed)
        whole = torch.cat([prompt, torch.randint(1, 200, (1, 5))], 1)
        got = tokens(model, whole, 8, **{CACHE: copy.deepcopy(kept)})
        assert torch.equal(got, tokens(reference, whole, 8))
    assert kept.get_seq_length() == 70


def test_reset_starts_anew_in_the_same_pages() -> None:
    model = enable(fresh("llama"))
    cache = WavefillCache(model)
    want = tokens(stock("llama"), plain(9), 12)
    for rows in (2, 1):
        forward(model, plain(30, rows), cache)
        cache.reset()
        assert cache.get_seq_length() == 0
        pages = rows_of(cache).pages
        assert pages.free_pages == pages.num_pages
    assert torch.equal(tokens(model, plain(9), 12, **{CACHE: cache}), want)


def test_a_cache_filled_in_inference_mode_goes_on_outside_of_it() -> None:
    model, reference = enable(fresh("llama")), stock("llama")
    ids = plain(200)
    cache = WavefillCache(model)
    with torch.inference_mode():
        model(ids[:, :60], use_cache=True, **{CACHE: cache})
    out = forward(model, ids[:, 60:199], cache)  # grows
    with torch.inference_mode():
        out = model(ids[:, 199:], use_cache=True, **{CACHE: cache})
    alike(out.logits[:, -1], forward(reference, ids).logits[:, -1])


@pytest.mark.parametrize("layer", [0, 1, 2])
def test_a_forward_that_fails_midway_leaves_the_cache_as_it_was(layer: int) -> None:
    model, reference = enable(fresh("llama")), stock("llama")
    ids = plain(30)
    cache = WavefillCache(model)

    def boom(*args: Any) -> None:
        raise KeyError("midway")

    for start, stop in ((0, 12), (12, 13), (13, 30)):
        handle = model.model.layers[layer].mlp.register_forward_hook(boom)
        with pytest.raises(KeyError):
            forward(model, ids[:, start:stop], cache)
        handle.remove()
        assert cache.get_seq_length() == start
        out = forward(model, ids[:, start:stop], cache)
    alike(out.logits[:, -1], forward(reference, ids).logits[:, -1])


def test_an_empty_cache_takes_any_number_of_rows() -> None:
    """Also one that was cropped to nothing, and one whose first forward failed."""
    model = enable(fresh("llama"))
    cache = WavefillCache(model)
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        forward(model, plain(9, 3), cache)
    handle.remove()
    for rows in (2, 1):
        alike(forward(model, plain(5, rows), cache).logits, forward(stock("llama"), plain(5, rows)).logits)
        cache.crop(-5)


def test_growth_copies_no_more_than_a_constant_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enable(fresh("llama"))
    cache = WavefillCache(model)
    forward(model, plain(3), cache)
    pages, grown = rows_of(cache).pages, []
    real = pages.grow
    monkeypatch.setattr(pages, "grow", lambda count: (grown.append(count), real(count)))
    for _ in range(24):
        forward(model, plain(64), cache)
    tokens_held = cache.get_seq_length()
    assert sum(grown) * pages.page_size < 8 * tokens_held
    assert len(grown) < 12


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2-mixed"])
def test_slots_without_a_token_are_never_attended(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case P1: the capacity of a buffer taken for the number of tokens in it. Here the free slots hold NaN."""
    real = PagedKVCache.grow

    def poisoned(self: PagedKVCache, num_pages: int) -> None:
        before = self.num_pages
        real(self, num_pages)
        for layer in range(self.layers):
            pages = self.view(layer)
            pages.k[before:] = torch.nan
            pages.v[before:] = torch.nan

    monkeypatch.setattr(PagedKVCache, "grow", poisoned)
    for inputs in (plain(100), padded()):
        assert torch.equal(tokens(enable(fresh(family)), inputs, 9), tokens(stock(family), inputs, 9))


def test_a_prompt_that_reaches_its_window_while_decoding() -> None:
    """Case K10: window 8, prompt 6, four steps."""
    model = build("mistral", sliding_window=8)
    want = tokens(model, plain(6), 4)
    assert torch.equal(tokens(enable(model), plain(6), 4), want)


def test_a_cache_belongs_to_an_enabled_model_of_its_size() -> None:
    model = enable(fresh("llama"))
    with pytest.raises(InvalidArgument, match="3 layers"):
        forward(model, plain(4), WavefillCache(build("llama", num_hidden_layers=2)))
    with pytest.raises(WavefillError, match="enable"):
        forward(stock("llama"), plain(4), WavefillCache(stock("llama")))
    cache = forward(model, plain(4, 2))[CACHE]
    with pytest.raises(InvalidArgument, match="rows of the cache"):
        forward(model, plain(1, 3), cache)
    wider = enable(build("llama-g5", head_dim=16))
    with pytest.raises(InvalidArgument, match="heads and head size"):
        forward(wider, plain(1, 2), cache)

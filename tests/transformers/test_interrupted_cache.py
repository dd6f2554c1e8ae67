"""A forward that Ctrl-C stops anywhere leaves its cache as it was: torch runs no hook after it, so the cache has to.

First with a model, then with the rows of a cache alone, interrupted bytecode by bytecode, generate's changes included.
"""

from __future__ import annotations

import copy
import functools
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

pytest.importorskip("transformers.generation")

import torch
from tiny import (
    CACHE,
    fresh,
    one_thread,  # noqa: F401
    padded,
    plain,
    stock,
    tokens,
)
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from interrupting import run
from wavefill import PagedKVCache, WavefillError
from wavefill.integrations.transformers import WavefillCache, disable, enable
from wavefill.integrations.transformers import step as module
from wavefill.integrations.transformers.cache import rows_of
from wavefill.integrations.transformers.rows import Rows

pytestmark = pytest.mark.transformers


def forward(model: PreTrainedModel, ids: Tensor, cache: Any, mask: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(ids, attention_mask=mask, use_cache=True, **{CACHE: cache}).logits
    return logits


def ctrl_c(*_: Any) -> None:
    raise KeyboardInterrupt


def interrupt(model: PreTrainedModel, place: str, run: Callable[[], Any]) -> None:
    """`run`, stopped where the module at `place` would begin, or at "place:end" where it has ended."""
    name, _, end = place.partition(":")
    found = model.get_submodule(name)
    handle = found.register_forward_hook(ctrl_c) if end else found.register_forward_pre_hook(ctrl_c)
    try:
        with pytest.raises(KeyboardInterrupt):
            run()
    finally:
        handle.remove()


PLACES = ["model.embed_tokens", "model.rotary_emb", "model.norm", "model.norm:end"] + [
    f"model.layers.{layer}.{part}" for layer in range(3) for part in ("self_attn", "self_attn.o_proj", "mlp", "mlp:end")
]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("pads", [(0, 0), (3, 0)], ids=["unpadded", "padded"])
def test_the_next_forward_goes_on_as_if_there_had_been_no_other(place: str, pads: tuple[int, ...]) -> None:
    model, reference = enable(fresh("mistral-window")), stock("mistral-window")
    batch = padded(2, 30, pads)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    cache = WavefillCache(model)
    for start, stop in ((0, 12), (12, 13), (13, 30)):
        new, seen = ids[:, start:stop], mask[:, :stop]
        before = [layer.keys for layer in cache.layers]
        for other in (ids[:, :1], new, new):
            interrupt(model, place, lambda other=other: forward(model, other, cache, mask))
            assert cache.get_seq_length() == start
            assert cache.get_mask_sizes(1, 0) == (start + 1, 0)
            assert cache.layers[0].is_initialized == bool(start)
            for keys, held in zip((layer.keys for layer in cache.layers), before, strict=True):
                assert (keys is held is None) or torch.equal(keys, held)
        logits = forward(model, new, cache, seen)
    want = forward(reference, ids, DynamicCache(), mask)
    torch.testing.assert_close(logits[:, -1], want[:, -1], rtol=2e-5, atol=2e-5)
    pages = rows_of(cache).pages
    assert len(pages.requests) == 2
    cache.reset()
    assert pages.free_pages == pages.num_pages


@pytest.mark.parametrize("place", ["model.layers.0.mlp", "model.layers.2.self_attn.o_proj", "lm_head"])
@pytest.mark.parametrize("step", [0, 1, 9])
def test_generate_that_was_stopped_is_continued_to_the_same_tokens(place: str, step: int) -> None:
    model = enable(fresh("llama"))
    prompt = plain(13)
    want = tokens(stock("llama"), prompt, 20)
    cache, calls = WavefillCache(model), 0

    def stop(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == step + 1:
            raise KeyboardInterrupt

    handle = model.get_submodule(place).register_forward_pre_hook(stop)
    with pytest.raises(KeyboardInterrupt):
        tokens(model, prompt, 20, **{CACHE: cache})
    handle.remove()
    held = cache.get_seq_length()
    # The model's stack has returned when its head is called, and what it computed is kept.
    assert held == (13 + step if place == "lm_head" else 13 + step - 1 if step else 0)
    text = want[:, :max(held + 1, 13)]
    assert torch.equal(tokens(model, text, 33 - text.shape[1], **{CACHE: cache}), want)


@pytest.mark.parametrize("change", ["crop", "reorder", "repeat", "select", "reset", "deepcopy", "pickle", "mask"])
def test_whatever_comes_next_sees_the_cache_as_it_was(change: str) -> None:
    model, reference = enable(fresh("llama")), stock("llama")
    ids = plain(20, 2)
    cache, theirs = WavefillCache(model), DynamicCache()
    mask = torch.ones_like(ids)
    for one, filled in ((model, cache), (reference, theirs)):
        forward(one, ids[:, :10], filled)
    interrupt(model, "model.layers.1.mlp", lambda: forward(model, ids[:, 10:], cache))
    rows = 2
    if change == "crop":
        for each in (cache, theirs):
            each.crop(-1)
    elif change == "reorder":
        for each in (cache, theirs):
            each.reorder_cache(torch.tensor([1, 1]))
    elif change == "repeat":
        rows = 4
        for each in (cache, theirs):
            each.batch_repeat_interleave(2)
    elif change == "select":
        rows = 1
        for each in (cache, theirs):
            each.batch_select_indices(torch.tensor([1]))
    elif change == "reset":
        cache.reset()
        theirs = DynamicCache()
    elif change == "mask":
        mask[0, :3] = 0
    else:
        cache = copy.deepcopy(cache) if change == "deepcopy" else pickle.loads(pickle.dumps(cache))
    new, slots = ids.repeat(2, 1)[:rows, 13:15], theirs.get_seq_length()
    seen = mask.repeat(2, 1)[:rows, :slots + 2] if change == "mask" else None
    positions = {} if seen is None else {"position_ids": (seen.cumsum(1) - 1)[:, -2:]}
    with torch.no_grad():
        got, want = (one(new, attention_mask=seen, use_cache=True, **positions, **{CACHE: held}).logits
                     for one, held in ((model, cache), (reference, theirs)))
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    assert len(rows_of(cache).pages.requests) == rows


def test_a_model_that_is_not_enabled_does_not_go_on_with_the_step() -> None:
    model = enable(fresh("llama"))
    cache = WavefillCache(model)
    forward(model, plain(5), cache)
    for place in ("model.layers.0.self_attn", "model.layers.0.mlp", "model.layers.2.mlp"):
        interrupt(model, place, lambda: forward(model, plain(1), cache))
        with pytest.raises(WavefillError):
            forward(disable(model), plain(1), cache)
        assert cache.get_seq_length() == 5
        enable(model)
    forward(model, plain(1), cache)
    assert cache.get_seq_length() == 6


# ---- the rows alone

LAYERS, SIZE, PAGE = 2, 4, 3
#: Tokens of each row, None for padding; every token is a number of its own.
Model = list[list[int | None]]
Change = tuple[Callable[[Rows], None], Model]


def step(rows: Rows, ids: Tensor, mask: Tensor) -> None:
    made = rows.begin(ids.shape[0], ids.shape[1], mask, None)
    for layer in range(LAYERS):
        new = (ids + 1000 * layer)[:, None, :, None].expand(-1, 1, -1, SIZE).float()
        rows.write(made, layer, new, -new)
        made.attended += 1
    rows.end(made, returned=True)


def begin_next(rows: Rows) -> None:
    """As a GPU does between two forwards: the next step of one token a row is under way before its own comes."""
    if (begun := rows.begin_next(None)) is not None:
        begun.is_under_way = True


def assert_holds(rows: Rows, want: Model) -> None:
    assert rows.slots == (len(want[0]) if want else 0)
    for layer in range(LAYERS if rows.slots else 0):
        keys, values = rows.dense(layer)
        expected = torch.tensor([[0 if x is None else x + 1000 * layer for x in row] for row in want]).float()
        assert torch.equal(keys[:, 0, :, 0], expected)
        assert torch.equal(values, -keys)


def assert_pages_are_counted(rows: Rows) -> None:
    pages = rows.pages
    assert sorted(pages.requests) == sorted(rows.held.ids)
    assert [pages.length(i) for i in rows.held.ids] == list(rows.held.lengths)
    table = pages.block_table(rows.held.ids)
    holders = np.bincount(table[table >= 0].numpy(), minlength=pages.num_pages)
    assert pages.free_pages == int((holders == 0).sum())


class Changes:
    """Random changes to rows, and what they make of the model."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.token = 0

    def any(self, want: Model) -> Change:
        kinds = [self.forward, self.forward, self.next, self.forget, self.crop, self.gather, self.reset]
        return self.random.choice(kinds if want else kinds[:2])(want)

    def forward(self, want: Model) -> Change:
        rows, count = len(want) or self.random.randint(1, 3), self.random.randint(1, 5)
        ids = torch.arange(self.token + 1, self.token + 1 + rows * count).view(rows, count)
        self.token += rows * count
        after = [[*old, *(None if self.random.random() < 0.2 else x for x in new)]
                 for old, new in zip(want or [[]] * rows, ids.tolist(), strict=True)]
        mask = torch.tensor([[x is not None for x in row] for row in after])
        return (lambda it: step(it, ids, mask)), after

    def next(self, want: Model) -> Change:
        """A step of a real token a row, begun before."""
        rows = len(want) or 1
        ids = torch.arange(self.token + 1, self.token + 1 + rows)[:, None]
        self.token += rows
        after = [[*old, *new] for old, new in zip(want or [[]] * rows, ids.tolist(), strict=True)]
        mask = torch.tensor([[x is not None for x in row] for row in after])

        def change(it: Rows) -> None:
            begin_next(it)
            step(it, ids, mask)

        return change, after

    def begin(self, want: Model) -> Change:
        """A step begun, and nothing of it held."""
        return begin_next, want

    def forget(self, want: Model) -> Change:
        """A forward whose mask has lost some of the cached tokens."""
        return self.forward([[None if self.random.random() < 0.3 else x for x in row] for row in want])

    def crop(self, want: Model) -> Change:
        count = self.random.randint(0, 4)
        return (lambda it: it.crop(count)), [row[:len(row) - count] for row in want] if count < len(want[0]) else []

    def gather(self, want: Model) -> Change:
        index = [self.random.randrange(len(want)) for _ in range(self.random.randint(1, 4))]
        return (lambda it: it.gather(index)), [want[at] for at in index]

    def reset(self, want: Model) -> Change:
        return Rows.reset, []


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize("kind", ["first", "forward", "next", "begin", "forget", "crop", "gather", "reset"])
@pytest.mark.parametrize("seed", range(3))
def test_every_change_is_made_or_not_made(kind: str, begun: bool, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PagedKVCache", functools.partial(PagedKVCache, page_size=PAGE))
    changes, start, want = Changes(seed), Rows(range(LAYERS)), []
    for _ in range(0 if kind == "first" else 2 + seed):
        change, want = changes.any(want)
        change(start)
        assert_holds(start, want)
    if kind != "first" and not want:
        change, want = changes.forward(want)
        change(start)
    change, after = getattr(changes, "forward" if kind == "first" else kind)(want)
    whole = run(functools.partial(change, copy.deepcopy(start)))
    for stop in range(1 + seed, whole + 1, max(whole // 40, 1)):
        rows = copy.deepcopy(start)
        if begun:
            begin_next(rows)
        run(functools.partial(change, rows), stop)
        made = rows.slots != start.slots or rows.held.ids != start.held.ids
        if begun and stop % 2:
            rows = copy.deepcopy(rows)
        assert_holds(rows, now := after if made else want)
        for _ in range(2):
            following, now = changes.any(now)
            following(rows)
            assert_holds(rows, now)
        following, now = changes.forward(now)
        following(rows)
        assert_holds(rows, now)
        assert_pages_are_counted(rows)

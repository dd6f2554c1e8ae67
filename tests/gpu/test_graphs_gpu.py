"""Decoding steps of enabled models as CUDA graphs: the same results as without, whatever is changed between steps."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from replaying import check, exact, generated, graph_events, prompt, small_model  # noqa: F401

from wavefill import InvalidArgument, PagedKVCache
from wavefill.integrations.transformers import WavefillCache, disable, enable, rows
from wavefill.integrations.transformers.graphs import GraphedForward


def test_a_step_is_captured_once_and_replayed_for_all_lengths(model: Any, replays: list[str]) -> None:
    """The first step runs as it is, the second is captured; a page boundary at 64 tokens is crossed."""
    check(model, prompt(), 60)
    assert replays == ["capture"] + ["replay"] * 58


def test_another_call_takes_the_pages_and_the_graph_of_the_last(model: Any, replays: list[str]) -> None:
    check(model, prompt(length=40))
    count = len(replays)
    found = generated(model, prompt(length=33), 20)
    assert replays[count:] == ["replay"] * 19
    disable(model)
    torch.testing.assert_close(found.sequences, generated(model, prompt(length=33), 20).sequences)


def test_a_cache_that_lives_keeps_its_pages(model: Any) -> None:
    """Two conversations by turns, each with a cache of its own."""
    enable(model)
    caches = [WavefillCache(model) for _ in range(2)]
    turns = [prompt(length=20), prompt(length=27)]
    for _ in range(2):
        for i, cache in enumerate(caches):
            turns[i] = model.generate(
                turns[i], attention_mask=torch.ones_like(turns[i]), max_new_tokens=8, do_sample=False,
                past_key_values=cache)
    disable(model)
    for i, length in enumerate((20, 27)):
        torch.testing.assert_close(turns[i], generated(model, prompt(length=length), 16).sequences)


@pytest.mark.parametrize("how", [{"do_sample": True, "temperature": 2.0}, {"num_beams": 3},
                                 {"do_sample": False, "repetition_penalty": 1.3}],
                         ids=["sampling", "beams", "processor"])
def test_ways_of_generate(model: Any, how: dict[str, Any], replays: list[str]) -> None:
    check(model, prompt(2), **how)
    assert replays.count("replay") > 10


def test_padded_rows(model: Any, replays: list[str]) -> None:
    mask = torch.ones(3, 30, dtype=torch.int64, device="cuda")
    mask[0, :7], mask[2, :29] = 0, 0
    check(model, prompt(3), mask=mask)
    assert replays.count("replay") > 10


def test_pages_that_move(model: Any, replays: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "ROOM", 0)
    check(model, prompt(length=70), 220)
    assert replays.count("capture") >= 2


def test_pages_that_the_gpu_has_no_room_to_spare_for(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as are needed are taken then."""
    kept, asked = PagedKVCache.grow, []

    def grow(self: PagedKVCache, num_pages: int) -> None:
        asked.append(num_pages)
        kept(self, 1 << 30 if len(asked) % 2 else num_pages)

    monkeypatch.setattr(PagedKVCache, "grow", grow)
    check(model, prompt(length=20), 80)
    assert asked == [rows.ROOM, 1, 4, 2]


def test_weights_that_change_in_place_and_that_move(model: Any) -> None:
    check(model, prompt())
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(-1.0)
    check_enabled(model)
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = torch.randn_like(weight) * 0.1
    check_enabled(model)
    model.model.layers[2].mlp = copy.deepcopy(model.model.layers[0].mlp)
    check_enabled(model)


def check_enabled(model: Any) -> None:
    """Without enabling again, the model gives what a copy with its own attention gives."""
    found = generated(model, prompt(), 12)
    other = disable(copy.deepcopy(model))
    torch.testing.assert_close(found.sequences, generated(other, prompt(), 12).sequences)


def test_hooks_see_every_step(model: Any) -> None:
    enable(model)
    generated(model, prompt(), 8)
    seen: list[int] = []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *args: seen.append(1))
    generated(model, prompt(), 8)
    handle.remove()
    assert len(seen) == 8


def test_a_mask_that_forgets_cached_tokens_is_obeyed(model: Any) -> None:
    """A replay is not taken where a later mask drops tokens that are in the cache."""
    ids = prompt(1, 24)
    results = []
    for switch in (enable, disable):
        switch(model)
        with torch.no_grad():
            out = model(ids, use_cache=True)
            cache, logits = out.past_key_values, []
            for step in range(6):
                mask = torch.ones(1, 25 + step, dtype=torch.int64, device="cuda")
                mask[:, :5] = int(step < 4)
                position = torch.tensor([[24 + step]], device="cuda")
                out = model(ids[:, step : step + 1], attention_mask=mask, past_key_values=cache, position_ids=position)
                logits.append(out.logits)
        results.append(torch.stack(logits))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("first", [0, 7], ids=["full", "padded"])
@pytest.mark.parametrize("end", ["forgotten", "padding"])
def test_masks_are_looked_at_while_the_graph_replays(model: Any, replays: list[str], first: int, end: str) -> None:
    """A loop that passes masks, which the host does not wait for: the last two are not what a replay takes for granted,
    since two tokens are dropped, or the new one of a row is padding.
    """
    ids, whole = prompt(2, 34), torch.ones(2, 34, dtype=torch.int64, device="cuda")
    whole[0, :first] = 0
    results = []
    for switch in (enable, disable):
        switch(model)
        cache, logits, start = None, [], 0
        with torch.no_grad():
            for stop in range(24, 35):
                mask = whole[:, :stop].clone()
                if stop >= 33:
                    mask[1, slice(3, 5) if end == "forgotten" else slice(32, 33)] = 0
                positions = torch.arange(start, stop, device="cuda")[None].expand(2, -1)
                out = model(ids[:, start:stop], attention_mask=mask, past_key_values=cache, position_ids=positions,
                            use_cache=True)
                cache, start = out.past_key_values, stop
                logits.append(out.logits[:, -1])
        results.append(torch.stack(logits))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)
    assert replays.count("replay") >= 8


def test_a_mask_that_is_refused_late_leaves_the_cache_as_it_was(model: Any) -> None:
    enable(model)
    ids, mask = prompt(2, 34), torch.ones(2, 34, dtype=torch.int64, device="cuda")
    mask[0, :7] = 0
    with torch.no_grad():
        cache = model(ids[:, :28], attention_mask=mask[:, :28], use_cache=True).past_key_values
        for stop in range(29, 34):
            model(ids[:, stop - 1 : stop], attention_mask=mask[:, :stop], past_key_values=cache)
        held = cache.layers[0].rows.held
        with pytest.raises(InvalidArgument, match="attention_mask: must be 0 where"):
            model(ids[:, 33:], attention_mask=torch.ones_like(mask), past_key_values=cache)
        assert cache.layers[0].rows.held is held
        got = model(ids[:, 33:], attention_mask=mask, past_key_values=cache).logits
        kept = model(ids[:, :33], attention_mask=mask[:, :33], use_cache=True).past_key_values
        want = model(ids[:, 33:], attention_mask=mask, past_key_values=kept).logits
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_copies_and_pickles_of_an_enabled_model(model: Any) -> None:
    enable(model)
    expected = generated(model, prompt(), 10).sequences
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        held = other.model.__dict__["forward"]
        assert isinstance(held, GraphedForward)
        assert held.decoder is other.model
        torch.testing.assert_close(generated(other, prompt(), 10).sequences, expected)
    disable(model)
    assert "forward" not in model.model.__dict__


def test_what_waits_for_the_device_runs_without_a_graph(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    kept = type(model.model.layers[0].mlp).forward
    mlp = model.model.layers[0].mlp

    def waits(x: torch.Tensor) -> Any:
        assert bool(x.isfinite().all())
        return kept(mlp, x)

    mlp.forward = waits
    with caplog.at_level("DEBUG", logger="wavefill"):
        check(model, prompt())
        check(model, prompt(), do_sample=True)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    assert [r.message for r in caplog.records if "can't be captured" in r.message] != []
    assert {"without a CUDA graph" in r.message for r in caplog.records if r.name == "wavefill"} == {True}


def test_values_that_change_between_calls(model: Any) -> None:
    check(model, prompt())
    model.model.layers[1].self_attn.scaling *= 3
    check_enabled(model)
    model.model.norm.variance_epsilon = 0.5
    check_enabled(model)


def test_hooks_run_once_a_step_from_the_first_step_on(model: Any) -> None:
    seen: list[int] = []
    handle = model.model.layers[1].mlp.register_forward_hook(lambda *args: seen.append(1))
    enable(model)
    generated(model, prompt(), 8)
    handle.remove()
    assert len(seen) == 8


def test_a_model_that_moves_to_the_cpu(model: Any) -> None:
    enable(model)
    found = generated(model, prompt(), 8)
    model.cpu()
    ids = prompt().cpu()
    moved = generated(model, ids, 8)
    torch.testing.assert_close(moved.sequences, found.sequences.cpu())


def test_without_a_cache_in_the_output(model: Any) -> None:
    enable(model)
    cache = WavefillCache(model)
    with torch.no_grad():
        model(prompt(), past_key_values=cache)
        for _ in range(4):
            model(prompt(1, 1), past_key_values=cache, use_cache=False)
    assert cache.get_seq_length() == 34

"""Models with layers that have a state in place of K and V: attention goes through wavefill, and the states, which stay
transformers' own, go along with everything that is done to a cache, or refuse it by name.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers.generation")

import torch
from modes import MODES
from tiny import (
    CACHE,
    HYBRIDS,
    build,
    expected,
    fresh,
    one_thread,  # noqa: F401
    padded,
    plain,
    stock,
    teacher_forced,
    tokens,
)
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer

import interrupting
from wavefill import InvalidArgument, UnsupportedModel, WavefillError
from wavefill.integrations.transformers import WavefillCache, disable, enable, kernels
from wavefill.integrations.transformers.cache import PagedLayer, StateLayer, layers_for, rows_of

pytestmark = pytest.mark.transformers

RECURRENT, CONVOLUTION = ("qwen3-next", "granite-hybrid"), ("lfm2", "lfm2-attention-first")


def forward(model: PreTrainedModel, ids: Tensor, cache: Any = None, mask: Tensor | None = None) -> Any:
    positions = {} if mask is None else {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1]:]}
    with torch.no_grad():
        return model(ids, attention_mask=mask, use_cache=True, **positions, **{CACHE: cache})


def alike(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, rtol=3e-5, atol=3e-5)


def states_of(cache: Any) -> list[Tensor]:
    """All states that a cache holds, of our layers or of stock ones."""
    return [x for layer in cache.layers if isinstance(layer, LinearAttentionLayer)
            for states in (layer.conv_states, layer.recurrent_states) for x in states.values() if x is not None]


@pytest.mark.parametrize("pads", [(0, 0, 0), (11, 0, 2)], ids=["unpadded", "padded on the left"])
@pytest.mark.parametrize("previous", ["sdpa", "eager"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_logits_are_those_of_eager(family: str, previous: str, pads: tuple[int, ...]) -> None:
    """A prompt, four tokens at once, single ones."""
    batch = padded(3, 40, pads)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    reference, model = fresh(family), fresh(family)
    reference.set_attn_implementation("eager")
    model.set_attn_implementation(previous)
    want, got = (teacher_forced(one, ids, mask, 21) for one in (reference, enable(model)))
    alike(got[mask.bool()], want[mask.bool()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", RECURRENT)
def test_logits_in_16_bits_are_as_near_float32_as_those_of_eager(family: str, dtype: torch.dtype) -> None:
    batch = padded(3, 40, (11, 0, 2))
    ids, mask = batch["input_ids"], batch["attention_mask"]
    low = fresh(family).to(dtype)
    low.set_attn_implementation("eager")
    real = mask.bool()
    truth = teacher_forced(copy.deepcopy(low).float(), ids, mask, 21)[real]
    errors = [(teacher_forced(model, ids, mask, 21)[real].float() - truth).abs()
              for model in (copy.deepcopy(low), enable(low))]
    assert errors[1].max() <= 2 * errors[0].max()
    assert errors[1].mean() <= 1.2 * errors[0].mean()


@pytest.mark.parametrize("mode", ["sampling", "return-sequences", "sampled-beams", "embeddings", "without-cache",
                                  "dynamic", "assistant"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_tokens_are_those_of_the_stock_model(family: str, mode: str) -> None:
    if mode == "assistant" and family in RECURRENT:
        pytest.skip("transformers has none for it, see below")
    assert torch.equal(MODES[mode](enable(fresh(family))), expected((mode,), family, MODES[mode]))


@pytest.mark.parametrize("family", HYBRIDS)
def test_attention_goes_through_wavefill_and_the_rest_is_transformers(family: str,
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = enable(fresh(family)), []
    real = kernels.attention
    monkeypatch.setattr(kernels, "attention", lambda *args, **options: calls.append(0) or real(*args, **options))
    ids = plain(14, 2)
    ours, theirs = None, None
    for piece in (ids[:, :9], ids[:, 9:10], ids[:, 10:13], ids[:, 13:]):
        ours, theirs = forward(model, piece, ours)[CACHE], forward(stock(family), piece, theirs)[CACHE]
    kinds = stock(family).config.layer_types
    assert len(calls) == 3 * kinds.count("full_attention")
    assert [type(layer) for layer in ours.layers] == [
        PagedLayer if kind == "full_attention" else StateLayer for kind in kinds]
    assert len(rows_of(ours).places) == rows_of(ours).pages.layers == kinds.count("full_attention")
    pairs = list(zip(states_of(ours), states_of(theirs), strict=True))
    assert len(pairs) == (len(kinds) - kinds.count("full_attention")) * (2 if family in RECURRENT else 1)
    for got, want in pairs:
        alike(got, want)
    for (k, v, *_), layer in zip(ours, [x for x in theirs.layers if not isinstance(x, LinearAttentionLayer)],
                                 strict=True):
        alike(k, layer.keys)
        alike(v, layer.values)


# -- what is done to a cache ---------------------------------------------------------------------------------------

@pytest.mark.parametrize("family", HYBRIDS)
def test_a_new_dynamic_cache_of_the_caller_is_taken_over(family: str) -> None:
    for cache in (DynamicCache(), DynamicCache(config=stock(family).config)):
        model = enable(fresh(family))
        assert forward(model, plain(5), cache)[CACHE] is cache
        alike(forward(model, plain(3), cache).logits,
              forward(stock(family), plain(3), forward(stock(family), plain(5))[CACHE]).logits)
    filled = forward(stock(family), plain(5))[CACHE]
    with pytest.raises(InvalidArgument, match=r"past_key_values: .*DynamicCache with 5 tokens"):
        forward(model, plain(1), filled)
    with pytest.raises(InvalidArgument, match=r"past_key_values: .*plain dynamic layers.*LinearAttentionLayer"):
        forward(enable(fresh("llama")), plain(1), DynamicCache(config=stock(family).config))
    with pytest.raises(InvalidArgument, match=r"past_key_values: must have the model's 3 layers .*\[0, 1, 2\]"):
        forward(enable(fresh("llama")), plain(1), cache)


@pytest.mark.parametrize("family", HYBRIDS)
def test_rows_are_reordered_repeated_and_selected(family: str) -> None:
    """Each row goes on as the one that it was taken from."""
    model, reference = enable(fresh(family)), stock(family)
    batch = padded()
    ids, mask = batch["input_ids"], batch["attention_mask"]
    cache = forward(model, ids, mask=mask)[CACHE]
    steps: list[tuple[str, Any, list[int]]] = [
        ("batch_repeat_interleave", 2, [0, 0, 1, 1, 2, 2]),
        ("reorder_cache", torch.tensor([3, 3, 0, 5, 1, 2]), [3, 3, 0, 5, 1, 2]),
        ("batch_select_indices", torch.tensor([4, 0, -1, 1]), [4, 0, 5, 1]),
        ("batch_select_indices", torch.tensor([True, False, True, True]), [0, 2, 3]),
    ]
    for name, argument, picked in steps:
        getattr(cache, name)(argument)
        new = torch.randint(1, 200, (len(picked), 2))  # rows part ways, so what they share must be copied
        ids = torch.cat([ids[picked], new], 1)
        mask = torch.cat([mask[picked], torch.ones(len(picked), 2, dtype=torch.long)], 1)
        want = forward(reference, ids, mask=mask).logits[:, -1]
        alike(forward(model, new, cache, mask).logits[:, -1], want)


@pytest.mark.parametrize("family", HYBRIDS)
def test_reset_and_any_number_of_rows_after_it(family: str) -> None:
    model = enable(fresh(family))
    cache = WavefillCache(model)
    for rows, forget in ((2, cache.reset), (3, lambda: cache.crop(-9)), (1, lambda: cache.crop(-30))):
        alike(forward(model, plain(9, rows), cache).logits, forward(stock(family), plain(9, rows)).logits)
        forget()
        assert cache.get_seq_length() == 0
        assert not states_of(cache)
        assert not cache.has_previous_state()
    want = tokens(stock(family), plain(9), 12)
    assert torch.equal(tokens(model, plain(9), 12, **{CACHE: cache}), want)


@pytest.mark.parametrize("family", HYBRIDS)
def test_a_cache_filled_in_inference_mode_goes_on_outside_of_it(family: str) -> None:
    model, ids = enable(fresh(family)), plain(16)
    cache = WavefillCache(model)
    for start, stop, mode in ((0, 9, torch.inference_mode), (9, 10, torch.no_grad), (10, 11, torch.inference_mode),
                              (11, 15, torch.no_grad), (15, 16, torch.no_grad)):
        with mode():
            logits = model(ids[:, start:stop], use_cache=True, **{CACHE: cache}).logits
    alike(logits[:, -1], forward(stock(family), ids).logits[:, -1])


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_copies_go_on_apart(family: str, how: str) -> None:
    model, reference = enable(fresh(family)), stock(family)
    prompt = plain(20)
    kept = forward(model, prompt)[CACHE]
    for seed in range(2):
        torch.manual_seed(seed)
        whole = torch.cat([prompt, torch.randint(1, 200, (1, 5))], 1)
        other = copy.deepcopy(kept) if how == "deepcopy" else pickle.loads(pickle.dumps(kept))
        assert torch.equal(tokens(model, whole, 8, **{CACHE: other}), tokens(reference, whole, 8))
    assert kept.get_seq_length() == 20


@pytest.mark.parametrize("family", CONVOLUTION)
def test_convolutions_go_back_where_the_past_is_recorded(family: str) -> None:
    model, reference = enable(fresh(family)), stock(family)
    ids = plain(30)
    cache = WavefillCache(model)
    cache.activate_past_recording()
    forward(model, ids[:, :12], cache)
    for back, new in ((3, 6), (0, 1), (1, 2), (2, 9)):
        cache.crop(-back)
        start = cache.get_seq_length()
        logits = forward(model, ids[:, start:start + new], cache).logits
        alike(logits[:, -1], forward(reference, ids[:, :start + new]).logits[:, -1])
    held, before = cache.get_seq_length(), states_of(cache)
    with pytest.raises(InvalidArgument, match=r"tokens_to_remove: .*no more than the 9 tokens .*copy\.deepcopy"):
        cache.crop(-10)
    assert cache.get_seq_length() == held
    assert all(map(torch.equal, states_of(cache), before))


@pytest.mark.parametrize("family", CONVOLUTION)
@pytest.mark.parametrize("prompt", [1, 2, 3, 4])
def test_a_prompt_shorter_than_the_convolution_goes_back(family: str, prompt: int) -> None:
    model, reference = enable(fresh(family)), stock(family)
    ids = plain(12)
    for back in range(1, prompt):
        cache = WavefillCache(model)
        cache.activate_past_recording()
        forward(model, ids[:, :prompt], cache)
        cache.crop(-back)
        for start in range(prompt - back, 9):
            logits = forward(model, ids[:, start:start + 1], cache).logits
            alike(logits[:, -1], forward(reference, ids[:, :start + 1]).logits[:, -1])


@pytest.mark.parametrize("family", HYBRIDS)
def test_what_a_state_cannot_undo_is_refused(family: str) -> None:
    model, ids = enable(fresh(family)), plain(14)
    cache = WavefillCache(model)
    rule = (r"recurrent states.*copy\.deepcopy\(cache\)" if family in RECURRENT
            else r"not recorded.*activate_past_recording\(\)")
    forward(model, ids[:, :9], cache)
    before = states_of(cache)
    for recording in (False, True)[: 2 if family in RECURRENT else 1]:
        if recording:
            cache.activate_past_recording()
        with pytest.raises(InvalidArgument, match=f"tokens_to_remove: .*{rule}"):
            cache.crop(-1)
        assert cache.get_seq_length() == 9
        assert all(map(torch.equal, states_of(cache), before))
    cache.crop(0)
    alike(forward(model, ids[:, 9:], cache).logits, forward(stock(family), ids).logits[:, 9:])


@pytest.mark.parametrize("before", ["a refusal", "Ctrl-C"])
@pytest.mark.parametrize("family", CONVOLUTION)
def test_recording_that_begins_late_goes_on(family: str, before: str) -> None:
    """What a refusal tells one to do helps; nothing that was not finished before turns the recording off again."""
    model, ids = enable(fresh(family)), plain(14)
    cache = WavefillCache(model)
    forward(model, ids[:, :9], cache)
    if before == "Ctrl-C":
        interrupt(model, "model.layers.3", KeyboardInterrupt, lambda: forward(model, ids[:, :2], cache))
    else:
        with pytest.raises(InvalidArgument, match="activate_past_recording"):
            cache.crop(-1)
    cache.activate_past_recording()
    forward(model, ids[:, :3], cache)
    cache.crop(-3)
    alike(forward(model, ids[:, 9:], cache).logits, forward(stock(family), ids).logits[:, 9:])


@pytest.mark.parametrize("family", RECURRENT)
def test_assisted_decoding_of_a_recurrent_model_is_refused_by_transformers(family: str) -> None:
    for model in (stock(family), enable(fresh(family))):
        with pytest.raises(ValueError, match="stateful"):
            tokens(model, plain(), prompt_lookup_num_tokens=3)


@pytest.mark.parametrize("family", CONVOLUTION)
def test_two_enabled_models_assist_each_other(family: str) -> None:
    want = tokens(stock(family), plain())
    for assistant in (enable(build(family, seed=9)), build(family, seed=9)):
        assert torch.equal(tokens(enable(fresh(family)), plain(), assistant_model=assistant), want)
    assert torch.equal(tokens(stock(family), plain(), assistant_model=enable(build(family, seed=9))), want)


# -- forwards that do not return -----------------------------------------------------------------------------------

def interrupt(model: PreTrainedModel, place: str, error: type[BaseException], call: Callable[[], Any]) -> None:
    def stop(*_: Any) -> None:
        raise error

    handle = model.get_submodule(place).register_forward_pre_hook(stop)
    try:
        with pytest.raises(error):
            call()
    finally:
        handle.remove()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ArithmeticError])
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_forward_that_does_not_return_leaves_the_cache_as_it_was(family: str, error: type[BaseException]) -> None:
    model, reference = enable(fresh(family)), stock(family)
    batch = padded(2, 20, (3, 0))
    ids, mask = batch["input_ids"], batch["attention_mask"]
    parts = ("self_attn", "linear_attn", "conv", "mamba", "mlp", "feed_forward", "shared_mlp")
    places = ["model.rotary_emb", *(name for name, _ in model.named_modules()
                                    if name.count(".") == 3 and name.endswith(tuple("." + part for part in parts)))]
    assert len(places) == 1 + 2 * len(model.model.layers)
    for place in places:
        cache = WavefillCache(model)
        for start, stop in ((0, 9), (9, 10), (10, 14), (14, 15)):
            for count in (stop - start, 1):
                new, seen = ids[:, start:start + count], mask[:, :start + count]
                interrupt(model, place, error, functools.partial(forward, model, new, cache, seen))
                assert cache.get_seq_length() == start
            logits = forward(model, ids[:, start:stop], cache, mask[:, :stop]).logits
        alike(logits[:, -1], forward(reference, ids[:, :15], mask=mask[:, :15]).logits[:, -1])


@pytest.mark.parametrize("change", ["crop", "reorder", "repeat", "select", "reset", "deepcopy", "pickle"])
@pytest.mark.parametrize("family", HYBRIDS)
def test_whatever_comes_next_sees_the_cache_as_it_was(family: str, change: str) -> None:
    model, reference = enable(fresh(family)), stock(family)
    ids = plain(20, 2)
    cache = WavefillCache(model)
    if family not in RECURRENT:
        cache.activate_past_recording()
    forward(model, ids[:, :10], cache)
    interrupt(model, f"model.layers.{len(model.model.layers) - 1}", KeyboardInterrupt,
              lambda: forward(model, ids[:, 10:], cache))
    kept, rows = ids[:, :10], [0, 1]
    if change == "crop" and family not in RECURRENT:
        cache.crop(-1)
        kept = ids[:, :9]
    elif change == "crop":
        cache.crop(0)
    elif change == "reorder":
        cache.reorder_cache(torch.tensor([1, 1]))
        rows = [1, 1]
    elif change == "repeat":
        cache.batch_repeat_interleave(2)
        rows = [0, 0, 1, 1]
    elif change == "select":
        cache.batch_select_indices(torch.tensor([1]))
        rows = [1]
    elif change == "reset":
        cache.reset()
        kept = ids[:, :0]
    else:
        cache = copy.deepcopy(cache) if change == "deepcopy" else pickle.loads(pickle.dumps(cache))
    whole = torch.cat([kept, ids[:, 13:15]], 1)[rows]
    alike(forward(model, whole[:, -2:], cache).logits, forward(reference, whole).logits[:, -2:])


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("family", HYBRIDS)
def test_a_model_that_is_not_enabled_changes_no_state(family: str, steps: int) -> None:
    """It would find states without a step: what it writes in place goes into copies, the rest is refused."""
    model, ids = enable(fresh(family)), plain(14)
    cache = WavefillCache(model)
    forward(model, ids[:, :9], cache)
    before = states_of(cache)
    with pytest.raises(WavefillError, match="enable"):
        forward(stock(family), ids[:, :steps], cache)
    with pytest.raises(WavefillError):
        forward(disable(model), ids[:, :steps], cache)
    assert all(map(torch.equal, states_of(cache), before))
    alike(forward(enable(model), ids[:, 9:], cache).logits, forward(stock(family), ids).logits[:, 9:])


@pytest.mark.parametrize("kind", ["first", "forward", "crop", "gather", "reset"])
def test_states_and_pages_change_together_or_not_at_all(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at any bytecode of a change: the states are those of the tokens that the pages hold."""
    monkeypatch.setattr(interrupting, "FILES", (*interrupting.FILES, "transformers/states.py"))
    config = build("lfm2").config

    def step(rows: Any, ids: Tensor) -> None:
        made = rows.begin(*ids.shape, None, None)
        for layer in rows.states.layers:
            new = ids[:, None].float()
            full = new if layer.convolutions[0] is None else torch.cat([layer.convolutions[0], new], -1)
            if layer.convolutions[0] is not None:
                layer.convolutions[0].fill_(-1.0)  # as a model that writes in place
            layer.convolutions[0], layer.has_previous_state[0], layer.conv_kernel_size[0] = full, True, 2
        for layer in rows.places:
            new = ids[:, None, :, None].expand(-1, 1, -1, 4).float()
            rows.write(made, layer, new, new)
            made.attended += 1
        rows.end(made, returned=True)

    def holds(rows: Any) -> list[list[float]]:
        keys = rows.dense(next(iter(rows.places)))[0][:, 0, :, 0].tolist() if rows.slots else []
        for layer in rows.states.layers:
            kept = layer.convolutions[0]
            assert (keys == []) == (kept is None)
            if kept is not None:
                assert kept[:, 0].tolist() == [row[len(row) - kept.shape[-1]:] for row in keys]
        return keys

    start = layers_for(config, record_past=True)[0].rows
    if kind != "first":
        step(start, torch.arange(1, 13).view(2, 6))
        step(start, torch.arange(21, 25).view(2, 2))
    change: Callable[[Any], None] = {
        "first": lambda rows: step(rows, torch.arange(1, 7).view(2, 3)),
        "forward": lambda rows: step(rows, torch.arange(31, 37).view(2, 3)),
        "crop": lambda rows: rows.crop(3), "gather": lambda rows: rows.gather([1, 0, 1]),
        "reset": lambda rows: rows.reset(),
    }[kind]
    before, after = holds(start), copy.deepcopy(start)
    whole = interrupting.run(functools.partial(change, after))
    now = holds(after)
    assert now != before
    for stop in range(1, whole + 1, max(whole // 80, 1)):
        rows = copy.deepcopy(start)
        interrupting.run(functools.partial(change, rows), stop)
        rows._settle()
        assert holds(rows) in (before, now)
        step(rows, torch.arange(41, 41 + 2 * (rows.batch or 1)).view(-1, 2))
        holds(rows)


# -- models --------------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("family", HYBRIDS)
def test_changed_models_are_refused(family: str) -> None:
    model = fresh(family)
    layers = model.model.layers
    attention = next(layer.self_attn for layer in layers if getattr(layer, "self_attn", None) is not None)

    class Patched(type(attention)):  # type: ignore[misc]
        pass

    kind, attention.__class__ = type(attention), Patched
    with pytest.raises(UnsupportedModel, match=f"Patched in place of {kind.__name__}"):
        enable(model)
    attention.__class__ = kind
    model.model.layers = layers[1:]
    with pytest.raises(UnsupportedModel, match=r"layer_idx .*layer_types say; got \[.*Set config"):
        enable(model)


@pytest.mark.parametrize("family", HYBRIDS)
def test_continuous_batching_is_refused_by_name(family: str) -> None:
    model = enable(fresh(family))
    with pytest.raises(UnsupportedModel, match=r"has layers with a state .*Call generate\(\)"):
        model.generate_batch([[5, 6, 7]])
    assert torch.equal(tokens(model, plain(), 5), tokens(stock(family), plain(), 5))


@pytest.mark.parametrize("family", HYBRIDS)
def test_training_is_as_without_wavefill(family: str) -> None:
    model, reference = enable(fresh(family)).train(), fresh(family).train()
    losses = []
    for one in (model, reference):
        loss = one(**padded(), labels=padded()["input_ids"]).loss
        loss.backward()
        losses.append(loss.detach())
    assert torch.equal(losses[0], losses[1])


def test_a_compiled_model_gives_the_same_tokens() -> None:
    plainly = build("qwen3-next", num_hidden_layers=2)
    model = enable(copy.deepcopy(plainly))
    model.compile(backend="eager")
    try:
        assert torch.equal(tokens(model, padded(), 3), tokens(plainly, padded(), 3))
    finally:
        torch._dynamo.reset()

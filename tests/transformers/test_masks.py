"""Padding of every shape on an enabled model: exact where a mask makes sense, refused by name where it doesn't."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers.generation")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import (
    CACHE,
    VOCABULARY,
    fresh,
    one_thread,  # noqa: F401
    padded,
    plain,
    stock,
    tokens,
)
from torch import Tensor
from transformers import PreTrainedModel

from wavefill import InvalidArgument
from wavefill.integrations.transformers import enable

pytestmark = pytest.mark.transformers

MODELS = ("llama", "mistral-window", "qwen3-mixed")
WITH_STATES = (*MODELS, "lfm2", "qwen3-next")
_enabled: dict[str, PreTrainedModel] = {}


def enabled(family: str) -> PreTrainedModel:
    if family not in _enabled:
        _enabled[family] = enable(fresh(family))
    return _enabled[family]


def run(model: PreTrainedModel, ids: Tensor, mask: Tensor | None, steps: list[int]) -> Tensor:
    """Logits of all positions, the tokens given in pieces of `steps`."""
    parts, cache, start = [], None, 0
    with torch.inference_mode():
        for count in steps:
            stop = start + count
            seen = None if mask is None else mask[:, :stop]
            positions = torch.arange(start, stop)[None] if mask is None else \
                (mask[:, :stop].cumsum(1) - 1).clamp(min=0)[:, start:]
            out = model(ids[:, start:stop], attention_mask=seen, position_ids=positions, use_cache=True,
                        **{CACHE: cache})
            assert torch.isfinite(out.logits).all()
            parts.append(out.logits)
            cache, start = out[CACHE], stop
    return torch.cat(parts, 1)


def agree(family: str, ids: Tensor, mask: Tensor, steps: list[int]) -> None:
    """At every position: generate samples from the last one, be it padding or not."""
    got, want = (run(m, ids, mask, steps) for m in (enabled(family), stock(family)))
    torch.testing.assert_close(got, want, rtol=3e-5, atol=3e-5)


def cut(*zeros: slice | None, width: int = 19) -> Tensor:
    """A mask of a row for each of `zeros`, 0 there."""
    mask = torch.ones(len(zeros), width, dtype=torch.long)
    for row, at in enumerate(zeros):
        mask[row, at or slice(0)] = 0
    return mask


#: Prompts that end in padding, in some row.
MASKS = {
    "right": cut(slice(11, None), None, slice(18, None)),
    "right and left": cut(slice(11, None), slice(0, 6), None),
    "both ends": cut(slice(15, None), slice(2, None), None) * cut(slice(0, 3), None, None),
    "between and right": cut(slice(4, 9), slice(3, 5), None) * cut(slice(17, None), slice(9, None), slice(13, None)),
    "nothing real": cut(slice(None), None, slice(1, None)),
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {}, "sampling": {"do_sample": True, "temperature": 1.7}, "beams": {"num_beams": 3},
    "return-sequences": {"num_beams": 4, "num_return_sequences": 2}, "chunked-prefill": {"prefill_chunk_size": 4},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("family", MODELS)
def test_prompts_that_end_in_padding_give_all_tokens_of_sdpa(family: str, shape: str, mode: str) -> None:
    batch, got = {"input_ids": plain(19, 3), "attention_mask": MASKS[shape]}, []
    for model in (enabled(family), stock(family)):
        torch.manual_seed(11)
        got.append(tokens(model, batch, 12, **MODES[mode]))
    assert torch.equal(got[0], got[1])


@pytest.mark.parametrize("first", [None, "right", "between and right"])
@pytest.mark.parametrize("family", WITH_STATES)
def test_turns_that_end_in_padding_give_all_tokens_of_sdpa(family: str, first: str | None) -> None:
    def turns(model: PreTrainedModel) -> list[Tensor]:
        ids, mask = plain(19, 3), torch.ones(3, 19, dtype=torch.long) if first is None else MASKS[first]
        said, cache = [], {}
        for more in (cut(slice(4, None), None, slice(1, None), width=7), cut(None, slice(0, 1), None, width=1),
                     cut(slice(2, 3), slice(2, None), slice(None), width=5)):
            out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False,
                                 return_dict_in_generate=True, **cache)
            said.append(out.sequences)
            cache = {CACHE: out[CACHE]}
            ids = torch.cat([out.sequences, plain(more.shape[1], 3)], 1)
            mask = torch.cat([mask, torch.ones(3, 6, dtype=torch.long), more], 1)
        return [*said, tokens(model, {"input_ids": ids, "attention_mask": mask}, 6, **cache)]

    for got, want in zip(turns(enabled(family)), turns(stock(family)), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("family", WITH_STATES)
@pytest.mark.parametrize("steps", [[19], [12, 7], [3, 1, 1, 6, 8], [2] * 9 + [1]], ids=str)
def test_left_padding_in_any_number_of_chunks(family: str, steps: list[int]) -> None:
    batch = padded(4, 19, (5, 0, 1, 18))
    agree(family, batch["input_ids"], batch["attention_mask"], steps)


@pytest.mark.parametrize("family", WITH_STATES)
def test_right_padding(family: str) -> None:
    ids, mask = plain(19, 3), torch.ones(3, 19, dtype=torch.long)
    mask[0, 11:] = 0
    mask[2, 18:] = 0
    agree(family, ids, mask, [19])
    agree(family, ids, mask, [8, 11])
    agree(family, ids, mask, [17, 1, 1])


@pytest.mark.parametrize("family", WITH_STATES)
def test_padding_between_real_tokens(family: str) -> None:
    ids, mask = plain(24, 3), torch.ones(3, 24, dtype=torch.long)
    mask[0, 4:9] = 0
    mask[1, :2] = 0
    mask[1, 20:23] = 0
    agree(family, ids, mask, [24])
    agree(family, ids, mask, [7, 1, 10, 5, 1])


@settings(max_examples=25)
@given(st.data())
def test_any_mask_in_any_pieces(data: st.DataObject) -> None:
    family = data.draw(st.sampled_from(MODELS))
    rows, width = data.draw(st.integers(1, 3)), data.draw(st.integers(2, 18))
    mask = torch.tensor(data.draw(st.lists(st.lists(st.booleans(), min_size=width, max_size=width),
                                           min_size=rows, max_size=rows)), dtype=torch.long)
    steps, left = [], width
    while left:
        steps.append(data.draw(st.integers(1, left)))
        left -= steps[-1]
    ids = torch.randint(1, VOCABULARY, (rows, width), generator=torch.Generator().manual_seed(1))
    agree(family, ids, mask, steps)


def test_a_query_with_nothing_real_before_it_gets_zero_from_attention() -> None:
    model, seen = fresh("llama"), []
    enable(model)
    batch = padded(3, 9, (4, 0, 9))
    model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    run(model, batch["input_ids"], batch["attention_mask"], [6, 3])
    out = torch.cat(seen, 1)
    assert not out[~batch["attention_mask"].bool()].any()
    assert out[batch["attention_mask"].bool()].any(1).all()


@pytest.mark.parametrize("family", WITH_STATES)
def test_a_token_that_a_later_mask_leaves_out_is_forgotten(family: str) -> None:
    """As when generate derives the mask from padding tokens that the model itself produced."""
    ids = plain(22, 2)
    logits = []
    for model in (enabled(family), stock(family)):
        mask = torch.ones(2, 22, dtype=torch.long)
        with torch.inference_mode():
            cache = model(ids[:, :20], attention_mask=mask[:, :20], use_cache=True)[CACHE]
            mask[0, 13] = 0
            out = model(ids[:, 20:21], attention_mask=mask[:, :21], use_cache=True, **{CACHE: cache})
            mask[0, 3:6] = 0
            mask[1, 0] = 0
            last = model(ids[:, 21:], attention_mask=mask, use_cache=True, **{CACHE: cache})
        logits.append(torch.cat([out.logits, last.logits]))
    torch.testing.assert_close(logits[0], logits[1], rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("change", ["batch_select_indices", "reorder_cache", "crop"])
def test_rows_that_have_no_padding_left_need_no_mask(change: str) -> None:
    batch, logits = padded(3, 19, (5, 0, 0)), []
    batch["attention_mask"][0, :5] = 1
    batch["attention_mask"][0, 16:] = 0
    argument = {"batch_select_indices": torch.tensor([1, 2]), "reorder_cache": torch.tensor([1, 2, 1]), "crop": -3}
    for model in (enabled("llama"), stock("llama")):
        with torch.inference_mode():
            cache = model(**batch, use_cache=True)[CACHE]
            getattr(cache, change)(argument[change])
            rows = 2 if change == "batch_select_indices" else 3
            logits.append(model(plain(4, rows), use_cache=True, **{CACHE: cache}).logits)
    torch.testing.assert_close(logits[0], logits[1], rtol=3e-5, atol=3e-5)


def test_masks_that_do_not_continue_the_cache_are_refused() -> None:
    model, batch = enabled("llama"), padded()
    ids, mask = batch["input_ids"], batch["attention_mask"]

    def after(**arguments: Any) -> None:
        with torch.inference_mode():
            cache = model(ids, attention_mask=mask, use_cache=True)[CACHE]
            model(ids[:, :1], use_cache=True, **{CACHE: cache}, **arguments)

    longer = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
    after(attention_mask=longer)
    after(attention_mask=torch.cat([longer, longer], 1))  # what is too long is cut, as in transformers
    with pytest.raises(InvalidArgument, match=r"attention_mask: must be given"):
        after()
    with pytest.raises(InvalidArgument, match=r"attention_mask: must be 0 where"):
        after(attention_mask=torch.ones_like(longer))
    with pytest.raises(InvalidArgument, match=r"attention_mask: must be \[3, 20\]"):
        after(attention_mask=mask)
    with pytest.raises(InvalidArgument, match=r"attention_mask: must be \[3, 20\]"):
        after(attention_mask=longer[:2])
    with pytest.raises(InvalidArgument, match=r"attention_mask: must be \[batch, tokens\]"):
        after(attention_mask=torch.ones(3, 1, 1, 20, dtype=torch.bool))
    with pytest.raises(InvalidArgument, match="attention_mask"):
        after(attention_mask={"full_attention": None})


@pytest.mark.parametrize("previous", ["sdpa", "eager"])
@pytest.mark.parametrize("arguments", [
    {"attention_mask": torch.ones(2, 1, 12, 12, dtype=torch.bool).tril()[..., torch.randperm(12)].clone()},
    {"position_ids": torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]] * 2)},
    {"attention_mask": torch.tensor([[0] * 3 + [1] * 9, [1] * 9 + [0] * 3])},
], ids=["4-D mask", "packed sequences", "padding"])
@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_forwards_without_a_cache_have_the_bits_of_before(family: str, arguments: dict[str, Any],
                                                          previous: str) -> None:
    model = fresh(family)
    model.set_attn_implementation(previous)
    if previous == "eager" and arguments.get("attention_mask", plain()).dim() == 4:
        arguments = {"attention_mask": torch.where(arguments["attention_mask"], 0.0, -1e9)}
    ids = plain(12, 2)
    with torch.inference_mode():
        want = model(ids, use_cache=False, **arguments).logits
        got = enable(model)(ids, use_cache=False, **arguments).logits
    assert torch.equal(got, want)

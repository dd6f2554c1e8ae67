"""Steps of decoding that begin before their forward: taken where they are what comes, and else as if they weren't."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from replaying import VOCABULARY, check, exact, generated, prompt, small_model  # noqa: F401
from transformers import StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from wavefill.integrations.transformers import disable, enable, rows
from wavefill.integrations.transformers.ahead import Begun
from wavefill.integrations.transformers.graphs import GraphedForward, begin_next


@pytest.fixture(name="begun")
def begun_steps(monkeypatch: pytest.MonkeyPatch) -> list[Begun]:
    """The steps that were begun before their forwards."""
    seen: list[Begun] = []
    kept = GraphedForward.begin_next

    def begin(self: GraphedForward, tokens: torch.Tensor) -> Begun | None:
        found = kept(self, tokens)
        if found is not None:
            seen.append(found)
        return found

    monkeypatch.setattr(GraphedForward, "begin_next", begin)
    return seen


def taken(begun: list[Begun]) -> list[bool]:
    return [one.is_taken for one in begun]


class Words(BaseStreamer):
    """Takes tokens."""

    def __init__(self) -> None:
        self.found: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.found += value.flatten().tolist()

    def end(self) -> None:
        pass


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("how", [{}, {"do_sample": True, "temperature": 2.0}, {"repetition_penalty": 1.3}],
                         ids=["greedy", "sampling", "processor"])
def test_generate_takes_every_step_but_the_first_two(model: Any, begun: list[Begun], batch: int, how: Any) -> None:
    """24 tokens: the first is the prompt's, the second runs as it is, the third is captured; none begins past the end.
    Pages of 16 tokens fill up meanwhile.
    """
    mask = torch.ones(batch, 30, dtype=torch.int64, device="cuda")
    mask[0, : 7 * (batch > 1)] = 0
    check(model, prompt(batch), mask=mask, **how)
    assert taken(begun) == [True] * 21


def test_a_streamer_gets_all_tokens(model: Any, begun: list[Begun]) -> None:
    enable(model)
    words = Words()
    found = model.generate(prompt(), max_new_tokens=24, do_sample=False, streamer=words)
    assert words.found == found.flatten().tolist()
    assert taken(begun) == [True] * 21


def test_beams_begin_nothing(model: Any, begun: list[Begun]) -> None:
    check(model, prompt(2), num_beams=3)
    assert begun == []


def test_an_end_token_costs_a_step_and_the_cache_goes_on(model: Any, begun: list[Begun]) -> None:
    """The step that ran for nothing is no part of the cache that `generate` returns."""
    disable(model)
    ids = prompt()
    whole = generated(model, ids, 40, repetition_penalty=5.0).sequences
    new = whole[0, 30:].tolist()
    length = next(i for i in range(8, 40) if new[i] not in new[:i]) + 1
    end = new[length - 1]
    enable(model)
    first = model.generate(ids, max_new_tokens=40, do_sample=False, repetition_penalty=5.0, eos_token_id=end,
                           pad_token_id=0, return_dict_in_generate=True)
    assert first.sequences[0].tolist() == whole[0, : 30 + length].tolist()
    assert taken(begun) == [True] * (length - 3) + [False]
    assert first.past_key_values.get_seq_length() == 30 + length - 1
    second = model.generate(first.sequences, past_key_values=first.past_key_values, max_new_tokens=40 - length,
                            do_sample=False, repetition_penalty=5.0, eos_token_id=None)
    assert second.tolist() == whole.tolist()


def test_rows_that_end_at_different_tokens(model: Any) -> None:
    disable(model)
    ids = prompt(3)
    end = int(generated(model, ids, 20).sequences[1, 30 + 9])
    results = []
    for switch in (disable, enable):
        switch(model)
        results.append(model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=60, do_sample=False,
                                      eos_token_id=end, pad_token_id=0))
    torch.testing.assert_close(*results)


def test_no_room_for_the_next_token_is_no_reason_to_move_pages(
    model: Any, begun: list[Begun], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "ROOM", 0)
    check(model, prompt(length=70), 220)
    assert all(taken(begun))
    assert 180 < len(begun) < 217


def test_other_criteria_still_stop(model: Any) -> None:
    class AtLength(StoppingCriteria):  # type: ignore[misc]
        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            return torch.full((len(input_ids),), input_ids.shape[1] >= 41, device=input_ids.device)

    enable(model)
    criteria = StoppingCriteriaList([AtLength()])
    found = model.generate(prompt(), max_new_tokens=60, do_sample=False, stopping_criteria=criteria)
    assert found.shape[1] == 41
    assert len(criteria) == 1


def test_a_loop_that_isnt_generates_begins_one_in_vain(model: Any, begun: list[Begun]) -> None:
    """Criteria that an enabled model made, called by something that forgets the newest token each time."""
    enable(model)
    cache = prefilled(model)
    generated(model, prompt(), 2)
    config = copy.deepcopy(model.generation_config)
    config.max_length, config._eos_token_tensor = 500, None
    criteria = model._get_stopping_criteria(generation_config=config, stopping_criteria=StoppingCriteriaList())
    with torch.no_grad():
        for _ in range(5):
            model(prompt(1, 1), past_key_values=cache)
            criteria(prompt(1, 40), None)
            cache.crop(-1)
    assert taken(begun) == [False]


def prefilled(model: Any) -> Any:
    """A cache of 33 tokens whose next step replays."""
    ids = prompt(1, 33)
    with torch.no_grad():
        cache = model(ids[:, :28], use_cache=True).past_key_values
        for i in range(28, 33):
            model(ids[:, i : i + 1], past_key_values=cache)
    return cache


def forwards(model: Any, cache: Any, tokens: torch.Tensor, count: int = 4, **how: Any) -> torch.Tensor:
    """Logits of `tokens` [rows, n], and of some single ones after them."""
    with torch.no_grad():
        logits = [model(tokens, past_key_values=cache, **how).logits[:, -1]]
        for i in range(count):
            one = torch.full((tokens.shape[0], 1), 5 + i, device="cuda")
            logits.append(model(one, past_key_values=cache).logits[:, -1])
    return torch.stack(logits)


def cropped(cache: Any) -> Any:
    cache.crop(-3)
    return cache


def reordered(cache: Any) -> Any:
    cache.reorder_cache(torch.tensor([0]))
    return cache


def doubled(cache: Any) -> Any:
    cache.batch_repeat_interleave(2)
    return cache


def emptied(cache: Any) -> Any:
    cache.reset()
    return cache


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda cache: cache, "crop": cropped, "reorder": reordered, "repeat": doubled, "reset": emptied,
    "copy": copy.deepcopy, "pickle": lambda cache: pickle.loads(pickle.dumps(cache))}


@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("tokens", [[7], [8], [7, 8]], ids=["right", "wrong", "two"])
def test_what_happens_to_a_cache_meanwhile(model: Any, change: str, tokens: list[int]) -> None:
    results = []
    for begins in (False, True):
        enable(disable(model))
        cache = prefilled(model)
        if begins:
            found = begin_next(model, torch.tensor([[7]], device="cuda"))
            assert found is not None
        cache = CHANGES[change](cache)
        rows = 2 if change == "repeat" else 1
        results.append(forwards(model, cache, torch.tensor([tokens] * rows, device="cuda")))
        if begins:
            # A wrong token is seen only once the step was taken.
            assert found.is_taken == (change == "nothing" and len(tokens) == 1)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", ["position", "mask"])
def test_another_position_or_mask_than_it_was_begun_with(model: Any, how: str) -> None:
    given: dict[str, Any] = {"position": {"position_ids": torch.tensor([[90]], device="cuda")},
                             "mask": {"attention_mask": (torch.arange(34, device="cuda") >= 5).long()[None]}}[how]
    given.setdefault("position_ids", torch.tensor([[33]], device="cuda"))
    results = []
    for begins in (False, True):
        enable(disable(model))
        cache = prefilled(model)
        if begins:
            assert begin_next(model, torch.tensor([[7]], device="cuda")) is not None
        results.append(forwards(model, cache, torch.tensor([[7]], device="cuda"), count=0, **given))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_weights_that_change_meanwhile(model: Any) -> None:
    results = []
    for begins in (False, True):
        enable(disable(model))
        cache = prefilled(model)
        if begins:
            assert begin_next(model, torch.tensor([[7]], device="cuda")) is not None
        kept = model.model.layers[1].mlp.down_proj.weight.data
        model.model.layers[1].mlp.down_proj.weight.data = -kept
        results.append(forwards(model, cache, torch.tensor([[7]], device="cuda")))
        model.model.layers[1].mlp.down_proj.weight.data = kept
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_a_cache_that_is_no_more_meanwhile(model: Any) -> None:
    enable(model)
    want = generated(model, prompt(length=50), 12).sequences
    for _ in range(6):
        cache = prefilled(model)
        assert begin_next(model, torch.tensor([[7]], device="cuda")) is not None
        del cache
        gc.collect()
        torch.testing.assert_close(generated(model, prompt(length=50), 12).sequences, want)


def test_one_is_enough(model: Any) -> None:
    enable(model)
    cache, token = prefilled(model), torch.tensor([[7]], device="cuda")
    assert begin_next(model, token) is not None
    assert begin_next(model, token) is None
    assert begin_next(model, torch.tensor([[7], [7]], device="cuda")) is None
    assert forwards(model, cache, token).isfinite().all()
    disable(model)
    assert begin_next(model, token) is None


def test_other_models_and_copies_go_on_by_themselves(model: Any, begun: list[Begun]) -> None:
    enable(model)
    want = generated(model, prompt(), 20).sequences
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        begun.clear()
        torch.testing.assert_close(generated(other, prompt(), 20).sequences, want)
        assert taken(begun) == [True] * 17
    disable(model)
    assert "_get_stopping_criteria" not in model.__dict__
    assert want.max() < VOCABULARY

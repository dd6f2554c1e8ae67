"""What stands between a product and the softmax, over the families that have it: windows, soft caps, sinks and scales.

Logits are those of transformers' eager attention, in float32, over prompts longer than the window, several tokens at
once and single ones. Letters and numbers are those of tests/cases.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

pytest.importorskip("transformers.generation")

import torch
from modes import MODES
from tiny import (
    CACHE,
    SCORED,
    WINDOWED,
    build,
    one_thread,  # noqa: F401
    padded,
    plain,
    teacher_forced,
    tokens,
)
from torch import Tensor
from transformers import PreTrainedModel

from wavefill.integrations.transformers import enable, kernels

pytestmark = pytest.mark.transformers

#: Rounding of two correct float32 runs; what an option that is left out changes is far above it.
CLOSE = {"rtol": 3e-5, "atol": 3e-5}
FAMILIES = (*SCORED, *WINDOWED)


@cache
def _model(family: str, **more: Any) -> PreTrainedModel:
    model = build(family, **more)
    model.set_attn_implementation("eager")
    return model


def eager(family: str, **more: Any) -> PreTrainedModel:
    """The family's model with eager attention, never enabled."""
    return _model(family, **more)


def enabled(family: str, **more: Any) -> PreTrainedModel:
    """A copy of `eager(family)`, enabled."""
    return enable(copy.deepcopy(eager(family, **more)))


def in_pieces(model: PreTrainedModel, ids: Tensor, steps: list[int], mask: Tensor | None = None) -> Tensor:
    """Logits of all positions, the tokens given in pieces of `steps`."""
    parts, held, start = [], None, 0
    with torch.inference_mode():
        for stop in torch.tensor(steps).cumsum(0).tolist():
            positions = None if mask is None else (mask[:, :stop].cumsum(1) - 1).clamp(min=0)[:, start:]
            out = model(ids[:, start:stop], attention_mask=None if mask is None else mask[:, :stop], use_cache=True,
                        position_ids=positions, **{CACHE: held})
            parts.append(out.logits)
            held, start = out[CACHE], stop
    return torch.cat(parts, 1)


@pytest.mark.parametrize("pads", [(0, 0, 0), (11, 0, 2)], ids=["unpadded", "padded on the left"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_eager(family: str, pads: tuple[int, ...]) -> None:
    """A prompt of 21 tokens, more than each window but one, then four at once, then single ones."""
    batch = padded(3, 40, pads)
    ids, mask = batch["input_ids"], batch["attention_mask"]
    want, got = (teacher_forced(model, ids, mask, 21) for model in (eager(family), enabled(family)))
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], **CLOSE)


@pytest.mark.parametrize("call", ["single tokens", "several at once"])
@pytest.mark.parametrize(("family", "option"), [
    ("gemma2", "softcap"), ("gemma2-d256", "softcap"), ("gpt-oss", "sinks"),
    ("gemma2", "window"), ("gemma3", "window"), ("gpt-oss", "window"), ("mistral-window", "window"),
    ("phi3-window", "window"), ("qwen2-mixed", "window"), ("qwen3-mixed", "window"),
    ("gemma2", "scale"), ("gemma3", "scale"),
])
def test_each_option_makes_a_difference_in_each_call(family: str, option: str, call: str,
                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """The other tests here would see an option that does not arrive: its logits are then far from those of eager."""
    real = kernels.attention

    def without(query: Tensor, *args: Any, **options: Any) -> Tensor:
        if (args[3] is None) == (call == "single tokens"):
            if option == "scale":
                options["scale"] = query.shape[-1] ** -0.5
            elif option == "window":
                options["window"] = None
            else:
                options["options"] = replace(options["options"], **{option: None})
        return real(query, *args, **options)

    monkeypatch.setattr(kernels, "attention", without)
    ids, mask = plain(40, 2), torch.ones(2, 40, dtype=torch.long)
    want, got = (teacher_forced(model, ids, mask, 21) for model in (eager(family), enabled(family)))
    assert (got - want).abs().max() > 30 * (CLOSE["atol"] + CLOSE["rtol"] * want.abs().max())


def test_every_layer_passes_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    real = kernels.attention

    def noted(*args: Any, scale: float, window: int | None, options: Any, **more: Any) -> Tensor:
        sinks = None if options.sinks is None else options.sinks.tolist()
        seen.append((round(scale**-2, 3), window, options.softcap, sinks))
        return real(*args, scale=scale, window=window, options=options, **more)

    monkeypatch.setattr(kernels, "attention", noted)
    want = {
        "gemma2": [(7, 6, 2.0, None), (7, None, 2.0, None), (7, 6, 2.0, None)],
        "gemma2-d256": [(144, 7, 3.0, None), (144, None, 3.0, None), (144, 7, 3.0, None)],
        "gemma2-uncapped": [(256, 6, None, None), (256, None, None, None), (256, 6, None, None)],
        "gemma3": [(7, 6, None, None), (7, None, None, None), (7, 6, None, None)],
        "gemma3-d256": [(256, 9, None, None), (256, 9, None, None), (256, None, None, None)],
    }
    layers = eager("gpt-oss").model.layers
    want["gpt-oss"] = [(16, window, None, layer.self_attn.sinks.tolist())
                       for window, layer in zip((6, None, 6), layers, strict=True)]
    for family in SCORED:
        seen.clear()
        tokens(enabled(family), plain(2), 3)
        assert seen[-3:] == want[family], family


#: Prompts with padding after real tokens or between them, which the kernels have no form for.
MASKS = {
    "right": [range(13, 19), range(0), range(18, 19)],
    "within": [range(4, 9), range(2), range(11, 13)],
    "anywhere": [[0, 3, 4, 5, 17, 18], [6, 8, 15], [*range(3), *range(9, 12)]],
}


@pytest.mark.parametrize("steps", [[19], [8, 11], [7, 1, 5, 1, 1, 4]], ids=str)
@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt-oss", "mistral-window"])
def test_padding_of_every_shape(family: str, shape: str, steps: list[int]) -> None:
    """Where something is seen, that is: of a query that sees no key eager takes the mean of all, and ours is 0."""
    ids, mask = plain(19, 3), torch.ones(3, 19, dtype=torch.long)
    for row, zeros in enumerate(MASKS[shape]):
        mask[row, list(zeros)] = 0
    at = torch.arange(19)
    near = (at <= at[:, None]) & (at > at[:, None] - 6)
    sees = (near & mask.bool()[:, None]).any(2)
    want, got = (in_pieces(model, ids, steps, mask) for model in (eager(family), enabled(family)))
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got[sees], want[sees], **CLOSE)


def test_a_query_that_sees_nothing_gets_zero() -> None:
    """With a soft cap and with sinks, in the forms that the kernels have and in the one that they have not."""
    for family in ("gemma2", "gpt-oss"):
        model, seen = enabled(family), []
        ids, mask = plain(19, 2), torch.ones(2, 19, dtype=torch.long)
        mask[0, :4] = 0
        mask[1, :3] = 0
        mask[1, 5:7] = 0
        projection = model.model.layers[0].self_attn.o_proj
        projection.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        in_pieces(model, ids, [9, 10], mask)
        out = torch.cat(seen, 1)
        blind = mask.cumsum(1) == 0
        assert not out[blind].any()
        assert out[~blind].any(1).all()


def test_sinks_of_a_model_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """They go to the kernel in float32, as they are."""
    model = enable(copy.deepcopy(eager("gpt-oss")).to(torch.bfloat16))
    seen: list[Tensor] = []
    real = kernels.attention
    monkeypatch.setattr(kernels, "attention",
                        lambda *args, **options: seen.append(options["options"].sinks) or real(*args, **options))
    tokens(model, plain(9), 2)
    assert len(seen) == 3 + 3
    for sinks, layer in zip(seen, [*model.model.layers] * 2, strict=True):
        assert sinks.dtype is torch.float32
        assert torch.equal(sinks, layer.self_attn.sinks.float())


def test_the_soft_cap_is_there_whatever_the_model_came_with() -> None:
    """Older releases load Gemma-2 with sdpa, which leaves the soft cap out."""
    model = copy.deepcopy(eager("gemma2"))
    if not model._supports_sdpa:
        pytest.skip("this transformers has no sdpa for Gemma-2")
    model.set_attn_implementation("sdpa")
    want, got = (in_pieces(one, plain(20), [12, 1, 7]) for one in (eager("gemma2"), enable(model)))
    torch.testing.assert_close(got, want, **CLOSE)


def test_token_types_change_nothing_in_a_text_model() -> None:
    ids, types = plain(20), torch.zeros(1, 20, dtype=torch.long)
    types[0, 4:9] = 1
    with torch.inference_mode():
        want = eager("gemma3")(ids, token_type_ids=types).logits
        torch.testing.assert_close(enabled("gemma3")(ids, token_type_ids=types).logits, want, **CLOSE)


# -- the cases ----------------------------------------------------------------------------------------------------

#: Without other layers around them, so that nothing but the window's edge decides.
ONE = {"num_hidden_layers": 1}
EDGES = ["gemma2", "gemma3", "gpt-oss", "mistral-window", "phi3-window"]


@pytest.mark.parametrize("window", [41, 49, 50, 51])
@pytest.mark.parametrize("family", EDGES)
def test_k5_the_oldest_key_of_the_window(family: str, window: int) -> None:
    """Case K5: the window took one key too few, or one too many: past it, and at one below, at and above the length."""
    ids = plain(50)
    want = in_pieces(eager(family, sliding_window=window, **ONE), ids, [50])
    for steps in ([50], [49, 1], [window - 2, 50 - window + 2], [3, *[1] * 47]):
        torch.testing.assert_close(in_pieces(enabled(family, sliding_window=window, **ONE), ids, steps), want, **CLOSE)


def test_k5_as_it_was_reported() -> None:
    """Case K5: 5,000 tokens with a window of 4,096: the last query sees keys 904 to 4,999, and the fault began at 905.

    Only key 904 speaks: the last logits change with its token, and not with the one before it.
    """
    small = {"num_attention_heads": 1, "num_key_value_heads": 1, "max_position_embeddings": 8192, **ONE}
    model = enabled("mistral-window", sliding_window=4096, **small)
    ids = torch.full((3, 5000), 7)
    ids[1, 904] = ids[2, 903] = 9

    def last(row: Tensor) -> Tensor:
        """Of one row at a time: products round a row by its place among the rows of a call, on some processors."""
        with torch.inference_mode():
            held = model(row[None, :-1], use_cache=True, logits_to_keep=1)[CACHE]
            return model(row[None, -1:], use_cache=True, **{CACHE: held}).logits

    plain_one, inside, before = map(last, ids)
    assert not torch.equal(plain_one, inside)
    assert torch.equal(plain_one, before)


@pytest.mark.parametrize("family", EDGES)
def test_k7_one_query_token_over_many_keys(family: str) -> None:
    """Case K7: the path of single tokens forgot the window: 512 of 2,000 keys."""
    long = {"sliding_window": 512, "max_position_embeddings": 2048, "num_attention_heads": 2,
            "num_key_value_heads": 1, "head_dim": 16, "hidden_size": 32, **ONE}
    ids = plain(2000)
    model, reference = enabled(family, **long), eager(family, **long)
    want, got = (in_pieces(one, ids, [1998, 1, 1])[:, -2:] for one in (reference, model))
    torch.testing.assert_close(got, want, **CLOSE)
    forgotten = in_pieces(eager(family, **{**long, "sliding_window": 2048}), ids, [2000])[:, -2:]
    assert (forgotten - want).abs().max() > 1e-2


@pytest.mark.parametrize("prompt", [3, 5, 6, 7, 30])
@pytest.mark.parametrize("family", EDGES)
def test_k9_drafts_that_run_past_the_window(family: str, prompt: int) -> None:
    """Case K9: drafts of several tokens met a mask with too few columns; prompts before, at and past the window."""
    model, reference = enabled(family), eager(family)
    want = tokens(reference, plain(prompt), 24)
    assert torch.equal(tokens(model, plain(prompt), 24, prompt_lookup_num_tokens=4), want)
    assert torch.equal(tokens(model, plain(prompt), 24, assistant_model=copy.deepcopy(model)), want)
    ids = plain(prompt + 24)
    want_logits, got = (in_pieces(one, ids, [prompt, 5, 2, 9, 8]) for one in (reference, model))
    torch.testing.assert_close(got, want_logits, **CLOSE)


@pytest.mark.parametrize("family", EDGES)
def test_k10_a_prompt_that_reaches_its_window_while_decoding(family: str) -> None:
    """Case K10: a window of 8, a prompt of 6, four steps: the last 8 keys, in order."""
    ids = plain(10)
    want, got = (in_pieces(one, ids, [6, 1, 1, 1, 1]) for one in
                 (eager(family, sliding_window=8), enabled(family, sliding_window=8)))
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("mode", ["sampling", "return-sequences", "assistant", "penalty", "embeddings"])
@pytest.mark.parametrize("family", ["gemma2", "gemma3", "gpt-oss"])
def test_tokens_are_those_of_eager(family: str, mode: str) -> None:
    assert torch.equal(MODES[mode](enabled(family)), MODES[mode](eager(family)))

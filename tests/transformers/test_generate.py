"""`generate` on an enabled model gives the stock model's tokens in fp32, in every mode that transformers has, and its
logits are as near to float64 as those of the stock model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers.generation")

import torch
from modes import ASSISTED, EVERYWHERE, MODES
from tiny import (
    FAMILIES,
    HYBRIDS,
    SCORED,
    VOCABULARY,
    WINDOWED,
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
from transformers.generation import BaseStreamer

from wavefill.integrations.transformers import disable, enable, kernels

pytestmark = pytest.mark.transformers

ALL = (*FAMILIES, *SCORED, *HYBRIDS)
FEW = ("llama", "qwen2-mixed", "mistral-window")
#: Recurrent states are computed in float32 whatever the model computes in, so there is no truth in float64.
FLOAT32_STATES = ("qwen3-next", "granite-hybrid")
#: Stock transformers 5.17 fails here on layers of two kinds.
ONLY_LLAMA = ("early-exit",)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ALL)
def test_tokens_are_those_of_the_stock_model(family: str, mode: str) -> None:
    if mode not in EVERYWHERE and family not in FEW[: 1 if mode in ONLY_LLAMA else None]:
        pytest.skip("this mode runs on fewer families")
    if mode in ASSISTED and stock(family)._is_stateful:
        pytest.skip("transformers has no assisted decoding for it, which tests/transformers/test_hybrid.py checks")
    run = MODES[mode]
    got = run(enable(fresh(family)))
    assert torch.equal(got, expected((mode,), family, run))
    assert len(set(got.flatten().tolist())) > 6, "the model says the same over and over, so the test can't tell"


@pytest.mark.parametrize("family", FEW)
def test_decoding_runs_in_wavefill_once_a_layer_and_step(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    real = kernels.attention

    def counted(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(tuple(query.shape))
        return real(query, *args, **kwargs)

    monkeypatch.setattr(kernels, "attention", counted)
    tokens(enable(fresh(family)), plain(4), 11)
    heads = stock(family).config.num_attention_heads
    assert [shape[:2] for shape in calls] == [(1, heads)] * (3 * 10)


@pytest.fixture
def softmax_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention asks for a softmax in float32 whatever it computes in; of float64 it gets one in float64."""
    real = torch.nn.functional.softmax

    def softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
        return real(x, dim=dim, dtype=x.dtype if x.dtype is torch.float64 else dtype)

    monkeypatch.setattr(torch.nn.functional, "softmax", softmax)


@pytest.mark.usefixtures("softmax_in_float64")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", [family for family in ALL if family not in FLOAT32_STATES])
def test_logits_are_as_near_float64_as_those_of_the_stock_model(family: str, dtype: torch.dtype) -> None:
    batch = padded(3, 40, (11, 0, 2))
    ids, mask = batch["input_ids"], batch["attention_mask"]
    low = fresh(family).to(dtype)
    exact = copy.deepcopy(low).to(torch.float64)
    exact.config._experts_implementation = "eager"  # grouped products take no float64
    real = mask.bool()
    truth = teacher_forced(exact, ids, mask, 21)[real]
    errors = []
    for model in (copy.deepcopy(low), enable(low)):
        logits = teacher_forced(model, ids, mask, 21)[real].double()
        errors.append((logits - truth).abs())
    eps = torch.finfo(dtype).eps
    # Two roundings of independent sums, so one run may be up to twice as far off as the other by chance.
    assert errors[1].max() <= 2 * errors[0].max() + 4 * eps * truth.abs().max()
    assert errors[1].mean() <= 1.2 * errors[0].mean() + eps


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [1, 3])
def test_an_unpadded_prompt_has_the_bits_of_sdpa(family: str, rows: int) -> None:
    width = 5 if family in WINDOWED else 33  # within the window; past it sdpa makes a mask, and the kernel runs
    ids = plain(width, rows)
    with torch.inference_mode():
        assert torch.equal(enable(fresh(family))(ids).logits, stock(family)(ids).logits)


def test_two_enabled_models_assist_each_other() -> None:
    run = MODES["assistant"]
    model, assistant = enable(fresh("llama")), enable(build("llama", seed=9))
    got = tokens(model, plain(), assistant_model=assistant)
    assert torch.equal(got, expected(("assistant",), "llama", run))


class Kept(BaseStreamer):
    def __init__(self) -> None:
        self.seen: list[int] = []

    def put(self, value: Tensor) -> None:
        self.seen.extend(value.flatten().tolist())

    def end(self) -> None: ...


def test_streaming_hands_out_the_same_tokens() -> None:
    streamer = Kept()
    got = tokens(enable(fresh("llama")), plain(), streamer=streamer)
    assert streamer.seen == got[0].tolist()


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_generate_within_a_grad_mode(context: Callable[[], Any]) -> None:
    model = enable(fresh("qwen3"))
    with context():
        got = tokens(model, padded(), 50)
    assert torch.equal(got, expected(("padded",), "qwen3", MODES["padded"]))


def test_generate_again_and_after_an_error() -> None:
    model = enable(fresh("llama"))

    def boom(*args: Any) -> None:
        raise ArithmeticError

    for _ in range(2):
        handle = model.model.layers[1].mlp.register_forward_pre_hook(boom)
        with pytest.raises(ArithmeticError):
            tokens(model, padded())
        handle.remove()
        assert torch.equal(tokens(model, plain(), 30), expected(("greedy",), "llama", MODES["greedy"]))
    disable(model)
    assert torch.equal(tokens(model, plain(), 30), expected(("greedy",), "llama", MODES["greedy"]))


def test_rows_that_end_early_stay_exact() -> None:
    model, reference = fresh("llama"), stock("llama")
    free = tokens(reference, padded(), 30)
    eos = int(free[1, 19 + 8])  # row 1 ends here, the others go on
    want = tokens(reference, padded(), 30, eos_token_id=eos)
    assert torch.equal(tokens(enable(model), padded(), 30, eos_token_id=eos), want)
    assert (want == 0).any(), "no row ended early"


def test_scores_and_hidden_states_come_back() -> None:
    options = {"return_dict_in_generate": True, "output_logits": True, "output_hidden_states": True}
    runs = [m.generate(**padded(), max_new_tokens=6, do_sample=False, **options)
            for m in (stock("llama"), enable(fresh("llama")))]
    assert len(runs[1].hidden_states) == 6
    assert runs[1].logits[0].shape == (3, VOCABULARY)
    for want, got in zip(runs[0].hidden_states[-1], runs[1].hidden_states[-1], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)

"""enable(model) on a GPU: what transformers' own attention gives there, in every way of generating, without waiting."""

from __future__ import annotations

import copy
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers.generation")
sys.path.append(str(Path(__file__).parents[1] / "transformers"))

import torch
from tiny import (
    CACHE,
    build,
    fresh,
    one_thread,  # noqa: F401
    padded,
    plain,
    teacher_forced,
    tokens,
)
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from wavefill.integrations.transformers import WavefillCache, enable
from wavefill.spec import InvalidArgument, UnsupportedModel

pytestmark = pytest.mark.transformers

DEVICE = "cuda"
FAMILIES = ("llama", "llama-g5", "qwen2-mixed", "qwen3-mixed", "mistral-window", "phi3", "gemma2", "gemma2-d256",
            "gemma3", "gpt-oss", "qwen3-next", "granite-hybrid", "lfm2")


@pytest.fixture(autouse=True)
def _whole_products() -> Iterator[None]:
    """Products of float32 are not rounded to TF32."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@cache
def eager(family: str) -> PreTrainedModel:
    model = fresh(family).to(DEVICE)
    model.set_attn_implementation("eager")
    return model


@cache
def enabled(family: str) -> PreTrainedModel:
    return enable(fresh(family).to(DEVICE))


def there(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.to(DEVICE) for name, x in batch.items()}


def ones(*sizes: int) -> Tensor:
    return torch.ones(*sizes, dtype=torch.long, device=DEVICE)


def close(got: Tensor, want: Tensor) -> None:
    """To what rounding in float32 comes to after a few layers with large weights; a key too many is seen at once."""
    torch.testing.assert_close(got, want, rtol=2e-4, atol=2e-4)


def forward(model: PreTrainedModel, ids: Tensor, held: Any, mask: Tensor | None = None) -> Tensor:
    with torch.inference_mode():
        return model(ids.to(DEVICE), attention_mask=mask, use_cache=True, **{CACHE: held}).logits


# ---- numbers


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_float32(family: str) -> None:
    """A prompt, several tokens at once, then one by one, with padding and without."""
    for pads in ((0, 0, 0), (5, 0, 1)):
        batch = there(padded(3, 29, pads))
        got, want = (teacher_forced(m, batch["input_ids"], batch["attention_mask"], 19)
                     for m in (enabled(family), eager(family)))
        real = batch["attention_mask"].bool()  # eager has some mean of V where nothing is seen
        close(got[real], want[real])


@pytest.mark.parametrize("pads", [(0, 0), (7, 0)], ids=["dense", "padded"])
@pytest.mark.parametrize(("family", "dtype", "size"), [
    ("llama", torch.bfloat16, 64), ("llama", torch.bfloat16, 128), ("llama", torch.float16, 16),
    ("gemma2", torch.bfloat16, 64), ("gpt-oss", torch.bfloat16, 64), ("mistral-window", torch.float16, 128),
])
def test_logits_in_16_bits_are_as_near_as_those_of_transformers(family: str, dtype: torch.dtype, size: int,
                                                                pads: tuple[int, ...]) -> None:
    all_experts = {"num_experts_per_tok": 3} if family == "gpt-oss" else {}  # a choice of some may turn on a rounding
    model = build(family, head_dim=size, max_position_embeddings=512, **all_experts).to(DEVICE, dtype)
    exact = copy.deepcopy(model).float()
    batch = there(padded(2, 216, pads))
    ids, mask = batch["input_ids"], batch["attention_mask"]
    want, plainly = (teacher_forced(m, ids, mask, 205)[mask.bool()].double() for m in (exact, model))
    got = teacher_forced(enable(model), ids, mask, 205)[mask.bool()].double()
    error, theirs = ((x - want).square().mean().sqrt().item() for x in (got, plainly))
    assert error <= 2 * theirs


MASKS = {
    "right": (slice(11, None), slice(0), slice(18, None)),
    "between": (slice(4, 9), slice(0, 2), slice(13, 16)),
    "nothing real": (slice(None), slice(0), slice(1, None)),
}


@pytest.mark.parametrize("where", ["cpu", DEVICE])
@pytest.mark.parametrize("shape", MASKS)
@pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2"])
def test_padding_anywhere(family: str, shape: str, where: str) -> None:
    """Against the CPU, where the same models are held to sdpa at every position."""
    ids, mask = plain(24, 3), torch.ones(3, 24, dtype=torch.long)
    for row, at in enumerate(MASKS[shape]):
        mask[row, :19][at] = 0
    logits = []
    for model, device in ((enabled(family), DEVICE), (enable(fresh(family)), "cpu")):
        held, start, parts = WavefillCache(model), 0, []
        for stop in (8, 19, 20, 21, 24):
            seen = mask[:, :stop].to(where if device == DEVICE else device)
            with torch.inference_mode():
                parts.append(model(ids[:, start:stop].to(device), attention_mask=seen, use_cache=True,
                                   **{CACHE: held}).logits.cpu())
            start = stop
        logits.append(torch.cat(parts, 1))
    close(*logits)


# ---- generate


def second_turn(model: PreTrainedModel) -> Tensor:
    batch = there(padded())
    first = model.generate(**batch, max_new_tokens=9, do_sample=False, return_dict_in_generate=True)
    more = torch.cat([first.sequences, plain(7, 3).to(DEVICE)], 1)
    mask = torch.cat([batch["attention_mask"], ones(3, more.shape[1] - 19)], 1)
    return tokens(model, {"input_ids": more, "attention_mask": mask}, 9, **{CACHE: first[CACHE]})


def sampled(model: PreTrainedModel) -> Tensor:
    torch.manual_seed(11)
    return tokens(model, there(padded()), do_sample=True, temperature=1.7)


def one(model: PreTrainedModel, **options: Any) -> Tensor:
    return tokens(model, there({"input_ids": plain()}), **options)


MODES: dict[str, Callable[[PreTrainedModel], Tensor]] = {
    "greedy": lambda model: one(model, new=60),
    "padded": lambda model: tokens(model, there(padded())),
    "sampling": sampled,
    "beams": lambda model: tokens(model, there(padded()), num_beams=4, num_return_sequences=2),
    "prompt-lookup": lambda model: one(model, prompt_lookup_num_tokens=3),
    "assistant": lambda model: one(model, assistant_model=copy.deepcopy(model)),
    "chunked-prefill": lambda model: tokens(model, there(padded()), prefill_chunk_size=4),
    "second-turn": second_turn,
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_tokens_are_those_of_eager(family: str, mode: str) -> None:
    assert torch.equal(*(MODES[mode](model) for model in (enabled(family), eager(family))))


@pytest.mark.parametrize("family", ["gemma3", "gpt-oss", "qwen3-next", "granite-hybrid", "lfm2"])
def test_tokens_of_padded_batches_and_beams(family: str) -> None:
    for mode in ("padded", "beams"):
        assert torch.equal(*(MODES[mode](model) for model in (enabled(family), eager(family))))


# ---- caches


CHANGES: dict[str, tuple[Any, Callable[[Tensor], Tensor]]] = {
    "crop": (-3, lambda mask: mask[:, :-3]),
    "reorder_cache": (torch.tensor([1, 2, 1]), lambda mask: mask[[1, 2, 1]]),
    "batch_repeat_interleave": (2, lambda mask: mask.repeat_interleave(2, 0)),
    "batch_select_indices": (torch.tensor([0, 2]), lambda mask: mask[[0, 2]]),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_changed_caches_go_on(family: str, change: str) -> None:
    (argument, changed), batch, logits = CHANGES[change], there(padded()), []
    if change == "crop" and family == "mistral-window":
        pytest.skip("transformers' own windows can't be cropped")
    for model, held in ((enabled(family), WavefillCache(enabled(family))), (eager(family), DynamicCache(
            config=eager(family).config))):
        forward(model, batch["input_ids"], held, batch["attention_mask"])
        getattr(held, change)(argument.to(DEVICE) if isinstance(argument, Tensor) else argument)
        mask = changed(batch["attention_mask"])
        for count in (1, 3, 1):
            mask = torch.cat([mask, ones(len(mask), count)], 1)
            logits.append(forward(model, plain(count, len(mask)), held, mask))
    for got, want in zip(logits[:3], logits[3:], strict=True):
        close(got, want)


def test_saved_and_copied_caches_go_on_where_they_are_loaded() -> None:
    batch, model = there(padded()), enabled("llama")
    held, mask = WavefillCache(model), torch.cat([batch["attention_mask"], ones(3, 1)], 1)
    forward(model, batch["input_ids"], held, batch["attention_mask"])
    file = io.BytesIO()
    torch.save(held, file)
    copies = [copy.deepcopy(held)]
    for where in (None, DEVICE, "cpu"):
        file.seek(0)
        copies.append(torch.load(file, weights_only=False, map_location=where))
    want = forward(model, plain(1, 3), held, mask)
    for copied in copies[:3]:
        close(forward(model, plain(1, 3), copied, mask), want)
    with torch.inference_mode():
        on_cpu = enable(fresh("llama"))(plain(1, 3), attention_mask=mask.cpu(), use_cache=True, **{CACHE: copies[3]})
    close(on_cpu.logits, want.cpu())


def test_masks_that_do_not_continue_the_cache_are_refused() -> None:
    batch, model = there(padded()), enabled("llama")
    mask, held = batch["attention_mask"], WavefillCache(model)
    forward(model, batch["input_ids"], held, mask)
    longer = torch.cat([mask, ones(3, 1)], 1)
    for wrong, message in ((None, "must be given"), (torch.ones_like(longer), "must be 0 where"),
                           (mask, r"must be \[3, 20\]")):
        with pytest.raises(InvalidArgument, match=f"attention_mask: {message}"):
            forward(model, plain(1, 3), held, wrong)
    flags = longer.bool()
    first = forward(model, plain(1, 3), held, flags)
    flags.zero_()  # the caller's own, which the cache does not share
    held.crop(-1)
    close(forward(model, plain(1, 3), held, longer), first)


# ---- without waiting


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt-oss"])
def test_decoding_does_not_wait_for_the_device(family: str, dtype: torch.dtype) -> None:
    """Over the end of a page and the growth of the pool."""
    model = enable(build(family, head_dim=64, max_position_embeddings=512).to(DEVICE, dtype))
    if family == "gpt-oss":  # its experts may wait, which is none of ours
        for layer in model.model.layers:
            layer.mlp.forward = lambda x: (torch.zeros_like(x), None)
    held, ids = WavefillCache(model), plain(1, 2).to(DEVICE)
    with torch.inference_mode():
        for count in (60, 1, 1):
            model(plain(count, 2).to(DEVICE), use_cache=True, **{CACHE: held})
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(70):
                model(ids, use_cache=True, **{CACHE: held})
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert held.get_seq_length() == 132


@pytest.mark.parametrize("pads", [(0, 0), (5, 0)], ids=["no padding", "padding"])
def test_a_step_with_a_mask_waits_once(pads: tuple[int, ...]) -> None:
    batch, model = there(padded(2, 19, pads)), enabled("llama")
    held, mask, ids = WavefillCache(model), batch["attention_mask"], plain(1, 2).to(DEVICE)
    forward(model, batch["input_ids"], held, mask)
    for expected in (None, 1, 1):
        mask = torch.cat([mask, ones(2, 1)], 1)
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                forward(model, ids, held, mask)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        waits = [warning for warning in seen if "called a synchronizing" in str(warning.message)]
        assert expected is None or len(waits) == expected  # the first compiles and loads kernels


# ---- what is refused


def test_models_spread_over_devices_are_refused() -> None:
    for where in ("cpu", "meta"):
        model = fresh("llama").to(DEVICE)
        model.model.layers[1].to(where)
        with pytest.raises(UnsupportedModel, match=rf"is on cuda:0 and {where}|is on {where} and cuda:0"):
            enable(model)
    with pytest.raises(UnsupportedModel, match="float64"):
        enable(fresh("llama").to(DEVICE, torch.float64))
    with torch.device(DEVICE), pytest.raises(UnsupportedModel, match="GPU backend: D is 320"):
        enable(build("llama", head_dim=320))


def test_a_cache_stays_where_its_tokens_are() -> None:
    model = enable(fresh("llama"))
    held = WavefillCache(model)
    with torch.inference_mode():
        model(plain(9), use_cache=True, **{CACHE: held})
    model.to(DEVICE)
    with pytest.raises(InvalidArgument, match=r"key: must be on the device of the cache \(cpu\); got cuda:0"):
        forward(model, plain(1), held)
    assert held.get_seq_length() == 9
    held.reset()
    got = forward(model, plain(9), held)
    close(got, forward(eager("llama"), plain(9), None))
    assert held.layers[0].keys.device.type == DEVICE

"""What writes in place says so to autograd, and values that no head can have are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import wavefill
from helpers import make_case, run
from wavefill.spec import InvalidArgument, InvalidType


def test_a_backward_pass_through_what_out_overwrote_stops() -> None:
    """Its gradient would come from the new values, in silence."""
    case = make_case([4, 9], dtype=torch.float32)
    weight, out = torch.ones(case.out_shape, requires_grad=True), torch.zeros(case.out_shape)
    loss = (weight * out).sum()
    with torch.no_grad():
        run(case, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_backward_pass_through_a_cache_that_was_appended_to_stops() -> None:
    k_cache, v_cache = torch.zeros(3, 4, 2, 8), torch.zeros(3, 4, 2, 8)
    for cache in (k_cache, v_cache):
        weight = torch.ones_like(cache, requires_grad=True)
        loss = (weight * cache).sum()
        with torch.no_grad():
            torch.ops.wavefill.append(k_cache, v_cache, torch.ones(1, 2, 8), torch.ones(1, 2, 8), torch.tensor([5]))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_tensors_of_inference_mode_are_written() -> None:
    with torch.inference_mode():
        case = make_case([4, 9], dtype=torch.float32)
        run(case, out=torch.zeros(case.out_shape))


@pytest.mark.parametrize(("name", "value", "shown"), [
    ("sinks", math.nan, "NaN"), ("sinks", math.inf, "inf"),
    ("alibi_slopes", math.nan, "NaN"), ("alibi_slopes", math.inf, "inf"), ("alibi_slopes", -math.inf, "-inf"),
])
def test_values_that_are_no_numbers(name: str, value: float, shown: str) -> None:
    """Also where a request has no key, whose LSE would be the sink."""
    given: dict[str, Any] = {name: torch.tensor([0.0, 1.0, value, 2.0])}
    for q_lens in (None, [2, 1]):
        with pytest.raises(InvalidArgument, match=rf"{name}\[2\]: must be finite.*got {shown}\. "):
            run(make_case([0, 9], HQ=4, q_lens=q_lens, **given))


def test_what_is_no_list_of_masks() -> None:
    masks = torch.ones(2, 2, dtype=torch.bool)
    for given in (None, 5):
        with pytest.raises(InvalidType, match="masks: must be a tensor or a list of tensors; got"):
            wavefill.pack_mask(given)  # type: ignore[arg-type]
    for wrong in (masks.to_sparse(), torch.nested.nested_tensor([masks])):
        with pytest.raises(InvalidArgument, match=r"masks.*must be a dense, strided tensor"):
            wavefill.pack_mask([wrong])

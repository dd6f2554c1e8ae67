"""The tolerance passes what is right and fails what is wrong by a single key."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from helpers import (
    DTYPES,
    Case,
    assert_close_to_reference,
    guarded,
    make_case,
    name_of,
    same_bits,
    torch_attention,
    torch_threads,
)
from wavefill import reference


def as_kernel(case: Case, **changes: Tensor) -> tuple[Tensor, Tensor]:
    with torch_threads(1):
        out, lse = reference.attention(*dataclasses.replace(case, **changes).tensors(), **case.options())
    return out.to(case.q.dtype), lse.float()


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("n", [1, 2, 50, 1000])
def test_rounding_passes(dtype: torch.dtype, n: int) -> None:
    case = make_case([n], D=64, dtype=dtype)
    assert_close_to_reference(*as_kernel(case), case)
    assert_close_to_reference(*torch_attention(case)[:2], case)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("n", [2, 50, 1000])
def test_a_lost_key_fails(dtype: torch.dtype, n: int) -> None:
    case = make_case([n], D=64, dtype=dtype)
    out, lse = as_kernel(case)
    short_out, short_lse = as_kernel(case, seq_lens=case.seq_lens - 1)
    with pytest.raises(AssertionError, match=r"output: .* worst is token 0, head \d: error .*, allowed "):
        assert_close_to_reference(short_out, lse, case)
    with pytest.raises(AssertionError, match="lse: "):
        assert_close_to_reference(out, short_lse, case)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("n", [3, 50, 1000])
def test_with_all_options_rounding_passes_and_a_lost_option_fails(dtype: torch.dtype, n: int) -> None:
    """Each option left out, or a single key that the mask hides, is more than the bounds allow."""
    case = make_case([n], q_lens=[3], D=64, dtype=dtype, softcap=2.0, sinks=True, alibi_slopes=0.05, mask=True, seed=2)
    assert_close_to_reference(*as_kernel(case), case)
    assert_close_to_reference(*torch_attention(case)[:2], case)
    assert case.mask is not None
    for name, value in (("softcap", None), ("sinks", None), ("alibi_slopes", None), ("mask", case.mask ^ 1)):
        out, lse = as_kernel(case)
        other_out, other_lse = as_kernel(dataclasses.replace(case, **{name: value}))
        with pytest.raises(AssertionError, match="output: "):
            assert_close_to_reference(other_out, lse, case)
        with pytest.raises(AssertionError, match="lse"):
            assert_close_to_reference(out, other_lse, case)


def test_a_single_wrong_row_is_named() -> None:
    case = make_case([30] * 40, HQ=8, KH=2)
    out, lse = as_kernel(case)
    out[17, 5, 3] += 0.01
    with pytest.raises(AssertionError, match=r"output: 1 of 320 .* worst is token 17, head 5"):
        assert_close_to_reference(out, lse, case)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_inf_fail(bad: float) -> None:
    case = make_case([30])
    out, lse = as_kernel(case)
    with pytest.raises(AssertionError, match="lse"):
        assert_close_to_reference(out, torch.full_like(lse, bad), case)
    with pytest.raises(AssertionError, match="output"):
        assert_close_to_reference(torch.full_like(out, bad), lse, case)


def test_an_empty_row_must_be_exactly_empty() -> None:
    case = make_case([0, 3])
    out, lse = as_kernel(case)
    lse[0, 1] = -1e30
    with pytest.raises(AssertionError, match="lse is -inf"):
        assert_close_to_reference(out, lse, case)
    out, lse = as_kernel(case)
    out[0, 1, 0] = 1e-30
    with pytest.raises(AssertionError, match="not 0"):
        assert_close_to_reference(out, lse, case)


def test_guard_bands_see_a_write_past_the_end() -> None:
    view, untouched = guarded((2, 3), torch.float16)
    untouched()
    view.as_strided((7,), (1,))[6] = 0
    with pytest.raises(AssertionError, match="past the output"):
        untouched()


def test_the_seed_gives_the_same_numbers_in_every_layout() -> None:
    plain, other = make_case([5, 9]), make_case([5, 9], page_size=4, layout="kv_tokens", capacity=30)
    assert torch.equal(plain.q, other.q)
    torch.testing.assert_close(plain.expected.out, other.expected.out, rtol=1e-12, atol=1e-12)


def test_same_bits_tells_zeros_apart() -> None:
    assert same_bits(torch.tensor([math.nan]), torch.tensor([math.nan]))
    assert not same_bits(torch.tensor([0.0]), torch.tensor([-0.0]))

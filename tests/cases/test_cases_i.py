"""Section I of the case list: group sizes and head sizes that other kernels refuse or get wrong."""

from __future__ import annotations

import pytest
import torch

import wavefill
from helpers import DTYPES, SCHEDULES, check, make_case, name_of
from wavefill import InvalidType

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)


@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize(("HQ", "KH"), [(28, 4), (24, 4), (40, 8), (64, 4), (64, 1), (96, 8)],
                         ids=["28_4", "24_4", "40_8", "64_4", "64_1", "96_8"])
def test_i1_groups_of_5_6_7_12_16_and_64(HQ: int, KH: int, D: int) -> None:
    for dtype, schedule in zip(DTYPES, SCHEDULES, strict=True):
        check(make_case([1, 70, 130], HQ=HQ, KH=KH, D=D, dtype=dtype, page_size=16), schedule=schedule)


@dtypes
def test_i2_groups_that_are_no_power_of_two(dtype: torch.dtype) -> None:
    check(make_case([4096], HQ=12, KH=2, D=16, dtype=dtype))
    check(make_case([100], q_lens=[5], HQ=9, KH=3, D=64, dtype=dtype))


@dtypes
def test_i3_a_hundred_queries_of_two_heads_a_group(dtype: torch.dtype) -> None:
    check(make_case([300], q_lens=[100], HQ=4, KH=2, D=128, dtype=dtype))


@dtypes
@pytest.mark.parametrize("D", [16, 32, 48, 80, 96, 112, 120, 192])
def test_i4_i5_head_sizes_that_are_small_or_no_power_of_two(dtype: torch.dtype, D: int) -> None:
    """Every schedule, and lanes past the head size must not show in the next head."""
    for schedule in SCHEDULES:
        check(make_case([1, 65, 129], HQ=6, KH=3, D=D, dtype=dtype, page_size=16), schedule=schedule)


@dtypes
@pytest.mark.parametrize("G", [1, 5, 8, 9])
def test_i6_192_and_128_with_any_group(dtype: torch.dtype, G: int) -> None:
    check(make_case([1, 65, 200], HQ=G, KH=1, D=192, DV=128, dtype=dtype, page_size=16))


@dtypes
@pytest.mark.parametrize("G", [16, 128])
def test_i7_latent_heads_with_large_groups(dtype: torch.dtype, G: int) -> None:
    for n in (3, 500):
        check(make_case([n], HQ=G, KH=1, D=576, DV=512, dtype=dtype, page_size=64, latent=True))
    check(make_case([200], HQ=G, KH=1, D=512, dtype=dtype))


@dtypes
@pytest.mark.parametrize("q_len", [1, 2])
def test_i8_512_with_a_length_for_each_request(dtype: torch.dtype, q_len: int) -> None:
    check(make_case([0, 3, 200, 64], q_lens=[q_len] * 4, HQ=4, KH=2, D=512, dtype=dtype))


@dtypes
@pytest.mark.parametrize("B", [1, 2, 5, 12])
def test_i10_192_and_128_with_several_queries(dtype: torch.dtype, B: int) -> None:
    case = make_case([54] * B, q_lens=[37] * B, HQ=4, KH=4, D=192, DV=128, dtype=dtype)
    check(case)
    with pytest.raises(InvalidType, match=r"^mask: dtype must be int32"):
        wavefill.attention(*case.tensors(), cu_seqlens_q=case.cu_seqlens_q, mask=torch.ones(B, 37, 54))
    check(make_case([54] * B, q_lens=[37] * B, HQ=4, KH=4, D=192, DV=128, dtype=dtype, mask=True))


@pytest.mark.parametrize(("D", "DV"), [(577, 64), (64, 577), (1024, 1024)], ids=["K577", "V577", "1024"])
def test_head_sizes_past_576_are_refused_by_name(D: int, DV: int) -> None:
    with pytest.raises(wavefill.BackendUnavailable, match=r"D.? is \d+.*up to 576"):
        check(make_case([3], D=D, DV=DV))

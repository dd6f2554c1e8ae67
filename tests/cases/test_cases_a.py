"""Section A of the case list: size limits that fit on a CPU."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from helpers import DTYPES, SCHEDULES, check, make_case, name_of, run
from wavefill import InvalidArgument


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_a5_zeros_past_32768_tokens(dtype: torch.dtype) -> None:
    n = 33_728
    case = make_case([1], HQ=1, KH=1, D=512, dtype=dtype)
    zeros = torch.zeros(1, n, 1, 512, dtype=dtype)
    case = dataclasses.replace(case, q=torch.zeros_like(case.q), k_cache=zeros, v_cache=zeros,
                               seq_lens=torch.tensor([n], dtype=torch.int32))
    for schedule in SCHEDULES:
        out, lse = run(case, schedule=schedule)
        assert (out == 0).all()
        assert float(lse) == pytest.approx(math.log(n), rel=1e-6)


@pytest.mark.parametrize("page_size", [None, 1, 16])
def test_a5_lengths_round_the_limits_of_16_bits(page_size: int | None) -> None:
    lens = [32_767, 32_768, 32_769, 33_728, 65_535, 65_536, 65_537, 0]
    case = make_case(lens, HQ=2, KH=1, D=8, page_size=page_size)
    for schedule in SCHEDULES:
        check(case, schedule=schedule)


@pytest.mark.parametrize("page_size", [None, 1, 16])
@pytest.mark.parametrize("over", [1, 16, 2**31 - 1 - 48])
def test_a8_a_length_past_the_table_is_refused(page_size: int | None, over: int) -> None:
    """The rows of the table lie next to each other, so that reading on would find valid pages."""
    case = make_case([48, 48], page_size=page_size)
    check(case)
    longer = dataclasses.replace(case, seq_lens=torch.tensor([48 + over, 48], dtype=torch.int32))
    for schedule in SCHEDULES:
        with pytest.raises(InvalidArgument, match=rf"seq_lens\[0\]: .*48.* got {48 + over}\."):
            run(longer, schedule=schedule)


def test_a8_a_table_that_is_part_of_a_wider_one() -> None:
    """Rows keep the wide table's stride; the limit is the narrow one's."""
    case = make_case([40, 33], page_size=8, capacity=200)
    narrow = dataclasses.replace(case, block_table=case.block_table[:, :5])
    check(narrow)
    with pytest.raises(InvalidArgument, match=r"seq_lens\[1\]: .*40"):
        run(dataclasses.replace(narrow, seq_lens=torch.tensor([40, 41], dtype=torch.int32)))

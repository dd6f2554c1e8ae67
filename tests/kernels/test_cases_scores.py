"""Rows of the case list marked G in its sections K and L, and others of several query tokens; see test_cases.py."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from running import CONFIG, CUTS, call, check, run

from helpers import make_case
from wavefill.spec import Fixed, Schedule, StreamK

cuts = pytest.mark.parametrize("schedule", CUTS, ids=repr)
#: Two query tokens a row, so that requests have several.
TWO = replace(CONFIG, block=2)


@cuts
@pytest.mark.parametrize("q_lens", [None, [1, 1], [5, 3]], ids=str)
def test_k3_sinks_on_every_path(schedule: Schedule, q_lens: list[int] | None) -> None:
    """Sinks were accepted and ignored for more than one query token."""
    case = make_case([60, 20], D=16, page_size=16, q_lens=q_lens, sinks=True)
    out, _ = check(case, schedule, config=TWO if q_lens else CONFIG)
    without, _ = run(replace(case, sinks=None), schedule, config=TWO if q_lens else CONFIG)
    assert (out - without).abs().amax(-1).min() > 1e-3  # in every row and head


@pytest.mark.parametrize("splits", [1, 2, 3, 7, 20])
def test_k4_sinks_count_once_whatever_the_split(splits: int) -> None:
    check(make_case([100], D=16, page_size=16, q_lens=[3], sinks=2.0), Fixed(splits=splits), config=TWO)


@cuts
@pytest.mark.parametrize("length", [99, 100, 101, 122])
def test_k5_the_oldest_key_of_a_window(schedule: Schedule, length: int) -> None:
    """One key too few, or too many: the last query of 122 sees keys 22 to 121 of a window of 100, in drafts too."""
    for q_lens in (None, [4]):
        case = make_case([length], D=16, page_size=16, q_lens=q_lens, window=100)
        case.k_cache.nan_to_num_(0.0)
        check(case, schedule, config=TWO if q_lens else CONFIG)


@cuts
def test_k7_one_query_token_keeps_the_window(schedule: Schedule) -> None:
    check(make_case([200], D=16, page_size=16, window=50), schedule)
    check(make_case([200], D=16, page_size=16, window=50, q_lens=[1]), schedule, config=TWO)


@cuts
def test_k8_windows_begin_where_each_request_does(schedule: Schedule) -> None:
    """The start came from the longest request: short ones saw nothing."""
    check(make_case([10, 300], D=16, page_size=16, window=64, q_lens=[2, 3]), schedule, config=TWO)


@cuts
@pytest.mark.parametrize("q_lens", [None, [1], [30]], ids=str)
def test_k11_alibi_over_a_cache(schedule: Schedule, q_lens: list[int] | None) -> None:
    """The bias vanished, or was off by one, where queries are fewer than keys."""
    check(make_case([90], D=16, page_size=16, q_lens=q_lens, alibi_slopes=True), schedule,
          config=TWO if q_lens else CONFIG)


@cuts
def test_k14_masks_whose_bits_are_no_whole_bytes(schedule: Schedule) -> None:
    check(make_case([21, 35, 13], D=16, page_size=16, q_lens=[3, 5, 7], mask=True), schedule, config=TWO)


@cuts
@pytest.mark.parametrize("n", [1, 2])
def test_l1_queries_are_the_last_keys(schedule: Schedule, n: int) -> None:
    """Aligned to the first keys instead, one query saw key 0 alone."""
    check(make_case([75], D=16, page_size=16, q_lens=[n]), schedule, config=TWO)


@cuts
def test_l3_more_query_tokens_than_rows_of_the_table(schedule: Schedule) -> None:
    """768 query rows were looked up in 256 rows of the table. Here its last row ends at the last page of memory."""
    case = make_case([9] * 16, D=16, HQ=2, KH=1, page_size=16, q_lens=[3] * 16, spare_pages=0)
    check(case, schedule, config=TWO)


@cuts
def test_b10_pages_before_the_window_of_a_draft(schedule: Schedule) -> None:
    """Pages that none of its tokens sees hold NaN, and ids that lead out of the cache."""
    case = make_case([150], D=16, page_size=16, q_lens=[4], window=40)
    expected = case.expected
    assert case.block_table is not None
    unseen = (150 - 4 - 40 + 1) // 16
    for page in case.block_table[0, :unseen].tolist():
        case.k_cache[page], case.v_cache[page] = math.nan, math.nan  # type: ignore[index]
    case.block_table[0, :unseen] = 2**31 - 1
    out, lse = torch.empty(case.out_shape), torch.empty(case.out_shape[:2])
    call(case, schedule, out, lse, config=TWO)
    expected.check(out, lse)


def test_n6_the_work_is_that_of_the_window() -> None:
    """Layers with windows were split as if the whole cache counted. Tiles before the window belong to no worker."""
    case = make_case([600], D=16, HQ=1, KH=1, page_size=16, q_lens=[2], window=20)
    assert case.block_table is not None
    case.block_table[0, : (600 - 2 - 20 + 1) // 16] = 2**31 - 1  # nobody looks
    check(case, StreamK(), workers=7, config=TWO)

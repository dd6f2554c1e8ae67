"""Rows of the case list marked G in its sections K and L, and others of several query tokens; see test_cases.py.

tests/gpu/test_cases_scores_gpu.py has them as users call, with the kernels of Hopper.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from running import CONFIG, CUTS, call, check, run

from helpers import make_case, same_bits
from wavefill.backends.gpu import configs, launch
from wavefill.backends.gpu.configs import Config
from wavefill.backends.gpu.kernels import Variant
from wavefill.schedule import Table, make_table, row_ranges
from wavefill.spec import Fixed, Invariant, Schedule, StreamK

cuts = pytest.mark.parametrize("schedule", CUTS, ids=repr)
#: Two query tokens a row, so that requests have several.
TWO = replace(CONFIG, block=2)
#: How four query heads a KV head of head size 128 are run with at most eight query tokens a request, or any number.
SEVERAL = {"Hopper, 8": configs.many(4, 8), "Hopper": configs.many(4, None),
           "portable, 8": configs.portable_several(128, 4, 2, 8), "portable": configs.portable_several(128, 4, 2, None)}
severals = pytest.mark.parametrize("config", list(SEVERAL.values()), ids=list(SEVERAL))


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


def test_d4_tokens_that_this_call_is_about_are_counted_once() -> None:
    """Splits were those of the cache before 196 keys came to it: all of them fell to the last split, or were missed."""
    check(make_case([60 + 52], D=16, page_size=16, q_lens=[52]), Fixed(splits=2), config=TWO)


def test_d7_splits_that_were_asked_for_are_made() -> None:
    """The setting was dropped where queries are not causal. Sums of eight parts are not those of one."""
    case = make_case([300], D=16, page_size=16, q_lens=[3], causal=False)
    whole, parts = (check(case, Fixed(splits=n), config=TWO) for n in (1, 8))
    assert not same_bits(whole[0], parts[0])


def work(schedule: Schedule, config: Config, length: int, q_len: int,
         window: int | None = None) -> tuple[launch.Call, Table]:
    """The call of one request on an H200's 132 SMs, and which of its programs reads what."""
    q, k = torch.empty(q_len, 32, 128, device="meta"), torch.empty(9, 16, 8, 128, device="meta")
    made = launch.plan(q, k, k, torch.empty(1, 1 << 16, dtype=torch.int32, device="meta"), q, q[..., 0], scale=1.0,
                       window=window, schedule=schedule, config=config, workers=132 * config.ctas, requests=1,
                       interpret=True)
    rows = row_ranges([length], [q_len], window=window, q_block=config.block)
    return made, make_table(schedule, rows.start, rows.stop, KH=8, workers=made.attention_grid[0], tile=config.tile,
                            grown=True)


@pytest.mark.parametrize("schedule", [StreamK(), Fixed(), Invariant()], ids=repr)
@severals
@pytest.mark.parametrize("q_len", [2, 4, 8])
def test_n5_drafts_take_the_split_path(schedule: Schedule, config: Config, q_len: int) -> None:
    """2 to 8 query tokens left it: one program read all keys of a KV head."""
    made, table = work(schedule, config, 7400, q_len)
    kind = (dict(made.attention.constants)["KIND"] if isinstance(made.attention, Variant)
            else made.attention.build.kind)
    assert kind == launch.cut_of(schedule, config.tile).kind  # as in decode
    assert set(table.row.tolist()) == {0}  # K and V are read once for all tokens
    pieces = np.bincount(table.head, minlength=8)
    assert pieces.min() >= (16 if isinstance(schedule, StreamK) else 4)


@pytest.mark.parametrize("schedule", [StreamK(), Fixed(), Invariant()], ids=repr)
@severals
@pytest.mark.parametrize("q_len", [1, 4])
@pytest.mark.parametrize("window", [128, 512])
def test_n6_keys_before_the_window_make_no_work(schedule: Schedule, config: Config, q_len: int, window: int) -> None:
    """Layers with windows were split and read as if the whole cache counted."""
    tables = [work(schedule, config, length, q_len, window)[1] for length in (2048, 32_768, 1 << 20)]
    assert len({len(table) for table in tables}) == 1
    assert {table.tiles for table in tables} == {8 * -(-(window + q_len - 1) // config.tile)}


def test_n6_pages_before_the_window_are_not_looked_up() -> None:
    case = make_case([600], D=16, HQ=1, KH=1, page_size=16, q_lens=[2], window=20)
    assert case.block_table is not None
    case.block_table[0, : (600 - 2 - 20 + 1) // 16] = 2**31 - 1  # nobody looks
    check(case, StreamK(), workers=7, config=TWO)

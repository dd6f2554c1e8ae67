"""The portable kernel, the merge and the scan against the float64 reference, in the interpreter."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from running import CONFIG, CUTS, SCHEDULES, TILE, call, check, run

from helpers import LAYOUTS, Case, make_case, name_of, same_bits
from wavefill.backends.gpu import launch, variants
from wavefill.spec import Invariant, Schedule, StreamK

RAGGED = [70, 0, 3, 33, 0]
cuts = pytest.mark.parametrize("schedule", CUTS, ids=repr)
schedules = pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
bad_ids = pytest.mark.parametrize("table_pad", [-1, 2**31 - 1])


@schedules
@pytest.mark.parametrize("workers", [1, 3, 30])
def test_any_number_of_workers(schedule: Schedule, workers: int) -> None:
    check(make_case(RAGGED, D=16, page_size=16, capacity=90), schedule, workers=workers)


@schedules
def test_float16(schedule: Schedule) -> None:
    check(make_case([50, 1, 0, 17], D=32, dtype=torch.float16, page_size=16), schedule)


@cuts
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=name_of)
@pytest.mark.parametrize("page_size", [1, 3, 16, 48, None])
def test_page_sizes(schedule: Schedule, dtype: torch.dtype, page_size: int | None) -> None:
    check(make_case([49, 0, 16, 5], HQ=2, D=16, dtype=dtype, page_size=page_size), schedule)


@bad_ids
@schedules
def test_unused_slots_of_the_table_are_not_read(schedule: Schedule, table_pad: int) -> None:
    check(make_case([33, 0, 1], D=16, page_size=16, capacity=100, table_pad=table_pad), schedule)


@cuts
@pytest.mark.parametrize("page_size", [5, None])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(schedule: Schedule, page_size: int | None, layout: str) -> None:
    check(make_case([40, 17], D=16, DV=24, page_size=page_size, layout=layout), schedule)


@cuts
@pytest.mark.parametrize("page_size", [5, None])
def test_a_last_dimension_of_stride_two(schedule: Schedule, page_size: int | None) -> None:
    case = make_case([40, 17], D=16, page_size=page_size)

    def apart(x: torch.Tensor) -> torch.Tensor:
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), math.nan)
        wide[..., ::2] = x
        return wide[..., ::2]

    check(dataclasses.replace(case, k_cache=apart(case.k_cache), v_cache=apart(case.v_cache)), schedule)


@cuts
def test_queries_and_outputs_that_lie_apart(schedule: Schedule) -> None:
    case = make_case([40, 17], HQ=6, D=16, page_size=16)
    q = torch.full((2, 9, 40), math.nan)
    q[:, :6, :16] = case.q
    out, lse = torch.full((6, 2, 40), math.nan), torch.full((6, 2), math.nan)
    apart = dataclasses.replace(case, q=q[:, :6, :16])
    call(apart, schedule, out.transpose(0, 1)[..., :16], lse.transpose(0, 1))
    case.expected.check(out.transpose(0, 1)[..., :16], lse.transpose(0, 1))
    assert out[..., 16:].isnan().all()


@cuts
def test_every_length_over_three_tiles(schedule: Schedule) -> None:
    lens = list(range(3 * TILE + 3))
    check(make_case(lens, HQ=1, KH=1, D=16, page_size=16), schedule, workers=5)


@cuts
@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 31, 32, 33])
def test_every_length_alone(schedule: Schedule, length: int) -> None:
    check(make_case([length], HQ=2, KH=1, D=16, page_size=16), schedule, workers=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=name_of)
@pytest.mark.parametrize("G", [1, 2, 3, 4, 5, 6, 7, 8, 9, 40])
def test_groups(G: int, dtype: torch.dtype) -> None:
    check(make_case([35, 2], HQ=2 * G, KH=2, D=16, dtype=dtype, page_size=16), StreamK(), workers=3)


@cuts
def test_a_group_shared_by_several_programs(schedule: Schedule) -> None:
    check(make_case([35, 2, 0], HQ=40, KH=1, D=8, page_size=16), schedule,
          config=dataclasses.replace(CONFIG, heads=16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=name_of)
@pytest.mark.parametrize(("D", "DV"), [(16, 16), (48, 48), (64, 64), (80, 80), (96, 96), (128, 128), (192, 192),
                                       (192, 128), (48, 80), (24, 16)])
def test_head_sizes(D: int, DV: int, dtype: torch.dtype) -> None:
    check(make_case([35, 2], HQ=2, KH=1, D=D, DV=DV, dtype=dtype, page_size=16), StreamK(), workers=3)


@schedules
@pytest.mark.parametrize("window", [1, 16, 17, 49])
def test_windows(schedule: Schedule, window: int) -> None:
    check(windowed([50, 0, 16, 33, 1], window), schedule)


@cuts
@pytest.mark.parametrize("window", [2, 15, 31, 32, 33, 48, 50, 51, 2**40])
def test_window_edges(schedule: Schedule, window: int) -> None:
    check(windowed([50, 17, 3], window), schedule)


def windowed(lens: list[int], window: int) -> Case:
    """NaN in every slot that the windows leave out."""
    case = make_case(lens, HQ=2, KH=1, D=16, page_size=5, window=window)
    for b, n in enumerate(lens):
        for t in range(max(n - window, 0)):
            where = int(case.block_table[b, t // 5]), t % 5
            case.k_cache[where] = case.v_cache[where] = math.nan
    return case


@pytest.fixture
def few_lengths_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that scan 16 lengths at a time, and batches that are scanned beforehand from 41 requests on."""
    for module, name, value in ((variants, "CHUNK", 16), (variants, "SCAN_CHUNK", 32), (launch, "SCAN_AT_MOST", 40)):
        monkeypatch.setattr(module, name, value)


def many(B: int) -> Case:
    """A large batch of nearly nothing."""
    rng = torch.Generator().manual_seed(1)
    lens = (torch.randint(0, 4, (B,), generator=rng) - 1).clamp(min=0).tolist()
    lens[5], lens[B - 1] = 150, 40
    return make_case(lens, HQ=1, KH=1, D=8, page_size=16)


@schedules
@pytest.mark.parametrize("B", [40, 41, 70])
@pytest.mark.usefixtures("few_lengths_at_once")
def test_batches_scanned_in_several_steps_and_beforehand(schedule: Schedule, B: int) -> None:
    check(many(B), schedule, workers=4)


def test_more_requests_than_a_worker_scans() -> None:
    assert launch.SCAN_AT_MOST < 1030
    check(many(1030), Invariant(chunk=32), workers=4)


@cuts
def test_a_batch_without_any_key(schedule: Schedule) -> None:
    check(make_case([0, 0, 0], D=16, page_size=16, capacity=32), schedule)


@cuts
def test_lengths_past_the_table_are_cut_to_it(schedule: Schedule) -> None:
    case = make_case([48, 20], D=16, page_size=16, capacity=48)
    expected = case.expected
    out, lse = run(dataclasses.replace(case, seq_lens=torch.tensor([1_000_000, 20], dtype=torch.int32)), schedule)
    expected.check(out, lse)


@schedules
def test_the_same_bits_every_time(schedule: Schedule) -> None:
    case = make_case([90, 0, 31], D=16, page_size=16)
    first, second = run(case, schedule), run(case, schedule)
    assert same_bits(first[0], second[0])
    assert same_bits(first[1], second[1])


@pytest.mark.parametrize("workers", [1, 7])
def test_invariant_rows_do_not_depend_on_company_workers_or_table(workers: int) -> None:
    schedule = Invariant(chunk=32)
    lens = [70, 0, 129, 5, 64]
    out, lse = run(make_case(lens, D=16, page_size=16), schedule)
    wide = make_case(lens, D=16, page_size=16, capacity=1000)
    for b in range(len(lens)):
        alone = run(wide.request(b), schedule, workers=workers)
        assert same_bits(alone[0][0], out[b])
        assert same_bits(alone[1][0], lse[b])


@pytest.mark.parametrize("B", [2, 48])
def test_invariant_rows_of_many_pieces_do_not_depend_on_how_many_there_are(B: int) -> None:
    """Rows of 40 pieces among so many requests that the merge would take other shapes: case of a soak on a GPU."""
    case = make_case([640] + [17] * (B - 1), HQ=4, KH=2, D=16, page_size=16)
    out, lse = run(case, Invariant(chunk=16))
    alone = run(case.request(0), Invariant(chunk=16))
    assert same_bits(alone[0][0], out[0])
    assert same_bits(alone[1][0], lse[0])

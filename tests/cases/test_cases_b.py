"""Section B of the case list: nothing to attend to, everything hidden, and NaN where nobody should look."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

import wavefill
from helpers import DTYPES, SCHEDULES, Case, check, make_case, name_of, run, same_bits
from wavefill import Fixed, InvalidArgument, StreamK

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
schedules = pytest.mark.parametrize("schedule", SCHEDULES)


def empty(out: Tensor, lse: Tensor) -> bool:
    return bool((out == 0).all() and (lse == -math.inf).all())


class TestMerge:
    @dtypes
    @pytest.mark.parametrize("N", [0, 1, 2, 3, 17])
    @pytest.mark.parametrize("shape", [(1, 1), (5,), (3, 4)], ids=name_of)
    @pytest.mark.parametrize("held", [0.0, math.nan, math.inf])
    def test_b1_empty_states_merge_to_the_empty_state(
        self, dtype: torch.dtype, N: int, shape: tuple[int, ...], held: float
    ) -> None:
        outs, lses = torch.full((N, *shape, 64), held, dtype=dtype), torch.full((N, *shape), -math.inf)
        out, lse = wavefill.merge_states(outs, lses)
        assert out.dtype == dtype
        assert tuple(out.shape) == (*shape, 64)
        assert empty(out, lse)
        real = torch.randn(*shape, 64).to(dtype), torch.randn(*shape)
        again = wavefill.merge_states(torch.stack([out, real[0]]), torch.stack([lse, real[1]]))
        assert torch.equal(again[0], real[0])
        assert torch.equal(again[1], real[1])

    @dtypes
    def test_b2_rows_that_are_empty_in_the_first_chunks(self, dtype: torch.dtype) -> None:
        outs, lses = torch.randn(3, 6, 4, 40).to(dtype), torch.randn(3, 6, 4)
        for rows, chunks in ((slice(0, 2), (0, 1)), (slice(2, 4), (0,)), (slice(4, 5), (1, 2))):
            for chunk in chunks:
                outs[chunk, rows], lses[chunk, rows] = math.nan, -math.inf
        out, lse = wavefill.merge_states(outs, lses)
        assert torch.equal(out[:2], outs[2, :2])
        assert torch.equal(lse[:2], lses[2, :2])
        assert torch.equal(out[4], outs[0, 4])
        running = outs[0], lses[0]
        for chunk in (1, 2):
            running = wavefill.merge_states(
                torch.stack([running[0], outs[chunk]]), torch.stack([running[1], lses[chunk]])
            )
        torch.testing.assert_close(running[0], out, rtol=3 * torch.finfo(dtype).eps, atol=1e-3)
        torch.testing.assert_close(running[1], lse)
        assert out.isfinite().all()

    @pytest.mark.parametrize("bad", [math.inf, math.nan])
    @pytest.mark.parametrize("at", [(0, 0), (1, 2)])
    def test_b3_an_lse_that_is_no_state_is_refused(self, bad: float, at: tuple[int, int]) -> None:
        lses = torch.randn(2, 3)
        lses[at] = bad
        with pytest.raises(InvalidArgument, match=r"lses: .*-inf"):
            wavefill.merge_states(torch.zeros(2, 3, 8), lses)

    @dtypes
    def test_b4_partials_of_requests_without_keys_there(self, dtype: torch.dtype) -> None:
        """Two parts of each request's keys, where either part may be empty."""
        first, second = make_case([0, 500, 0, 3], dtype=dtype), make_case([7, 0, 0, 20], dtype=dtype, seed=1)
        parts = [run(dataclasses.replace(part, q=first.q)) for part in (first, second)]
        out, lse = wavefill.merge_states(torch.stack([o for o, _ in parts]), torch.stack([x for _, x in parts]))
        assert torch.equal(out[0], parts[1][0][0])
        assert torch.equal(out[1], parts[0][0][1])
        assert empty(out[2], lse[2])
        whole = make_case([23], dtype=dtype)
        whole.k_cache[0, :3], whole.v_cache[0, :3] = first.k_cache[3, :3], first.v_cache[3, :3]
        whole.k_cache[0, 3:], whole.v_cache[0, 3:] = second.k_cache[3, :20], second.v_cache[3, :20]
        want, want_lse = run(dataclasses.replace(whole, q=first.q[3:]))
        torch.testing.assert_close(out[3:], want, rtol=4 * torch.finfo(dtype).eps, atol=2 * torch.finfo(dtype).eps)
        torch.testing.assert_close(lse[3:], want_lse)


@dtypes
@schedules
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("lens", [[0, 17, 0, 1], [0, 500, 0, 3], [0, 0, 0], [64, 0], [0, 65]], ids=name_of)
def test_b4_b7_empty_requests_among_others(
    dtype: torch.dtype, schedule: str, page_size: int | None, lens: list[int]
) -> None:
    case = make_case(lens, dtype=dtype, page_size=page_size, capacity=512)
    out, lse = check(case, schedule=schedule)
    for b, n in enumerate(lens):
        if n == 0:
            assert empty(out[b], lse[b])
    # Taking the empty requests out changes nothing for the others.
    rest = [b for b, n in enumerate(lens) if n]
    if rest and schedule == "invariant":
        for b in rest:
            alone = run(case.request(b), schedule=schedule)
            assert same_bits(alone[0][0], out[b])
            assert same_bits(alone[1][0], lse[b])


@dtypes
@schedules
@pytest.mark.parametrize("page_size", [None, 4, 256])
def test_b8_b9_what_lies_past_a_length_changes_no_bit(dtype: torch.dtype, schedule: str, page_size: int | None) -> None:
    lens = [1, 3, 13, 63, 64, 65, 127, 129]
    results = [
        run(make_case(lens, D=64, dtype=dtype, page_size=page_size, capacity=256, poison=poison), schedule=schedule)
        for poison in (0.0, math.nan, math.inf, -math.inf)
    ]
    for out, lse in results[1:]:
        assert same_bits(out, results[0][0])
        assert same_bits(lse, results[0][1])


@dtypes
@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_b9_the_tail_of_the_last_page_of_a_latent_cache(dtype: torch.dtype, poison: float) -> None:
    check(make_case([13, 4, 1, 5], HQ=16, KH=1, D=576, DV=512, dtype=dtype, page_size=4, latent=True, poison=poison))


@dtypes
@schedules
@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_b10_pages_before_the_window_are_not_read(dtype: torch.dtype, schedule: str, page_size: int) -> None:
    """They hold NaN, and their entries in the table are no pages at all."""
    lens, window = [*range(256, 260), *range(1024, 1028), 2048, 100], 128
    case = make_case(lens, D=16, dtype=dtype, page_size=page_size, window=window)
    for b, n in enumerate(lens):
        stale = max(0, n - window) // page_size
        pages = case.block_table[b, :stale].long()
        case.k_cache[pages], case.v_cache[pages] = math.nan, math.nan
        case.block_table[b, :stale] = -7
    check(case, schedule=schedule)


@pytest.mark.parametrize("q_len", [2, 5])
def test_b10_several_queries_read_from_the_first_ones_window_on(q_len: int) -> None:
    lens, window, page_size = [300, 1000, 64], 100, 16
    case = make_case(lens, q_lens=[q_len] * 3, page_size=page_size, window=window)
    for b, n in enumerate(lens):
        stale = max(0, n - q_len + 1 - window) // page_size
        case.k_cache[case.block_table[b, :stale].long()] = math.nan
        case.block_table[b, :stale] = 2**31 - 1
    check(case)


@dtypes
@schedules
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not_causal"])
def test_b11_equal_scores_give_the_mean_of_the_valid_values(dtype: torch.dtype, schedule: str, causal: bool) -> None:
    lens = [*range(1, 300, 7), 64, 128, 256, 257]
    case = make_case(lens, HQ=2, KH=1, D=128, dtype=dtype, page_size=16, causal=causal)
    case = dataclasses.replace(case, q=torch.zeros_like(case.q))
    _, lse = check(case, schedule=schedule)
    torch.testing.assert_close(lse, torch.tensor(lens).float().log().unsqueeze(1).expand_as(lse))


@schedules
@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize(("HQ", "KH"), [(4, 4), (8, 2), (5, 1)], ids=["mha", "gqa", "mqa"])
def test_b12_b13_more_splits_and_workers_than_tiles(schedule: str, q_len: int, HQ: int, KH: int) -> None:
    for split in (4, 32, 1000):
        case = make_case([1, 2, 3, 5, 70, 0], q_lens=[q_len] * 6, HQ=HQ, KH=KH, page_size=16)
        check(case, schedule=Fixed(splits=split))
        check(case, schedule=StreamK(tile=split))


@dtypes
def test_b14_one_live_split_among_idle_ones(dtype: torch.dtype) -> None:
    """Eight splits are asked for where the window leaves one tile."""
    case = make_case([500, 64, 30], dtype=dtype, page_size=16, window=20)
    check(case, schedule=Fixed(splits=8))


@pytest.mark.parametrize("schedule", ["auto", *SCHEDULES, Fixed(rule="flashdecoding"), Fixed(splits=3)], ids=str)
@dtypes
def test_b15_degenerate_shapes(schedule: object, dtype: torch.dtype) -> None:
    no_requests = make_case([], dtype=dtype)
    out, lse = run(no_requests, schedule=schedule)
    assert (tuple(out.shape), tuple(lse.shape)) == ((0, 4, 32), (0, 4))
    no_requests_paged = make_case([], dtype=dtype, page_size=16)
    assert run(no_requests_paged, schedule=schedule)[0].shape[0] == 0
    no_queries = make_case([4096], q_lens=[0], dtype=dtype, page_size=16)
    assert run(no_queries, schedule=schedule)[0].shape[0] == 0
    no_slots = make_case([0, 0], dtype=dtype, page_size=16)
    no_slots = dataclasses.replace(no_slots, block_table=torch.empty(2, 0, dtype=torch.int32))
    assert empty(*run(no_slots, schedule=schedule))
    no_tokens = make_case([0, 0], dtype=dtype)
    no_tokens = dataclasses.replace(no_tokens, k_cache=no_tokens.k_cache[:, :0], v_cache=no_tokens.v_cache[:, :0])
    assert empty(*run(no_tokens, schedule=schedule))


@dtypes
@schedules
@pytest.mark.parametrize("page_size", [None, 1])
def test_b16_b17_b18_rows_that_see_nothing(dtype: torch.dtype, schedule: str, page_size: int | None) -> None:
    """More queries than keys: those before the first key see none, and their outputs were full of NaN."""
    case = make_case([3, 0, 1, 64], q_lens=[5, 2, 140, 66], dtype=dtype, page_size=page_size)
    out, lse = check(case, schedule=schedule)
    blind = torch.cat([torch.arange(n) < n - k for k, n in zip([3, 0, 1, 64], [5, 2, 140, 66], strict=True)])
    assert empty(out[blind], lse[blind])
    assert (lse[~blind] > -math.inf).all()


@dtypes
@schedules
@pytest.mark.parametrize("sinks", [False, True], ids=["no-sinks", "sinks"])
def test_b17_b19_a_mask_that_hides_all_from_some_rows(dtype: torch.dtype, schedule: str, sinks: bool) -> None:
    """All of a prompt are query tokens, and the first 14 of them see nothing: 0, and the sink where there is one."""
    sees = torch.ones(70, 70, dtype=torch.bool)
    sees[:14] = sees[40] = False
    case = make_case([70, 3], q_lens=[70, 3], dtype=dtype, mask=[sees, torch.zeros(3, 3).bool()], sinks=sinks)
    out, lse = check(case, schedule=schedule)
    blind = [*range(14), 40, *range(70, 73)]
    assert (out[blind] == 0).all()
    assert torch.equal(lse[blind], torch.full((len(blind), 4), -math.inf) if case.sinks is None
                       else case.sinks.expand(len(blind), -1))


@dtypes
@schedules
def test_b20_the_first_tiles_are_hidden_from_some_queries(dtype: torch.dtype, schedule: str) -> None:
    """The queries of a block walk the same tiles, of which the later ones' windows leave out the first."""
    case = make_case([400, 200], q_lens=[150, 130], HQ=2, KH=1, dtype=dtype, window=10)
    check(case, schedule=schedule)


@schedules
def test_b20_scores_of_minus_infinity_over_whole_tiles(schedule: str) -> None:
    """Dot products that overflow to -inf weigh nothing, wherever they stand."""
    def overflowing(part: slice) -> Case:
        case = make_case([200], HQ=2, KH=1, D=16)
        case.q.fill_(1e19)
        case.k_cache[:] = case.k_cache * 1e-19
        case.k_cache[0, part] = -1e30
        return case

    for part in (slice(0, 64), slice(0, 130), slice(64, 128), slice(100, 200), slice(0, 199)):
        check(overflowing(part), schedule=schedule)

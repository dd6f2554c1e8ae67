"""Several query tokens a request, and options, against the float64 reference, in the interpreter."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from running import CONFIG, CUTS, SCHEDULES, TILE, call, check, run

from helpers import Case, make_case, name_of, same_bits
from helpers import run as run_on_cpu
from wavefill.backends.gpu import configs, launch, variants
from wavefill.spec import Invariant, Schedule, StreamK

#: Keys and query tokens: a draft, nothing new, more queries than keys, no keys, one token, a chunk of a prompt.
LENS, Q_LENS = [37, 20, 2, 0, 33], [5, 0, 4, 2, 1]
SMALL = {"HQ": 2, "KH": 1, "D": 16, "page_size": 16}
OPTIONS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 1.5}, "sinks": {"sinks": True}, "alibi": {"alibi_slopes": True}, "mask": {"mask": True},
    "window": {"window": 7}, "not causal": {"causal": False},
}
TWO = dataclasses.replace(CONFIG, block=2)
FOUR = dataclasses.replace(CONFIG, block=4)
cuts = pytest.mark.parametrize("schedule", CUTS, ids=repr)
schedules = pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
halves = pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=name_of)


def drafts(lens: list[int] = LENS, q_lens: list[int] = Q_LENS, **kwargs: Any) -> Case:
    return make_case(lens, q_lens=q_lens, **(SMALL | kwargs))


def padded(case: Case, padding: int) -> Case:
    """More query tokens than requests have, of NaN, with a mask's bits all set."""
    q = torch.cat([case.q, torch.full((padding, *case.q.shape[1:]), math.nan, dtype=case.q.dtype)])
    mask = case.mask
    if mask is not None:
        mask = torch.cat([mask, torch.full((padding, mask.shape[1]), -1, dtype=torch.int32)])
    return dataclasses.replace(case, q=q, mask=mask)


# -- rows


@halves
@schedules
def test_ragged_drafts(schedule: Schedule, dtype: torch.dtype) -> None:
    check(drafts(HQ=4, KH=2, dtype=dtype), schedule, config=FOUR)


@schedules
@pytest.mark.parametrize("workers", [1, 30])
def test_any_number_of_workers(schedule: Schedule, workers: int) -> None:
    check(drafts([70, 3, 33], [3, 0, 6]), schedule, workers=workers, config=TWO)


@cuts
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("padding", [1, 20])
def test_tokens_of_no_request(schedule: Schedule, padding: int, sinks: bool) -> None:
    case = padded(drafts([20, 3], [3, 2], sinks=sinks, mask=True), padding)
    out, lse = check(case, schedule, config=TWO)
    assert (out[5:] == 0).all()
    assert (lse[5:] == -math.inf).all()


@cuts
@pytest.mark.parametrize("q_lens", [[3, 2], [0, 0]], ids=str)
def test_tokens_before_the_first_offset(schedule: Schedule, q_lens: list[int]) -> None:
    """Offsets start at 0. Where they do not, such tokens are no request's, and nothing of old memory shows."""
    case = padded(drafts([20, 3], q_lens), 4)
    case.q.nan_to_num_(0.0)
    out, lse = run(dataclasses.replace(case, cu_seqlens_q=case.cu_seqlens_q + 2), schedule, config=TWO)
    none = [0, 1, *range(sum(q_lens) + 2, len(out))]
    assert (out[none] == 0).all()
    assert (lse[none] == -math.inf).all()
    assert out.isfinite().all()


@cuts
@pytest.mark.parametrize(("lens", "q_lens"), [([], []), ([5, 0], [0, 0]), ([0, 0], [3, 1])])
def test_batches_without_work(schedule: Schedule, lens: list[int], q_lens: list[int]) -> None:
    check(padded(drafts(lens, q_lens, capacity=16), 2), schedule, config=TWO)


@cuts
@pytest.mark.parametrize("length", [1, 16, 17, 33])
@pytest.mark.parametrize("n", [1, 3, 18])
def test_every_length_and_number_of_tokens_alone(schedule: Schedule, length: int, n: int) -> None:
    check(drafts([length], [n], D=8), schedule, workers=2, config=FOUR)


@pytest.mark.parametrize(("G", "block"), [(1, 16), (1, 64), (3, 4), (5, 8), (8, 4), (40, 1), (128, 1)])
def test_groups_and_blocks(G: int, block: int) -> None:
    config = dataclasses.replace(CONFIG, block=block)
    check(drafts([35, 2], [min(block, 8) + 1, 2], HQ=G, D=8, dtype=torch.float16), StreamK(), config=config)


@cuts
def test_a_group_shared_by_several_programs(schedule: Schedule) -> None:
    """One query token a row, its heads in three programs."""
    check(drafts([35, 2], [3, 2], HQ=40, KH=1, D=8, sinks=True, alibi_slopes=True, mask=True), schedule,
          config=dataclasses.replace(CONFIG, heads=16))


@halves
@pytest.mark.parametrize(("D", "DV"), [(64, 64), (80, 80), (128, 128), (24, 17), (192, 128)])
def test_head_sizes(D: int, DV: int, dtype: torch.dtype) -> None:
    check(drafts([35, 2], [3, 2], D=D, DV=DV, dtype=dtype), StreamK(), config=FOUR)


@cuts
@pytest.mark.parametrize("page_size", [1, 5, 16, None])
def test_page_sizes(schedule: Schedule, page_size: int | None) -> None:
    check(drafts(page_size=page_size, window=6, mask=True), schedule, config=TWO)


@cuts
def test_queries_and_outputs_that_lie_apart(schedule: Schedule) -> None:
    case = drafts([40, 17], [3, 2], HQ=6, mask=True)
    q, mask = torch.full((5, 9, 40), math.nan), torch.full((5, 7), -1, dtype=torch.int32)
    q[:, :6, :16], mask[:, :1] = case.q, case.mask
    out, lse = torch.full((6, 5, 40), math.nan), torch.full((6, 5), math.nan)
    call(dataclasses.replace(case, q=q[:, :6, :16], mask=mask[:, :1]), schedule, out.transpose(0, 1)[..., :16],
         lse.transpose(0, 1), config=TWO)
    case.expected.check(out.transpose(0, 1)[..., :16], lse.transpose(0, 1))
    assert out[..., 16:].isnan().all()


@cuts
@pytest.mark.parametrize("window", [1, 17, 2**40])
def test_pages_before_a_window_are_not_read(schedule: Schedule, window: int) -> None:
    """Neither the slots, which hold NaN, nor the entries of the table, which are no pages."""
    lens, q_lens = [50, 16, 3], [4, 3, 5]
    case = drafts(lens, q_lens, page_size=4, window=window)
    expected, table = case.expected, case.block_table.clone()
    for b, (n, m) in enumerate(zip(lens, q_lens, strict=True)):
        first = max(n - m - window + 1, 0)
        for t in range(first):
            where = int(case.block_table[b, t // 4]), t % 4
            case.k_cache[where] = case.v_cache[where] = math.nan
        table[b, : first // 4] = 2**31 - 1
    out, lse = run(dataclasses.replace(case, block_table=table), schedule, config=FOUR)
    expected.check(out, lse)


@pytest.fixture
def few_rows_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in ((variants, "CHUNK", 16), (variants, "SCAN_CHUNK", 32), (variants, "EXPAND_CHUNK", 4),
                                (variants, "EXPAND_SIZE", 8), (launch, "EXPAND_SIZE", 8), (launch, "SCAN_AT_MOST", 20)):
        monkeypatch.setattr(module, name, value)


@schedules
@pytest.mark.parametrize("B", [6, 24])
@pytest.mark.usefixtures("few_rows_at_once")
def test_rows_scanned_in_several_steps_and_beforehand(schedule: Schedule, B: int) -> None:
    rng = torch.Generator().manual_seed(1)
    lens, q_lens = (torch.randint(0, most, (B,), generator=rng).tolist() for most in (12, 5))
    lens[5], q_lens[5] = 150, 3
    check(drafts(lens, q_lens, HQ=1, KH=1, D=8, sinks=True), schedule, workers=4, config=TWO)


def test_blocks_do_not_show() -> None:
    """Fewer query tokens a row read the same keys."""
    case = drafts(mask=True, sinks=True)
    for block in (1, 8):
        check(case, StreamK(), config=dataclasses.replace(CONFIG, block=block))


@pytest.mark.parametrize("workers", [1, 7])
def test_invariant_requests_do_not_depend_on_company_workers_or_table(workers: int) -> None:
    schedule, how = Invariant(chunk=32), {"mask": True, "sinks": True, "alibi_slopes": True, "softcap": 2.0}
    lens, q_lens = [70, 9, 50], [5, 2, 1]
    out, lse = run(drafts(lens, q_lens, **how), schedule, config=FOUR)
    wide = drafts(lens, q_lens, capacity=500, **how)
    for b, first in enumerate([0, 5, 7]):
        alone = run(wide.request(b), schedule, workers=workers, config=FOUR)
        assert same_bits(alone[0], out[first : first + q_lens[b]])
        assert same_bits(alone[1], lse[first : first + q_lens[b]])


def test_the_block_of_a_shape() -> None:
    """As many query tokens as fill a product, no more than a request has, and of wide or float32 heads fewer."""
    def block(*args: Any) -> int:
        return configs.portable_several(*args).block

    assert [block(64, G, 2, None) for G in (1, 4, 5, 8, 33, 64, 128)] == [64, 16, 8, 8, 1, 1, 1]
    assert [block(128, 4, 2, most) for most in (1, 2, 3, 5, 100, None)] == [1, 2, 4, 8, 8, 8]
    assert [block(256, G, 2, None) for G in (4, 32, 128)] == [4, 1, 1]
    assert [block(64, G, 4, None) for G in (1, 4, 128)] == [16, 4, 1]
    assert configs.portable_several(128, 128, 2, None).heads == 32


# -- options


@pytest.mark.parametrize(("schedule", "dtype"), list(zip(CUTS, (torch.float32, torch.float16, torch.float32),
                                                         strict=True)), ids=name_of)
@pytest.mark.parametrize("names", [pair for n in (1, 2) for pair in itertools.combinations(OPTIONS, n)], ids="+".join)
def test_options_alone_and_in_pairs(names: tuple[str, ...], schedule: Schedule, dtype: torch.dtype) -> None:
    how = {key: value for name in names for key, value in OPTIONS[name].items()}
    check(padded(drafts([37, 2], [3, 3], dtype=dtype, **how), 1), schedule, config=TWO)


@halves
@schedules
def test_all_options_at_once(schedule: Schedule, dtype: torch.dtype) -> None:
    check(padded(drafts(dtype=dtype, softcap=3.0, sinks=True, alibi_slopes=True, mask=True, window=11), 2), schedule,
          config=TWO)


@halves
@schedules
@pytest.mark.parametrize("names", [("softcap",), ("sinks",), ("alibi",), ("softcap", "sinks", "alibi", "window")],
                         ids="+".join)
def test_options_of_one_query_token(schedule: Schedule, names: tuple[str, ...], dtype: torch.dtype) -> None:
    how = {key: value for name in names for key, value in OPTIONS[name].items()}
    check(make_case([37, 0, 2], dtype=dtype, **SMALL, **how), schedule)


@cuts
@pytest.mark.parametrize("sink", [-math.inf, -40.0, 0.0, 9.0])
@pytest.mark.parametrize("lens", [[0, 40], [3, 17]])
def test_sinks_of_any_size(schedule: Schedule, sink: float, lens: list[int]) -> None:
    check(drafts(lens, [2, 3], sinks=sink), schedule, config=TWO)
    check(make_case(lens, D=16, sinks=sink), schedule)


@pytest.mark.parametrize("softcap", [2.0**-126, 1e-3, 0.3, 5.0, 50.0, 1e6, 2.0**127])
@pytest.mark.parametrize("scale", [0.0, 0.25, 30.0])
def test_soft_caps_of_any_size(softcap: float, scale: float) -> None:
    check(drafts([30, 5], [3, 1], softcap=softcap, scale=scale), StreamK(), config=TWO)


@pytest.mark.parametrize("n", [31, 32, 33, 70])
def test_masks_of_several_words(n: int) -> None:
    """A draft of more tokens than a word has bits, of which each sees itself and every third before it."""
    i = torch.arange(n)
    mask = ((i[:, None] - i[None, :]) % 3 == 0) & (i[:, None] >= i[None, :])
    check(drafts([n + 5, n - 3], [n, n], HQ=1, KH=1, D=8, mask=[mask, mask]), StreamK(), config=FOUR)


@cuts
def test_a_mask_that_hides_all_of_a_draft(schedule: Schedule) -> None:
    """Nothing is left where the draft is all that a request has."""
    case = drafts([4, 30], [4, 4], mask=[torch.zeros(4, 4, dtype=torch.bool)] * 2)
    out, lse = check(case, schedule, config=TWO)
    assert (out[:4] == 0).all()
    assert (lse[:4] == -math.inf).all()


def test_a_tree_is_what_its_branches_are() -> None:
    """Two branches after a common token: each leaf sees its own, as on the CPU."""
    tree = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]).bool()
    case = drafts([40], [5], mask=[tree])
    here, there = check(case, StreamK(), config=FOUR), run_on_cpu(case)
    torch.testing.assert_close(here[0], there[0])
    torch.testing.assert_close(here[1], there[1])


@cuts
def test_hidden_slots_of_a_tile_do_not_show(schedule: Schedule) -> None:
    """Slots past what a row sees hold NaN, those of tokens that are not written yet and of other pages too."""
    case = drafts([TILE + 3, 5], [3, 2], capacity=2 * TILE, mask=True, softcap=2.0, alibi_slopes=True)
    assert case.k_cache.isnan().any()
    check(case, schedule, config=dataclasses.replace(CONFIG, block=1))

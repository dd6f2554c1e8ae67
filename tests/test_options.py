"""Soft cap, sinks, ALiBi and masks of drafts: every cell of the matrix, every length, and the edges of each option."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

import wavefill
from helpers import (
    DTYPES,
    SCHEDULES,
    Case,
    check,
    check_each_isa,
    cpu_isas,
    make_case,
    name_of,
    run,
    same_bits,
    torch_threads,
    using_isa,
)
from wavefill import Fixed, InvalidArgument, InvalidType, Invariant, StreamK, scores
from wavefill.backends import cpu
from wavefill.scores import AXES, Cell, Options
from wavefill.spec import parse_schedule

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
schedules = pytest.mark.parametrize("schedule", SCHEDULES)
#: All options together; `mask` is for cases with several query tokens.
ALL = {"softcap": 2.5, "sinks": True, "alibi_slopes": True}

# ---- the matrix

#: Keys and query tokens of each request, by the words of the axis.
BATCHES: dict[str, tuple[list[int], list[int] | None]] = {
    "1": ([40, 0, 130, 65], None),
    "draft": ([40, 5, 130, 65, 3], [4, 2, 0, 16, 3]),
    "chunk": ([200, 33, 64], [70, 1, 1]),
}
GRIDS = [dict(zip(("sinks", "softcap", "window", "alibi_slopes", "mask", "q_len"), values, strict=True))
         for values in itertools.product(*[(False, True)] * 5, BATCHES)]


def case_of(cell: Cell) -> Case:
    lens, q_lens = BATCHES[cell.q_len]
    return make_case(lens, q_lens=q_lens, HQ=6, KH=2, D=24, DV=16, dtype=getattr(torch, cell.dtype), page_size=16,
                     sinks=cell.sinks, alibi_slopes=cell.alibi_slopes, mask=cell.mask and q_lens is not None,
                     softcap=1.5 if cell.softcap else None, window=20 if cell.window else None)


def call(case: Case, schedule: str) -> tuple[Tensor, Tensor]:
    return run(case, schedule=schedule)


@pytest.mark.parametrize("grid", GRIDS, ids=lambda g: "-".join([g["q_len"], *(n for n, on in g.items() if on is True)]))
def test_every_cell_is_right_or_refused_by_name(grid: dict[str, object]) -> None:
    cells = [cell for cell in scores.cells("cpu") if all(getattr(cell, name) == on for name, on in grid.items())]
    assert len(cells) == 3 * 3 * 2
    served: dict[str, list[Cell]] = {"eager": [], "compiled": []}
    for cell in cells:
        words = scores.refusal(cell, "cpu")
        if words is None:
            served[cell.run].append(cell)
        else:
            with pytest.raises(TypeError, match=words):
                wavefill.decode_attention(*case_of(cell).tensors(), mask=torch.ones(4, 1).int())  # type: ignore[call-overload]
    for cell in served["eager"]:
        check_each_isa(case_of(cell), schedule=cell.schedule)
    cases = [(case_of(cell), cell.schedule) for cell in served["compiled"]]
    torch.compiler.reset()
    together = torch.compile(lambda: [call(*each) for each in cases], fullgraph=True, backend="aot_eager")
    for (case, _), result in zip(cases, together() if cases else (), strict=True):
        case.expected.check(*result)


def test_the_matrix_has_every_combination() -> None:
    for device, runs in (("cpu", 2), ("cuda", 3)):
        found = list(scores.cells(device))
        assert len(set(found)) == len(found) == 3 * 2**5 * 3 * 3 * runs
        assert [field.name for field in dataclasses.fields(Cell)] == list(AXES)


def test_the_page_shows_the_matrix() -> None:
    page = (Path(__file__).parents[1] / "docs" / "api.md").read_text(encoding="utf-8")
    assert page.partition("<!-- options -->\n")[2].partition("\n<!-- /options -->")[0] == scores.table()


# ---- every length


@dtypes
@pytest.mark.parametrize("page_size", [None, 1, 16])
@pytest.mark.parametrize("mask", [False, True], ids=["decode", "drafts"])
def test_every_length_with_all_options(mask: bool, page_size: int | None, dtype: torch.dtype) -> None:
    """0 to 140 keys, in one batch and in a call each; three heads of a group, so that vectors of four are not full."""
    q_lens = [n % 5 for n in range(141)] if mask else None
    for window in (None, 33):
        case = make_case(range(141), q_lens=q_lens, HQ=3, KH=1, D=8, dtype=dtype, page_size=page_size, window=window,
                         mask=mask, **ALL)
        for schedule in (*SCHEDULES, StreamK(tile=5)):
            check(case, schedule=schedule)
    check_each_isa(case, schedule="stream_k")
    with torch_threads(1):
        each = [run(case.request(b)) for b in range(141)]
    case.expected.check(torch.cat([out for out, _ in each]), torch.cat([lse for _, lse in each]))


@pytest.mark.parametrize("G", [1, 2, 3, 4, 5, 7, 8, 16, 64, 128])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8, 17, 100])
def test_groups_and_query_counts(G: int, n: int) -> None:
    """Slopes and positions differ between the rows of a block, however query tokens times heads are cut."""
    case = make_case([130, n, 65], q_lens=[n, n, 1], HQ=2 * G, KH=2, D=16, dtype=torch.float16, mask=True, **ALL)
    check_each_isa(case, schedule="stream_k")


@pytest.mark.parametrize(("D", "DV", "latent"), [(64, 64, False), (192, 128, False), (576, 512, True), (33, 17, False)])
@dtypes
def test_head_sizes_and_layouts(D: int, DV: int, latent: bool, dtype: torch.dtype) -> None:
    for layout in ("nhd", "kv_tokens", "hnd"):
        check(make_case([100, 7], q_lens=[5, 2], HQ=8, KH=1 if latent else 2, D=D, DV=DV, dtype=dtype, page_size=16,
                        layout=layout, latent=latent, mask=True, **ALL))


@dtypes
@pytest.mark.parametrize("scale", [-0.4, 0.0, 3.0])
def test_any_scale_comes_before_the_cap(dtype: torch.dtype, scale: float) -> None:
    check_each_isa(make_case([150, 3, 70], q_lens=[70, 5, 3], dtype=dtype, scale=scale, window=40, mask=True, **ALL))


# ---- sinks


@dtypes
@pytest.mark.parametrize("schedule", [
    *(Fixed(splits=n) for n in (1, 2, 3, 5, 20)), StreamK(tile=16), StreamK(), Invariant(chunk=64), Invariant(),
    Fixed(rule="flashdecoding"),
], ids=str)
@pytest.mark.parametrize("workers", [1, 2, 7, 60])
def test_a_sink_counts_once_whatever_the_split(workers: int, schedule: object, dtype: torch.dtype) -> None:
    """Against a call without sinks: one more term in the sum, and a value of 0 for it."""
    case = make_case([700, 0, 129, 1], HQ=6, KH=2, D=16, dtype=dtype, page_size=16, sinks=True)
    results = []
    for options in (Options(sinks=case.sinks), scores.NONE):
        out, lse = torch.full(case.out_shape, math.nan, dtype=dtype), torch.full((4, 6), math.nan)
        q, k, v, lens, table = case.tensors()
        cpu.attention(q, k, v, lens, table, None, out, lse, scale=0.25, causal=True, window=None,
                      schedule=parse_schedule(schedule), workers=workers, options=options)
        results.append((out.double(), lse.double()))
    (out, lse), (bare, bare_lse) = results
    assert case.sinks is not None
    whole = torch.logaddexp(bare_lse, case.sinks.double())
    torch.testing.assert_close(lse, whole, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(out, bare * (bare_lse - whole).exp().unsqueeze(-1), rtol=2 * torch.finfo(dtype).eps,
                               atol=1e-6)


@schedules
@pytest.mark.parametrize("sink", [1e4, -1e4, 60.0, -60.0, -math.inf])
@pytest.mark.parametrize("alone", [False, True], ids=["with-all", "alone"])
def test_extreme_sinks(alone: bool, sink: float, schedule: str) -> None:
    others = {} if alone else ALL
    for q_lens in (None, [3, 1, 2, 0, 4]):
        case = make_case([700, 0, 129, 65, 1], q_lens=q_lens, page_size=16, **{**others, "sinks": sink})
        out, lse = check(case, schedule=schedule)
        if sink == 1e4:
            assert (out == 0).all()
            assert (lse == 1e4).all()
        if sink == -math.inf:
            bare = run(dataclasses.replace(case, sinks=None), schedule=schedule)
            assert same_bits(out, bare[0])
            assert same_bits(lse, bare[1])


@dtypes
def test_numbers_a_head_may_have_any_dtype_and_stride(dtype: torch.dtype) -> None:
    case = make_case([70, 3], q_lens=[3, 1], mask=True, **ALL)
    assert case.sinks is not None
    assert case.alibi_slopes is not None
    assert case.mask is not None
    sinks, slopes = case.sinks.to(dtype), case.alibi_slopes.to(dtype)
    check(dataclasses.replace(case, sinks=sinks, alibi_slopes=slopes))
    apart = dataclasses.replace(case, sinks=torch.stack([sinks, sinks + 9], 1)[:, 0],
                                alibi_slopes=slopes[:1].expand(4), mask=torch.cat([case.mask, -case.mask], 1)[:, :1])
    check(apart)


@schedules
def test_parts_of_a_context_that_are_merged_take_the_sinks_once(schedule: str) -> None:
    case = make_case([300], sinks=True)
    q, k, v, _, _ = case.tensors()
    assert v is not None
    parts = [wavefill.decode_attention(q, k[:, keys], v[:, keys], torch.tensor([n], dtype=torch.int32), return_lse=True,
                                       sinks=sinks, schedule=schedule)
             for keys, n, sinks in ((slice(100), 100, None), (slice(100, 300), 200, case.sinks))]
    merged = wavefill.merge_states(torch.stack([out for out, _ in parts]), torch.stack([lse for _, lse in parts]))
    for x, y in zip(merged, run(case, schedule=schedule), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


# ---- soft cap


@pytest.mark.parametrize("cap", [1.0, 30.0, 0.01, 1e30, 3e38, 2.0**-126])
def test_the_cap_is_exact_to_a_few_units(cap: float) -> None:
    """With a single key the LSE is the capped score. From far below the cap, where a tanh made of exponentials loses
    its digits, to far above, on both sides of 0."""
    size = torch.logspace(-12, 6, 4001, dtype=torch.float64) * min(cap, 1e25)
    size = torch.cat([size, cap * torch.linspace(0.55, 0.7, 400, dtype=torch.float64)]).float()
    q = torch.cat([size, -size])[size.repeat(2) >= 2.0**-126].view(-1, 1, 1)
    one = torch.ones(len(q), 1, 1, 1)
    for isa in cpu_isas():
        with using_isa(isa):
            _, lse = wavefill.decode_attention(q, one, one, torch.ones(len(q), dtype=torch.int32), scale=1.0,
                                               softcap=cap, return_lse=True)
        exact = cap * torch.tanh(q.double().flatten() / cap)
        error = (lse.double().flatten() - exact).abs() / exact.abs()
        assert float(error.max()) < 3.5 * torch.finfo(torch.float32).eps, isa
        half = len(q) // 2
        assert same_bits(lse[:half], -lse[half:])


def test_scores_that_are_no_numbers_stay_so_and_infinite_ones_are_capped() -> None:
    q = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0]).view(-1, 1, 1)
    one = torch.ones(5, 1, 1, 1)
    for isa in cpu_isas():
        with using_isa(isa):
            _, lse = wavefill.decode_attention(q, one, one, torch.ones(5, dtype=torch.int32), scale=1.0, softcap=7.0,
                                               return_lse=True)
        assert lse[0].isnan().all()
        assert lse[1:].flatten().tolist() == [7.0, -7.0, 0.0, 0.0]


@dtypes
@schedules
@pytest.mark.parametrize("cap", [1e-30, 1e-3, 50.0, 3e38])
def test_caps_from_tiny_to_huge(cap: float, schedule: str, dtype: torch.dtype) -> None:
    case = make_case([200, 1, 65], dtype=dtype, page_size=16, softcap=cap, scale=2.0)
    out, lse = check(case, schedule=schedule)
    if cap == 3e38:
        bare_out, bare_lse = run(dataclasses.replace(case, softcap=None), schedule=schedule)
        torch.testing.assert_close(lse, bare_lse, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(out.float(), bare_out.float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    if cap == 1e-30:
        torch.testing.assert_close(lse[0], torch.full((4,), math.log(200)))


# ---- ALiBi


@dtypes
@schedules
@pytest.mark.parametrize("slope", [0.0, 0.05, -0.05, 3.0, 1e4])
def test_slopes(slope: float, schedule: str, dtype: torch.dtype) -> None:
    case = make_case([300, 5, 64], q_lens=[4, 7, 1], dtype=dtype, page_size=16, alibi_slopes=slope)
    out, lse = check(case, schedule=schedule)
    if slope == 0:
        torch.testing.assert_close(lse, run(dataclasses.replace(case, alibi_slopes=None), schedule=schedule)[1])
    if slope == 1e4:  # every token that sees a key sees its own alone
        k, v = case.k_cache, case.v_cache
        assert case.block_table is not None
        assert v is not None
        own = (int(case.block_table[0, 299 // 16]), 299 % 16)
        torch.testing.assert_close(out[3], v[own].repeat_interleave(2, 0))
        score = (case.q[3].float() * k[own].repeat_interleave(2, 0).float()).sum(-1) * 32**-0.5
        torch.testing.assert_close(lse[3], score, rtol=1e-5, atol=1e-5)


@schedules
@pytest.mark.parametrize("causal", [False, True], ids=["not_causal", "causal"])
def test_the_bias_is_of_the_distance_on_both_sides(causal: bool, schedule: str) -> None:
    """Equal scores, so that the LSE is that of the biases: 0 for a token's own key, -slope for its neighbours."""
    case = make_case([90], q_lens=[6], HQ=2, KH=1, D=4, alibi_slopes=torch.tensor([0.25, 1.5]), causal=causal)
    case = dataclasses.replace(case, q=torch.zeros_like(case.q))
    _, lse = run(case, schedule=schedule)
    for i, (h, slope) in itertools.product(range(6), enumerate((0.25, 1.5))):
        pos = 84 + i
        terms = [math.exp(-slope * abs(pos - j)) for j in range(pos + 1 if causal else 90)]
        assert float(lse[i, h]) == pytest.approx(math.log(math.fsum(terms)), rel=1e-6)


# ---- masks of drafts


def bits_of(mask: Tensor, t: int, n: int) -> list[int]:
    return [(int(mask[t, j // 32]) >> (j % 32)) & 1 for j in range(n)]


@pytest.mark.parametrize("sizes", [[], [0], [1], [3, 0, 5], [31, 32, 33], [64, 1], [65, 2, 0], [100]], ids=str)
def test_packing(sizes: list[int]) -> None:
    masks = [torch.rand(n, n) < 0.5 for n in sizes]
    packed = wavefill.pack_mask(masks)
    assert packed.dtype == torch.int32
    assert packed.shape == (sum(sizes), max([1, *(-(-n // 32) for n in sizes)]))
    rows = [(mask, i) for mask in masks for i in range(len(mask))]
    for t, (mask, i) in enumerate(rows):
        assert bits_of(packed, t, packed.shape[1] * 32) == mask[i].int().tolist() + [0] * (
            packed.shape[1] * 32 - mask.shape[1])
    if len(set(sizes)) == 1:
        assert torch.equal(wavefill.pack_mask(torch.stack(masks)), packed)


@pytest.mark.parametrize(("masks", "error", "message"), [
    ([torch.ones(2, 3).bool()], InvalidArgument, r"masks\[0\]: must be \[n, n\]; got \[2, 3\]"),
    ([torch.ones(1, 1).bool(), torch.ones(2).bool()], InvalidArgument, r"masks\[1\]: must be \[n, n\]; got \[2\]"),
    ([torch.ones(2, 2)], InvalidType, r"masks\[0\]: dtype must be bool; got torch.float32"),
    ([[True]], InvalidType, r"masks\[0\]: must be a torch.Tensor; got list"),
    (torch.ones(2, 2).bool(), InvalidArgument, r"masks: as one tensor must be \[B, n, n\]; got \[2, 2\]"),
    ([torch.ones(1, 1).bool(), torch.ones(1, 1, device="meta").bool()], InvalidArgument, r"masks\[1\]: must be on"),
])
def test_what_is_no_mask(masks: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        wavefill.pack_mask(masks)  # type: ignore[arg-type]


@dtypes
@schedules
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not_causal"])
@pytest.mark.parametrize("n", [1, 2, 16, 31, 32, 33, 64, 65, 100])
def test_drafts_of_any_length(n: int, causal: bool, schedule: str, dtype: torch.dtype) -> None:
    """Ragged ones too, zero-length ones among them, and requests that have fewer keys than query tokens."""
    case = make_case([n + 70, 0, n, 9, n // 2], q_lens=[n, 0, n, 3, n], HQ=2, KH=1, D=8, dtype=dtype, page_size=16,
                     mask=True, causal=causal)
    check(case, schedule=schedule)


def test_a_tree() -> None:
    """Two branches of two tokens after a root: each sees its own ancestors, as if it had come alone."""
    tree = torch.tensor([[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 1, 0, 1, 0], [1, 0, 1, 0, 1]]).bool()
    case = make_case([75], q_lens=[5], mask=[tree])
    out, lse = check(case)
    for leaf, path in ((3, [0, 1, 3]), (4, [0, 2, 4])):
        kept = torch.tensor([*range(70), *(70 + i for i in path)])
        assert case.v_cache is not None
        alone = Case(case.q[leaf : leaf + 1], case.k_cache[:, kept], case.v_cache[:, kept],
                     torch.tensor([73], dtype=torch.int32))
        alone_out, alone_lse = run(alone)
        torch.testing.assert_close(out[leaf : leaf + 1], alone_out)
        torch.testing.assert_close(lse[leaf : leaf + 1], alone_lse)


@dtypes
@schedules
def test_a_mask_that_shows_all_changes_no_bit(schedule: str, dtype: torch.dtype) -> None:
    sizes = [40, 0, 3, 64]
    case = make_case([300, 5, 70, 64], q_lens=sizes, dtype=dtype, mask=[torch.ones(n, n).bool() for n in sizes])
    bare = run(dataclasses.replace(case, mask=None), schedule=schedule)
    assert all(same_bits(a, b) for a, b in zip(run(case, schedule=schedule), bare, strict=True))


def test_bits_past_a_draft_and_words_past_all_of_them_mean_nothing() -> None:
    case = make_case([300, 70], q_lens=[37, 5], mask=True)
    assert case.mask is not None
    expected = run(case)
    beyond = torch.randint(-(2**31), 2**31, (42, 4), dtype=torch.int64).int()
    own = wavefill.pack_mask([torch.ones(n, n).bool() for n in (37, 5)])
    beyond[:, :2] = (beyond[:, :2] & ~own) | (case.mask & own)
    found = run(dataclasses.replace(case, mask=beyond))
    assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))


# ---- rows that see nothing, and padding


@dtypes
@schedules
@pytest.mark.parametrize("mask", [False, True], ids=["causal", "mask"])
def test_rows_without_keys_have_the_sink_and_padding_has_not(mask: bool, schedule: str, dtype: torch.dtype) -> None:
    sizes = [5, 2, 3, 40]
    hidden = [torch.zeros(n, n).bool() for n in sizes]
    case = make_case([3, 0, 3, 40], q_lens=sizes, dtype=dtype, sinks=True, softcap=2.0, mask=hidden if mask else False)
    out, lse = check(case, schedule=schedule)
    assert case.sinks is not None
    blind = range(50) if mask else [0, 1, 5, 6]
    for t in blind:
        assert (out[t] == 0).all()
        assert torch.equal(lse[t], case.sinks)
    padded = dataclasses.replace(
        case, q=torch.cat([case.q, torch.full((3, *case.q.shape[1:]), math.nan, dtype=dtype)]),
        mask=None if case.mask is None else torch.cat([case.mask, torch.full((3, case.mask.shape[1]), -1).int()]))
    out, lse = run(padded, schedule=schedule, out=torch.full((53, *case.out_shape[1:]), math.nan, dtype=dtype))
    case.expected.check(out[:50], lse[:50])
    assert (out[50:] == 0).all()
    assert (lse[50:] == -math.inf).all()


def test_a_batch_of_nothing_but_padding() -> None:
    case = make_case([7, 0], q_lens=[0, 0], sinks=True, mask=True)
    out, lse = wavefill.attention(torch.full((2, 4, 32), math.nan), *case.tensors()[1:], sinks=case.sinks,
                                  cu_seqlens_q=case.cu_seqlens_q, mask=torch.zeros(2, 1).int(), return_lse=True)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


# ---- gradients


@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_a_backward_pass_through_numbers_a_head_is_refused(name: str) -> None:
    case = make_case([20])
    learnt = torch.nn.Parameter(torch.zeros(4))
    out = wavefill.decode_attention(*case.tensors(), **{name: learnt})
    assert out.requires_grad
    with pytest.raises(InvalidArgument, match=rf"^{name}: .*no backward pass"):
        out.sum().backward()
    with torch.no_grad():
        assert not wavefill.decode_attention(*case.tensors(), **{name: learnt}).requires_grad

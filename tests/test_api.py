"""The public functions: their signatures, what they take and give back, and what a call costs."""

from __future__ import annotations

import doctest
import inspect
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import wavefill
from helpers import DTYPES, Case, assert_close_to_reference, check, guarded, make_case, name_of, run
from wavefill import Fixed, InvalidArgument, Invariant, KVPages, StreamK, reference

# ---- signatures


def test_signatures() -> None:
    """Names are a promise: positions, keywords and defaults."""
    tensors = ["q", "k_cache", "v_cache", "seq_lens", "block_table"]
    options = {
        "scale": None, "window": None, "softcap": None, "sinks": None, "alibi_slopes": None, "k_scale": None,
        "v_scale": None, "head_dim_v": None, "max_seq_len": None, "schedule": "auto", "softmax": "online",
        "impl": "auto", "return_lse": False, "out": None, "sm_budget": None, "kv_shard": None,
    }
    several = {"cu_seqlens_q": inspect.Parameter.empty, "max_q_len": None, "causal": True, "mask": None, **options}
    for function, keywords in ((wavefill.decode_attention, options), (wavefill.attention, several)):
        parameters = inspect.signature(function).parameters.values()
        assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == tensors
        assert {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY} == keywords
    assert list(inspect.signature(wavefill.merge_states).parameters) == ["outs", "lses"]


def test_the_examples_in_the_docstrings_run() -> None:
    from wavefill import api, cache

    for module in (api, cache):
        names = {"torch": torch, "wavefill": wavefill, **vars(module)}
        results = doctest.testmod(module, extraglobs=names)
        assert results.attempted > 3
        assert not results.failed


# ---- out


@pytest.mark.parametrize("page_size", [None, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_out_is_written_in_place_and_nothing_round_it(dtype: torch.dtype, page_size: int | None) -> None:
    case = make_case([7, 0, 130], dtype=dtype, page_size=page_size)
    fresh, fresh_lse = run(case)
    out, untouched = guarded(case.out_shape, dtype)
    result, lse = run(case, out=out)
    untouched()
    assert result is out
    assert torch.equal(out, fresh)
    assert torch.equal(lse, fresh_lse)
    alone = wavefill.decode_attention(*case.tensors(), out=out)
    assert alone is out


def _heads_first(shape: tuple[int, ...]) -> Tensor:
    return torch.full((shape[1], shape[0], shape[2]), torch.nan).transpose(0, 1)


def _columns_apart(shape: tuple[int, ...]) -> Tensor:
    return torch.full((*shape[:2], 2 * shape[2]), torch.nan)[..., ::2]


def _columns_first(shape: tuple[int, ...]) -> Tensor:
    return torch.full((shape[2], *shape[:2]), torch.nan).permute(1, 2, 0)


@pytest.mark.parametrize("several", [False, True], ids=["one-token", "several"])
@pytest.mark.parametrize("make_out", [_heads_first, _columns_apart, _columns_first])
def test_out_may_have_any_strides(make_out: Callable[[tuple[int, ...]], Tensor], several: bool) -> None:
    case = make_case([7, 0, 130], q_lens=[2, 1, 3] if several else None)
    out = make_out(case.out_shape)
    result, lse = run(case, out=out)
    assert result is out
    assert_close_to_reference(result, lse, case)
    if make_out is _columns_apart:
        assert torch.as_strided(out, out.shape, out.stride(), 1).isnan().all(), "the columns between are not ours"


def test_out_may_interleave_with_q_but_not_meet_it() -> None:
    """One buffer for q and the output is fine as long as no element belongs to both."""
    case = make_case([7, 20], D=16)
    both = torch.full((2, 4, 32), torch.nan)
    both[..., :16] = case.q
    q = both[..., :16]
    out = wavefill.decode_attention(q, *case.tensors()[1:], out=both[..., 16:])
    assert torch.equal(out, run(case)[0])
    with pytest.raises(InvalidArgument, match="out: is written and must share no memory with q"):
        wavefill.decode_attention(q, *case.tensors()[1:], out=both[..., 15:31])


# ---- strides of the inputs


def _spread(x: Tensor) -> Tensor:
    """The same values with a last stride of 2."""
    wide = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype)
    wide[..., ::2] = x
    return wide[..., ::2]


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


@pytest.mark.parametrize("stride", [_spread, _transposed])
@pytest.mark.parametrize("which", ["q", "k_cache", "v_cache", "all"])
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_last_strides_other_than_one(which: str, stride: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    case = make_case([7, 0, 70], page_size=16, dtype=dtype)
    q, k, v, lens, table = case.tensors()
    q, k, v = (stride(x) if which in (name, "all") else x for name, x in (("q", q), ("k_cache", k), ("v_cache", v)))
    out, lse = wavefill.decode_attention(q, k, v, lens, table, return_lse=True)
    assert_close_to_reference(out, lse, case)


def test_expanded_inputs() -> None:
    """Stride 0: one query for all heads, one KV head for all."""
    case = make_case([7, 70], KH=4)
    q, k, v, lens, _ = case.tensors()
    q, k = q[:, :1].expand(-1, 4, -1), k[:, :, :1].expand(-1, -1, 4, -1)
    expanded = Case(q.contiguous(), k.contiguous(), v, lens)
    out, lse = wavefill.decode_attention(q, k, v, lens, return_lse=True)
    assert_close_to_reference(out, lse, expanded)


def test_strided_lengths_tables_and_offsets() -> None:
    case = make_case([70, 20, 3], page_size=4, q_lens=[2, 1, 3])
    expected = run(case)
    q, k, v, lens, table = case.tensors()
    assert table is not None
    assert case.cu_seqlens_q is not None
    lens, starts = (torch.stack([x, x - 99], 1)[:, 0] for x in (lens, case.cu_seqlens_q))
    wide = torch.cat([table, torch.full_like(table, -7)], 1)[:, : table.shape[1]]
    for some in (wide, table.t().contiguous().t(), torch.stack([table, table], 2)[..., 0]):
        out, lse = wavefill.attention(q, k, v, lens, some, cu_seqlens_q=starts, return_lse=True)
        assert torch.equal(out, expected[0])
        assert torch.equal(lse, expected[1])


# ---- options


def test_scale_defaults_to_the_root_of_the_head_size() -> None:
    case = make_case([70, 20], D=48)
    q, *rest = case.tensors()
    assert torch.equal(wavefill.decode_attention(q, *rest), wavefill.decode_attention(q, *rest, scale=48**-0.5))
    assert torch.equal(wavefill.decode_attention(q, *rest, scale=1), wavefill.decode_attention(q, *rest, scale=1.0))


def test_lse_comes_only_when_asked_for() -> None:
    case = make_case([70, 0])
    alone = wavefill.decode_attention(*case.tensors())
    out, lse = wavefill.decode_attention(*case.tensors(), return_lse=True)
    assert torch.equal(alone, out)
    assert lse.dtype == torch.float32
    assert lse.is_contiguous()
    assert out.is_contiguous()


@pytest.mark.parametrize("schedule", [
    "auto", "fixed", "stream_k", "invariant", Fixed(), Fixed(splits=3), Fixed(chunk=100), Fixed(rule="flashdecoding"),
    StreamK(), StreamK(tile=32), Invariant(), Invariant(chunk=128),
], ids=str)
def test_every_schedule_is_exact(schedule: wavefill.spec.ScheduleArg) -> None:
    check(make_case([700, 0, 129], page_size=16), schedule=schedule)
    check(make_case([700, 5, 129], q_lens=[3, 0, 2]), schedule=schedule)


@pytest.mark.parametrize("impl", ["auto", "cpu"])
def test_impl(impl: str) -> None:
    check(make_case([70]), impl=impl)


def test_pages_of_a_cache_stand_for_both_caches() -> None:
    case = make_case([70, 20], page_size=16, q_lens=[2, 3])
    q, k, v, lens, table = case.tensors()
    assert v is not None
    pages = KVPages(k, v)
    found = wavefill.attention(q, pages, None, lens, table, cu_seqlens_q=case.cu_seqlens_q, return_lse=True)
    for x, y in zip(found, run(case), strict=True):
        assert torch.equal(x, y)


def test_a_latent_cache_is_its_own_v() -> None:
    case = make_case([70, 0, 20], page_size=16, HQ=16, KH=1, D=576, DV=512, latent=True, dtype=torch.bfloat16)
    check(case)


@pytest.mark.parametrize("hint", [70, 71, 10**6])
def test_upper_bounds_change_nothing(hint: int) -> None:
    case = make_case([70, 20], page_size=16, q_lens=[2, 3])
    for schedule in ("auto", "invariant"):
        found = run(case, max_seq_len=hint, max_q_len=3, schedule=schedule)
        for x, y in zip(found, run(case, schedule=schedule), strict=True):
            assert torch.equal(x, y)


def test_not_causal_sees_all_keys() -> None:
    case = make_case([9, 4], q_lens=[3, 4], causal=False)
    out, _ = check(case)
    last = wavefill.attention(*case.tensors(), cu_seqlens_q=case.cu_seqlens_q, causal=True)
    assert torch.equal(out[2], last[2])
    assert not torch.equal(out[0], last[0])


# ---- nothing to do


@pytest.mark.parametrize("page_size", [None, 16])
def test_degenerate_shapes_give_empty_results(page_size: int | None) -> None:
    for schedule in ("auto", "fixed", "invariant"):
        none = make_case([], page_size=page_size)
        out, lse = run(none, schedule=schedule)
        assert (out.shape, lse.shape) == ((0, 4, 32), (0, 4))
        idle = make_case([4096, 3], page_size=page_size, q_lens=[0, 0])
        out, lse = run(idle, schedule=schedule)
        assert (out.shape, lse.shape) == ((0, 4, 32), (0, 4))
        check(make_case([0, 17, 0, 1], page_size=page_size), schedule=schedule)
        check(make_case([0, 0], page_size=page_size), schedule=schedule)


def test_caches_without_room_serve_requests_without_keys() -> None:
    q, lens = torch.randn(2, 4, 8), torch.zeros(2, dtype=torch.int32)
    for kv, table in (
        (torch.empty(2, 0, 2, 8), None),
        (torch.empty(0, 16, 2, 8), torch.full((2, 3), -1, dtype=torch.int32)),
        (torch.empty(3, 16, 2, 8), torch.empty(2, 0, dtype=torch.int32)),
    ):
        out, lse = wavefill.decode_attention(q, kv, kv, lens, table, return_lse=True)
        assert (out == 0).all()
        assert (lse == -math.inf).all()


def test_tokens_past_the_last_offset_get_zeros() -> None:
    case = make_case([9, 4], q_lens=[3, 4])
    padded = torch.cat([case.q, torch.full((5, 4, 32), torch.nan)])
    out = torch.full((12, 4, 32), torch.nan)
    _, lse = wavefill.attention(padded, *case.tensors()[1:], cu_seqlens_q=case.cu_seqlens_q, return_lse=True, out=out)
    assert_close_to_reference(out[:7], lse[:7], case)
    assert (out[7:] == 0).all()
    assert (lse[7:] == -math.inf).all()


# ---- merge


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("shape", [(), (3,), (5, 4), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("n", [0, 1, 2, 3, 7])
def test_merge_of_any_number_of_states(n: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    outs, lses = torch.randn(n, *shape, 24).to(dtype), 5 * torch.randn(n, *shape)
    lses[torch.rand(lses.shape) < 0.3] = -math.inf
    outs[lses == -math.inf] = torch.nan
    out, lse = wavefill.merge_states(outs, lses)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((*shape, 24), dtype, shape, torch.float32)
    expected = reference.merge_states(outs, lses)
    torch.testing.assert_close(out.double(), expected[0], atol=1e-6, rtol=2 * torch.finfo(dtype).eps)
    torch.testing.assert_close(lse.double(), expected[1], atol=1e-6, rtol=1e-6)


def test_merging_empty_states_is_not_poisonous() -> None:
    """Rows without keys in the first two parts equal the third alone; empty in all stays empty and mergeable."""
    outs, lses = torch.zeros(3, 4, 8), torch.full((3, 4), -math.inf)
    outs[2], lses[2, :3] = torch.randn(4, 8), torch.randn(3)
    out, lse = wavefill.merge_states(outs, lses)
    assert torch.equal(out[:3], outs[2, :3])
    torch.testing.assert_close(lse[:3], lses[2, :3])
    assert (out[3] == 0).all()
    assert lse[3] == -math.inf
    again, _ = wavefill.merge_states(torch.stack([out, out]), torch.stack([lse, lse]))
    torch.testing.assert_close(again, out)


def test_far_apart_lses_do_not_overflow() -> None:
    out, lse = wavefill.merge_states(torch.tensor([[1.0], [2.0]]), torch.tensor([1e30, -1e30]))
    assert out.tolist() == [1.0]
    assert lse == torch.tensor(1e30)


@pytest.mark.parametrize("cut", [1, 64, 3072])
def test_parts_of_a_context_merge_to_the_whole(cut: int) -> None:
    """A prefix and a suffix of 3,136 keys, merged by their natural-log LSEs (another base would be 12 % off)."""
    case = make_case([3136])
    q, k, v, lens, _ = case.tensors()
    assert v is not None
    parts = [wavefill.decode_attention(q, k[:, s], v[:, s], torch.tensor([n], dtype=torch.int32), return_lse=True)
             for s, n in ((slice(None, cut), cut), (slice(cut, None), 3136 - cut))]
    out, lse = wavefill.merge_states(*(torch.stack(x) for x in zip(*parts, strict=True)))
    whole, whole_lse = wavefill.decode_attention(q, k, v, lens, return_lse=True)
    torch.testing.assert_close(out, whole, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(lse, whole_lse)


@pytest.mark.parametrize("scale", [0.088, 1.0, 2.5])
@pytest.mark.parametrize("splits", [1, 4])
def test_lse_holds_the_scale_once(scale: float, splits: int) -> None:
    case = make_case([300], scale=scale)
    _, lse = run(case, schedule=Fixed(splits=splits))
    q, k, *_ = case.tensors()
    scores = torch.einsum("bhgd,bshd->bhgs", q.view(1, 2, 2, 32), k) * scale
    torch.testing.assert_close(lse, scores.logsumexp(-1).flatten(1), rtol=1e-5, atol=1e-5)


# ---- gradients


def test_a_backward_pass_is_refused_and_nothing_else() -> None:
    case = make_case([20])
    q, k, v, lens, _ = case.tensors()
    expected = wavefill.decode_attention(q, k, v, lens)
    q.requires_grad_()
    for call in (
        lambda: wavefill.decode_attention(q, k, v, lens),
        lambda: wavefill.decode_attention(q, k, v, lens, return_lse=True)[1],
        lambda: wavefill.merge_states(torch.stack([q, q]), torch.zeros(2, 1, 4))[0],
    ):
        result = call()
        assert result.requires_grad, "a gradient that is lost in silence is worse than an error"
        with pytest.raises(InvalidArgument, match=r"no backward pass.*torch\.no_grad\(\)"):
            result.sum().backward()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            result = wavefill.decode_attention(q, k, v, lens)
        assert torch.equal(result, expected)
        assert not result.requires_grad


def test_results_of_inference_mode_go_on() -> None:
    with torch.inference_mode():
        case = make_case([20, 3], page_size=4)
        out = torch.empty(case.out_shape)
        assert torch.equal(wavefill.decode_attention(*case.tensors(), out=out), run(case)[0])


# ---- NaN where nobody looks, and where somebody does


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("page_size", [None, 16])
def test_nan_stays_in_its_request(page_size: int | None, window: int | None, dtype: torch.dtype) -> None:
    """Slots without a token hold NaN in every case; here a key of the first request does, too."""
    case = make_case([70, 69, 0], q_lens=[3, 4, 1], page_size=page_size, window=window, dtype=dtype)
    expected, lse = run(case)
    assert expected.isfinite().all()
    row = 0 if case.block_table is None else int(case.block_table[0, 69 // 16])
    _, _, v, *_ = case.tensors()
    assert v is not None
    v[row, 69 if page_size is None else 69 % 16] = torch.nan
    found, found_lse = run(case)
    assert found[2].isnan().all(), "the query that sees the key"
    assert torch.equal(found[3:], expected[3:])
    assert torch.equal(found_lse, lse), "V has no part in it"

"""Attention over quantised caches on the CPU: held to float64 on what the codes stand for."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

import wavefill
from helpers import DTYPES, LAYOUTS, SCHEDULES, cpu_isas, make_case, name_of, run, same_bits, torch_threads, using_isa
from quantised import PLAIN, Quantised, make_quantised
from wavefill import Fixed, Invariant, StreamK
from wavefill.spec import InvalidArgument, InvalidType

forms = pytest.mark.parametrize("form", PLAIN)
#: Lengths round tiles (32) and pages (16, 64).
EDGES = [1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 0, 333]


@lru_cache(maxsize=1)
def all_lengths(form: str, dtype: torch.dtype, page_size: int) -> Quantised:
    return make_quantised(form, range(1101), HQ=2, KH=1, D=16, dtype=dtype, page_size=page_size)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("dtype", "page_size"), list(zip(DTYPES, (1, 64, 16), strict=True)), ids=name_of)
@forms
def test_every_length(form: str, dtype: torch.dtype, page_size: int, schedule: str) -> None:
    """0 to 1,100 keys, in one batch and in a call each, and the LSE of each."""
    case = all_lengths(form, dtype, page_size)
    case.check(cpu_isas()[:1], schedule=schedule)
    with torch_threads(1):
        each = [case.request(b).run(schedule=schedule) for b in range(1101)]
    case.plain.expected.check(torch.cat([out for out, _ in each]), torch.cat([lse for _, lse in each]))


@pytest.mark.parametrize("isa", cpu_isas())
@forms
def test_every_length_with_each_instruction_set(form: str, isa: str) -> None:
    all_lengths(form, torch.bfloat16, 16).check([isa], schedule="stream_k")


@pytest.mark.parametrize(("HQ", "KH"), [(G * KH, KH) for G in (1, 2, 3, 4, 5, 8, 16, 33) for KH in (1, 3)], ids=str)
@forms
def test_group_sizes(form: str, HQ: int, KH: int) -> None:
    for dtype, schedule in zip(DTYPES, SCHEDULES, strict=True):
        make_quantised(form, EDGES, HQ=HQ, KH=KH, D=24, dtype=dtype, page_size=16).check(schedule=schedule)


DIMS = [(D, D) for D in (1, 2, 7, 15, 31, 33, 60, 64, 80, 96, 112, 128, 192, 256, 576)]
DIMS += [(192, 128), (64, 128), (24, 1), (1, 24), (40, 33)]


@pytest.mark.parametrize(("D", "DV"), DIMS, ids=[f"D{a}_DV{b}" for a, b in DIMS])
@forms
def test_head_sizes(form: str, D: int, DV: int) -> None:
    for dtype, layout in zip(DTYPES, ("nhd", "hnd", "kv_tokens"), strict=True):
        case = make_quantised(form, [1, 64, 65, 130], HQ=10, KH=2, D=D, DV=DV, dtype=dtype, page_size=3, layout=layout)
        case.check(schedule="stream_k")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("page_size", [None, 3, 16, 64], ids=lambda p: "contiguous" if p is None else f"page{p}")
@forms
def test_layouts(form: str, page_size: int | None, layout: str) -> None:
    case = make_quantised(form, EDGES, HQ=6, KH=3, D=20, DV=12, page_size=page_size, layout=layout, capacity=400)
    case.check(cpu_isas()[:1], schedule=SCHEDULES[LAYOUTS.index(layout) % 3])


def test_a_cache_in_bytes_is_one_of_e4m3() -> None:
    """vLLM hands fp8 as uint8."""
    for form in PLAIN[:3]:
        one, other = (make_quantised(form, EDGES, page_size=16, as_uint8=as_uint8) for as_uint8 in (True, False))
        for a, b in zip(one.run(), other.run(), strict=True):
            assert same_bits(a, b)


@pytest.mark.parametrize("schedule", [
    Fixed(splits=5), Fixed(chunk=100), StreamK(tile=7), StreamK(tile=100), Invariant(chunk=64), "auto",
], ids=str)
@forms
def test_schedules(form: str, schedule: Any) -> None:
    make_quantised(form, [1000, 3, 0, 517], HQ=8, KH=2, D=40, page_size=16).check(schedule=schedule)


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@forms
def test_several_query_tokens(form: str, dtype: torch.dtype) -> None:
    """Drafts, chunks and one token in a batch, with the causal mask, without it, and under a window."""
    for extra in ({}, {"causal": False}, {"window": 37}):
        case = make_quantised(form, [70, 5, 300, 64, 0], q_lens=[3, 5, 130, 1, 2], HQ=6, KH=2, D=36, dtype=dtype,
                              page_size=16, **extra)
        case.check()


@pytest.mark.parametrize("q_lens", [None, [1, 4, 3, 9]], ids=["decode", "drafts"])
@forms
def test_options(form: str, q_lens: list[int] | None) -> None:
    """K4: sinks and the other options are applied to quantised caches too, whether the keys are split or not."""
    for sinks, softcap, slopes, window in itertools.product((False, True), (None, 20.0), (False, True), (None, 50)):
        case = make_quantised(form, [1, 65, 300, 130], HQ=6, KH=3, D=32, page_size=16, q_lens=q_lens, sinks=sinks,
                              softcap=softcap, alibi_slopes=slopes, window=window, mask=q_lens is not None)
        for schedule in (Fixed(splits=1), Fixed(splits=3)):
            case.check(cpu_isas()[:1], schedule=schedule)


@pytest.mark.parametrize("form", PLAIN[:1])
def test_latent_cache(form: str) -> None:
    """V is the first columns of K, and so has K's scale."""
    for dtype in DTYPES:
        case = make_quantised(form, [0, 1, 100], HQ=16, KH=1, D=576, DV=512, dtype=dtype, page_size=64, latent=True)
        case.check()


# ---- scales


def test_j1_scales_are_applied() -> None:
    """J1: k_scale and v_scale were ignored on some paths."""
    case = make_case([700, 64], HQ=64, KH=16, D=128, page_size=1, poison=0.0)
    codes = replace(case, k_cache=case.k_cache.to(torch.float8_e4m3fn), v_cache=case.v_cache.to(torch.float8_e4m3fn))
    plain = replace(case, k_cache=codes.k_cache.float() * 0.25, v_cache=codes.v_cache.float() * 0.5)
    several = torch.tensor([0, 1, 2], dtype=torch.int32)
    for one in (codes, replace(codes, cu_seqlens_q=several)):
        plain.expected.check(*run(one, k_scale=0.25, v_scale=0.5))


@pytest.mark.parametrize("KH", [1, 3])
def test_j2_every_head_has_its_own_scale(KH: int) -> None:
    """J2: descales of heads were lost."""
    case = make_case([700, 64], HQ=6, KH=KH, D=64, page_size=16, poison=0.0)
    k_scale, v_scale = torch.logspace(-2, math.log10(8), KH), torch.logspace(math.log10(8), -2, KH)
    codes = replace(case, k_cache=case.k_cache.to(torch.float8_e4m3fn), v_cache=case.v_cache.to(torch.float8_e4m3fn))
    plain = replace(case, k_cache=codes.k_cache.float() * k_scale.view(-1, 1),
                    v_cache=codes.v_cache.float() * v_scale.view(-1, 1))
    plain.expected.check(*run(codes, k_scale=k_scale, v_scale=v_scale))
    wide = torch.stack([k_scale, v_scale], -1)  # strides of their own
    plain.expected.check(*run(codes, k_scale=wide[:, 0], v_scale=wide[:, 1]))


def test_j3_a_number_and_tensors_are_the_same_scale() -> None:
    """J3: a scale as a float crashed in one place and counted as 1 in another."""
    case = make_case([100, 7], HQ=4, KH=2, D=32, page_size=16, poison=0.0)
    case = replace(case, k_cache=case.k_cache.to(torch.float8_e4m3fn), v_cache=case.v_cache.to(torch.float8_e4m3fn))
    forms = [0.25, torch.tensor(0.25), torch.full((2,), 0.25)]
    expected = run(case, k_scale=forms[0], v_scale=forms[0])
    for k_scale, v_scale in itertools.product(forms, forms):
        for a, b in zip(run(case, k_scale=k_scale, v_scale=v_scale), expected, strict=True):
            assert same_bits(a, b)
    token = torch.full(case.k_cache.shape[:3], 0.25)
    out, lse = run(case, k_scale=token, v_scale=token)
    torch.testing.assert_close(out, expected[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, expected[1], rtol=1e-5, atol=1e-6)
    ones = [run(case, k_scale=k, v_scale=v) for k, v in itertools.product((None, 1.0), (None, 1.0))]
    assert all(same_bits(out, ones[0][0]) and same_bits(lse, ones[0][1]) for out, lse in ones)


def test_scales_of_tokens_may_have_any_strides_and_float16() -> None:
    """H9: scales that lie in the rows of the codes, 4 bytes behind each."""
    case = make_quantised("fp8-token-head", EDGES, HQ=6, KH=3, D=20, page_size=16, layout="nhd")
    pages, P, KH, D = case.coded.k_cache.shape
    rows = torch.empty(pages, P, KH, D + 4, dtype=torch.uint8)
    rows[..., :D] = case.coded.k_cache.view(torch.uint8)
    rows[..., D:] = case.k_scale.unsqueeze(-1).view(torch.uint8)
    inline = rows.view(torch.float32)[..., D // 4]
    codes = rows[..., :D].view(torch.float8_e4m3fn)
    replace(case, coded=replace(case.coded, k_cache=codes), k_scale=inline).check()
    heads_first = case.v_scale.transpose(1, 2).contiguous().transpose(1, 2)
    replace(case, v_scale=heads_first).check()


def test_scales_of_a_tile_that_lies_in_several_pages() -> None:
    """The first and the last page of a tile lie as if they were neighbours of a page that is elsewhere."""
    case = make_quantised("int8", [24], HQ=2, KH=1, D=16, page_size=8, spare_pages=5)
    k, v, k_scale, v_scale = (torch.empty_like(x) for x in (case.coded.k_cache, case.coded.v_cache, case.k_scale,
                                                            case.v_scale))
    table = torch.tensor([[0, 5, 2]], dtype=torch.int32)
    for to, x in ((k, case.coded.k_cache), (v, case.coded.v_cache), (k_scale, case.k_scale), (v_scale, case.v_scale)):
        to[table[0].long()] = x[case.coded.block_table[0].long()]
    coded = replace(case.coded, k_cache=k, v_cache=v, block_table=table)
    replace(case, coded=coded, k_scale=k_scale.contiguous(), v_scale=v_scale.contiguous()).check()


def test_every_code_of_e4m3() -> None:
    """All 256 codes are read as torch reads them, NaN included, wherever in a row they lie."""
    codes = torch.arange(256, dtype=torch.uint8)
    for isa, shift in itertools.product(cpu_isas(), (0, 1)):
        k = torch.zeros(1, 1, 1, 256, dtype=torch.uint8)
        v = codes.roll(shift).view(1, 1, 1, 256)
        with using_isa(isa):
            out = wavefill.decode_attention(torch.zeros(1, 1, 256), k, v, torch.tensor([1], dtype=torch.int32))
        torch.testing.assert_close(out.flatten(), v.view(torch.float8_e4m3fn).float().flatten(), rtol=0, atol=0,
                                   equal_nan=True)


def test_the_least_int8_is_read_as_it_is() -> None:
    """wavefill writes no -128; other engines may."""
    codes = torch.tensor([-128, -127, -1, 0, 1, 127] * 8, dtype=torch.int8).view(1, 1, 1, 48)
    for isa, dtype in itertools.product(cpu_isas(), DTYPES):
        q = torch.zeros(1, 1, 48, dtype=dtype)
        q[..., 6] = 1.0
        with using_isa(isa):
            out, lse = wavefill.decode_attention(q, codes, codes, torch.tensor([1], dtype=torch.int32), k_scale=1.0,
                                                 v_scale=1.0, scale=1.0, return_lse=True)
        assert torch.equal(out.flatten(), codes.flatten().to(dtype))
        assert float(lse) == -128.0


@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
def test_j7_nan_in_k_reaches_its_request_alone(dtype: torch.dtype) -> None:
    """J7: NaN became 448 on its way in and 480 on its way out."""
    case = make_quantised("fp8-tensor", [70, 70, 70], HQ=4, KH=2, D=32, dtype=dtype, page_size=16)
    page, head = int(case.coded.block_table[1, 2]), 1
    case.coded.k_cache.view(torch.uint8)[page, 5, head, 7] = 0xFF
    for isa in cpu_isas():
        with using_isa(isa):
            out, lse = case.run()
        assert out[1, 2:].isnan().all()
        assert lse[1, 2:].isnan().all()
        assert not out[[0, 2]].isnan().any()
        assert not out[1, :2].isnan().any()


# ---- errors


def call(k_dtype: torch.dtype = torch.float8_e4m3fn, **kwargs: Any) -> Tensor:
    k = torch.zeros(2, 16, 2, 8).to(k_dtype)
    arguments = {"v_cache": k, **kwargs}
    return wavefill.decode_attention(
        torch.zeros(1, 4, 8), k, arguments.pop("v_cache"), torch.tensor([3], dtype=torch.int32),
        torch.zeros(1, 2, dtype=torch.int32), **arguments)


REFUSED = {
    "16-bit": ({"k_dtype": torch.float32, "k_scale": 0.5}, InvalidArgument, "k_scale: belongs to quantised caches"),
    "int8-without": ({"k_dtype": torch.int8, "k_scale": 0.5}, InvalidArgument, "v_scale: must be given for"),
    "shape": ({"k_scale": torch.ones(3)}, InvalidArgument, r"k_scale: must be \[\], \[KH\] = \[2\]"),
    "rows": ({"v_scale": torch.ones(2, 16, 1)}, InvalidArgument, r"one a token and head, \[2, 16, 2\]; got"),
    "dtype": ({"v_scale": torch.ones(2).half()}, InvalidType, "v_scale: dtype must be float32"),
    "value": ({"v_scale": torch.tensor([1.0, math.inf])}, InvalidArgument, r"v_scale: must be finite \(KV head 1\)"),
    "number": ({"k_scale": math.nan}, InvalidArgument, "k_scale: must be finite in float32"),
    "text": ({"k_scale": "1"}, InvalidType, "k_scale: must be a float"),
    "mixed": ({"v_cache": torch.zeros(2, 16, 2, 8)}, InvalidType, "v_cache: dtype must be that of k_cache"),
    "e5m2": ({"k_dtype": torch.float8_e5m2}, InvalidType, "k_cache: dtype must be that of q"),
    "latent": ({"v_cache": None, "head_dim_v": 4, "scale": 1.0, "v_scale": 1.0}, InvalidArgument,
               "v_scale: must be None where v_cache is"),
}


@pytest.mark.parametrize(("kwargs", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_what_scales_must_not_be(kwargs: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call(**kwargs)


def test_scales_in_a_compiled_call() -> None:
    case = make_quantised("fp8-head", [100, 7], page_size=16)

    @torch.compile(backend="eager", fullgraph=True)
    def attend(k_scale: Tensor | None) -> Tensor:
        c = case.coded
        return wavefill.decode_attention(c.q, c.k_cache, c.v_cache, c.seq_lens, c.block_table, k_scale=k_scale,
                                         v_scale=case.v_scale)

    assert same_bits(attend(case.k_scale), case.run()[0])

"""Every kind of bad input is a ValueError or TypeError that says parameter, rule, value and next step."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import wavefill
from wavefill import BackendUnavailable, InvalidArgument, InvalidType, WavefillError, ops, overlaps, reference

B, HQ, KH, D, DV, P, PAGES = 2, 4, 2, 8, 6, 4, 5


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def paged(**changes: Any) -> dict[str, Any]:
    """A good call of `decode_attention`, changed."""
    good = {
        "q": torch.randn(B, HQ, D), "k_cache": torch.randn(PAGES, P, KH, D), "v_cache": torch.randn(PAGES, P, KH, DV),
        "seq_lens": ints(7, 3), "block_table": torch.tensor([[0, 3], [4, -1]], dtype=torch.int32),
    }
    return {**good, **changes}


def packed(**changes: Any) -> dict[str, Any]:
    """A good call of `attention`, changed."""
    return paged(q=torch.randn(5, HQ, D), cu_seqlens_q=ints(0, 3, 5)) | changes


def plain(**changes: Any) -> dict[str, Any]:
    """A good call of `decode_attention` without a table, changed."""
    good = paged(k_cache=torch.randn(B, 8, KH, D), v_cache=torch.randn(B, 8, KH, DV), block_table=None)
    return good | changes


K, V, Q = torch.randn(PAGES, P, KH, D), torch.randn(PAGES, P, KH, DV), torch.randn(B, HQ, D)
WIDE = torch.randn(B, HQ, 2 * D)
PAGES_OF_A_CACHE = wavefill.KVPages(K, V)

WIDE_OUT = torch.zeros(5, HQ, DV)

#: kind: (arguments, error, what the message starts with: parameter, rule, and the value after "got")
BAD: dict[str, tuple[dict[str, Any], type[WavefillError], str, str]] = {
    # types
    "q-list": (paged(q=[1.0]), InvalidType, "q: must be a torch.Tensor", "list"),
    "k-none": (paged(k_cache=None), InvalidType, "k_cache: must be a torch.Tensor", "NoneType"),
    "v-array": (paged(v_cache=V.numpy()), InvalidType, "v_cache: must be a torch.Tensor", "ndarray"),
    "lens-list": (paged(seq_lens=[7, 3]), InvalidType, "seq_lens: must be a torch.Tensor", "list"),
    "table-list": (paged(block_table=[[0, 3], [4, -1]]), InvalidType, "block_table: must be a torch.Tensor", "list"),
    "cu-list": (packed(cu_seqlens_q=[0, 3, 5]), InvalidType, "cu_seqlens_q: must be a torch.Tensor", "list"),
    "out-list": (paged(out=[1.0]), InvalidType, "out: must be a torch.Tensor", "list"),
    "scale-text": (paged(scale="1"), InvalidType, "scale: must be a float or None", "str"),
    "scale-tensor": (paged(scale=torch.tensor(1.0)), InvalidType, "scale: must be a float or None", "Tensor"),
    "scale-bool": (paged(scale=True), InvalidType, "scale: must be a float or None", "bool"),
    "window-float": (paged(window=4.0), InvalidType, "window: must be an int or None", "4.0"),
    "window-bool": (paged(window=True), InvalidType, "window: must be an int or None", "True"),
    "window-pair": (paged(window=(4, 0)), InvalidType, "window: must be an int or None", "(4, 0)"),
    "max-tensor": (paged(max_seq_len=torch.tensor(7)), InvalidType, "max_seq_len: must be an int or None", "tensor(7)"),
    "max-q-text": (packed(max_q_len="3"), InvalidType, "max_q_len: must be an int or None", "'3'"),
    "dim-float": (paged(v_cache=None, head_dim_v=6.0, scale=1.0), InvalidType, "head_dim_v: must be an int", "6.0"),
    "lse-int": (paged(return_lse=1), InvalidType, "return_lse: must be a bool", "1"),
    "causal-none": (packed(causal=None), InvalidType, "causal: must be a bool", "None"),
    "schedule-int": (paged(schedule=3), InvalidType, "schedule: must be a name or a Fixed", "int"),
    "impl-none": (paged(impl=None), InvalidType, "impl: must be a name", "NoneType"),
    # dtypes
    "q-double": (paged(q=Q.double()), InvalidType, "q: dtype must be one of float32", "torch.float64"),
    "k-half": (paged(k_cache=K.half()), InvalidType, "k_cache: dtype must be that of q", "torch.float16"),
    "v-bf16": (paged(v_cache=V.bfloat16()), InvalidType, "v_cache: dtype must be that of q", "torch.bfloat16"),
    "lens-int64": (paged(seq_lens=ints(7, 3).long()), InvalidType, "seq_lens: dtype must be int32", "torch.int64"),
    "table-int64": (paged(block_table=ints(0, 1).view(2, 1).long()), InvalidType, "block_table: dtype must be int32",
                    "torch.int64"),
    "cu-int64": (packed(cu_seqlens_q=ints(0, 3, 5).long()), InvalidType, "cu_seqlens_q: dtype must be int32",
                 "torch.int64"),
    "out-half": (paged(out=torch.empty(B, HQ, DV).half()), InvalidType, "out: dtype must be that of q",
                 "torch.float16"),
    # shapes
    "q-4d": (paged(q=Q[:, None]), InvalidArgument, "q: must be [tokens, HQ, D]", "[2, 1, 4, 8]"),
    "q-narrow": (paged(q=Q[..., :4]), InvalidArgument, "k_cache: must have the head size of q (4)", "[5, 4, 2, 8]"),
    "q-no-columns": (paged(q=Q[..., :0], k_cache=K[..., :0]), InvalidArgument, "q: must be", "[2, 4, 0]"),
    "q-batch": (paged(q=torch.randn(3, HQ, D)), InvalidArgument, "seq_lens: must have one entry for each of q's 3",
                "[2]"),
    "k-3d": (paged(k_cache=K[0]), InvalidArgument, "k_cache: must be [pages, page_size, KH, D]", "[4, 2, 8]"),
    "k-hnd": (paged(k_cache=torch.randn(PAGES, 3, P, D), v_cache=torch.randn(PAGES, 3, P, DV), q=torch.randn(B, 6, D)),
              InvalidArgument, "k_cache: KH must divide the query heads (6)", "KH 4"),
    "k-no-heads": (paged(k_cache=K[:, :, :0], v_cache=V[:, :, :0]), InvalidArgument, "k_cache: KH must divide", "KH 0"),
    "v-tokens": (paged(v_cache=V[:, :3]), InvalidArgument, "v_cache: must match k_cache [5, 4, 2, 8]", "[5, 3, 2, 6]"),
    "v-no-columns": (paged(v_cache=V[..., :0]), InvalidArgument, "v_cache: must match", "[5, 4, 2, 0]"),
    "lens-2d": (paged(seq_lens=ints(7, 3)[:, None]), InvalidArgument, "seq_lens: must be one-dimensional", "[2, 1]"),
    "table-1d": (paged(block_table=ints(0, 4)), InvalidArgument, "block_table: must be [B, max_pages]", "[2]"),
    "table-rows": (paged(block_table=ints(0, 3, 4).view(3, 1)), InvalidArgument,
                   "block_table: must have one row for each of the 2", "[3, 1]"),
    "table-a-row-a-token": (packed(block_table=ints(*range(5)).view(5, 1)), InvalidArgument,
                            "block_table: must have one row for each of the 2", "[5, 1]"),
    "batch": (plain(seq_lens=ints(7, 3, 1), q=torch.randn(3, HQ, D)), InvalidArgument,
              "k_cache: without block_table must be [B, S, KH, D] with B = 3", "[2, 8, 2, 8]"),
    "cu-short": (packed(cu_seqlens_q=ints(0, 5)), InvalidArgument, "cu_seqlens_q: must be [B + 1] = [3]",
                 "[2]"),
    "out-shape": (paged(out=torch.empty(B, HQ, D)), InvalidArgument, "out: must be [2, 4, 6]", "[2, 4, 8]"),
    "pages-and-v": (paged(k_cache=PAGES_OF_A_CACHE), InvalidArgument, "v_cache: must be None when k_cache is a KVPages",
                    "a tensor"),
    # latent caches
    "latent-no-dim": (paged(v_cache=None, scale=1.0), InvalidArgument, "head_dim_v: must be given when v_cache is None",
                      "None"),
    "latent-no-scale": (paged(v_cache=None, head_dim_v=6), InvalidArgument, "scale: must be given when v_cache is None",
                        "None"),
    "latent-wide": (paged(v_cache=None, head_dim_v=9, scale=1.0), InvalidArgument, "head_dim_v: must be from 1", "9"),
    "dim-differs": (paged(head_dim_v=5), InvalidArgument, "head_dim_v: must be v_cache's head size (6)", "5"),
    # devices
    "q-meta": (paged(q=Q.to("meta")), InvalidArgument, "k_cache: must be on the device of the other tensors (meta)",
               "cpu"),
    "k-meta": (paged(k_cache=K.to("meta")), InvalidArgument, "k_cache: must be on the device", "meta"),
    "lens-meta": (paged(seq_lens=ints(7, 3).to("meta")), InvalidArgument, "seq_lens: must be on the device", "meta"),
    "out-meta": (paged(out=torch.empty(B, HQ, DV, device="meta")), InvalidArgument, "out: must be on the device",
                 "meta"),
    # memory
    "out-is-q": (plain(q=Q, v_cache=torch.randn(B, 8, KH, D), out=Q),
                 InvalidArgument, "out: is written and must share no memory with q", "overlapping memory"),
    "out-in-k": (paged(out=K[0, 0, 0, :DV].expand(B, HQ, DV), k_cache=K), InvalidArgument,
                 "out: is written and must not overlap itself", "strides [0, 0, 1]"),
    "out-over-lens": (paged(seq_lens=(LENS := torch.zeros(B * HQ * DV + 2, dtype=torch.int32))[:2],
                            out=LENS[1:-1].view(torch.float32).view(B, HQ, DV)), InvalidArgument,
                      "out: is written and must share no memory with seq_lens", "overlapping memory"),
    # values
    "length-negative": (paged(seq_lens=ints(7, -1)), InvalidArgument, "seq_lens[1]: must not be negative", "-1"),
    "length-over-table": (paged(seq_lens=ints(9, 3)), InvalidArgument,
                          "seq_lens[0]: must be at most the cache's capacity of 8 tokens", "9"),
    "length-over-s": (plain(seq_lens=ints(7, 9)), InvalidArgument, "seq_lens[1]: must be at most the cache's", "9"),
    "length-huge": (paged(seq_lens=ints(2**31 - 1, 3)), InvalidArgument, "seq_lens[0]: must be at most", "2147483647"),
    "no-table-columns": (paged(block_table=torch.empty(2, 0, dtype=torch.int32)), InvalidArgument,
                         "seq_lens[0]: must be at most the cache's capacity of 0 tokens", "7"),
    "page-over": (paged(block_table=ints(0, 5, 4, -1).view(2, 2)), InvalidArgument,
                  "block_table[0, 1]: must be a page id from 0 to 4", "5"),
    "page-negative": (paged(block_table=ints(0, 3, -1, 0).view(2, 2)), InvalidArgument,
                      "block_table[1, 0]: must be a page id", "-1"),
    "page-huge": (paged(block_table=ints(0, 2**31 - 1, 4, 0).view(2, 2)), InvalidArgument,
                  "block_table[0, 1]: must be a page id", "2147483647"),
    "cu-start": (packed(cu_seqlens_q=ints(1, 3, 5)), InvalidArgument, "cu_seqlens_q[0]: must be 0", "1"),
    "cu-falls": (packed(cu_seqlens_q=ints(0, 4, 3)), InvalidArgument, "cu_seqlens_q[2]: must not be below",
                 "3"),
    "cu-over": (packed(cu_seqlens_q=ints(0, 3, 6)), InvalidArgument,
                "cu_seqlens_q[-1]: must be at most the 5 query tokens", "6"),
    "scale-over-float32": (paged(scale=1e39), InvalidArgument, "scale: must be finite in float32", "1e+39"),
    "scale-under-float32": (paged(scale=-3.5e38), InvalidArgument, "scale: must be finite in float32", "-3.5e+38"),
    "scale-nan": (paged(scale=float("nan")), InvalidArgument, "scale: must be finite", "nan"),
    "scale-inf": (paged(scale=float("inf")), InvalidArgument, "scale: must be finite", "inf"),
    "window-0": (paged(window=0), InvalidArgument, "window: must be at least 1", "0"),
    "window-negative": (paged(window=-(2**63)), InvalidArgument, "window: must be at least 1", "-9223372036854775808"),
    "max-negative": (paged(max_seq_len=-1), InvalidArgument, "max_seq_len: must be 0 or more", "-1"),
    "max-small": (paged(max_seq_len=6), InvalidArgument, "max_seq_len: must be an upper bound of seq_lens (up to 7)",
                  "6"),
    "max-q-small": (packed(max_q_len=2), InvalidArgument,
                    "max_q_len: must be an upper bound of the query lengths (up to 3)", "2"),
    # numbers that no operator carries
    "scale-huge": (paged(scale=10**400), InvalidArgument, "scale: must be finite in float32", "inf"),
    "window-huge": (paged(window=2**63), InvalidArgument, f"window: must be at most {2**63 - 1}", f"{2**63}"),
    "window-endless": (paged(window=10**5000), InvalidArgument, "window: must be at most", "a number of 16,610 bits"),
    "window-below": (paged(window=-(2**70)), InvalidArgument, "window: must be at least 1", f"-{2**70}"),
    "dim-huge": (paged(v_cache=None, head_dim_v=2**64, scale=1.0), InvalidArgument, "head_dim_v: must be at most",
                 f"{2**64}"),
    "max-huge": (paged(max_seq_len=2**70), InvalidArgument, "max_seq_len: must be at most", f"{2**70}"),
    "max-below": (paged(max_seq_len=-(10**5000)), InvalidArgument, "max_seq_len: must be at least 0", "a negative"),
    "max-q-huge": (packed(max_q_len=2**63), InvalidArgument, "max_q_len: must be at most", f"{2**63}"),
    "max-q-numpy-bool": (packed(max_q_len=np.bool_(True)), InvalidType, "max_q_len: must be an int", "np.True_"),
    "window-numpy-float": (paged(window=np.float32(4)), InvalidType, "window: must be an int or None", "np.float32"),
    # options
    "impl-array": (paged(impl=np.zeros(2)), InvalidType, "impl: must be a name", "ndarray"),
    "softmax-array": (paged(softmax=np.zeros(2)), InvalidArgument, "softmax: is not in this version", "array("),
    "schedule-surrogate": (paged(schedule="\ud800"), InvalidArgument, "schedule: must be one of 'auto'", r"'\ud800'"),
    "schedule": (paged(schedule="best"), InvalidArgument, "schedule: must be one of 'auto', 'fixed'", "'best'"),
    "gradient": (paged(q=Q.clone().requires_grad_(), out=torch.empty(B, HQ, DV)), InvalidArgument,
                 "q: wavefill is for inference", "a tensor that requires grad"),
    # scales of quantised caches, which this one is not; tests/test_quantised.py has the others
    "k-scale": (paged(k_scale=0.25), InvalidArgument, "k_scale: belongs to quantised caches", "a cache of torch.float"),
    "v-scale-heads": (paged(v_scale=torch.ones(KH)), InvalidArgument, "v_scale: belongs to", "a cache of torch.float"),
    # coming versions
    "softmax": (paged(softmax="unified"), InvalidArgument, "softmax: is not in this version", "'unified'"),
    "softmax-none": (paged(softmax=None), InvalidArgument, "softmax: is not in this version", "None"),
    "sm-budget": (paged(sm_budget=8), InvalidArgument, "sm_budget: limits the SMs of a GPU", "8"),
    "sm-budget-zero": (paged(sm_budget=0), InvalidArgument, "sm_budget: must be at least 1", "0"),
    "kv-shard": (paged(kv_shard=(0, 2, 16)), InvalidArgument, "kv_shard: is not in this version", "(0, 2, 16)"),
    # soft cap, sinks, ALiBi
    "softcap-zero": (paged(softcap=0.0), InvalidArgument, "softcap: must be above 0", "0.0"),
    "softcap-negative": (paged(softcap=-30.0), InvalidArgument, "softcap: must be above 0", "-30.0"),
    "softcap-under-float32": (paged(softcap=1e-46), InvalidArgument, "softcap: must be above 0", "1e-46"),
    "softcap-nan": (paged(softcap=float("nan")), InvalidArgument, "softcap: must be finite in float32", "nan"),
    "softcap-inf": (paged(softcap=float("inf")), InvalidArgument, "softcap: must be finite in float32", "inf"),
    "softcap-text": (paged(softcap="30"), InvalidType, "softcap: must be a float or None", "str"),
    "sinks-list": (paged(sinks=[0.0] * HQ), InvalidType, "sinks: must be a torch.Tensor", "list"),
    "sinks-kv-heads": (paged(sinks=torch.zeros(KH)), InvalidArgument, "sinks: must be [HQ] = [4]", "[2]"),
    "sinks-a-column": (paged(sinks=torch.zeros(HQ, 1)), InvalidArgument, "sinks: must be [HQ] = [4]", "[4, 1]"),
    "sinks-int": (paged(sinks=ints(0, 0, 0, 0)), InvalidType, "sinks: dtype must be one of float32", "torch.int32"),
    "sinks-meta": (paged(sinks=torch.zeros(HQ).to("meta")), InvalidArgument, "sinks: must be on the device", "meta"),
    "sinks-gradient": (paged(sinks=torch.zeros(HQ, requires_grad=True), out=torch.empty(B, HQ, DV)), InvalidArgument,
                       "sinks: wavefill is for inference", "a tensor that requires grad"),
    "sinks-out": (paged(sinks=WIDE[0, 0, :HQ], out=WIDE[..., :DV]), InvalidArgument,
                  "out: is written and must share no memory with sinks", "overlapping memory"),
    "alibi-number": (paged(alibi_slopes=0.5), InvalidType, "alibi_slopes: must be a torch.Tensor", "float"),
    "alibi-heads": (packed(alibi_slopes=torch.ones(5)), InvalidArgument, "alibi_slopes: must be [HQ] = [4]", "[5]"),
    "alibi-double": (paged(alibi_slopes=torch.ones(HQ).double()), InvalidType, "alibi_slopes: dtype must be one of",
                     "torch.float64"),
    "alibi-meta": (paged(alibi_slopes=torch.ones(HQ, device="meta")), InvalidArgument, "alibi_slopes: must be on the",
                   "meta"),
    "alibi-out": (paged(alibi_slopes=WIDE[1, 0, :HQ], out=WIDE[..., :DV]), InvalidArgument,
                  "out: is written and must share no memory with alibi_slopes", "overlapping memory"),
    # masks of drafts
    "mask-list": (packed(mask=[1] * 5), InvalidType, "mask: must be a torch.Tensor", "list"),
    "mask-bool": (packed(mask=torch.ones(5, 7).bool()), InvalidType, "mask: dtype must be int32", "torch.bool"),
    "mask-long": (packed(mask=torch.ones(5, 1).long()), InvalidType, "mask: dtype must be int32", "torch.int64"),
    "mask-1d": (packed(mask=ints(1, 1, 1, 1, 1)), InvalidArgument, "mask: must be [T, W] = [5, W]", "[5]"),
    "mask-rows": (packed(mask=torch.ones(3, 1).int()), InvalidArgument, "mask: must be [T, W] = [5, W]", "[3, 1]"),
    "mask-no-words": (packed(mask=torch.ones(5, 0).int()), InvalidArgument, "mask: must be [T, W] = [5, W]", "[5, 0]"),
    "mask-meta": (packed(mask=torch.ones(5, 1).int().to("meta")), InvalidArgument, "mask: must be on the dev", "meta"),
    "mask-narrow": (packed(q=torch.randn(40, HQ, D), cu_seqlens_q=ints(0, 7, 40), mask=torch.ones(40, 1).int()),
                    InvalidArgument, "mask: must have a bit for each of the 33 query tokens of request 1", "32 bits"),
    "mask-hint": (packed(mask=torch.ones(5, 1).int(), max_q_len=33), InvalidArgument,
                  "mask: must have a bit for each of up to 33 query tokens", "32 bits a row"),
    "mask-out": (packed(out=WIDE_OUT, mask=WIDE_OUT.view(torch.int32)[:, 0, :1]), InvalidArgument,
                 "out: is written and must share no memory with mask", "overlapping memory"),
}


def call(arguments: dict[str, Any]) -> Any:
    function = wavefill.attention if "cu_seqlens_q" in arguments else wavefill.decode_attention
    return function(**arguments)


def assert_complains(run: Callable[[], Any], error: type[Exception], start: str, got: str) -> None:
    with pytest.raises(error) as caught:
        run()
    message = str(caught.value)
    assert isinstance(caught.value, (ValueError, TypeError, BackendUnavailable))
    assert message.startswith(start), message
    shape = re.fullmatch(r"(?P<param>[^:]+): (?P<rule>.+); got (?P<value>.+?)\. (?P<next>[A-Z].+\.)", message)
    assert shape is not None, f"not of the form 'parameter: rule; got value. Next step.': {message}"
    assert shape["value"].startswith(got), message


def test_the_calls_that_are_made_bad_are_good() -> None:
    for arguments in (paged(), packed(), plain()):
        assert call(arguments).isfinite().all()


@pytest.mark.parametrize("kind", BAD)
def test_bad_input(kind: str) -> None:
    arguments, error, start, got = BAD[kind]
    assert_complains(lambda: call(arguments), error, start, got)


@pytest.mark.parametrize("kind", ["length-negative", "length-over-table", "page-over", "max-small", "scale-nan"])
def test_a_refused_call_leaves_out_as_it_was(kind: str) -> None:
    arguments = BAD[kind][0] | {"out": torch.full((B, HQ, DV), 7.0)}
    with pytest.raises(InvalidArgument):
        call(arguments)
    assert (arguments["out"] == 7).all()


@pytest.mark.parametrize("impl", ["gpu", "triton", "CPU", ""])
def test_an_impl_that_does_not_exist(impl: str) -> None:
    assert_complains(lambda: call(paged(impl=impl)), BackendUnavailable,
                     "impl: must be one of 'auto', 'cpu', 'cuda' in this version", repr(impl))


def test_a_head_size_without_a_kernel() -> None:
    wide = plain(q=torch.randn(B, HQ, 600), k_cache=torch.randn(B, 8, KH, 600))
    assert_complains(lambda: call(wide), BackendUnavailable, "impl: the CPU backend cannot serve this call",
                     "D is 600; the CPU backend takes head sizes up to 576")


def test_unknown_and_positional_options_are_type_errors() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'window_size'"):
        call(paged(window_size=4))
    with pytest.raises(TypeError, match="positional argument"):
        wavefill.decode_attention(*paged().values(), 1.0)  # type: ignore[misc]
    with pytest.raises(TypeError, match="cu_seqlens_q"):
        wavefill.attention(*paged().values())  # type: ignore[call-arg]


@pytest.mark.parametrize("garbage", [-1, PAGES, 2**31 - 1, -(2**31)])
def test_garbage_past_the_last_page_is_not_read(garbage: int) -> None:
    arguments = paged()
    expected = call(arguments)
    table = torch.full((B, 6), garbage, dtype=torch.int32)
    table[:, :2] = arguments["block_table"]
    table[1, 1] = garbage
    assert torch.equal(call(arguments | {"block_table": table}), expected)


@pytest.mark.parametrize("length", [0, 1, P, 2 * P])
def test_lengths_count_keys_up_to_the_capacity(length: int) -> None:
    out, lse = call(paged(seq_lens=ints(length, 0), return_lse=True))
    assert (lse[0] > -torch.inf).all() == (length > 0)
    assert (out[1] == 0).all()
    assert (lse[1] == -torch.inf).all()


MERGES: dict[str, tuple[tuple[Any, Any], type[WavefillError], str, str]] = {
    "list": (([torch.zeros(4)], torch.zeros(1)), InvalidType, "outs: must be a torch.Tensor", "list"),
    "lses-list": ((torch.zeros(1, 4), [0.0]), InvalidType, "lses: must be a torch.Tensor", "list"),
    "1d": ((torch.zeros(4), torch.tensor(0.0)), InvalidArgument, "lses: must have the shape of outs", "outs [4]"),
    "count": ((torch.zeros(3, 4), torch.zeros(2)), InvalidArgument, "lses: must have the shape of outs", "outs [3, 4]"),
    "lses-half": ((torch.zeros(3, 4), torch.zeros(3).half()), InvalidType, "lses: dtype must be float32",
                  "torch.float16"),
    "int": ((torch.zeros(3, 4).int(), torch.zeros(3)), InvalidType, "outs: dtype must be one of", "torch.int32"),
    "meta": ((torch.zeros(3, 4), torch.zeros(3, device="meta")), InvalidArgument, "lses: must be on the", "meta"),
    "nan": ((torch.zeros(2, 4), torch.tensor([0.0, torch.nan])), InvalidArgument, "lses: must hold finite", "NaN"),
    "inf": ((torch.zeros(2, 4), torch.tensor([0.0, torch.inf])), InvalidArgument, "lses: must hold finite", "NaN"),
}


@pytest.mark.parametrize("kind", MERGES)
def test_bad_states_to_merge(kind: str) -> None:
    states, error, start, got = MERGES[kind]
    assert_complains(lambda: wavefill.merge_states(*states), error, start, got)


def _the_operators_own() -> list[str]:
    """Kinds that concern tensors and values, which an operator sees; not Python's types, nor options it lacks."""
    names = {*paged(), "cu_seqlens_q", "scale", "causal", "window", "head_dim_v", "schedule", "max_seq_len",
             "max_q_len", "out", "softcap", "sinks", "alibi_slopes", "mask"}
    return [
        kind for kind, (arguments, error, rule, _) in BAD.items()
        if names.issuperset(arguments) and (error is InvalidArgument or "dtype" in rule) and kind != "pages-and-v"
        and not kind.endswith(("-huge", "-below", "-endless", "-surrogate"))
    ]


@pytest.mark.parametrize("kind", _the_operators_own())
def test_a_direct_call_of_the_operator_is_refused_with_the_same_words(kind: str) -> None:
    arguments, error, start, got = BAD[kind]
    operator = ops.attention_out if "out" in arguments else ops.attention
    assert_complains(lambda: operator(**arguments), error, start, got)


@pytest.mark.parametrize("tile", [2**16 + 1, 2**60, 2**63 - 1, 10**30, np.int64(2**40)])
def test_tiles_that_no_scratch_memory_holds_are_refused(tile: int) -> None:
    with pytest.raises(InvalidArgument, match=r"StreamK\.tile: must be at most 65536; got"):
        wavefill.StreamK(tile=tile)


OPTIONS: dict[str, Callable[[Any], Any]] = {
    "Fixed.splits": lambda n: wavefill.Fixed(splits=n), "Fixed.chunk": lambda n: wavefill.Fixed(chunk=n),
    "Invariant.chunk": lambda n: wavefill.Invariant(chunk=n), "StreamK.tile": lambda n: wavefill.StreamK(tile=n),
    **{name: lambda n, name=name: wavefill.AttentionSpec(**{"HQ": 8, "KH": 8, "D": 64, "DV": 64} | {name: n})
       for name in ("HQ", "KH", "D", "DV", "page_size", "window", "q_len")},
}


@pytest.mark.parametrize("value", [2**63, 10**30, 10**5000, 0, -1, -(2**63) - 1, -(10**5000)], ids=int.bit_length)
@pytest.mark.parametrize("option", OPTIONS)
def test_whole_numbers_out_of_range_are_refused(option: str, value: int) -> None:
    rule = f"{option}: must be at {'least 1' if value < 1 else 'most'}"
    with pytest.raises(InvalidArgument, match=rf"^{rule}.*; got (-?\d|a (negative )?number of)"):
        OPTIONS[option](value)


@pytest.mark.parametrize("value", [True, np.bool_(True), 4.0, np.float64(4), "4", torch.tensor(4), [4]], ids=repr)
@pytest.mark.parametrize("option", OPTIONS)
def test_what_is_no_whole_number_is_refused(option: str, value: object) -> None:
    with pytest.raises(InvalidType, match=rf"^{option}: must be an int( or None)?; got "):
        OPTIONS[option](value)


@pytest.mark.parametrize("option", OPTIONS)
def test_whole_numbers_of_numpy_become_python_s(option: str) -> None:
    for number in (np.int64(8), np.uint8(8), np.int32(8)):
        made = OPTIONS[option](number)
        assert made == OPTIONS[option](8)
        assert type(getattr(made, option.rpartition(".")[2])) is int


def test_numbers_of_numpy_are_options_of_a_call() -> None:
    arguments = packed()
    plain_numbers = {"window": 3, "max_seq_len": 7, "max_q_len": 3, "head_dim_v": DV, "scale": 0.25, "softcap": 2.0}
    numpy = {name: (np.float32 if type(n) is float else np.int32)(n) for name, n in plain_numbers.items()}
    assert torch.equal(call(arguments | numpy), call(arguments | plain_numbers))


@pytest.mark.parametrize("schedule", [
    wavefill.Fixed(splits=2**63 - 1), wavefill.Fixed(chunk=2**63 - 1), wavefill.Invariant(chunk=2**63 - 1),
], ids=str)
def test_the_largest_options_are_served(schedule: Any) -> None:
    arguments = packed()
    torch.testing.assert_close(call(arguments | {"schedule": schedule}), call(arguments))


@pytest.mark.parametrize("schedule", ["auto", "fixed", "invariant"])
@pytest.mark.parametrize("window", [9, 10, 2**31 - 1, 2**31, 2**62, 2**63 - 12, 2**63 - 1])
def test_a_window_past_every_key_is_no_window(window: int, schedule: str) -> None:
    """Also where a request has more queries than keys, so that positions are negative."""
    starts = ints(0, 11, 12)
    arguments = packed(q=torch.randn(12, HQ, D), cu_seqlens_q=starts, schedule=schedule, return_lse=True)
    for found, expected in zip(call(arguments | {"window": window}), call(arguments), strict=True):
        assert torch.equal(found, expected)
    given = {name: value for name, value in arguments.items() if name not in ("schedule", "return_lse")}
    for function in (ops.attention, reference.attention):
        for found, expected in zip(function(**given, window=window), function(**given), strict=True):
            assert torch.equal(found, expected)


@pytest.mark.parametrize("scale", [0.0, 1e-46, 5e-324, -1e-46, 1e-39])
def test_scales_under_float32_weigh_all_keys_alike(scale: float) -> None:
    arguments = packed(q=torch.randn(5, HQ, D))
    out = call(arguments | {"scale": scale})
    torch.testing.assert_close(out, call(arguments | {"scale": 0.0}))
    expected, _ = reference.attention(**arguments, scale=scale)
    torch.testing.assert_close(out.double(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("apart", [False, True], ids=["one storage", "storages of their own"])
def test_overlaps_are_found_to_the_element(apart: bool) -> None:
    """Views of one piece of memory, before, in and after each other, also where each has a storage just as large."""
    memory = np.zeros(24, dtype=np.float32)
    whole = torch.from_numpy(memory)

    def view(start: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
        if not apart:
            return whole.as_strided(shape, strides, start)
        size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        return torch.from_numpy(memory[start : start + size]).as_strided(shape, strides)

    def addresses(tensor: Tensor) -> set[int]:
        places = torch.arange(24).as_strided(tensor.shape, tensor.stride())
        return {tensor.data_ptr() + 4 * place for place in places.flatten().tolist()}

    layouts = (((4,), (1,)), ((4,), (2,)), ((2, 2), (5, 1)), ((2, 2), (1, 6)), ((0, 2), (2, 1)))
    for layout, other_layout, start in itertools.product(layouts, layouts, range(16)):
        written, other = view(9, *layout), view(start, *other_layout)
        if addresses(written) & addresses(other):
            with pytest.raises(InvalidArgument, match=r"written: .* no memory with other"):
                overlaps.no_overlap((("written", written),), (("other", other),))
        else:
            overlaps.no_overlap((("written", written),), (("other", other),))

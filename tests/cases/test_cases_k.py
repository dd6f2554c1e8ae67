"""Section K of the case list: windows, `pos - window < j <= pos`, sinks, ALiBi and masks of drafts."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch
from torch import Tensor

import wavefill
from helpers import DTYPES, SCHEDULES, Case, check, make_case, name_of, run
from wavefill import Fixed, InvalidArgument, InvalidType, Invariant

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
schedules = pytest.mark.parametrize("schedule", SCHEDULES)


def keys_seen(case: Case, schedule: str) -> tuple[list[list[int]], Tensor]:
    """(first key, last key, count) of each query token, read off the outputs.

    All scores are equal, so the LSE is ln(count), and V spells each key's position and its square.
    """
    n = int(case.seq_lens[0])
    position = torch.arange(n, dtype=torch.float32) / n
    v = torch.stack([position, position**2], dim=-1).view(1, n, 1, 2)
    case = dataclasses.replace(case, q=torch.zeros_like(case.q), v_cache=v)
    out, lse = run(case, schedule=schedule)
    count = lse[:, 0].double().exp()
    mean = out[:, 0, 0].double() * n
    first = mean - (count - 1) / 2
    seen = torch.stack([first, first + count - 1, count], dim=-1).round().int()
    # The mean of squares tells a run of keys from other sets with the same mean.
    spread = out[:, 0, 1].double() * n * n - mean**2
    torch.testing.assert_close(spread, (count**2 - 1) / 12, rtol=2e-3, atol=0.5)
    return seen.tolist(), lse


@schedules
@pytest.mark.parametrize("q_len", [1, 5])
@pytest.mark.parametrize(
    ("n", "window"), [(5000, 4096), (300, 300), (300, 299), (300, 301), (300, 1), (64, 64), (65, 64)], ids=str
)
def test_k5_the_oldest_key_of_a_window(n: int, window: int, q_len: int, schedule: str) -> None:
    """At 5,000 keys and a window of 4,096 the last query sees keys 904 to 4,999, in decode and with drafts alike."""
    case = make_case([n], q_lens=[q_len], HQ=1, KH=1, D=4, window=window)
    seen, _ = keys_seen(case, schedule)
    positions = range(n - q_len, n)
    assert seen == [[max(0, p - window + 1), p, min(p + 1, window)] for p in positions]
    if (n, window) == (5000, 4096):
        assert seen[-1] == [904, 4999, 4096]


@schedules
def test_k5_every_window_of_a_short_request(schedule: str) -> None:
    for window in range(1, 72):
        case = make_case([70], HQ=1, KH=1, D=4, window=window)
        assert keys_seen(case, schedule)[0] == [[max(0, 70 - window), 69, min(70, window)]]


@dtypes
@schedules
def test_k5_a_window_of_the_length_or_more_changes_no_bit_of_invariant(dtype: torch.dtype, schedule: str) -> None:
    case = make_case([300, 64, 1], dtype=dtype, page_size=16)
    plain, _ = check(case, schedule=schedule)
    for window in (300, 301, 2**31 - 1):
        out, _ = check(dataclasses.replace(case, window=window), schedule=schedule)
        if schedule == "invariant":
            assert torch.equal(out, plain)


@dtypes
@schedules
@pytest.mark.parametrize("page_size", [None, 16])
def test_k7_a_single_query_keeps_to_the_window(dtype: torch.dtype, schedule: str, page_size: int | None) -> None:
    case = make_case([2000], dtype=dtype, page_size=page_size, window=512)
    _, lse = check(case, schedule=schedule)
    everything = dataclasses.replace(case, window=None).expected.lse
    assert (everything - lse > 0.5).all()


@dtypes
@schedules
@pytest.mark.parametrize("q_len", [1, 3])
def test_k8_the_window_of_each_request_ends_at_its_own_length(dtype: torch.dtype, schedule: str, q_len: int) -> None:
    lens = [10, 1000, 64, 65, 0, 1]
    case = make_case(lens, q_lens=[q_len] * len(lens), dtype=dtype, page_size=16, window=64)
    _, lse = check(case, schedule=schedule)
    assert (lse[:q_len] > -math.inf).all()


@dtypes
@schedules
@pytest.mark.parametrize("q_len", [1, 2, 16, 70])
def test_k3_k4_sinks_reach_every_path(dtype: torch.dtype, schedule: str, q_len: int) -> None:
    """Sinks were accepted and ignored with several queries, and dropped for some kinds of cache, split or not."""
    for page_size, layout, split in itertools.product((None, 16), ("nhd", "kv_tokens"), (False, True)):
        case = make_case([300, 90], q_lens=[q_len, 3], dtype=dtype, page_size=page_size, layout=layout, sinks=2.0)
        named = {"fixed": Fixed(splits=4), "invariant": Invariant(chunk=64)}.get(schedule, schedule)
        _, lse = check(case, schedule=named if split else schedule)
        bare = dataclasses.replace(case, sinks=None).expected.lse
        with_sink = torch.logaddexp(bare, torch.full_like(bare, 2.0))
        torch.testing.assert_close(lse.double(), with_sink, rtol=1e-5, atol=1e-5)
    if q_len == 1:
        check(make_case([300, 90], dtype=dtype, sinks=2.0), schedule=schedule)


@schedules
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not_causal"])
def test_k6_a_window_is_causal_too(schedule: str, causal: bool) -> None:
    """16 tokens in one packed request and a window of 4: nobody sees a later key, whatever `causal` says."""
    case = make_case([16], q_lens=[16], HQ=1, KH=1, D=4, window=4, causal=causal)
    assert keys_seen(case, schedule)[0] == [[max(0, p - 3), p, min(p + 1, 4)] for p in range(16)]


@schedules
def test_k10_the_last_keys_in_order_step_by_step(schedule: str) -> None:
    """A window of 8 that a prompt of 6 and four steps go past: the last 8 keys, and each in its place."""
    for n in range(6, 11):
        case = make_case([n], HQ=1, KH=1, D=4, window=8)
        assert keys_seen(case, schedule)[0] == [[max(0, n - 8), n - 1, min(n, 8)]]


@dtypes
@schedules
@pytest.mark.parametrize("page_size", [None, 16])
def test_k11_alibi_with_a_cache_is_that_of_a_full_forward(
    dtype: torch.dtype, schedule: str, page_size: int | None
) -> None:
    """The bias vanished for a single query over a cache, or counted from another position."""
    slopes = 2.0 ** -torch.arange(1.0, 5.0)
    whole = make_case([300], q_lens=[300], D=16, dtype=dtype, page_size=page_size, alibi_slopes=slopes)
    last = dataclasses.replace(whole, q=whole.q[299:], cu_seqlens_q=None)
    out, lse = check(last, schedule=schedule)
    torch.testing.assert_close(lse[0].double(), whole.expected.lse[299], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(out[0].double(), whole.expected.out[299], rtol=0.02, atol=0.02)
    drafts = dataclasses.replace(whole, q=whole.q[293:], cu_seqlens_q=torch.tensor([0, 7], dtype=torch.int32))
    _, lse = check(drafts, schedule=schedule)
    torch.testing.assert_close(lse.double(), whole.expected.lse[293:], rtol=1e-5, atol=1e-4)


@dtypes
@schedules
def test_k12_a_rank_with_some_of_the_heads_takes_their_slopes(dtype: torch.dtype, schedule: str) -> None:
    """Heads 8 to 15 of 32: the slopes that were passed, not those that head numbers from 0 would have."""
    slopes = 2.0 ** (-8 * torch.arange(1.0, 33.0) / 32)
    whole = make_case([200, 3], HQ=32, KH=8, D=16, dtype=dtype, alibi_slopes=slopes, sinks=True)
    assert whole.sinks is not None
    assert whole.v_cache is not None
    part = dataclasses.replace(whole, q=whole.q[:, 8:16], k_cache=whole.k_cache[:, :, 2:4],
                               v_cache=whole.v_cache[:, :, 2:4], alibi_slopes=slopes[8:16], sinks=whole.sinks[8:16])
    out, lse = check(part, schedule=schedule)
    torch.testing.assert_close(lse.double(), whole.expected.lse[:, 8:16], rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(out.double(), whole.expected.out[:, 8:16], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("shape", [(10, 15), (9, 20), (20, 10), (9, 1), (11, 1), (10,), (10, 0), (1, 10, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32], ids=name_of)
def test_k13_a_mask_of_another_shape_or_dtype_is_refused(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Ten query tokens over 20 keys: the mask is [10, W] packed words, and whatever is not is never read."""
    case = make_case([20], q_lens=[10])
    right = dtype == torch.int32 and shape[0] == 10 and len(shape) == 2 and shape[1] > 0
    mask = torch.ones(shape, dtype=dtype)
    if right:  # more words than the draft takes
        check(dataclasses.replace(case, mask=torch.full(shape, -1, dtype=dtype)))
        return
    rule = r"^mask: (must be \[T, W\] = \[10, W\]|dtype must be int32)"
    with pytest.raises((InvalidArgument, InvalidType), match=rule):
        wavefill.attention(*case.tensors(), cu_seqlens_q=case.cu_seqlens_q, mask=mask)


@schedules
def test_k13_a_mask_with_too_few_bits_is_refused(schedule: str) -> None:
    case = make_case([90, 90], q_lens=[33, 2], mask=True)
    check(case, schedule=schedule)
    assert case.mask is not None
    with pytest.raises(InvalidArgument, match=r"^mask: .* each of the 33 query tokens of request 0; got 32 bits"):
        run(dataclasses.replace(case, mask=case.mask[:, :1]), schedule=schedule)


@dtypes
@schedules
def test_k14_rows_of_a_mask_start_at_whole_words(dtype: torch.dtype, schedule: str) -> None:
    """Three requests whose queries times keys are no multiple of 8, where packed offsets once ran together."""
    case = make_case([7, 13, 35], q_lens=[3, 5, 33], dtype=dtype, page_size=16, mask=True)
    out, lse = check(case, schedule=schedule)
    for b in range(3):
        assert case.cu_seqlens_q is not None
        tokens = slice(int(case.cu_seqlens_q[b]), int(case.cu_seqlens_q[b + 1]))
        alone_out, alone_lse = run(case.request(b), schedule=schedule)
        torch.testing.assert_close(out[tokens], alone_out, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
        torch.testing.assert_close(lse[tokens], alone_lse, rtol=1e-6, atol=1e-5)

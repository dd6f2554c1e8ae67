"""Section K of the case list: one rule for windows, `pos - window < j <= pos`."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from helpers import DTYPES, SCHEDULES, Case, check, make_case, name_of, run

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

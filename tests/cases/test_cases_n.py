"""Section N of the case list: N6, what lies before a window is not read. N12 is with the tests of the operators."""

from __future__ import annotations

import pytest
import torch

import wavefill
from helpers import SCHEDULES, make_case, run, same_bits
from wavefill.schedule import row_ranges


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("window", [128, 512])
def test_n6_pages_before_the_window_are_never_looked_up(window: int, schedule: str) -> None:
    """32K keys, of which the window leaves a hundredth. An id that is no page would be an error where it is read."""
    case = make_case([32_768], HQ=8, KH=2, D=64, dtype=torch.bfloat16, page_size=16, window=window)
    expected = run(case, schedule=schedule)
    q, k, v, lens, table = case.tensors()
    table = table.clone()
    table[:, :(32_768 - window) // 16] = 2**31 - 1
    got = wavefill.decode_attention(q, k, v, lens, table, schedule=schedule, return_lse=True, window=window)
    assert all(same_bits(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("length", [128, 1_000, 32_768, 1_000_000])
def test_n6_the_work_of_a_windowed_row_stops_growing(length: int) -> None:
    rows = row_ranges([length], window=128)
    assert rows.stop[0] - rows.start[0] == 128

"""Section N of the case list: N6, what lies before a window costs nothing. N12 is with the tests of the operators."""

from __future__ import annotations

import time

import pytest
import torch

from helpers import SCHEDULES, make_case, run, torch_threads


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("window", [128, 512])
def test_n6_time_does_not_grow_with_what_lies_before_the_window(window: int, schedule: str) -> None:
    """32K keys, of which the window leaves a hundredth; read in full they take about a hundred times as long."""

    def best(n: int) -> float:
        case = make_case([n], HQ=8, KH=8, D=64, dtype=torch.bfloat16, page_size=16, window=window)
        with torch_threads(1):
            took = []
            for _ in range(30):
                start = time.perf_counter()
                run(case, schedule=schedule)
                took.append(time.perf_counter() - start)
        return min(took)

    assert best(32_768) < 5 * best(window)

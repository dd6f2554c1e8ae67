"""What WAVEFILL_CHECK=1 finds in the tensors of a GPU call is what the CPU backend finds, in its words."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from helpers import Case, make_case
from helpers import run as run_on_cpu
from wavefill.backends.gpu import inspection
from wavefill.scores import Options
from wavefill.spec import InvalidArgument


def several(**kwargs: Any) -> Case:
    return make_case([20, 0, 9], q_lens=[3, 0, 2], HQ=1, KH=1, D=8, page_size=4, **kwargs)


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def table(case: Case, request: int, slot: int, page: int) -> Case:
    found = case.block_table.clone()
    found[request, slot] = page
    return replace(case, block_table=found)


def look(case: Case) -> None:
    inspection.check(case.seq_lens, case.block_table, case.cu_seqlens_q, case.k_cache, case.window, case.q.shape[0],
                     Options(None, case.sinks, case.alibi_slopes, case.mask))


WRONG = {
    "a sink of NaN": replace(several(), sinks=torch.tensor([math.nan])),
    "a sink of infinity": replace(several(), sinks=torch.tensor([math.inf])),
    "an infinite slope": replace(several(), alibi_slopes=torch.tensor([-math.inf])),
    "negative length": replace(several(), seq_lens=ints(20, -1, 9)),
    "length past the capacity": replace(several(), seq_lens=ints(20, 0, 21)),
    "offsets from 1": replace(several(), cu_seqlens_q=ints(1, 3, 3, 5)),
    "offsets that decrease": replace(several(), cu_seqlens_q=ints(0, 3, 2, 5)),
    "offsets past the tokens": replace(several(), cu_seqlens_q=ints(0, 3, 3, 6)),
    "a page that is none": table(several(), 0, 4, 99),
    "a negative page": table(several(), 2, 1, -1),
    "a page of a window": table(several(window=3), 0, 3, 99),
    "a page of one query token": table(make_case([20], HQ=1, KH=1, D=8, page_size=4), 0, 2, 99),
    "a narrow mask": make_case([70], q_lens=[40], HQ=1, KH=1, D=8,
                               mask=[torch.ones(40, 40, dtype=torch.bool)]),
}
WRONG["a narrow mask"] = replace(WRONG["a narrow mask"], mask=WRONG["a narrow mask"].mask[:, :1])


@pytest.mark.parametrize("name", WRONG)
def test_it_says_what_the_cpu_says(name: str) -> None:
    case = WRONG[name]
    with pytest.raises(InvalidArgument) as on_cpu:
        run_on_cpu(case)
    with pytest.raises(InvalidArgument) as here:
        look(case)
    assert str(here.value) == str(on_cpu.value)


@pytest.mark.parametrize("case", [several(), several(window=3, mask=True), table(several(window=3), 0, 2, 99),
                                  table(several(), 1, 0, 99), make_case([3, 0]), make_case([], q_lens=[])],
                         ids=["paged", "window", "before the window", "no tokens", "contiguous", "none"])
def test_it_leaves_alone_what_is_right(case: Case) -> None:
    look(case)

"""What runs around a library's kernel, and behind its gate, in the interpreter, with a stand-in for the library."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from running import CONFIG
from torch import Tensor

from helpers import Case, guarded, make_case
from wavefill import reference
from wavefill.backends.gpu import launch, libraries
from wavefill.backends.gpu.libraries import Given, Library
from wavefill.spec import StreamK

#: Keys and query tokens of each request: chunks, whole prompts, more queries than keys, none of either.
BATCHES = {
    "prompts": ([70, 33, 5], [70, 33, 5]),
    "chunks": ([90, 64, 300], [20, 1, 65]),
    "without keys": ([0, 40, 3, 0], [4, 40, 9, 0]),
    "one": ([130], [130]),
}


def stand_in(past: bool, odd_lse: float, given_to: list[Given]) -> Library:
    """A library with the habits of one: padding stays as it was, rows without keys have an odd LSE, and with `past` a
    NaN after a request's end spoils the request."""

    def attend(q: Tensor, k: Tensor, v: Tensor, out: Tensor, given: Given) -> Tensor:
        given_to.append(given)
        lse = torch.full((q.shape[1], q.shape[0]), math.nan)
        for b, (begin, end) in enumerate(zip(given.starts.tolist()[:-1], given.starts.tolist()[1:], strict=True)):
            if begin == end:
                continue
            n = int(given.lens[b])
            one = Case(q[begin:end], k[b : b + 1], v[b : b + 1], given.lens[b : b + 1],
                       cu_seqlens_q=torch.tensor([0, end - begin], dtype=torch.int32), scale=given.scale,
                       causal=given.causal)
            o, found = reference.attention(*one.tensors(), **one.options())
            spoilt = past and n and not v[b, n : n + libraries.LOOK].isfinite().all()
            out[begin:end] = math.nan if spoilt else o.to(out.dtype)
            lse[:, begin:end] = torch.where(found.isneginf(), odd_lse, found).T
        return lse

    return Library("a stand-in", attend, past=past)


def run(case: Case, past: bool = True, odd_lse: float = -math.inf, tokens: int | None = None,
        library: Library | None = None) -> tuple[Tensor, Tensor, list[Given]]:
    """(out, lse) of `libraries.attend`, with T `tokens`, and what the stand-in (`library` if given) was given."""
    q = case.q
    if tokens is not None:
        q = torch.cat([q, torch.full((tokens - len(q), *q.shape[1:]), math.nan, dtype=q.dtype)])
    assert case.v_cache is not None
    assert case.cu_seqlens_q is not None
    out, out_untouched = guarded((*q.shape[:2], case.v_cache.shape[3]), q.dtype)
    lse, lse_untouched = guarded(q.shape[:2], torch.float32)
    scale = case.q.shape[2] ** -0.5
    call = launch.plan(q, case.k_cache, case.v_cache, None, out, lse, scale=scale, window=None, schedule=StreamK(),
                       config=replace(CONFIG, block=2), workers=3, requests=len(case.seq_lens), causal=case.causal,
                       interpret=True)
    given: list[Given] = []
    libraries.attend(library or stand_in(past, odd_lse, given), scale, case.causal, False, call, q, case.k_cache,
                     case.v_cache, case.seq_lens, None, out, lse, starts=case.cu_seqlens_q, interpret=True)
    out_untouched()
    lse_untouched()
    return out, lse, given


def prompts(name: str, *, poison: float = 0.0, causal: bool = True, D: int = 16, layout: str = "nhd") -> Case:
    lens, q_lens = BATCHES[name]
    return make_case(lens, q_lens=q_lens, D=D, dtype=torch.float16, capacity=320, poison=poison, causal=causal,
                     layout=layout)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", BATCHES)
def test_a_library_that_clears_what_is_past_the_end(name: str, causal: bool) -> None:
    """As PyTorch's: rows without keys have an LSE of +inf. Unused slots are NaN."""
    case = prompts(name, poison=math.nan, causal=causal)
    out, lse, _ = run(case, past=False, odd_lse=math.inf)
    case.expected.check(out, lse)


@pytest.mark.parametrize(("poison", "layout"), [(0.0, "nhd"), (math.nan, "hnd"), (math.inf, "nhd")])
@pytest.mark.parametrize("name", BATCHES)
def test_values_past_the_end_that_are_no_numbers_open_the_gate(name: str, poison: float, layout: str) -> None:
    case = prompts(name, poison=poison, layout=layout)
    out, lse, _ = run(case)
    case.expected.check(out, lse)


def test_one_such_value_is_found_wherever_a_tile_may_reach() -> None:
    """And only there: the stand-in reads as far, and would spoil its output."""
    case = prompts("prompts")
    assert case.v_cache is not None
    for request, after in ((0, 0), (1, 63), (2, 64), (0, 255 - 70), (1, 255)):
        v = case.v_cache.clone()
        v[request, int(case.seq_lens[request]) + after, 1, 15] = math.nan
        out, lse, _ = run(replace(case, v_cache=v))
        case.expected.check(out, lse)


def test_a_shut_gate_leaves_the_library_alone() -> None:
    """What it wrote stays, and is not written a second time."""
    case = prompts("chunks")
    attend = stand_in(True, -math.inf, []).attend
    marked = Library("a stand-in", lambda *call: attend(*call).fill_(5.0), past=True)
    out, lse, _ = run(case, library=marked)
    assert torch.equal(out, run(case)[0])
    assert bool((lse == 5.0).all())


@pytest.mark.parametrize("poison", [0.0, math.nan])
@pytest.mark.parametrize("past", [True, False])
def test_tokens_of_no_request(past: bool, poison: float) -> None:
    case = prompts("chunks", poison=poison)
    used = len(case.q)
    out, lse, _ = run(case, past, tokens=used + 67)
    case.expected.check(out[:used], lse[:used])
    assert bool((out[used:] == 0).all())
    assert bool((lse[used:] == -math.inf).all())


def test_tokens_before_the_first_offset() -> None:
    case = prompts("prompts")
    assert case.cu_seqlens_q is not None
    moved = replace(case, q=torch.cat([case.q[:7], case.q]), cu_seqlens_q=case.cu_seqlens_q + 7)
    out, lse, _ = run(moved)
    case.expected.check(out[7:], lse[7:])
    assert bool((out[:7] == 0).all())
    assert bool((lse[:7] == -math.inf).all())


def test_a_library_gets_offsets_and_lengths_that_it_can_follow() -> None:
    case = prompts("prompts")
    wrong = replace(case, seq_lens=torch.tensor([9999, -3, 5], dtype=torch.int32),
                    cu_seqlens_q=torch.tensor([-2, 9, 4, 2**31 - 1], dtype=torch.int32))
    _, _, (given,) = run(wrong, past=False)
    assert given.lens.tolist() == [320, 0, 5]
    assert given.starts.tolist() == [0, 9, 9, len(case.q)]
    assert given.keys.tolist() == [0, 0, 0, 0]


def test_a_sum_that_is_nan_stays_so() -> None:
    """Libraries give it an infinite LSE."""
    case = prompts("one")
    q = case.q.clone()
    q[5, 1] = math.nan
    for past, odd in ((True, -math.inf), (False, math.inf)):
        attend = stand_in(past, odd, []).attend

        def odd_where_nan(q: Tensor, k: Tensor, v: Tensor, out: Tensor, given: Given, attend: Any = attend,
                          odd: float = odd) -> Tensor:
            lse: Tensor = attend(q, k, v, out, given)
            return torch.where(lse.isnan(), odd, lse)

        _, lse, _ = run(replace(case, q=q), library=Library("a stand-in", odd_where_nan, past=past))
        assert bool(lse[5, 1].isnan())
        assert int(lse.isnan().sum()) == 1

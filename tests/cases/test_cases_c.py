"""Section C of the case list: the LSE is the natural logarithm of the sum of the scaled scores, everywhere."""

from __future__ import annotations

import dataclasses
import itertools
import math

import pytest
import torch

import wavefill
from helpers import DTYPES, SCHEDULES, check, make_case, name_of, run
from sharding import rank_of
from wavefill import Fixed, Invariant

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)


@dtypes
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_c2_a_shared_prefix_and_a_suffix_weigh_as_one(dtype: torch.dtype, schedule: str) -> None:
    """3,072 keys of a prefix and 64 of a suffix, merged, against all 3,136 at once. In another base of the logarithm
    the suffix would get a fifth of its weight."""
    whole = make_case([3136], HQ=8, KH=2, D=64, dtype=dtype)
    parts = [
        run(dataclasses.replace(whole, k_cache=whole.k_cache[:, at], v_cache=whole.v_cache[:, at],
                                seq_lens=torch.tensor([n], dtype=torch.int32)), schedule=schedule)
        for at, n in ((slice(0, 3072), 3072), (slice(3072, 3136), 64))
    ]
    out, lse = wavefill.merge_states(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]))
    whole.expected.check(*run(whole, schedule=schedule))
    worst = (out.double() - whole.expected.out).norm() / whole.expected.out.norm()
    assert float(worst) < min(0.003, 16 * torch.finfo(dtype).eps)
    torch.testing.assert_close(lse.double(), whole.expected.lse, rtol=0, atol=2e-6)


@pytest.mark.parametrize("n", [1, 2, 10, 1000])
def test_c2_the_lse_of_equal_scores_is_the_natural_logarithm_of_their_number(n: int) -> None:
    case = make_case([n])
    _, lse = run(dataclasses.replace(case, q=torch.zeros_like(case.q)))
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(n)))


@dtypes
@pytest.mark.parametrize("scale", [0.088, 1.0, 2.5, 0.0, -0.3])
def test_c7_the_scale_counts_once_however_often_a_request_is_split(dtype: torch.dtype, scale: float) -> None:
    case = make_case([700, 64, 5], HQ=4, KH=2, D=32, dtype=dtype, page_size=16, scale=scale)
    for schedule in (Fixed(splits=1), Fixed(splits=4), Invariant(chunk=64), "stream_k"):
        _, lse = check(case, schedule=schedule)
        k = case.k_cache[case.block_table[2, 0].long(), :5].double().repeat_interleave(2, dim=1)
        scores = scale * torch.einsum("hd,nhd->hn", case.q[2].double(), k)
        torch.testing.assert_close(lse[2].double(), scores.logsumexp(1), rtol=1e-5, atol=1e-5)


@dtypes
@pytest.mark.parametrize("scale", [-0.3, 0.0, 1.5])
def test_c7_any_scale_with_queries_that_see_less_than_others(dtype: torch.dtype, scale: float) -> None:
    """A negative scale must not turn what is hidden into the largest score."""
    check(make_case([150, 3, 70], q_lens=[70, 5, 3], dtype=dtype, scale=scale, window=30))


@dtypes
def test_merging_equals_one_softmax_over_any_cut(dtype: torch.dtype) -> None:
    """Seventeen partials of uneven length, some of them empty, in the dtype of the caller's outputs."""
    whole = make_case([600], HQ=6, KH=3, D=40, dtype=dtype)
    cuts = [0, 0, 1, 2, 64, 65, 65, 100, 128, 200, 300, 301, 400, 512, 513, 590, 600, 600]
    outs, lses = [], []
    for a, b in itertools.pairwise(cuts):
        part = dataclasses.replace(whole, k_cache=whole.k_cache[:, a:b], v_cache=whole.v_cache[:, a:b],
                                   seq_lens=torch.tensor([b - a], dtype=torch.int32))
        out, lse = run(part)
        outs.append(out)
        lses.append(lse)
    out, lse = wavefill.merge_states(torch.stack(outs), torch.stack(lses))
    # Each partial was rounded to the dtype once.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), whole.expected.out, rtol=4 * eps, atol=eps)
    torch.testing.assert_close(lse.double(), whole.expected.lse, rtol=0, atol=2e-6)


@pytest.mark.parametrize("level", [-700.0, 0.0, 700.0, 3e38])
def test_merging_far_from_zero(level: float) -> None:
    outs = torch.tensor([[[1.0, 2.0]], [[3.0, 6.0]]])
    out, lse = wavefill.merge_states(outs, torch.full((2, 1), level))
    torch.testing.assert_close(out, torch.tensor([[2.0, 4.0]]))
    torch.testing.assert_close(lse, torch.tensor([level + math.log(2)]))
    out, lse = wavefill.merge_states(outs, torch.tensor([[-3e38], [5.0]]))
    assert torch.equal(out, outs[1])
    assert float(lse) == 5.0


@dtypes
@pytest.mark.parametrize("interleave", [1, 16])
def test_c4_drafts_over_keys_that_are_shared_out_over_ranks(dtype: torch.dtype, interleave: int) -> None:
    """Rows were masked by the rank's own length: token j may see the keys before H + j + 1 of all ranks, and of no rank
    the same number less one for each token before."""
    whole = make_case([150, 33, 70], q_lens=[4, 4, 40], dtype=dtype, page_size=16, sinks=True)
    states = [run(rank_of(whole, rank, 3, interleave)) for rank in range(3)]
    out, lse = wavefill.merge_states(*(torch.stack(side) for side in zip(*states, strict=True)))
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), whole.expected.out, rtol=4 * eps, atol=4 * eps)
    torch.testing.assert_close(lse.double(), whole.expected.lse, rtol=0, atol=2e-6)

"""Section L of the case list: causal masks are aligned at the last key."""

from __future__ import annotations

import math

import pytest
import torch

from helpers import DTYPES, SCHEDULES, Case, check, make_case, name_of, run
from wavefill import reference

dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
schedules = pytest.mark.parametrize("schedule", SCHEDULES)


@dtypes
@schedules
@pytest.mark.parametrize("page_size", [None, 16])
@pytest.mark.parametrize("q_len", [1, 2, 7])
def test_l1_a_few_queries_see_the_whole_history(
    dtype: torch.dtype, schedule: str, page_size: int | None, q_len: int
) -> None:
    """A query that saw only the keys of its own index would have an LSE near 0 instead of ln(300)."""
    case = make_case([300, q_len, 64], q_lens=[q_len] * 3, dtype=dtype, page_size=page_size)
    _, lse = check(case, schedule=schedule)
    assert (lse[:q_len] > math.log(150)).all()


@schedules
def test_l1_a_prefix_hit_equals_the_whole_prompt(schedule: str) -> None:
    """The last 7 tokens of a prompt of 40, given alone after a hit on the first 33."""
    whole = make_case([40], q_lens=[40], HQ=4, KH=2)
    out, lse = check(whole, schedule=schedule)
    hit = Case(whole.q[33:], whole.k_cache, whole.v_cache, whole.seq_lens,
               cu_seqlens_q=torch.tensor([0, 7], dtype=torch.int32))
    hit_out, hit_lse = check(hit, schedule=schedule)
    torch.testing.assert_close(hit_out, out[33:], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(hit_lse, lse[33:], rtol=1e-5, atol=1e-6)


@dtypes
@schedules
@pytest.mark.parametrize(("q_len", "n"), [(2, 3), (1, 1), (2, 2), (3, 2), (5, 9), (4, 1)], ids=str)
def test_l2_by_hand_in_kernel_and_oracle(dtype: torch.dtype, schedule: str, q_len: int, n: int) -> None:
    """With equal scores a query's output is the mean of what it sees: 2 to the power of the key's number."""
    v = (2.0 ** torch.arange(n)).view(1, n, 1, 1).to(dtype)
    case = Case(torch.ones(q_len, 1, 1, dtype=dtype), torch.zeros(1, n, 1, 1, dtype=dtype), v,
                torch.tensor([n], dtype=torch.int32), cu_seqlens_q=torch.tensor([0, q_len], dtype=torch.int32))
    out, lse = run(case, schedule=schedule)
    oracle_out, oracle_lse = reference.attention(*case.tensors(), **case.options())
    for i in range(q_len):
        count = n - q_len + i + 1
        mean, log = ((2.0**count - 1) / count, math.log(count)) if count > 0 else (0.0, -math.inf)
        assert float(out[i]) == pytest.approx(mean, rel=torch.finfo(dtype).eps)
        assert float(lse[i]) == pytest.approx(log, rel=1e-6)
        assert float(oracle_out[i]) == pytest.approx(mean, rel=1e-14)
        assert float(oracle_lse[i]) == pytest.approx(log, rel=1e-14)


@dtypes
def test_l3_query_tokens_share_their_requests_row_of_the_table(dtype: torch.dtype) -> None:
    """Three query tokens a request: 96 rows of queries over 32 rows of the table."""
    check(make_case([20] * 32, q_lens=[3] * 32, HQ=8, KH=1, D=96, DV=64, dtype=dtype, page_size=16, latent=True))

"""Paged inputs on a GPU with everything poisoned that must not be read, the oracle, and the bound of an error."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import wavefill

LN2 = math.log(2)


@dataclass
class Problem:
    """One call: q [B, HQ, D], caches, lengths and table (None where the cache is contiguous)."""

    q: Tensor
    k: Tensor
    v: Tensor
    lens: Tensor
    table: Tensor | None

    def run(self, **options: Any) -> tuple[Tensor, Tensor]:
        """The call into an output that was NaN before; its LSE comes along."""
        out = torch.full((*self.q.shape[:2], self.v.shape[3]), math.nan, device="cuda", dtype=self.q.dtype)
        return wavefill.decode_attention(self.q, self.k, self.v, self.lens, self.table, out=out, return_lse=True,
                                         **options)


def problem(lens: list[int], HQ: int, KH: int, D: int, *, DV: int | None = None, page: int | None = 16,
            dtype: torch.dtype = torch.bfloat16, order: str = "HND", width: int | None = None,
            seed: int = 0) -> Problem:
    """Random inputs; unused pages and tails are NaN, unused table slots lead out of the cache.

    page: tokens of a page, None for a contiguous cache. order: "HND", "NHD" or "KV" (K and V of a token side by side).
    width: columns of the table, as many as are needed if None.
    """
    generator = torch.Generator("cuda").manual_seed(seed)
    DV = D if DV is None else DV
    B, size = len(lens), page or max(*lens, 1)
    counts = [-(-n // page) for n in lens] if page else [1] * B
    blocks = sum(counts) + 1 if page else B
    table = None
    if page:
        table = torch.full((B, width or max(*counts, 1)), 2**31 - 1, dtype=torch.int32)
        order_of = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(seed)).to(torch.int32) + 1
        for b, ids in enumerate(torch.split(order_of, counts)):
            table[b, : len(ids)] = ids
    k, v = _storage(blocks, size, KH, D, DV, order, dtype)
    for cache in (k, v):
        cache.fill_(math.nan)
        for b, n in enumerate(lens):
            for i in range(counts[b]):
                block = int(table[b, i]) if table is not None else b
                tokens = min(size, n - i * size)
                if tokens > 0:
                    cache[block, :tokens] = torch.randn(tokens, KH, cache.shape[3], generator=generator,
                                                        device="cuda").to(dtype)
    q = torch.randn(B, HQ, D, generator=generator, device="cuda").to(dtype)
    return Problem(q, k, v, torch.tensor(lens, dtype=torch.int32, device="cuda"),
                   None if table is None else table.cuda())


def _storage(blocks: int, size: int, KH: int, D: int, DV: int, order: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if order == "KV":
        both = torch.empty(blocks, size, KH, D + DV, device="cuda", dtype=dtype)
        return both[..., :D], both[..., D:]
    if order == "HND":
        return tuple(torch.empty(blocks, KH, size, d, device="cuda", dtype=dtype).transpose(1, 2) for d in (D, DV))
    return tuple(torch.empty(blocks, size, KH, d, device="cuda", dtype=dtype) for d in (D, DV))


def oracle(p: Problem, window: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Float64 output [B, HQ, DV] and LSE [B, HQ], and the output as PyTorch computes it in the inputs' dtype."""
    B, HQ, D = p.q.shape
    KH, DV = p.k.shape[2], p.v.shape[3]
    out = torch.zeros(B, HQ, DV, device="cuda", dtype=torch.float64)
    plain = torch.zeros(B, HQ, DV, device="cuda", dtype=p.q.dtype)
    lse = torch.full((B, HQ), -math.inf, device="cuda", dtype=torch.float64)
    for b, n in enumerate(p.lens.tolist()):
        low = max(n - window, 0) if window else 0
        if n <= low:
            continue
        keys, values = (_tokens(p, cache, b, n)[low:].transpose(0, 1) for cache in (p.k, p.v))  # [KH, n, D]
        q = p.q[b].view(KH, HQ // KH, D)
        scores = q.double() @ keys.double().transpose(1, 2) * D**-0.5
        lse[b] = scores.logsumexp(-1).view(-1)
        out[b] = (scores.softmax(-1) @ values.double()).reshape(HQ, DV)
        weights = (q.float() @ keys.float().transpose(1, 2) * D**-0.5).softmax(-1).to(p.q.dtype)
        plain[b] = (weights @ values).reshape(HQ, DV)
    return out, lse, plain


def _tokens(p: Problem, cache: Tensor, b: int, n: int) -> Tensor:
    if p.table is None:
        return cache[b, :n]
    size = cache.shape[1]
    return cache[p.table[b, : -(-n // size)].long()].flatten(0, 1)[:n]


def hold(p: Problem, got: tuple[Tensor, Tensor], window: int | None = None) -> None:
    """Assert out and LSE of every row and head against the oracle.

    At most twice the error that PyTorch makes in the same dtype (its weights are rounded before they meet V, as ours
    are), plus the rounding of the result; LSE within float32 arithmetic.
    """
    out, lse, plain = oracle(p, window)
    got_out, got_lse = got
    eps = torch.finfo(p.q.dtype).eps
    bound = 2 * (plain.double() - out).abs().amax(-1) + eps * out.abs().amax(-1) + 1e-30
    error = (got_out.double() - out).abs().amax(-1)
    assert bool((error <= bound).all()), (  # a NaN fails
        f"worst row and head {(error / bound).nan_to_num(math.inf).argmax().item()}: error {error.max().item():.3g}, "
        f"bound {bound[error == error.max()].min().item() if error.isfinite().all() else 'NaN'}")
    empty = torch.isneginf(lse)
    assert bool((torch.isneginf(got_lse) == empty).all())
    assert bool((got_out[empty] == 0).all())
    assert (got_lse.double() - lse)[~empty].abs().max().nan_to_num(0).item() < 2e-5 if (~empty).any() else True

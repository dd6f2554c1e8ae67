"""The merge of chunks of prompts, whose rows are cut into a few pieces: partial states become results."""

from __future__ import annotations

import math

import pytest
import torch

from wavefill.backends.gpu import merge, rows

#: Rows of at most 2 query tokens, 2 KV heads of 3 query heads, tiles of 16 keys.
BLOCK, KH, G, DV, TILE = 2, 2, 3, 16, 16
LENS, STARTS, T = [70, 9, 0, 33], [1, 5, 6, 8, 11], 13
HQ, QUERIES = KH * G, BLOCK * G


def planes(window: int | None) -> tuple[torch.Tensor, int]:
    R = T // BLOCK + len(LENS)
    found = torch.zeros(7 * R + 3, dtype=torch.int32)
    rows.expand[(-(-R // 8),)](torch.tensor(STARTS, dtype=torch.int32), torch.tensor(LENS, dtype=torch.int32), found,
                               found, 0, len(LENS), R, T, BLOCK, 1, window or 0, 10_000, 4, 8, False)
    return found, R


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("param", [2, 3, 9])
def test_states_of_pieces_become_results(param: int, window: int | None, sinks: bool) -> None:
    generator = torch.Generator().manual_seed(param)
    found, R = planes(window)
    start, stop, _request, first, count = (found[i * R : (i + 1) * R].tolist() for i in range(5))
    tiles = [-(-b // TILE) - a // TILE if b > a else 0 for a, b in zip(start, stop, strict=True)]
    pieces = [min(n, param) for n in tiles]
    slots = KH * sum(pieces)
    o = torch.randn(slots, QUERIES, DV, generator=generator)
    m = torch.randn(slots, QUERIES, generator=generator)
    total_of = torch.rand(slots, QUERIES, generator=generator) + 0.1
    sink = torch.randn(HQ, generator=generator)
    out, lse = torch.full((T, HQ, DV), math.nan), torch.full((T, HQ), math.nan)
    merge.join_pieces[(R * KH, -(-QUERIES // 4))](
        found, out, lse, o, m, total_of, sink, R, KH, G, QUERIES, T, window or 0, 10_000, param,
        *out.stride()[:2], *lse.stride(), DV, 4, TILE, 4, False, sinks)

    slot = 0
    for row in range(R):
        for head in range(KH):
            mine = range(slot, slot + pieces[row])
            slot += pieces[row]
            for query in range(count[row] * G):
                token, h = first[row] + query // G, head * G + query % G
                if len(mine) == 1:  # the attention kernel wrote it
                    assert out[token, h].isnan().all()
                    assert lse[token, h].isnan()
                    continue
                logits = m[mine.start : mine.stop, query].double() * math.log(2)
                weights = logits.exp()
                total = (weights * total_of[mine.start : mine.stop, query].double()).sum()
                total = total + (sink[h].double().exp() if sinks else 0)
                value = (weights[:, None] * o[mine.start : mine.stop, query].double()).sum(0)
                expected = value / total if total else value
                assert torch.allclose(out[token, h].double(), expected, rtol=1e-5, atol=1e-6)
                assert torch.allclose(lse[token, h].double(), total.log(), rtol=1e-5, atol=1e-6)
    none = [token for token in range(T) if not STARTS[0] <= token < STARTS[-1]]
    assert bool((out[none] == 0).all())
    assert bool((lse[none] == -math.inf).all())

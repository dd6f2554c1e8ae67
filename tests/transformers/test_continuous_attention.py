"""Paged batches as the contracts give them, against attention over each request's keys by itself."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers.generation")

import torch
from torch import Tensor

from wavefill import api
from wavefill.integrations.transformers.continuous.attention import Plans, run
from wavefill.integrations.transformers.continuous.contract import Decode, Ragged

pytestmark = pytest.mark.transformers

HQ, KH, D, DV = 6, 2, 16, 8
OPTIONS: dict[str, Any] = {"scale": D**-0.5, "softcap": None, "sinks": None}
#: As Gemma-2 and gpt-oss pass them, and both at once.
SCORES: dict[str, dict[str, Any]] = {
    "plain": OPTIONS, "softcap": {**OPTIONS, "softcap": 0.7},
    "sinks": {**OPTIONS, "sinks": torch.linspace(-2, 3, HQ)},
    "both": {"scale": 0.6, "softcap": 0.7, "sinks": torch.linspace(-2, 3, HQ)},
}


def _alone(q: Tensor, k: Tensor, v: Tensor, window: int | None, options: dict[str, Any]) -> Tensor:
    """Attention of q [n, HQ, D] that ends the keys k [m, KH, D], in float64: [n, HQ, DV]."""
    at = torch.arange(len(k) - len(q), len(k))[:, None]
    key = torch.arange(len(k))
    seen = (key <= at) & (key > at - (len(k) if window is None else window))
    k, v = (x.double().repeat_interleave(HQ // KH, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * options["scale"]
    if options["softcap"] is not None:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    weights = scores.masked_fill(~seen, -torch.inf)
    if options["sinks"] is not None:
        weights = torch.cat([weights, options["sinks"].double()[:, None, None].expand(-1, len(q), 1)], 2)
    return torch.einsum("hqk,khd->qhd", weights.softmax(-1)[..., :len(k)], v)


def _starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("storage", ["packed", "slots"])
@pytest.mark.parametrize("lengths", [
    [(1, 1)], [(16, 16)], [(5, 37)], [(16, 16), (7, 7)], [(1, 9), (4, 30), (0, 0), (1, 1)],
    [(3, 700), *[(1, n) for n in range(1, 12)], (0, 0), (2, 40)],
], ids=["one-key", "one-prompt", "one-chunk", "prompts", "mixed", "one-long"])
def test_ragged(
    lengths: list[tuple[int, int]], storage: str, window: int | None, scores: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed keys and scattered token slots, windows too; one long request beside short ones stays within memory.

    16 packed query tokens with a window of 4 are case K6: causal and window both.
    """
    tables = []
    original = api.attention

    def watched(q: Tensor, k: Tensor, v: Tensor, seq_lens: Tensor, table: Tensor | None, **options: object) -> Tensor:
        tables.append(0 if table is None else table.numel())
        return original(q, k, v, seq_lens, table, **options)

    monkeypatch.setattr(api, "attention", watched)
    torch.manual_seed(len(lengths))
    q_lens, k_lens = [q for q, _ in lengths], [k for _, k in lengths]
    tokens, keys, padding = sum(q_lens), sum(k_lens), 3
    q = torch.randn(1, HQ, tokens + padding, D)
    k, v = torch.randn(keys, KH, D), torch.randn(keys, KH, DV)
    if storage == "packed":
        batch = Ragged(k, v, None, _starts(q_lens), _starts(k_lens))
    else:
        slots = torch.randperm(keys + 20)[:keys]
        k_pool, v_pool = torch.full((keys + 20, KH, D), torch.nan), torch.full((keys + 20, KH, DV), torch.nan)
        k_pool[slots], v_pool[slots] = k, v
        batch = Ragged(k_pool, v_pool, slots, _starts(q_lens), _starts(k_lens))
    out = run(batch, q, Plans(), window=window, **SCORES[scores])
    assert out.shape == (1, tokens + padding, HQ, DV)
    assert not out[0, tokens:].any()
    queries = q[0].transpose(0, 1)
    first_q, first_k = _starts(q_lens).tolist(), _starts(k_lens).tolist()
    for i, (n, m) in enumerate(lengths):
        want = _alone(queries[first_q[i]:first_q[i + 1]], k[first_k[i]:first_k[i + 1]], v[first_k[i]:first_k[i + 1]],
                      window, SCORES[scores]) if m else torch.zeros(n, HQ, DV)
        torch.testing.assert_close(out[0, first_q[i]:first_q[i + 1]].double(), want.double(), atol=2e-6, rtol=1e-5)
    assert sum(tables) <= 4 * keys


def test_plans_are_made_once() -> None:
    """Layers that share lengths and slots share the tables; layers that don't, don't."""
    plans = Plans()
    cu_q, cu_k = _starts([1, 1]), _starts([3, 2])
    k, v = torch.randn(9, KH, D), torch.randn(9, KH, DV)
    first, second = torch.tensor([0, 1, 2, 3, 4]), torch.tensor([8, 7, 6, 5, 4])
    made = plans.groups(Ragged(k, v, first, cu_q, cu_k))
    assert plans.groups(Ragged(k + 1, v, first, cu_q, cu_k)) is made
    other = plans.groups(Ragged(k, v, second, cu_q, cu_k))
    assert other is not made
    assert other[0].table is not None
    assert other[0].table.tolist() == [[8, 7, 6], [5, 4, 4]]


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("interleaved", [False, True], ids=["apart", "interleaved"])
def test_decode(interleaved: bool, scores: str) -> None:
    """One token a request: it is written to its page and attended to; padded rows are neither, and give 0.

    A length of 0 or less and a missing first page both mark a padded row. Nothing but the new tokens is written.
    """
    page, width = 4, 5
    lengths = torch.tensor([1, 4, 5, 17, 0, -1, 9], dtype=torch.int32)
    torch.manual_seed(1)
    storage = torch.randn(60, page, KH, D)
    k_pages, v_pages = (storage[:-1], storage[1:]) if interleaved else (storage.clone(), storage.clone())
    table = torch.full((len(lengths), width), -1, dtype=torch.int32)
    order = iter((2 * torch.randperm(28)).tolist())  # even pages of K are odd ones of V when they interleave
    for row, n in enumerate(lengths[:6].tolist()):
        for column in range(-(-n // page)):
            table[row, column] = next(order)
    k, v, q = torch.randn(7, KH, D), torch.randn(7, KH, D), torch.randn(1, HQ, 7, D)
    before = [k_pages.clone(), v_pages.clone()]
    out = run(Decode(k_pages, v_pages, table, lengths, k, v), q, Plans(), window=None, **SCORES[scores])
    assert out.shape == (1, 7, HQ, D)
    written = 0
    for row, n in enumerate(lengths.tolist()):
        if n <= 0 or row == 6:
            assert not out[0, row].any()
            continue
        at = torch.arange(n)
        where = table[row, at // page].long(), at % page
        keys, values = k_pages[where], v_pages[where]
        torch.testing.assert_close(keys[-1], k[row], atol=0, rtol=0)
        torch.testing.assert_close(values[-1], v[row], atol=0, rtol=0)
        torch.testing.assert_close(keys[:-1], before[0][where][:-1], atol=0, rtol=0)
        want = _alone(q[0, :, row][None], keys, values, None, SCORES[scores])
        torch.testing.assert_close(out[0, row][None].double(), want, atol=2e-6, rtol=1e-5)
        written += 1
    changed = (k_pages != before[0]).any(-1).any(-1).sum()
    assert changed == (2 * written if interleaved else written)

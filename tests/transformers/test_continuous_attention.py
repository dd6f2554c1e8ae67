"""Paged batches as the contracts give them, against attention over each request's keys by itself."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers.generation")

import torch
from torch import Tensor

from wavefill.cache import KVPages
from wavefill.integrations.transformers import kernels
from wavefill.integrations.transformers.continuous import attention
from wavefill.integrations.transformers.continuous.contract import Batch, Decode, Ragged, packed
from wavefill.scores import Options

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


def _run(batch: Batch, q: Tensor, window: int | None, scores: str) -> Tensor:
    options = dict(SCORES[scores])
    return attention.run(batch, q, attention.Plans(), window=window, scale=options.pop("scale"),
                         options=Options(**options))


def _starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def _in_pages(x: Tensor, lengths: list[int], size: int, order: list[int]) -> tuple[Tensor, Tensor]:
    """Keys [N, KH, D] of requests in pages [pages, size, KH, D], each from a page's beginning, NaN where there is none,
    and the slot of each. order: free pages."""
    pages, slots, free = torch.full((len(order) + 1, size, *x.shape[1:]), torch.nan), [], iter(order)
    for length in lengths:
        for at in range(0, length, size):
            page = next(free)
            slots.extend(page * size + offset for offset in range(min(size, length - at)))
    pages.flatten(0, 1)[slots] = x
    return pages, torch.tensor(slots)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("padding", [False, True], ids=["exact", "padded"])
@pytest.mark.parametrize("page", [0, 1, 4], ids=["packed", "slots", "pages"])
@pytest.mark.parametrize("lengths", [
    [(1, 1)], [(16, 16)], [(5, 37)], [(16, 16), (7, 7)], [(1, 9), (4, 30), (0, 0), (1, 1)],
    [(3, 700), *[(1, n) for n in range(1, 12)], (0, 0), (2, 40)],
], ids=["one-key", "one-prompt", "one-chunk", "prompts", "mixed", "one-long"])
def test_ragged(
    lengths: list[tuple[int, int]], page: int, padding: bool, window: int | None, scores: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Packed keys and scattered pages, windows too; one long request beside short ones stays within memory.

    Padded as for a CUDA graph, and in one call as on a GPU: more query tokens, requests without any, more keys, which
    are no numbers, and bounds above what is there. 16 packed query tokens with a window of 4 are case K6.
    """
    tables, original = [], kernels.attention

    def watched(q: Tensor, pages: KVPages, lens: Tensor, table: Tensor | None, *args: Any, **options: Any) -> Tensor:
        tables.append(0 if table is None else table.numel())
        return original(q, pages, lens, table, *args, **options)

    monkeypatch.setattr(kernels, "attention", watched)
    torch.manual_seed(len(lengths))
    more = 3 * padding
    q_lens, k_lens = ([*x, *[0] * more] for x in zip(*lengths, strict=True))
    tokens, keys = sum(q_lens), sum(k_lens)
    q = torch.randn(1, HQ, tokens + 3, D)
    k, v = torch.randn(keys, KH, D), torch.randn(keys, KH, DV)
    bounds = _starts(q_lens), _starts(k_lens), max(q_lens) + more, max(k_lens) + more
    if page:
        trash, *order = torch.randperm(sum(-(-n // page) for n in k_lens) + 5).tolist()
        (k_pages, slots), (v_pages, _) = (_in_pages(x, k_lens, page, order) for x in (k, v))
        batch = Ragged(k_pages, v_pages, torch.cat([slots, torch.full((2 * more,), trash * page)]), *bounds)
    else:
        batch = packed(*(torch.cat([x, torch.full((more, *x.shape[1:]), torch.nan)]) for x in (k, v)), *bounds)
    if padding:
        monkeypatch.setattr(attention, "_wastes", lambda *sizes: False)
    out = _run(batch, q, window, scores)
    assert out.shape == (1, tokens + 3, HQ, DV)
    assert not out[0, tokens:].any()
    queries = q[0].transpose(0, 1)
    first_q, first_k = _starts(q_lens).tolist(), _starts(k_lens).tolist()
    for i, (n, m) in enumerate(lengths):
        want = _alone(queries[first_q[i]:first_q[i + 1]], k[first_k[i]:first_k[i + 1]], v[first_k[i]:first_k[i + 1]],
                      window, SCORES[scores]) if m else torch.zeros(n, HQ, DV)
        torch.testing.assert_close(out[0, first_q[i]:first_q[i + 1]].double(), want.double(), atol=2e-6, rtol=1e-5)
    if padding:
        assert len(tables) == 1
    else:
        assert sum(tables) <= 4 * keys


def test_plans_are_made_once() -> None:
    """Layers that share lengths and slots share the tables; layers that don't, don't."""
    plans = attention.Plans()
    bounds = _starts([1, 1]), _starts([3, 2]), 1, 3
    k, v = torch.randn(9, 1, KH, D), torch.randn(9, 1, KH, DV)
    first, second = torch.tensor([0, 1, 2, 3, 4]), torch.tensor([8, 7, 6, 5, 4])
    made = plans.groups(Ragged(k, v, first, *bounds))
    assert plans.groups(Ragged(k + 1, v, first, *bounds)) is made
    other = plans.groups(Ragged(k, v, second, *bounds))
    assert other is not made
    assert other[0].table is not None
    assert other[0].table.tolist() == [[8, 7, 6], [5, 4, 4]]
    table = torch.tensor([[[3, -1], [-1, -1]], [[5, 6], [-1, -1]]], dtype=torch.int32)
    cu_k, tokens = _starts([2, 0]), torch.randn(2, KH, D)
    pages = torch.randn(9, 4, KH, D)
    once = plans.slots(Decode(pages, pages, table[0], cu_k, tokens, tokens))
    assert plans.slots(Decode(pages, pages, table[0], cu_k, tokens, tokens))[1] is once[1]
    assert [x.tolist() for x in once] == [[2, 0], [13, -1]]
    assert plans.slots(Decode(pages, pages, table[1], cu_k, tokens, tokens))[1].tolist() == [21, -1]


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("interleaved", [False, True], ids=["apart", "interleaved"])
def test_decode(interleaved: bool, scores: str) -> None:
    """One token a request: it is written to its page and attended to; padded rows are neither, and give 0.

    No key and a missing first page both mark a padded row. Nothing but the new tokens is written.
    """
    page, width = 4, 5
    lengths = torch.tensor([1, 4, 5, 17, 0, 0, 9], dtype=torch.int32)
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
    out = _run(Decode(k_pages, v_pages, table, _starts(lengths.tolist()), k, v), q, None, scores)
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

"""wavefill in the shape of a FlashAttention kernel package: its functions against float64, and what `kernels` finds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers.generation")

import torch
from test_continuous_attention import KH, SCORES, D, _alone, _starts
from torch import Tensor

from wavefill import InvalidArgument
from wavefill.integrations.transformers.continuous import flash

pytestmark = pytest.mark.transformers

HQ = 6


def _options(scores: str, window: int | None, causal: bool = True) -> dict[str, Any]:
    """As transformers passes them: a window of n keys, the query's own included, is (n - 1, n - 1)."""
    given = SCORES[scores]
    return {"softmax_scale": given["scale"], "softcap": given["softcap"] or 0.0, "s_aux": given["sinks"],
            "causal": causal, "window_size": (-1, -1) if window is None else (window - 1, window - 1)}


def _close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got.double(), want, atol=2e-6, rtol=1e-5)


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_func(tokens: int, window: int | None, scores: str) -> None:
    """One query is not called causal; keys lie heads before tokens, as in transformers' own caches."""
    torch.manual_seed(0)
    q, (k, v) = torch.randn(2, tokens, HQ, D), torch.randn(2, 2, KH, 9, D).transpose(2, 3)
    out = flash.flash_attn_func(q, k, v, **_options(scores, window, causal=tokens > 1))
    for row in range(2):
        _close(out[row], _alone(q[row], k[row], v[row], window, SCORES[scores]))


@pytest.mark.parametrize("scores", SCORES)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("lengths", [[(1, 9)], [(7, 7)], [(1, 9), (4, 30), (0, 0), (16, 16)]])
def test_varlen(lengths: list[tuple[int, int]], window: int | None, scores: str) -> None:
    torch.manual_seed(1)
    q_lens, k_lens = map(list, zip(*lengths, strict=True))
    q, k, v = torch.randn(sum(q_lens), HQ, D), *torch.randn(2, sum(k_lens), KH, D)
    out = flash.flash_attn_varlen_func(q, k, v, _starts(q_lens), _starts(k_lens), max(q_lens), max(k_lens),
                                       **_options(scores, window))
    parts = (x.split(n) for x, n in ((out, q_lens), (q, q_lens), (k, k_lens), (v, k_lens)))
    for got, *alone in zip(*parts, strict=True):
        if len(got):
            _close(got, _alone(*alone, window, SCORES[scores]))


def test_kvcache() -> None:
    """The new token goes to its page; a row that pads the batch writes nothing and gets 0."""
    torch.manual_seed(2)
    pages = torch.randn(2, 9, 4, KH, D)
    before = pages.clone()
    table = torch.tensor([[7, -1, -1], [3, 5, 0], [-1, -1, -1]], dtype=torch.int32)
    held, (k, v) = torch.tensor([3, 8, -1], dtype=torch.int32), torch.randn(2, 3, 1, KH, D)
    q = torch.randn(3, 1, HQ, D)
    out = flash.flash_attn_with_kvcache(q, *pages, k, v, held, table, **_options("plain", None))
    assert not out[2].any()
    for row, (page, offset) in enumerate(((7, 3), (0, 0))):
        assert torch.equal(pages[:, page, offset], torch.stack([k[row, 0], v[row, 0]]))
        at = torch.arange(int(held[row]) + 1)
        _close(out[row], _alone(q[row], *pages[:, table[row, at // 4].long(), at % 4], None, SCORES["plain"]))
        pages[:, page, offset] = before[:, page, offset]
    assert torch.equal(pages, before)


def test_what_it_does_not_compute_is_refused() -> None:
    q, k = torch.zeros(1, 3, HQ, D), torch.zeros(1, 9, KH, D)
    for options, message in (({"causal": False}, "causal: must be true"),
                             ({"causal": True, "dropout_p": 0.1}, "dropout_p: must be 0")):
        with pytest.raises(InvalidArgument, match=message):
            flash.flash_attn_func(q, k, k, **options)


def test_package(tmp_path: Path) -> None:
    """As `kernels` wants one for each kind of device."""
    assert flash.write(tmp_path) == f"wavefill/flash-attn2={tmp_path}"
    for device in ("cpu", "cuda"):
        folder = tmp_path / "build" / f"torch-{device}"
        assert json.loads((folder / "metadata.json").read_text())["backend"] == {"type": device}
        found: dict[str, Any] = {}
        exec((folder / "__init__.py").read_text(), found)
        assert found["flash_attn_with_kvcache"] is flash.flash_attn_with_kvcache

"""wavefill in the shape of a FlashAttention kernel package, for `transformers serve`, which takes no other attention.

    LOCAL_KERNELS=$(python -m wavefill.integrations.transformers.continuous.flash) \\
        transformers serve MODEL --continuous-batching --attn-implementation wavefill/flash-attn2

prints where the package lies and what name it has, and `kernels` loads it from there in place of one of the Hub's. The
functions below are what transformers calls then: by its own caches, copies of keys included. `enable(model)` reads
pages in `generate` as well, and gathers no keys, and is what to use wherever the model is at hand.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from wavefill.cache import KVPages
from wavefill.integrations.transformers import kernels
from wavefill.integrations.transformers.continuous import attention
from wavefill.integrations.transformers.continuous.contract import packed
from wavefill.integrations.transformers.current import untraced
from wavefill.ops import _options
from wavefill.spec import invalid

NAME = "wavefill/flash-attn2"
Window = tuple[int, int]
_MODULE = "wavefill.integrations.transformers.continuous.flash"  # which is not __name__ in `python -m`


@untraced
def flash_attn_func(
    q: Tensor, k: Tensor, v: Tensor, dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, s_aux: Tensor | None = None,
) -> Tensor:
    """Attention [B, S, HQ, DV] of q [B, S, HQ, D] that ends k [B, N, KH, D] and v [B, N, KH, DV].

    window_size: keys seen before a query's own, and after it, which is 0 where `causal`; -1: all. softcap: 0: none.
    s_aux: sinks [HQ].
    """
    B, S, HQ, D = q.shape
    _hold(dropout_p, causal or S == 1)
    lengths = torch.full((B,), k.shape[1], dtype=torch.int32, device=q.device)
    starts = torch.arange(0, (B + 1) * S, S, dtype=torch.int32, device=q.device)
    out = kernels.attention(
        q.reshape(B * S, HQ, D), KVPages(k, v), lengths, None, starts, max_q_len=S, scale=_scale(softmax_scale, D),
        window=_window(window_size), options=_options(softcap or None, s_aux, None, None))
    return out.view(B, S, HQ, -1)


@untraced
def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    window_size: Window = (-1, -1), softcap: float = 0.0, s_aux: Tensor | None = None,
) -> Tensor:
    """Attention [T, HQ, DV] of packed queries q [T, HQ, D] over packed keys k [N, KH, D] and v [N, KH, DV]."""
    _hold(dropout_p, causal or int(max_seqlen_q) == 1)
    window, most_k = _window(window_size), int(max_seqlen_k)
    if window is not None:  # for a graph of a layer with a window transformers may cut the bound to less than there is
        most_k = max(most_k, q.shape[0] + window - 1)
    batch = packed(k, v, cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), most_k)
    return attention.run(batch, q.transpose(0, 1).unsqueeze(0), attention.Plans(),
                         scale=_scale(softmax_scale, q.shape[-1]), window=window,
                         options=_options(softcap or None, s_aux, None, None))[0]


@untraced
def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, cache_seqlens: Tensor, block_table: Tensor,
    softmax_scale: float | None = None, causal: bool = False, window_size: Window = (-1, -1), softcap: float = 0.0,
    s_aux: Tensor | None = None,
) -> Tensor:
    """Write one new token of each request, k [B, 1, KH, D] and v, into its page, and attend: [B, 1, HQ, DV].

    q: [B, 1, HQ, D]. k_cache, v_cache: [pages, page_size, KH, D] and [.., DV]. cache_seqlens: [B] int32, keys before
    the new one, -1 in a row that pads. block_table: [B, width] int32.
    """
    if q.shape[1] != 1:
        raise invalid("q", "must have one token a request where there is a cache", q.shape[1], "Use varlen.")
    pages = KVPages(k_cache, v_cache)
    lengths, slots = attention.new_slots(cache_seqlens.int() + 1, block_table, k_cache.shape[1])
    kernels.append(pages, k[:, 0], v[:, 0], slots)
    return kernels.attention(
        q[:, 0], pages, lengths, block_table, None, max_q_len=1, scale=_scale(softmax_scale, q.shape[-1]),
        window=_window(window_size), options=_options(softcap or None, s_aux, None, None)).unsqueeze(1)


def _hold(dropout: float, causal: bool) -> None:
    if dropout:
        raise invalid("dropout_p", "must be 0", dropout, "Call model.eval().")
    if not causal:
        raise invalid("causal", "must be true", False, "Use the model's own attention.")


def _scale(scale: float | None, size: int) -> float:
    return float(size**-0.5 if scale is None else scale)


def _window(window_size: Window) -> int | None:
    return None if window_size[0] < 0 else int(window_size[0]) + 1


def write(folder: Path) -> str:
    """Write the package into `folder`, and return what LOCAL_KERNELS is to be for it."""
    names = "flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache"
    for device in ("cpu", "cuda"):
        package = folder / "build" / f"torch-{device}"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(f"from {_MODULE} import {names}\n")
        (package / "metadata.json").write_text(json.dumps({
            "name": "wavefill", "id": "wavefill_local", "version": 1, "license": "Apache-2.0", "python-depends": [],
            "backend": {"type": device}}))
    return f"{NAME}={folder}"


if __name__ == "__main__":
    print(write(Path(tempfile.mkdtemp(prefix="wavefill-"))))

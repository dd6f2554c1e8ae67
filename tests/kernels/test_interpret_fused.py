"""The kernels of a decoder layer in the interpreter: as near float64 as PyTorch, and whole fused layers of each family.

bf16 is left to the GPU: the interpreter cuts where hardware rounds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import layer_reference
from layer_reference import normed, silu_times
from wavefill.backends.gpu import flat, layer

DTYPES = (torch.float32, torch.float16)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [rows, heads, D] with their first elements rotated by cos and sin [rows, size]."""
    size = cos.shape[-1]
    front, rest = x[..., :size], x[..., size:]
    half = torch.cat((-front[..., size // 2 :], front[..., : size // 2]), -1)
    return torch.cat((front * cos[:, None] + half * sin[:, None], rest), -1)


def hold(got: Tensor, compute: Callable[..., Tensor], *inputs: Tensor) -> None:
    """`layer_reference.hold` of a function of tensors."""
    layer_reference.hold(got, lambda wide: compute(*(x.double() if wide else x for x in inputs)))


def noise(*size: int, dtype: torch.dtype, columns: int | None = None) -> Tensor:
    """Rows of numbers, of a wider tensor that is NaN elsewhere if `columns` says how wide."""
    made = torch.randn(*size, generator=torch.Generator().manual_seed(sum(size))).to(dtype)
    if columns is None:
        return made
    room = torch.full((*size[:-1], columns), torch.nan, dtype=dtype)
    room[..., : size[-1]] = made
    return room[..., : size[-1]]


@pytest.mark.parametrize("columns", [None, 600])
@pytest.mark.parametrize("N", [1, 72, 512])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms(dtype: torch.dtype, N: int, columns: int | None) -> None:
    x, delta, weight = (noise(n, N, dtype=dtype, columns=columns) for n in (3, 3, 1))
    x[1] = 0
    norm = partial(normed, eps=1e-5)
    hold(layer.rms_norm(x, weight[0], 1e-5, interpret=True), norm, x, weight[0])
    total, out = layer.add_rms_norm(x, delta + x, weight[0], 1e-5, interpret=True)
    assert torch.equal(total, x + (delta + x))
    hold(out, norm, total, weight[0])


@pytest.mark.parametrize("rows", [(1, 1), (3, 2)], ids=str)
@pytest.mark.parametrize(("HQ", "KH", "D", "size"), [(4, 2, 32, 32), (9, 3, 12, 12), (5, 1, 128, 96), (1, 1, 2, 2)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rotation(dtype: torch.dtype, HQ: int, KH: int, D: int, size: int, rows: tuple[int, int]) -> None:
    """With the same angles for all requests, and with each one's own."""
    B, T = rows
    for batch in {1, B}:
        qkv = noise(B * T, (HQ + 2 * KH) * D, dtype=dtype, columns=(HQ + 2 * KH) * D + 5)
        cos, sin = (f(noise(batch, T, size, dtype=torch.float32)).to(dtype) for f in (torch.cos, torch.sin))
        before = qkv.clone().view(B * T, -1, D)
        layer.rotate_(qkv, cos, sin, HQ, KH, D, interpret=True)
        after = qkv.clone().view(B * T, -1, D)
        assert torch.equal(after[:, HQ + KH :], before[:, HQ + KH :])
        assert torch.equal(after[..., size:], before[..., size:])
        hold(after[:, : HQ + KH], turned, before[:, : HQ + KH],
             *(x.expand(B, T, size).reshape(B * T, size) for x in (cos, sin)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_of_heads_and_rotation(dtype: torch.dtype) -> None:
    HQ, KH, D = 6, 2, 32
    qkv, (q_weight, k_weight) = noise(3, (HQ + 2 * KH) * D, dtype=dtype), noise(2, D, dtype=dtype)
    cos, sin = (f(noise(1, 3, D, dtype=torch.float32)).to(dtype) for f in (torch.cos, torch.sin))
    before = qkv.clone().view(3, -1, D)
    layer.rotate_(qkv, cos, sin, HQ, KH, D, q_weight=q_weight, k_weight=k_weight, eps=1e-3, interpret=True)
    after = qkv.view(3, -1, D)
    assert torch.equal(after[:, HQ + KH :], before[:, HQ + KH :])
    for heads, weight in ((slice(0, HQ), q_weight), (slice(HQ, HQ + KH), k_weight)):
        hold(after[:, heads], lambda x, w, c, s: turned(normed(x, w, 1e-3), c, s),
             before[:, heads], weight, cos[0], sin[0])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")
@pytest.mark.parametrize("N", [1, 80, 1100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_silu(dtype: torch.dtype, N: int) -> None:
    gate_up = noise(2, 2 * N, dtype=dtype, columns=2 * N + 3) * 4
    gate_up[0, 0] = -200.0  # exp overflows
    hold(layer.silu_mul(gate_up, interpret=True), silu_times, gate_up)


# ---- whole layers


FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"attention_bias": True, "mlp_bias": True}, "Mistral": {"sliding_window": 6}, "Qwen2": {}, "Qwen3": {},
    "Phi3": {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                        "partial_rotary_factor": 0.5}},
}


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_layers_compute_what_the_family_does(family: str, few: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logits of a prompt and two steps, with a cache, and every layer of them through the kernels.

    few: steps, of two rows, go through `flat.linear`, for which PyTorch stands in.
    """
    transformers = pytest.importorskip("transformers")
    from wavefill.integrations.transformers import fused

    calls: list[str] = []

    def interpreted(name: str) -> Callable[..., Any]:
        real = getattr(layer, name)

        def run(*args: Any, **more: Any) -> Any:
            calls.append(name)
            return real(*args, **more, interpret=True)
        return run

    for name in ("rms_norm", "add_rms_norm", "rotate_", "silu_mul"):
        monkeypatch.setattr(layer, name, interpreted(name))
    monkeypatch.setattr(fused, "_takes", lambda x, kwargs: True)
    if few:
        monkeypatch.setattr(flat, "takes", lambda rows, *_, **__: rows <= flat.MOST_ROWS)
        monkeypatch.setattr(flat, "linear", lambda *args, **more: calls.append("linear") or layer_reference.product(
            *args, **more))
    kind = getattr(transformers, f"{family}ForCausalLM")
    torch.manual_seed(3)
    model = kind(kind.config_class(
        vocab_size=97, hidden_size=72, intermediate_size=80, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=3, pad_token_id=0, eos_token_id=None, **({"head_dim": 16} if family == "Llama" else {}),
        **FAMILIES[family])).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.2  # biases and norms that are not 0 and 1
    ids = torch.randint(1, 97, (2, 9))
    name = "cache" if "cache" in inspect.signature(kind.forward).parameters else "past_key_values"

    @torch.no_grad()
    def logits() -> Tensor:
        parts, cache = [], None
        for start, stop in ((0, 7), (7, 8), (8, 9)):
            out = model(ids[:, start:stop], use_cache=True, **{name: cache})
            parts.append(out.logits)
            cache = out[name]
        return torch.cat(parts, 1)

    expected = logits()
    assert not calls
    fused.choose(model, True)
    assert fused.report(model) == []
    got = logits()
    many = ["rms_norm", "rotate_", "add_rms_norm", "silu_mul"] * 2
    step = ["linear", "rotate_", "linear", "linear", "linear"] * 2 if few else many
    assert calls == many + 2 * step
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    fused.choose(model, False)
    assert torch.equal(logits(), expected)

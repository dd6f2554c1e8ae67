"""Fused decoder layers on a GPU: as near the float32 model as the family's own are, and in a graph the same bits."""

from __future__ import annotations

import copy
import inspect
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from wavefill.backends.gpu import flat, kernels, layer

transformers = pytest.importorskip("transformers")
fused = pytest.importorskip("wavefill.integrations.transformers.fused")

#: family -> what its configuration has besides. Sizes that vectors divide, and odd ones.
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {}, "Llama odd": {"hidden_size": 60, "intermediate_size": 70, "num_attention_heads": 5,
                               "num_key_value_heads": 1, "head_dim": 12, "attention_bias": True, "mlp_bias": True},
    "Mistral": {"sliding_window": 40}, "Qwen2": {}, "Qwen3": {"head_dim": 32},
    "Phi3": {"sliding_window": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4,
                                                        "partial_rotary_factor": 0.5}},
}
DTYPES = (torch.bfloat16, torch.float16)
PROMPT, STEPS = 100, 6  # the prompt has more rows than a fused call takes


def build(family: str, dtype: torch.dtype) -> Any:
    kind = getattr(transformers, f"{family.split()[0]}ForCausalLM")
    torch.manual_seed(5)
    model = kind(kind.config_class(**{
        "vocab_size": 211, "hidden_size": 512, "intermediate_size": 1152, "num_hidden_layers": 3,
        "num_attention_heads": 8, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": None,
        **FAMILIES[family]})).eval()
    for parameter in model.parameters():
        parameter.data += torch.randn_like(parameter) * 0.02  # biases and norms that are not 0 and 1
    return model.to("cuda", dtype)


@torch.no_grad()
def logits(model: Any, batch: int, width: int) -> Tensor:
    """Of steps of `width` tokens after a prompt, over transformers' own cache."""
    name = "cache" if "cache" in inspect.signature(type(model).forward).parameters else "past_key_values"
    ids = torch.randint(1, 211, (batch, PROMPT + STEPS * width), generator=torch.Generator().manual_seed(7)).cuda()
    out = model(ids[:, :PROMPT], use_cache=True)
    parts = []
    for start in range(PROMPT, ids.shape[1], width):
        out = model(ids[:, start : start + width], use_cache=True, **{name: out[name]})
        parts.append(out.logits)
    return torch.cat(parts, 1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each layer that was computed fused."""
    seen: list[int] = []
    real = fused._forward

    def counted(layer: Any, family: Any, x: Tensor, **kwargs: Any) -> Tensor:
        seen.append(x.shape[0] * x.shape[1])
        out: Tensor = real(layer, family, x, **kwargs)
        return out

    monkeypatch.setattr(fused, "_forward", counted)
    return seen


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each product that `flat` computed."""
    seen: list[int] = []
    real = flat.linear

    def counted(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        seen.append(len(x))
        return real(x, *args, **kwargs)

    monkeypatch.setattr(flat, "linear", counted)
    return seen


def in_products(family: str, rows: int) -> bool:
    """Whether a layer of a family here is products of `flat` and little besides."""
    takes = flat.takes(rows, 512, 1152, torch.bfloat16, torch.device("cuda", 0))
    return "odd" not in family and rows <= flat.MOST_ROWS and takes


@pytest.mark.parametrize(("batch", "width"), [*((n, 1) for n in range(1, 17)), (1, 7), (2, 4), (2, 5), (64, 1)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_as_near_float32(family: str, dtype: torch.dtype, batch: int, width: int, calls: list[int],
                                         products: list[int]) -> None:
    model = build(family, dtype)
    truth = logits(copy.deepcopy(model).float(), batch, width)
    own = (logits(model, batch, width) - truth).abs()
    assert not calls
    fused.choose(model, True)
    assert fused.report(model) == []
    error = (logits(model, batch, width) - truth).abs()
    assert calls == [batch * width] * 3 * STEPS
    assert products == calls * (4 if in_products(family, batch * width) else 0)
    eps = torch.finfo(dtype).eps
    assert error.max() <= 2 * own.max() + eps * truth.abs().max()
    assert error.mean() <= 1.2 * own.mean() + eps


@pytest.mark.parametrize("what", ["weight", "input"])
def test_tensors_off_16_bytes_go_another_way(what: str, calls: list[int], products: list[int]) -> None:
    """`flat` reads in vectors; what it can't is computed as many rows are."""
    model = build("Llama", torch.bfloat16)
    fused.choose(model, True)
    x = torch.randn(1 + 512, device="cuda", dtype=torch.bfloat16)
    if what == "weight":
        for one in model.model.layers:
            weight = one.mlp.down_proj.weight
            weight.data = torch.cat((weight.data.flatten()[:1], weight.data.flatten()))[1:].view_as(weight)
    start = 1 if what == "input" else 0
    position = model.model.rotary_emb(x, torch.zeros(1, 1, dtype=torch.long, device="cuda"))
    with torch.no_grad():
        model.model.layers[0](x[start : start + 512].view(1, 1, 512), position_embeddings=position)
    assert calls == [1]
    assert not products


@pytest.mark.parametrize("family", FAMILIES)
def test_disable_brings_back_the_bits(family: str) -> None:
    model = build(family, torch.bfloat16)
    before = logits(model, 2, 1)
    fused.choose(model, True)
    fused.choose(model, False)
    assert torch.equal(logits(model, 2, 1), before)


@pytest.mark.parametrize("what", ["rows", "gradients", "training", "autocast", "float32", "a moved weight"])
def test_other_calls_are_the_familys(what: str, calls: list[int]) -> None:
    model = build("Llama", torch.float32 if what == "float32" else torch.bfloat16)
    fused.choose(model, True)
    ids = torch.ones(5, 13 if what == "rows" else 1, dtype=torch.long, device="cuda")
    if what == "a moved weight":
        for one in model.model.layers:
            one.self_attn.k_proj.weight.data = one.self_attn.k_proj.weight.data.clone()
    model.train(what == "training")
    with torch.set_grad_enabled(what == "gradients"), torch.autocast("cuda", torch.float16, what == "autocast"):
        model(ids)
    assert not calls


@pytest.mark.parametrize("tokens", [1, 3, 6])
def test_a_graph_of_a_step_has_the_same_bits(tokens: int) -> None:
    """With all products in `flat`, and at 12 rows with none."""
    model = build("Llama", torch.bfloat16)
    fused.choose(model, True)
    ids = torch.randint(1, 211, (2, tokens), device="cuda")
    step = torch.no_grad()(lambda: model(ids, use_cache=False).logits)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    count = kernels.compiled_count
    with torch.cuda.graph(graph):
        out = step()
    ids.copy_(torch.randint(1, 211, (2, tokens), device="cuda"))
    graph.replay()
    assert torch.equal(out, step())
    assert kernels.compiled_count == count


def test_bfloat16_is_rounded_as_transformers_rounds_it() -> None:
    """Rotation to the bit, which has no long sums and no functions of its own; norms and silu within one rounding."""
    apply = transformers.models.llama.modeling_llama.apply_rotary_pos_emb
    generator = torch.Generator("cuda").manual_seed(1)
    noise = partial(torch.randn, generator=generator, device="cuda", dtype=torch.bfloat16)
    qkv, angles = noise(6, 12 * 128), noise(2, 3, 64).float()
    cos, sin = (f(torch.cat((angles, angles), -1)).bfloat16() for f in (torch.cos, torch.sin))
    heads = qkv.clone().view(2, 3, 12, 128).transpose(1, 2)
    q, k = apply(heads[:, :8], heads[:, 8:10], cos, sin)
    layer.rotate_(qkv, cos, sin, 8, 2, 128)
    expected = torch.cat((q, k, heads[:, 10:]), 1).transpose(1, 2).reshape(6, -1)
    assert torch.equal(qkv, expected)
    x, delta, weight, gate_up = noise(6, 4096), noise(6, 4096), noise(4096), noise(6, 2 * 14336)
    norm = transformers.models.llama.modeling_llama.LlamaRMSNorm(4096, 1e-5).to("cuda", torch.bfloat16)
    norm.weight.data = weight
    total, out = layer.add_rms_norm(x, delta, weight, 1e-5)
    assert torch.equal(total, x + delta)
    g, u = gate_up.chunk(2, -1)
    for got, wanted in ((out, norm(total)), (layer.rms_norm(x, weight, 1e-5), norm(x)),
                        (layer.silu_mul(gate_up), torch.nn.functional.silu(g) * u)):
        torch.testing.assert_close(got, wanted, rtol=2**-6, atol=2**-14)

"""PagedKVCache(kv_format=...): what is appended comes back as the format defines it, through every way pages take."""

from __future__ import annotations

import copy
import io
import math
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import wavefill
from helpers import Case, name_of, same_bits
from quantised import PLAIN
from wavefill import PagedKVCache
from wavefill.formats import FORMATS, Part
from wavefill.quantise import Scales, dequantise, quantise, scales
from wavefill.spec import BackendUnavailable, InvalidArgument, InvalidType

forms = pytest.mark.parametrize("form", PLAIN)
KH, D, DV = 2, 40, 24


def make(form: str, num_pages: int = 12, page_size: int = 16, **kwargs: Any) -> PagedKVCache:
    given = {}
    if form == "fp8-tensor":
        given = {"k_scale": 0.02, "v_scale": torch.tensor([0.01, 0.02])}
    elif form == "fp8-head":
        given = {"k_scale": torch.tensor([0.01, 0.02]), "v_scale": torch.tensor([[0.01, 0.02], [0.02, 0.03]])}
    return PagedKVCache(num_pages, layers=2, page_size=page_size, kv_heads=KH, head_dim=D, head_dim_v=DV,
                        **{"dtype": torch.float32, "kv_format": form, **given, **kwargs})


def new(count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """K and V of both layers."""
    sizes = torch.tensor([1.0, 10.0]).view(2, 1)  # heads differ
    return (torch.randn(2, count, KH, D) * sizes).to(dtype), (torch.randn(2, count, KH, DV) * sizes).to(dtype)


def stored(x: Tensor, part: Part, given: Tensor | None) -> Tensor:
    """What a cache gives back of x [tokens, KH, size]."""
    by = scales(x, part) if given is None or part.span == "token" else Scales(given)
    return dequantise(quantise(x, part, by), part, by)


def attend(cache: PagedKVCache, requests: list[int], layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
    return wavefill.decode_attention(q, cache.view(layer), None, cache.seq_lens(requests),
                                     cache.block_table(requests), return_lse=True)


def assert_holds(cache: PagedKVCache, form: str, held: dict[int, tuple[Tensor, Tensor]]) -> None:
    """That attention over each request is that over what the format makes of its K and V."""
    requests = list(held)
    for layer in range(2):
        q = torch.randn(len(requests), 2 * KH, D).to(cache.dtype)
        pages = cache.view(layer)
        longest = max(k.shape[1] for k, _ in held.values())
        k_all, v_all = (torch.zeros(len(requests), longest, KH, size) for size in (D, DV))
        for i, (k, v) in enumerate(held.values()):
            k_all[i, : k.shape[1]] = stored(k[layer], FORMATS[form].k, pages.k_scale)
            v_all[i, : v.shape[1]] = stored(v[layer], FORMATS[form].v, pages.v_scale)
        lens = torch.tensor([cache.length(i) for i in requests], dtype=torch.int32)
        Case(q, k_all, v_all, lens).expected.check(*attend(cache, requests, layer, q))


@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=name_of)
@forms
def test_what_is_appended_comes_back(form: str, dtype: torch.dtype, layout: str) -> None:
    cache = make(form, dtype=dtype, layout=layout)
    a, b = cache.add(2)
    steps = [new(37, dtype), new(2, dtype)]
    cache.append([a, b], *steps[0], counts=[30, 7])
    for layer in range(2):  # a step of one token each, layer by layer
        cache.append([a, b], steps[1][0][layer], steps[1][1][layer], layer=layer)
    held = {a: tuple(torch.cat((x[:, :30], y[:, :1]), 1) for x, y in zip(*steps, strict=True)),
            b: tuple(torch.cat((x[:, 30:], y[:, 1:]), 1) for x, y in zip(*steps, strict=True))}
    assert_holds(cache, form, held)  # type: ignore[arg-type]


@forms
def test_forks_truncation_growth_and_copies(form: str) -> None:
    cache = make(form, 3)
    (a,) = cache.add()
    first, more, other = new(20), new(3), new(5)
    cache.append(a, *first)
    (b,) = cache.fork(a)
    cache.append(b, *more)  # into a copy of the page that both share
    cache.truncate(a, 18)
    cache.grow(8)
    cache.append(a, *other)
    held = {a: tuple(torch.cat((x[:, :18], y), 1) for x, y in zip(first, other, strict=True)),
            b: tuple(torch.cat((x, y), 1) for x, y in zip(first, more, strict=True))}
    assert_holds(cache, form, held)  # type: ignore[arg-type]
    saved = io.BytesIO()
    torch.save(cache, saved)
    saved.seek(0)
    for twin in (copy.deepcopy(cache), pickle.loads(pickle.dumps(cache)), torch.load(saved, weights_only=False)):
        assert twin.kv_format == form
        assert_holds(twin, form, held)  # type: ignore[arg-type]
        twin.append(a, *new(1))
    assert cache.length(a) == 23


@forms
def test_slots_that_are_reserved_are_written_by_the_operator(form: str) -> None:
    cache = make(form)
    (a,) = cache.add()
    k, v = new(21)
    slots = cache.reserve(a, [21])
    for layer in range(2):
        pages = cache.view(layer)
        torch.ops.wavefill.append(pages.k, pages.v, k[layer], v[layer], slots, pages.k_scale, pages.v_scale)
    assert_holds(cache, form, {a: (k, v)})


def test_names() -> None:
    assert make("fp8").kv_format == "fp8-token-head"
    assert make("auto").kv_format == "auto"
    assert make("auto").view().k_scale is None
    assert make("auto").view().k.dtype == torch.float32
    tensors = make("int8").view()
    assert (tensors.k.dtype, tensors.k_scale.dtype, tuple(tensors.k_scale.shape)) == (  # type: ignore[union-attr]
        torch.int8, torch.float16, (12, 16, KH))


def test_a_cache_of_int8_takes_half_of_the_memory() -> None:
    cache = make("int8", dtype=torch.bfloat16)
    pages = cache.view()
    each = [pages.k, pages.v, pages.k_scale, pages.v_scale]
    used = sum(x.numel() * x.element_size() for x in each if x is not None)
    assert used == 12 * 16 * KH * (D + DV + 2 * 2)


def test_graphs_of_torch_compile_append_to_codes() -> None:
    cache = make("int8")
    (a,) = cache.add()
    k, v = new(9)
    slots = cache.reserve(a, [9])

    @torch.compile(backend="aot_eager", fullgraph=True)
    def write(k: Tensor, v: Tensor, pages: list[Tensor]) -> None:
        torch.ops.wavefill.append(pages[0], pages[1], k, v, slots, pages[2], pages[3])

    for layer in range(2):
        pages = cache.view(layer)
        write(k[layer], v[layer], [pages.k, pages.v, pages.k_scale, pages.v_scale])
    assert_holds(cache, "int8", {a: (k, v)})


@forms
def test_equal_tokens_are_equal_bytes_in_every_step_size(form: str) -> None:
    one, many = make(form), make(form)
    k, v = new(20)
    (a,), (b,) = one.add(), many.add()
    for i in range(20):
        one.append(a, k[:, i : i + 1], v[:, i : i + 1])
    many.append(b, k, v)
    q = torch.randn(1, 2 * KH, D)
    for layer in range(2):
        for x, y in zip(attend(one, [a], layer, q), attend(many, [b], layer, q), strict=True):
            assert same_bits(x, y)


REFUSED = {
    "name": ({"kv_format": "fp4"}, InvalidArgument, "kv_format: must be one of fp8-tensor, fp8-head"),
    "none": ({"kv_format": None}, InvalidArgument, "kv_format: must be one of"),
    "int4": ({"kv_format": "int4"}, InvalidArgument, "kv_format: is defined and measured, and no cache"),
    "scale-of-16-bit": ({"k_scale": 0.5}, InvalidArgument, "k_scale: belongs to fp8-tensor and fp8-head"),
    "scale-of-int8": ({"kv_format": "int8", "v_scale": 0.5}, InvalidArgument, "v_scale: belongs to fp8-tensor"),
    "scale-shape": ({"kv_format": "fp8-head", "k_scale": torch.ones(3)}, InvalidArgument, r"k_scale: must be \[2\] or"),
    "scale-zero": ({"kv_format": "fp8-tensor", "k_scale": 0.0}, InvalidArgument, "k_scale: must be finite and above 0"),
    "scale-nan": ({"kv_format": "fp8-tensor", "v_scale": torch.tensor(math.nan)}, InvalidArgument, "v_scale: must be"),
}


@pytest.mark.parametrize(("kwargs", "error", "words"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused(kwargs: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        PagedKVCache(1, kv_heads=KH, head_dim=D, dtype=torch.float32, **kwargs)


def test_a_gpu_has_no_quantised_cache_yet() -> None:
    from wavefill.store import format_of

    with pytest.raises(BackendUnavailable, match='kv_format: must be "auto" on a GPU'):
        format_of("int8", torch.device("cuda", 0))


def test_tokens_of_another_dtype_and_scales_with_pages_are_refused() -> None:
    cache = make("int8", dtype=torch.bfloat16)
    (a,) = cache.add()
    with pytest.raises(InvalidType, match=r"k: dtype must be that of the cache \(torch.bfloat16\)"):
        cache.append(a, *new(1))
    with pytest.raises(InvalidArgument, match="k_scale: must be None when k_cache is a KVPages"):
        wavefill.decode_attention(torch.zeros(1, 4, D).bfloat16(), cache.view(), None, cache.seq_lens(a),
                                  cache.block_table(a), k_scale=0.5)

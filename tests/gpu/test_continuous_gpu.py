"""`generate_batch` through wavefill on a GPU: tokens of `generate` with eager attention, in batches that transformers
pads, captures in CUDA graphs and prepares ahead, and in those where it does nothing of this."""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers.generation")
sys.path.append(str(Path(__file__).parents[1] / "transformers"))

import torch
from batching import batched, fresh, generation, greedy, outputs, prompts, settings, stock
from tiny import liven
from torch import Tensor
from transformers import ContinuousBatchingConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.model_runner import ModelRunner
from transformers.generation.continuous_batching.offloading_manager import OffloadingManager
from transformers.generation.continuous_batching.utils import CudaGraphBuffer

from wavefill.integrations.transformers import continuous, disable, enable
from wavefill.integrations.transformers.continuous import attention, flash, hooks
from wavefill.spec import BackendUnavailable, UnsupportedModel

pytestmark = pytest.mark.transformers

DEVICE = "cuda"
MIXED = (5, 37, 1, 18)
NEW = 20
#: What transformers chooses by itself, and its graphs for all, for decode alone, and for nothing.
GRAPHS: dict[str, dict[str, Any]] = {
    "default": {},
    "graphs": {"use_cuda_graph": True},
    "decode-graphs": {"use_cuda_graph": (False, True)},
    "neither": {"use_cuda_graph": False},
}


@pytest.fixture(autouse=True)
def _whole_products() -> Iterator[None]:
    """Products of float32 are not rounded to TF32."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.fixture(name="events")
def what_happened(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Graphs that transformers captured and replayed, calls of each path that were launched or captured."""
    counter: Counter[str] = Counter()

    def counted(owner: Any, name: str, counts: Callable[[Any], bool] = lambda result: True) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            counter[name] += counts(result)
            return result

        monkeypatch.setattr(owner, name, call)

    counted(ModelRunner, "_capture_graph")
    counted(CudaGraphBuffer, "get_graph", lambda graph: graph is not None)
    counted(attention, "_decode")
    counted(attention, "_ragged")
    return counter


@cache
def eager(family: str) -> PreTrainedModel:
    return copy.deepcopy(stock(family)).to(DEVICE)


_tokens: dict[tuple[str, tuple[int, ...], int], list[int]] = {}


def expected(family: str, prompt: list[int], new: int) -> list[int]:
    """The tokens of transformers' eager attention on the GPU."""
    key = family, tuple(prompt), new
    if key not in _tokens:
        _tokens[key] = greedy(eager(family), prompt, new)
    return _tokens[key]


def enabled(family: str) -> PreTrainedModel:
    return enable(fresh(family).to(DEVICE))


# ---- tokens


@pytest.mark.parametrize("graphs", GRAPHS)
@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2-mixed"])
def test_tokens(family: str, graphs: str, events: Counter[str]) -> None:
    """Prompts of 1 to 37 tokens together, by pages, by rings of a window, and by both."""
    inputs = prompts(*MIXED)
    got = batched(enabled(family), inputs, NEW, settings(**GRAPHS[graphs]))
    assert got == [expected(family, p, NEW) for p in inputs]
    paged = family == "llama"
    assert (events["_decode"] > 0) == paged
    if graphs in ("default", "graphs") or (graphs == "decode-graphs" and paged):
        assert events["_capture_graph"] > 0
        assert events["get_graph"] > events["_capture_graph"]
    elif graphs != "decode-graphs":
        assert events["_capture_graph"] == 0


@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma2", "gemma3", "gpt-oss"])
def test_tokens_of_other_families(family: str, events: Counter[str]) -> None:
    """Soft caps, sinks, scales of their own. gpt-oss chooses experts on the host, so nothing of it is captured."""
    inputs = prompts(*MIXED, seed=1)
    assert batched(enabled(family), inputs, NEW, settings()) == [expected(family, p, NEW) for p in inputs]
    assert (events["_capture_graph"] > 0) == (family != "gpt-oss")


@pytest.mark.parametrize("graphs", ["default", "neither"])
@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2-mixed"])
def test_prompts_in_chunks_and_past_the_window(family: str, graphs: str) -> None:
    """A batch of 16 tokens: long prompts come in pieces, beside the decode steps of others."""
    inputs = prompts(45, 3, 30, 8, 9, 10, 17, seed=2)
    config = settings(page=4, max_batch_tokens=16, **GRAPHS[graphs])
    assert batched(enabled(family), inputs, NEW, config) == [expected(family, p, NEW) for p in inputs]


@pytest.mark.parametrize("graphs", ["default", "neither"])
def test_shared_prefixes(graphs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts with a common beginning, and the same prompt twice, read the same pages."""
    shared, original = [], PagedAttentionCache.search_prefix_match

    def watched(*args: Any, **kwargs: Any) -> int:
        shared.append(original(*args, **kwargs))
        return shared[-1]

    monkeypatch.setattr(PagedAttentionCache, "search_prefix_match", watched)
    begin, *ends = prompts(51, 1, 6, 13, 2, seed=3)
    inputs = [begin + end for end in ends] + [begin, begin + ends[0]]
    config = settings(page=4, max_batch_tokens=64, **GRAPHS[graphs])
    assert batched(enabled("llama"), inputs, 12, config) == [expected("llama", p, 12) for p in inputs]
    assert sum(shared) > 0


@pytest.mark.parametrize("graphs", ["default", "graphs", "neither"])
@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_more_requests_than_fit(family: str, graphs: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages for a fraction of the requests: some wait, and some are taken out and begun again."""
    taken_out, original = [], OffloadingManager.offload_requests

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        taken_out.append(1)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(OffloadingManager, "offload_requests", watched)
    inputs = prompts(14, 9, 12, 1, 7, 11, 3, 13, seed=4)
    config = settings(page=4, blocks=14, max_batch_tokens=24, **GRAPHS[graphs])
    assert batched(enabled(family), inputs, 24, config) == [expected(family, p, 24) for p in inputs]
    if family == "llama":
        assert taken_out


def test_several_sequences_of_one_prompt() -> None:
    """Forked requests share the pages of the prompt; drawn from one candidate, they must all say the same."""
    inputs = prompts(21, 6, seed=5)
    drawn = generation(12, num_return_sequences=3, do_sample=True, top_k=1)
    results = enabled("llama").generate_batch(inputs, generation_config=drawn,
                                              continuous_batching_config=settings(page=4))
    for key, out in results.items():
        assert out.error is None
        prompt = inputs[int(key.split("__")[0].split("_")[1])]
        assert list(out.generated_tokens) == expected("llama", prompt, 12)


def test_a_kept_manager_and_generate_in_turn() -> None:
    """Each with graphs of its own, over its own pages; `disable` ends the manager."""
    model, inputs = enabled("llama"), prompts(9, 22, seed=6)
    for _ in range(2):
        results = model.generate_batch(inputs, generation_config=generation(8), persistent_manager=True,
                                       continuous_batching_config=settings())
        assert [out.error for out in results.values()] == [None, None]
        assert [list(out.generated_tokens) for out in results.values()] == [expected("llama", p, 8) for p in inputs]
        assert greedy(model, inputs[0], 8) == expected("llama", inputs[0], 8)
    disable(model)
    assert not hasattr(model, "_cached_continuous_batching_manager")
    assert greedy(model, inputs[1], 8) == expected("llama", inputs[1], 8)


# ---- 16 bits


@cache
def llama(size: int) -> LlamaForCausalLM:
    """Three layers of four query heads and two KV heads of `size`, in float32."""
    torch.manual_seed(7)
    config = LlamaConfig(vocab_size=199, hidden_size=128, intermediate_size=192, num_hidden_layers=3, head_dim=size,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=2048, pad_token_id=0,
                         attn_implementation="eager", eos_token_id=None, bos_token_id=1)
    return liven(LlamaForCausalLM(config).eval()).to(DEVICE)


def hold_but_for_rounding(exact: PreTrainedModel, rounded: PreTrainedModel, prompt: list[int], got: list[int],
                          want: list[int]) -> None:
    """Raise unless the first token that differs is as good as the best, but for what this dtype costs anyway."""
    at = next((i for i, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), None)
    if at is None:
        return
    ids = torch.tensor([prompt + got[:at]], device=DEVICE)
    with torch.inference_mode():
        best, theirs = (model(ids, use_cache=False).logits[0, -1].float() for model in (exact, rounded))
    assert best.max() - best[got[at]] <= 4 * (best - theirs).abs().max()


@pytest.mark.parametrize("graphs", ["default", "neither"])
@pytest.mark.parametrize(("dtype", "size", "page"), [
    (torch.bfloat16, 128, 256), (torch.bfloat16, 64, 16), (torch.float16, 128, 4),
])
def test_16_bits(dtype: torch.dtype, size: int, page: int, graphs: str) -> None:
    """Long prompts too, through the kernels that such pages allow."""
    exact = llama(size)
    rounded = copy.deepcopy(exact).to(dtype)
    inputs = prompts(700, 3, 64, 257, 1, seed=8)
    want = [greedy(rounded, p, NEW) for p in inputs]
    model = enable(copy.deepcopy(rounded))
    config = settings(page=page, blocks=2048 // page + 16, **{**GRAPHS[graphs], "max_batch_tokens": 512})
    for prompt, got, tokens in zip(inputs, batched(model, inputs, NEW, config), want, strict=True):
        hold_but_for_rounding(exact, rounded, prompt, got, tokens)


@pytest.mark.parametrize("fuse", [False, True])
def test_sizes_that_transformers_chooses(fuse: bool) -> None:
    """Pages of 256 tokens, as many as a part of the memory holds, batches of thousands of tokens."""
    exact = llama(128)
    rounded = copy.deepcopy(exact).to(torch.bfloat16)
    inputs = prompts(300, 40, 300, seed=9)
    want = [greedy(rounded, p, NEW) for p in inputs]
    model = enable(copy.deepcopy(rounded), fuse=fuse)
    results = outputs(model, inputs, NEW, ContinuousBatchingConfig(max_memory_percent=0.02))
    assert [out.error for out in results] == [None] * 3
    for prompt, out, tokens in zip(inputs, results, want, strict=True):
        hold_but_for_rounding(exact, rounded, prompt, list(out.generated_tokens), tokens)


# ---- without waiting


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2-mixed"])
def test_attention_does_not_wait_for_the_device(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the mask of a forward pass. Once kernels are loaded."""
    model, inputs, calls = enabled(family), prompts(*MIXED, seed=10), []
    config = settings(page=4, max_batch_tokens=24, **GRAPHS["neither"])
    batched(model, inputs, NEW, config)
    forward = continuous.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            calls.append(1)
            return forward(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(continuous, "forward", watched)
    assert batched(model, inputs, NEW, config) == [expected(family, p, NEW) for p in inputs]
    assert calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_of_the_kernel_package_in_a_graph(dtype: torch.dtype) -> None:
    """What `transformers serve` calls, captured, then replayed with other lengths: as on the CPU, in float32."""
    torch.manual_seed(0)
    lengths = torch.tensor([[0, 3, 3, 7], [0, 1, 6, 7]], dtype=torch.int32), torch.tensor(
        [[0, 9, 9, 40], [0, 30, 36, 40]], dtype=torch.int32)
    q, (k, v) = torch.randn(8, 4, 64).to(dtype), torch.randn(2, 48, 2, 64).to(dtype)
    pages, held = torch.randn(2, 9, 16, 2, 64).to(dtype), torch.tensor([[3, 31, -1], [-1, 14, 40]], dtype=torch.int32)
    table = torch.tensor([[8, 1, 2], [3, 4, 5], [6, 7, 0]], dtype=torch.int32)

    def run(q: Tensor, k: Tensor, v: Tensor, store: Tensor, table: Tensor, starts_q: Tensor, starts_k: Tensor,
            held: Tensor) -> tuple[Tensor, Tensor]:
        new = k[:3, None], v[:3, None]
        return (flash.flash_attn_varlen_func(q, k, v, starts_q, starts_k, 8, 48, causal=True),
                flash.flash_attn_with_kvcache(q[:3, None], *store, *new, held, table, causal=True))

    there = [x.to(DEVICE) for x in (q, k, v, pages, table, *(x[0] for x in (*lengths, held)))]
    run(*there)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(*there)
    for step in range(2):
        here = [q.float(), k.float(), v.float(), pages.float(), table, *(x[step] for x in (*lengths, held))]
        for x, y in zip(there, here, strict=True):
            x.copy_(y)
        graph.replay()
        want = run(*here)
        tolerance = 1e-4 if dtype == torch.float32 else 2e-2
        for x, y in zip((*got, there[3]), (*want, here[3]), strict=True):
            torch.testing.assert_close(x.float().cpu(), y, atol=tolerance, rtol=tolerance)


# ---- what is set off or refused


def test_a_model_on_the_cpu_beside_a_gpu(events: Counter[str]) -> None:
    """transformers would capture its steps, in graphs with nothing in them."""
    model, inputs = enable(fresh("llama")), prompts(*MIXED, seed=11)
    assert batched(model, inputs, 8, settings()) == [expected("llama", p, 8) for p in inputs]
    assert events["_capture_graph"] == 0


def test_releases_that_were_not_tested_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    model = enabled("llama")
    monkeypatch.setattr(type(hooks.contract_of(model)), "on_gpu", False)
    monkeypatch.setattr(hooks, "gpu_releases", lambda: "5.17")
    with pytest.raises(BackendUnavailable, match=r"must be of transformers 5\.17 on a GPU; got .* on cuda:0"):
        model.init_continuous_batching()
    assert model.config._attn_implementation == "wavefill"


def test_models_with_states() -> None:
    from tiny import fresh as tiny

    with pytest.raises(UnsupportedModel, match="continuous batching has no cache"):
        enable(tiny("lfm2").to(DEVICE)).init_continuous_batching()

"""`generate_batch` through wavefill gives the tokens that stock `generate` with eager attention gives, request by
request, on both paths (pages with a block table; token slots), and really runs wavefill's kernels on them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("transformers.generation")

import torch
from batching import (
    FAMILIES,
    WINDOWED,
    batched,
    cheap,  # noqa: F401
    expected,
    fresh,
    generation,
    greedy,
    prompts,
    settings,
)
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import CompileConfig
from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs
from transformers.generation.continuous_batching.model_runner import ModelRunner

from wavefill.integrations.transformers import continuous, disable, enable
from wavefill.integrations.transformers.continuous import attention, hooks

pytestmark = [pytest.mark.transformers, pytest.mark.usefixtures("cheap")]

MIXED = (5, 37, 1, 18)
NEW = 20


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often layers attended by pages of decode steps, and by tables of ragged batches."""
    counter: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counter[name] += 1
            return function(*args, **kwargs)

        return call

    for name in ("_decode", "_ragged"):
        monkeypatch.setattr(attention, name, counted(name, getattr(attention, name)))
    return counter


@pytest.mark.parametrize("path", ["pages", "slots"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens(family: str, path: str, calls: Counter[str]) -> None:
    """Prompts of 1 to 37 tokens together; a cache with windows has no block tables, so it takes slots by itself."""
    model = enable(fresh(family))
    inputs = prompts(*MIXED)
    config = settings(max_blocks_per_request=0 if path == "slots" else None)
    assert batched(model, inputs, NEW, config) == [expected(family, p, NEW) for p in inputs]
    steps = 2 * (NEW - 1)  # of two layers; the prompts take a step before them
    if path == "slots" or family in WINDOWED:
        assert calls["_decode"] == 0
        assert calls["_ragged"] >= steps
    else:
        assert calls["_decode"] == steps
        assert calls["_ragged"] == 2


@pytest.mark.parametrize("page", [4, 16])
def test_shared_prefixes(page: int, calls: Counter[str]) -> None:
    """Requests share the pages of a common beginning, whole ones only, and go on in pages of their own."""
    model = enable(fresh("llama"))
    begin, *ends = prompts(35, 1, 6, 13, 2, seed=1)
    inputs = [begin + end for end in ends] + [begin]
    assert batched(model, inputs, 12, settings(page)) == [expected("llama", p, 12) for p in inputs]
    assert calls["_decode"] > 0


@pytest.mark.parametrize("family", ["llama", "qwen2-mixed"])
def test_prompts_in_chunks(family: str, calls: Counter[str]) -> None:
    """A batch of 16 tokens: long prompts come in pieces, beside the decode steps of others."""
    model = enable(fresh(family))
    inputs = prompts(45, 3, 30, 17, seed=2)
    config = settings(max_batch_tokens=16)
    assert batched(model, inputs, NEW, config) == [expected(family, p, NEW) for p in inputs]
    assert calls["_ragged"] > 0


@pytest.mark.parametrize("family", ["llama", "mistral-window"])
def test_more_requests_than_fit(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages for a fraction of the requests: some wait, and some are taken out and begun again."""
    from transformers.generation.continuous_batching.offloading_manager import OffloadingManager

    taken_out = []
    name = next(n for n in ("offload_requests", "offload_one_request") if hasattr(OffloadingManager, n))
    original = getattr(OffloadingManager, name)
    monkeypatch.setattr(OffloadingManager, name, lambda self, *a, **k: taken_out.append(1) or original(self, *a, **k))
    model = enable(fresh(family))
    inputs = prompts(14, 9, 12, 1, 7, 11, 3, 13, seed=3)
    config = settings(page=4, blocks=14)
    assert batched(model, inputs, 24, config) == [expected(family, p, 24) for p in inputs]
    if family == "llama":
        assert taken_out


@pytest.mark.parametrize("family", WINDOWED)
def test_window_is_crossed(family: str) -> None:
    """Prompts that end before, at and past the window; decode goes far past it, and prompts come in chunks."""
    model = enable(fresh(family))
    inputs = prompts(1, 6, 7, 8, 9, 10, 33, seed=4)
    config = settings(page=4, max_batch_tokens=24)
    assert batched(model, inputs, 24, config) == [expected(family, p, 24) for p in inputs]


def test_padded_batches(calls: Counter[str]) -> None:
    """A compiled forward pass takes padded batches: more rows, query tokens and indices than the requests have."""
    model = enable(fresh("llama"))
    inputs = prompts(5, 19, 1, seed=9)
    config = settings(varlen_compile_config=CompileConfig(mode="default", fullgraph=False, backend="eager"))
    assert batched(model, inputs, 6, config) == [expected("llama", p, 6) for p in inputs]
    assert calls["_decode"] > 0
    assert calls["_ragged"] > 0


class Unread(TorchDispatchMode):
    """Fails where a value of a tensor is read on the host, which a GPU would be waited for."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert str(function.overloadpacket) not in ("aten._local_scalar_dense", "aten.nonzero", "aten.equal")
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama", "mistral-window", "qwen2-mixed", "gemma2"])
def test_batches_as_for_cuda_graphs(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a manager on a GPU makes them: sizes and bounds padded; and, where that is served, captured: nothing is read.
    """
    runner, ios, forward = ModelRunner.__init__, ContinuousBatchingIOs.__init__, continuous.forward

    def padding(self: Any, *args: Any, **kwargs: Any) -> None:
        runner(self, *args, **kwargs)
        self.pad_inputs = True

    def bounding(self: Any, *args: Any, **kwargs: Any) -> None:
        ios(self, *args, **kwargs)
        self.use_cuda_graph_varlen = True

    def unread(*args: Any, **kwargs: Any) -> Any:
        with Unread():
            return forward(*args, **kwargs)

    monkeypatch.setattr(ModelRunner, "__init__", padding)
    monkeypatch.setattr(ContinuousBatchingIOs, "__init__", bounding)
    monkeypatch.setattr(attention, "_wastes", lambda *sizes: False)
    model = enable(fresh(family))
    if hooks.contract_of(model).on_gpu:
        monkeypatch.setattr(continuous, "forward", unread)
    inputs = prompts(45, 3, 30, 1, 17, seed=10)
    config = settings(page=4, max_batch_tokens=24, blocks=80)
    assert batched(model, inputs, NEW, config) == [expected(family, p, NEW) for p in inputs]


def test_several_sequences_of_one_prompt() -> None:
    """Forked requests share the pages of the prompt; drawn from one candidate, they must all say the same."""
    model = enable(fresh("llama"))
    inputs = prompts(21, 6, seed=5)
    drawn = generation(12, num_return_sequences=3, do_sample=True, top_k=1)
    results = model.generate_batch(inputs, generation_config=drawn, continuous_batching_config=settings(page=4))
    assert len(results) in (2, 6)  # 5.17 hands back the first sequence of each prompt only
    for key, out in results.items():
        assert out.error is None
        prompt = inputs[int(key.split("__")[0].split("_")[1])]
        assert list(out.generated_tokens) == expected("llama", prompt, 12)


def test_manager(calls: Counter[str]) -> None:
    """The manager's own interface; requests come while others run, and `generate` answers in the meantime."""
    model = enable(fresh("qwen3"))
    first, second, third = prompts(19, 4, 11, seed=6)
    with model.continuous_batching_context_manager(
        generation_config=generation(16), continuous_batching_config=settings()
    ) as manager:
        manager.add_request(first, request_id="first")
        assert enable(model) is model  # again is the same, at any time
        assert greedy(model, third, 16) == expected("qwen3", third, 16)
        manager.add_request(second, request_id="second")
        got = {out.request_id: out for out in (manager.get_result(timeout=30) for _ in range(2))}
    assert {key: out.error for key, out in got.items()} == {"first": None, "second": None}
    assert list(got["first"].generated_tokens) == expected("qwen3", first, 16)
    assert list(got["second"].generated_tokens) == expected("qwen3", second, 16)
    assert model.config._attn_implementation == "wavefill"
    assert calls["_decode"] > 0


def test_manager_that_is_kept() -> None:
    """A persistent manager is used again, with `generate` in between, and `disable` ends it."""
    model = enable(fresh("llama"))
    inputs = prompts(9, 22, seed=7)
    for _ in range(2):
        results = model.generate_batch(inputs, generation_config=generation(8), persistent_manager=True,
                                       continuous_batching_config=settings())
        assert [out.error for out in results.values()] == [None, None]
        assert [list(out.generated_tokens) for out in results.values()] == [expected("llama", p, 8) for p in inputs]
        assert greedy(model, inputs[0], 8) == expected("llama", inputs[0], 8)
    disable(model)
    assert not hasattr(model, "_cached_continuous_batching_manager")
    assert batched(model, inputs, 8, settings()) == [expected("llama", p, 8) for p in inputs]


def test_bfloat16_and_eager_before() -> None:
    """The kernels' other dtype, on a model that had eager attention: every request ends, the first tokens agree."""
    model = enable(fresh("llama", "eager").to(torch.bfloat16))
    inputs = prompts(*MIXED, seed=8)
    got = batched(model, inputs, 6, settings())
    assert [len(tokens) for tokens in got] == [6] * len(inputs)
    assert model.config._attn_implementation == "wavefill_over_eager"
    disable(model)
    first = [greedy(model, p, 1) for p in inputs]
    assert sum(tokens[:1] == one for tokens, one in zip(got, first, strict=True)) >= 3

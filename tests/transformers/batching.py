"""Small random models, their stock tokens, and runs of `generate_batch` that fail loudly, for the tests beside."""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from tiny import WITHOUT_SDPA, liven
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

VOCABULARY = 199
PAGE = "page_size" if "page_size" in inspect.signature(ContinuousBatchingConfig).parameters else "block_size"

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}
#: name -> (class name, what its configuration has besides). Every kind of layer: full, windowed, and both mixed.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen3": ("Qwen3", {}),
    "phi3": ("Phi3", {}),
    "mistral-window": ("Mistral", {"sliding_window": 9}),
    "qwen2-mixed": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "gemma2": ("Gemma2", {"sliding_window": 7, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 5}),
    "gemma3": ("Gemma3", {"sliding_window": 9, "sliding_window_pattern": 2, "query_pre_attn_scalar": 5}),
    "gpt-oss": ("GptOss", {"sliding_window": 7, "num_local_experts": 2, "num_experts_per_tok": 1}),
}
WINDOWED = ("mistral-window", "qwen2-mixed", "gemma2", "gemma3", "gpt-oss")


@pytest.fixture(scope="module")
def cheap() -> Iterator[None]:
    """A manager's end collects garbage several times over: what pytest and torch hold need not be walked each time.
    One thread, since the models are tiny and threads that wait for work slow each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(threads)


@cache
def stock(family: str) -> PreTrainedModel:
    """The model with its eager attention, never enabled."""
    name, extra = FAMILIES[family]
    kind = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(3)
    model = liven(kind(kind.config_class(**_COMMON, **extra)).eval())
    model.set_attn_implementation("eager")
    return model


def fresh(family: str, implementation: str | None = None) -> PreTrainedModel:
    """A copy of `stock(family)` to be enabled, with sdpa where the family has it and nothing else is asked for."""
    model = copy.deepcopy(stock(family))
    model.set_attn_implementation(implementation or ("eager" if family in WITHOUT_SDPA else "sdpa"))
    return model


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random prompts of these lengths."""
    rng = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCABULARY, (n,), generator=rng).tolist() for n in lengths]


_tokens: dict[tuple[str, tuple[int, ...], int], list[int]] = {}


def expected(family: str, prompt: Sequence[int], new: int) -> list[int]:
    """The tokens that transformers' eager attention gives for this prompt alone."""
    key = (family, tuple(prompt), new)
    if key not in _tokens:
        _tokens[key] = greedy(stock(family), prompt, new)
    return _tokens[key]


def greedy(model: PreTrainedModel, prompt: Sequence[int], new: int) -> list[int]:
    """`new` greedy tokens of `generate` after `prompt`."""
    ids = torch.tensor([list(prompt)], device=model.device)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0)
    return out[0, len(prompt):].tolist()


def settings(page: int = 16, blocks: int = 64, **more: Any) -> ContinuousBatchingConfig:
    """A small continuous-batching configuration, under this release's names."""
    return ContinuousBatchingConfig(**{PAGE: page, "num_blocks": blocks, "max_batch_tokens": 64,
                                       "max_memory_percent": 0.5, **more})


def generation(new: int, **more: Any) -> GenerationConfig:
    """Greedy, of exactly `new` tokens."""
    greedy_by_default = {"do_sample": False, "eos_token_id": -1, "pad_token_id": 0, **more}
    return GenerationConfig(max_new_tokens=new, **greedy_by_default)


def outputs(model: PreTrainedModel, inputs: list[list[int]], new: int, config: ContinuousBatchingConfig) -> list[Any]:
    """The outputs of `generate_batch` in the order of `inputs`; errors are in their `.error`."""
    results = model.generate_batch(inputs, generation_config=generation(new), continuous_batching_config=config)
    return sorted(results.values(), key=lambda out: int(out.request_id.split("_")[1]))


def batched(model: PreTrainedModel, inputs: list[list[int]], new: int,
            config: ContinuousBatchingConfig | None = None) -> list[list[int]]:
    """The tokens of `generate_batch`, each request's; an error of any of them fails the test."""
    results = outputs(model, inputs, new, config or settings())
    assert [out.error for out in results] == [None] * len(inputs)
    return [list(out.generated_tokens) for out in results]

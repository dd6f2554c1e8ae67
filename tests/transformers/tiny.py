"""Small random models of every served family, and what stock transformers makes of them, for the tests beside.

Weights are scaled up, so that tokens depend on all keys and vary. Head counts, group and head sizes are odd ones.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

VOCABULARY = 211
#: What the running release calls the cache, as an argument and in outputs.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 72, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 16, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}
#: name -> (family, what its configuration has besides). Qwen2 and Phi-3 have no head_dim of their own: it is 72 / 9.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-g5": ("Llama", {"num_attention_heads": 5, "num_key_value_heads": 1, "hidden_size": 60, "head_dim": 12}),
    "qwen2": ("Qwen2", {"head_dim": 8}),
    "qwen2-mixed": ("Qwen2", {"head_dim": 8, "use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {}),
    "qwen3-mixed": ("Qwen3", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-window": ("Mistral", {"sliding_window": 6}),
    "mistral-late-window": ("Mistral", {"sliding_window": 26}),
    "phi3": ("Phi3", {"head_dim": 8, "sliding_window": None}),
    "phi3-window": ("Phi3", {"head_dim": 8, "sliding_window": 7}),
}
WINDOWED = tuple(name for name, (_, extra) in FAMILIES.items() if extra.get("sliding_window"))


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The models are tiny, and threads that wait for work slow each other. Takes effect where it is imported."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(family: str, seed: int = 5, **more: Any) -> PreTrainedModel:
    """A model of its own, fp32 and in eval mode, with sdpa."""
    name, extra = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**_COMMON, **extra, **more})
    torch.manual_seed(seed)
    model: PreTrainedModel = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.data.mul_(4)
    return model


@cache
def stock(family: str) -> PreTrainedModel:
    """The family's model with sdpa, shared by all tests and never enabled."""
    return build(family)


def fresh(family: str) -> PreTrainedModel:
    """A copy of the stock model, to be enabled."""
    return copy.deepcopy(stock(family))


def padded(rows: int = 3, width: int = 19, pads: tuple[int, ...] = (5, 0, 1)) -> dict[str, Tensor]:
    """Token ids and the mask of a batch that is padded on the left."""
    ids = torch.randint(1, VOCABULARY, (rows, width), generator=torch.Generator().manual_seed(7))
    mask = torch.ones_like(ids)
    for row, count in enumerate(pads[:rows]):
        ids[row, :count] = 0
        mask[row, :count] = 0
    return {"input_ids": ids, "attention_mask": mask}


def plain(width: int = 13, rows: int = 1) -> Tensor:
    """Token ids without padding."""
    return padded(rows, width, (0,) * rows)["input_ids"]


def tokens(model: PreTrainedModel, inputs: Tensor | dict[str, Tensor], new: int = 24, **options: Any) -> Tensor:
    """What `generate` gives, greedy unless `options` say otherwise."""
    arguments: dict[str, Any] = dict(inputs) if isinstance(inputs, dict) else {"input_ids": inputs}
    options.setdefault("do_sample", False)
    out: Tensor = model.generate(**arguments, max_new_tokens=new, **options)
    return out


def teacher_forced(model: PreTrainedModel, ids: Tensor, mask: Tensor, prompt: int) -> Tensor:
    """Logits of every position at which all rows have a token: a prompt, four tokens at once, then one by one."""
    parts, cache, start = [], None, 0
    with torch.inference_mode():
        for stop in (prompt, prompt + 4, *range(prompt + 5, ids.shape[1] + 1)):
            out = model(ids[:, start:stop], attention_mask=mask[:, :stop], use_cache=True, **{CACHE: cache},
                        position_ids=(mask[:, :stop].cumsum(1) - 1).clamp(min=0)[:, start:])
            parts.append(out.logits)
            cache, start = out[CACHE], stop
    return torch.cat(parts, 1)


_expected: dict[Any, Tensor] = {}


def expected(key: tuple[Any, ...], family: str, run: Callable[[PreTrainedModel], Tensor]) -> Tensor:
    """What `run` gives on the stock model, kept for the other tests that ask for `key`."""
    full = (*key, family)
    if full not in _expected:
        _expected[full] = run(stock(family))
    return _expected[full]

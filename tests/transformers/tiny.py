"""Small random models of every served family, and what stock transformers makes of them, for the tests beside.

Head counts, group and head sizes are odd ones.
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
#: Families with something between the product and the softmax: a soft cap, sinks, a scale of the configuration's.
SCORED: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": ("Gemma2", {"sliding_window": 6, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 7}),
    "gemma2-d256": ("Gemma2", {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 256,
                               "sliding_window": 7, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 144}),
    "gemma2-uncapped": ("Gemma2", {"sliding_window": 6, "attn_logit_softcapping": None}),
    "gemma3": ("Gemma3", {"sliding_window": 6, "sliding_window_pattern": 2, "query_pre_attn_scalar": 7}),
    "gemma3-d256": ("Gemma3", {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256,
                               "sliding_window": 9, "sliding_window_pattern": 3}),
    "gpt-oss": ("GptOss", {"sliding_window": 6, "num_local_experts": 3, "num_experts_per_tok": 2}),
}
#: Families with layers that have a state in place of K and V: linear attention, state space (which decodes in place),
#: and convolutions alone.
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("Qwen3Next", {"num_hidden_layers": 5, "full_attention_interval": 2, "num_experts": 3,
                                 "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                                 "shared_expert_intermediate_size": 16, "linear_num_value_heads": 4,
                                 "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 12}),
    "granite-hybrid": ("GraniteMoeHybrid", {
        "num_hidden_layers": 4, "head_dim": 8, "num_local_experts": 0, "shared_intermediate_size": 40,
        "attention_multiplier": 0.3, "position_embedding_type": "rope", "mamba_n_heads": 6, "mamba_d_state": 16,
        "mamba_chunk_size": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"]}),
    "lfm2": ("Lfm2", {"num_hidden_layers": 5, "head_dim": 8, "block_auto_adjust_ff_dim": False,
                      "layer_types": ["conv", "full_attention", "full_attention", "conv", "full_attention"]}),
    "lfm2-attention-first": ("Lfm2", {"num_hidden_layers": 4, "head_dim": 8, "block_auto_adjust_ff_dim": False,
                                      "layer_types": ["full_attention", "conv", "conv", "full_attention"]}),
}
#: Those that transformers compares with eager: it has no sdpa for them, or one that leaves the soft cap out.
WITHOUT_SDPA = ("gemma2", "gemma2-d256", "gemma2-uncapped", "gpt-oss")
_ALL = {**FAMILIES, **SCORED, **HYBRIDS}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The models are tiny, and threads that wait for work slow each other. Takes effect where it is imported."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def liven(model: PreTrainedModel) -> PreTrainedModel:
    """The model with larger weights, so that tokens depend on all keys and vary."""
    for name, weight in model.named_parameters():
        if weight.dim() > 1:
            weight.data.mul_(4)
        elif name.endswith("sinks"):
            weight.data.normal_()
    return model


def build(family: str, seed: int = 5, **more: Any) -> PreTrainedModel:
    """A model of its own, fp32 and in eval mode, with sdpa, or eager where there is none."""
    name, extra = _ALL[family]
    kind = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(seed)
    model: PreTrainedModel = liven(kind(kind.config_class(**{**_COMMON, **extra, **more})).eval())
    if family in WITHOUT_SDPA:
        model.set_attn_implementation("eager")
    return model


@cache
def stock(family: str) -> PreTrainedModel:
    """The family's model, shared by all tests and never enabled."""
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

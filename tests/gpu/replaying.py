"""A small Llama on the GPU, what `generate` makes of it, and what happens to CUDA graphs meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from wavefill.integrations.transformers import disable, enable

VOCABULARY = 97


@pytest.fixture(autouse=True)
def exact() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(name="model")
def small_model() -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=192, num_hidden_layers=3,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
                         attn_implementation="eager", pad_token_id=0, eos_token_id=None, bos_token_id=None)
    return LlamaForCausalLM(config).eval().cuda()


@pytest.fixture(name="replays")
def graph_events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happened to graphs, in order: "capture" and "replay"."""
    seen: list[str] = []
    for name, event in (("capture_begin", "capture"), ("replay", "replay")):
        kept = getattr(torch.cuda.CUDAGraph, name)

        def counted(self: Any, *args: Any, _kept: Any = kept, _event: str = event, **kwargs: Any) -> Any:
            seen.append(_event)
            return _kept(self, *args, **kwargs)

        monkeypatch.setattr(torch.cuda.CUDAGraph, name, counted)
    return seen


def prompt(batch: int = 1, length: int = 30) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator).cuda()


def generated(model: Any, ids: torch.Tensor, count: int = 24, mask: torch.Tensor | None = None, **how: Any) -> Any:
    mask = torch.ones_like(ids) if mask is None else mask
    return model.generate(ids, attention_mask=mask, generation_config=GenerationConfig(
        max_new_tokens=count, pad_token_id=0, eos_token_id=None, return_dict_in_generate=True, output_logits=True,
        **how))


def check(model: Any, ids: torch.Tensor, count: int = 24, **how: Any) -> None:
    """An enabled model gives the tokens and the logits that its own attention gives."""
    disable(model)
    torch.manual_seed(1)
    expected = generated(model, ids, count, **how)
    enable(model)
    torch.manual_seed(1)
    found = generated(model, ids, count, **how)
    torch.testing.assert_close(found.sequences, expected.sequences)
    for a, b in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)

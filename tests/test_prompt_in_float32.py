"""A long prompt in bfloat16 on a processor without its instructions: products in float32, rounded once."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from wavefill.bench import decoding


def test_many_rows_are_exact_up_to_one_rounding() -> None:
    x, weight, bias = (torch.randn(*shape).bfloat16() for shape in ((1, 9, 64), (48, 64), (48,)))
    q, kv = torch.randn(1, 4, 9, 16).bfloat16(), torch.randn(1, 2, 30, 16).bfloat16()
    with decoding.prompt_in_float32():
        product = functional.linear(x, weight, bias)
        attended = functional.scaled_dot_product_attention(q, kv, kv, enable_gqa=True)
        module = torch.nn.Linear(64, 48, dtype=torch.bfloat16)
        through_module = module(x)
    assert torch.equal(product, functional.linear(x.float(), weight.float(), bias.float()).bfloat16())
    exact = functional.scaled_dot_product_attention(q.float(), kv.float(), kv.float(), enable_gqa=True)
    assert torch.equal(attended, exact.bfloat16())
    assert torch.equal(through_module,
                       functional.linear(x.float(), module.weight.float(), module.bias.float()).bfloat16())


def test_a_decoding_step_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def widened(value: object) -> object:
        seen.append(value)
        return value

    monkeypatch.setattr(decoding, "_widened", widened)
    with decoding.prompt_in_float32():
        functional.linear(torch.randn(1, 1, 8).bfloat16(), torch.randn(4, 8).bfloat16())
        q = torch.randn(1, 2, 1, 8).bfloat16()
        functional.scaled_dot_product_attention(q, q, q)
        assert not seen
        functional.linear(torch.randn(1, 2, 8).bfloat16(), torch.randn(4, 8).bfloat16())
        assert len(seen) == 2


def test_only_bfloat16_is_ever_slow() -> None:
    assert not decoding.slow_in(torch.float32)
    assert not decoding.slow_in(torch.float16)
    assert decoding.slow_in(torch.bfloat16) is not torch.ops.mkldnn._is_mkldnn_bf16_supported()


@pytest.mark.transformers
def test_a_text_that_ends_with_its_first_token_ends_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setattr(decoding, "slow_in", lambda dtype: True)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                         num_attention_heads=2)).eval()
    decoder = decoding.Decoder("stock", model, [1, 2, 3], lambda model: model)
    decoder.block(4)
    assert len(decoder.tokens) == 4
    model.generation_config.eos_token_id = first = decoder.tokens[0]
    decoder.forget()
    decoder.block(4, stop_at_end=True)
    assert decoder.tokens == [first]

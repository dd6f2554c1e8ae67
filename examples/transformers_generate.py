"""Decode a transformers model through wavefill: one call to switch on, one to switch off.

The model here is a small Llama with random weights, so that this runs without a download. With a real one, replace
`tiny_llama()` by AutoModelForCausalLM.from_pretrained(...); nothing else changes.
"""

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from wavefill.integrations.transformers import disable, enable


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, max_position_embeddings=4096,
    )).eval()


model = tiny_llama()
prompts = torch.randint(3, 512, (2, 1000))
mask = torch.ones_like(prompts)
mask[1, :300] = 0  # the second prompt is shorter: padded on the left

for name, settings in {
    "greedy": {"do_sample": False},
    "four beams": {"do_sample": False, "num_beams": 4},
    "sampling": {"do_sample": True, "temperature": 0.8},
}.items():
    config = GenerationConfig(max_new_tokens=24, eos_token_id=None, pad_token_id=0, **settings)
    results = []
    for switch in (disable, enable):
        torch.manual_seed(1)
        results.append(switch(model).generate(prompts, attention_mask=mask, generation_config=config))
    assert torch.equal(*results), name
    print(f"{name}: the same {results[0].shape[1] - prompts.shape[1]} tokens a prompt with sdpa and with wavefill")

disable(model)
assert model.config._attn_implementation == "sdpa"

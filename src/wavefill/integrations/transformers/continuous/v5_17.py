"""transformers 5.17: the function updates the cache; one flat pool of token slots per layer of a group."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from wavefill.integrations.transformers.continuous.contract import (
    Batch,
    Contract,
    Decode,
    Ragged,
    Shape,
    lengths_of,
    new_tokens,
)


class V517(Contract):
    """Layers lie in groups of one attention kind; group g of the cache has its own indices and block table."""

    first = last = (5, 17)
    prefix = "paged|"
    needs = frozenset({"cache", "cu_seq_lens_q", "cu_seq_lens_k", "max_seqlen_q", "max_seqlen_k", "read_index",
                       "write_index", "block_table"})
    refuses = frozenset({"max_length_q", "max_length_k", "k_cache", "v_cache"})

    def matches(self, shape: Shape) -> bool:
        return ({"read_index", "write_index"} <= shape.update and "kwargs" not in shape.update
                and self.needs <= shape.call and not self.refuses & shape.call
                and "get_cache_for_block_table" not in shape.cache
                and "past_key_values" in shape.layer and "cache" not in shape.layer)

    def unpack(self, layer_idx: int, tokens: int, k: Tensor, v: Tensor, kwargs: dict[str, Any]) -> Batch:
        self.check_new(tokens, k)
        cache = kwargs["cache"]
        group, slot = cache.layer_index_to_group_indices[layer_idx]
        k_pool, v_pool = cache.key_cache[slot], cache.value_cache[slot]  # [slots, KH, D], shared by the groups
        ring = cache.sliding_windows[layer_idx] != 1                     # 1 marks a layer that sees everything
        cu_k = kwargs["cu_seq_lens_k"]
        if isinstance(cu_k, dict):                                       # only when the model mixes kinds of layers
            cu_k = cu_k["sliding_attention" if ring else "full_attention"]
        if kwargs["block_table"] is not None:
            pages = (-1, cache.block_size, *k_pool.shape[1:])
            return Decode(k_pool.view(pages), v_pool.view(pages), kwargs["block_table"][group], lengths_of(cu_k),
                          new_tokens(k), new_tokens(v))
        read, write = kwargs["read_index"][group], kwargs["write_index"][group]
        if ring:
            # A ring's new tokens overwrite keys that this very call still reads, so only update() may order it.
            k_all, v_all = cache.update(key_states=k, value_states=v, layer_idx=layer_idx,
                                        read_index=kwargs["read_index"], write_index=kwargs["write_index"])
            return Ragged(k_all, v_all, None, kwargs["cu_seq_lens_q"], cu_k)
        k_new, v_new = new_tokens(k), new_tokens(v)
        k_pool.index_copy_(0, write, k_new)
        v_pool.index_copy_(0, write, v_new)
        if read.numel() == 0:                                            # no request has older keys
            return Ragged(k_new, v_new, None, kwargs["cu_seq_lens_q"], cu_k)
        return Ragged(k_pool, v_pool, read, kwargs["cu_seq_lens_q"], cu_k)
